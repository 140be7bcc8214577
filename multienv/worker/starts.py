"""Resets at which a replay can begin: how the random generators stood before them is told now and then.

A replay of one slot begins with a reset of its env in a new process, with the generators put back. The state of the
generators must outlive the process, so it travels with the answer to the request in which the env was reset.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from multienv.wire.segment import BUSY, OTHER_SECONDS, STEP_SECONDS, Segment
from multienv.worker import seeding

# Part of the envs' time that telling may take; and where processes are replaced by plan, so that a replay is short.
SHARE, LARGE_SHARE = 0.005, 0.05
# Seconds that telling takes, about, before it was measured; and how fast what was measured may grow.
_COST, _GROWTH = 1e-4, 1.1


class Starts:
    """Tells of the generators before resets, or puts them back.

    Args:
        envs: Of all slots.
        share: Part of the envs' time that telling may take; 0: they are not told.
        segment: Of the worker; to be replaced when the envs move to another one.

    Attributes:
        told: Slot → state of its generators before the reset in the request that is being executed. The reply takes it
            from here. It stays the same object.
        replaying: In a replay: slot → state to put back before the slot is reset. Else ``None``.
    """

    def __init__(self, envs: Sequence[Any], share: float, segment: Segment) -> None:
        self.segment = segment
        self.told: dict[int, bytes] = {}
        self.replaying: dict[int, bytes] | None = None
        self._envs = envs
        self._share = share
        self._process = seeding.ProcessGenerators()
        self._cost = _COST
        # Of each slot's last start: number of the request, and time that resets and recorded calls had taken.
        self._last: list[tuple[int, float] | None] = [None] * len(envs)

    def take(self) -> Mapping[int, bytes]:
        """Return what is to be told, once."""
        taken = dict(self.told)
        self.told.clear()
        return taken

    def before_reset(self, slot: int) -> None:
        """Note that the env of a slot is about to be reset."""
        if self.replaying is not None:
            generators = self.replaying.pop(slot, None)
            if generators:
                seeding.restore(self._envs[slot], generators)
        elif self._share and self._is_due(slot):
            began = time.perf_counter()
            self.told[slot] = self._process.with_those_of(self._envs[slot])
            self._last[slot] = self.segment.words[BUSY], self.segment.times[OTHER_SECONDS]
            # As it is where nothing else wants the core.
            self._cost = min(time.perf_counter() - began, _GROWTH * self._cost)

    def forget(self, slot: int) -> None:
        """Note that the reset raised: no episode has begun."""
        self._last[slot] = None
        self.told.pop(slot, None)

    def count(self, seconds: float) -> None:
        """Add to the time of the envs what a reset or a recorded call has taken: a replay takes it again."""
        self.segment.times[OTHER_SECONDS] += seconds

    def _is_due(self, slot: int) -> bool:
        last = self._last[slot]
        if last is None:
            return True
        number, others = last
        words, times = self.segment.words, self.segment.times
        seconds = (words[BUSY] - number) * times[STEP_SECONDS] + times[OTHER_SECONDS] - others
        return seconds >= len(self._envs) * self._cost / self._share
