"""What generators are seeded with that are made without a seed: drawn once, recorded, and the same in a replay.

``numpy.random.default_rng()``, an env's ``np_random`` before any seeded reset, a space that is sampled unseeded: all
ask numpy for a seed, and numpy asks the system. In a worker it asks here. So no env has to be given a seed that the
caller has not given, and what was left to chance can be had again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

# Where numpy keeps what it asks; a numpy that keeps it elsewhere asks the system, and a replay tells of it.
_MODULE: Any = np.random.bit_generator
_NAME = "randbits"
_WORD = 32

_installed: Entropy | None = None


class Entropy:
    """Stands in for the system's.

    Each env has a stream of its own, however many share the process and whichever of them are called.

    Args:
        seed: What all streams come from.
        place: Tells which env is being called; 0 for none.

    Attributes:
        counts: How often each has drawn.
    """

    def __init__(self, seed: int, place: Callable[[], int]) -> None:
        """Nothing has been drawn."""
        self.counts: dict[int, int] = {}
        self._seed = seed
        self._place = place
        self._before: Any = None
        self._outer: Entropy | None = None

    def draw(self, bits: int) -> int:
        """So many random bits."""
        place = self._place()
        count = self.counts[place] = self.counts.get(place, 0) + 1
        words = np.random.SeedSequence((self._seed, place, count)).generate_state(-(-bits // _WORD))
        return int.from_bytes(words.tobytes(), "little") >> -bits % _WORD

    def begin_life(self, number: int) -> None:
        """The env that is being called is another one now: it draws what none has drawn before it."""
        self.counts[self._place()] = number << _WORD

    def install(self) -> None:
        """From now on numpy asks here, in this process."""
        global _installed
        self._before = getattr(_MODULE, _NAME, None)
        if self._before is not None:
            setattr(_MODULE, _NAME, self.draw)
            self._outer, _installed = _installed, self

    def remove(self) -> None:
        """Numpy asks the one it asked before; again does nothing."""
        global _installed
        if _installed is self:
            setattr(_MODULE, _NAME, self._before)
            _installed = self._outer


def begin_life(number: int) -> None:
    """See :class:`Entropy`; ``number`` is that of the request in which it begins."""
    if _installed is not None:
        _installed.begin_life(number)


def capture() -> dict[int, int] | None:
    """How far the streams of this process have come; ``None`` where there are none."""
    return None if _installed is None else dict(_installed.counts)


def restore(counts: dict[int, int] | None) -> None:
    """Go on from there."""
    if counts is not None and _installed is not None:
        _installed.counts = dict(counts)
