"""Seeds of the workers' ``random`` and ``numpy.random``, derived from the trainer's generators without advancing them.

So a script that seeds its generators before it makes its envs gives the same run each time, as with gymnasium's vector
envs. Two workers that live at the same time never have the same seeds.
"""

from __future__ import annotations

import pickle
import threading
import weakref
from hashlib import blake2b

from multienv._engine.wire.messages import seeds_from
from multienv._engine.worker.seeding import state_of_process


class ProcessSeeds:
    """Holds the seeds of one worker as long as it lives.

    Attributes:
        values: For ``random`` and for ``numpy.random``.
    """

    def __init__(self, values: tuple[int, int]) -> None:
        self.values = values


_lock = threading.Lock()
# Of the workers that live: the state that their seeds were derived from, and a number, counted up from 0.
_living: weakref.WeakValueDictionary[tuple[int, int], ProcessSeeds] = weakref.WeakValueDictionary()


def seeds_of_trainer() -> ProcessSeeds:
    """Return seeds that are derived from ``random`` and ``numpy.random`` as they stand, for one more worker.

    Workers that live already are counted, so that each has seeds of its own.
    """
    origin = int.from_bytes(blake2b(pickle.dumps(state_of_process()), digest_size=16).digest(), "little")
    with _lock:
        number = 0
        while (origin, number) in _living:
            number += 1
        found = _living[origin, number] = ProcessSeeds(seeds_from(origin, number))
    return found
