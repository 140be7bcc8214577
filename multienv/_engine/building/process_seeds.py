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
# Of the workers that live: the state that a seed of theirs was derived from, and a number, counted up from 0.
_living: weakref.WeakValueDictionary[tuple[int, int], ProcessSeeds] = weakref.WeakValueDictionary()


def seeds_of_trainer() -> ProcessSeeds:
    """Return seeds for one more worker, each derived from the trainer's generator of that kind as it stands.

    So that of ``numpy.random`` is the same each time if a script seeds nothing else. Workers that live already are
    counted, so that each has seeds of its own.
    """
    digests = [blake2b(pickle.dumps(state), digest_size=16).digest() for state in state_of_process()]
    of_random, of_numpy = [int.from_bytes(digest, "little") for digest in digests]
    with _lock:
        number = 0
        while (of_random, number) in _living or (of_numpy, number) in _living:
            number += 1
        found = ProcessSeeds((seeds_from(of_random, number)[0], seeds_from(of_numpy, number)[1]))
        _living[of_random, number] = _living[of_numpy, number] = found
    return found
