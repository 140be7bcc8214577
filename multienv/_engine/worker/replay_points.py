"""Resets at which a replay can begin: before some of them the state of the random generators is saved.

A replay of one slot begins with a reset of its env in a new process, in which the generators get the state that they
had before that reset. The state must outlive the process, so it is sent with the answer to the request in which the env
was reset. Saving a state takes time, so it is not done before every reset.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from multienv._engine.wire.segment import BUSY, OTHER_SECONDS, STEP_SECONDS, Segment
from multienv._engine.worker import seeding

# Part of the envs' time that saving may take; the larger one where processes are replaced by plan, which replays.
SHARE, LARGE_SHARE = 0.005, 0.05
# Seconds that saving takes, about, before it was measured; and the factor by which a measurement may exceed the last.
_COST, _GROWTH = 1e-4, 1.1
# Bytes of requests after which a state is saved in any case, so that the journal has a point that is not far back.
_BYTES = 2**20


class ReplayPoints:
    """Saves the state of the generators before resets; in a replay, restores it.

    Args:
        envs: Of all slots.
        share: Part of the envs' time that saving may take; 0: nothing is saved.
        segment: Of the worker; to be replaced when the envs move to another one.
        first: Slot → state to restore before its first reset: see ``Build.generators``.

    Attributes:
        generators: Slot → state of its generators before the reset in the request that is being executed. The reply
            takes it from here. The dict is never replaced: native code holds it.
        replaying: In a replay: slot → state to restore before the slot is reset. Else ``None``.
        with_payload: Bytes of the requests that do not lie in banks.
        has_drawn: In a replay envs have drawn other numbers from ``random`` or ``numpy.random`` than the first time.
    """

    def __init__(self, envs: Sequence[Any], share: float, segment: Segment, first: Mapping[int, bytes]) -> None:
        self.segment = segment
        self.generators: dict[int, bytes] = {}
        self.replaying: dict[int, bytes] | None = None
        self.has_drawn = False
        self._restored: Any = None  # state of the process's generators when they were restored last
        self._envs = envs
        self._share = share
        self._first = dict(first)
        # Where some envs of the process are in the middle of an episode, those that it shares are left to them.
        self._is_of_all = len(first) == len(envs)
        self._cost = _COST
        self.with_payload = 0
        # Of each slot's last replay point: number of the request; and what resets and recorded calls had taken, and
        # requests that do not lie in banks, by then.
        self._last: list[tuple[int, float, int] | None] = [None] * len(envs)

    def pop_generators(self) -> Mapping[int, bytes]:
        """Return the saved states, and forget them."""
        taken = dict(self.generators)
        self.generators.clear()
        return taken

    def before_reset(self, slot: int) -> None:
        """Note that the env of a slot is about to be reset."""
        generators = None if self.replaying is None else self.replaying.pop(slot, None)
        first = self._first.pop(slot, None)
        if first and not generators:
            seeding.restore(self._envs[slot], first, of_process=self._is_of_all)
            self._is_of_all, self._restored = False, seeding.state_of_process()
        if self.replaying is not None:
            if generators:
                present = seeding.state_of_process()
                seeding.restore(self._envs[slot], generators)
                recorded = seeding.state_of_process()
                # Something was drawn, and not what was drawn the first time: envs that drew then do not take part yet.
                self.has_drawn = self.has_drawn or present not in (self._restored, recorded)
                self._restored = recorded
        elif self._share and (self.generators or self._is_due(slot)):  # envs that are reset together begin together
            began = time.perf_counter()
            self.generators[slot] = seeding.states_of(self._envs[slot])
            self._last[slot] = self.segment.words[BUSY], self.segment.times[OTHER_SECONDS], self.with_payload
            # As it is where nothing else wants the core.
            self._cost = min(time.perf_counter() - began, _GROWTH * self._cost)

    def begin_replay(self) -> None:
        """Note that a replay begins."""
        self.replaying, self.has_drawn, self._restored = {}, False, seeding.state_of_process()

    def look_at_generators(self) -> None:
        """Note whether anything was drawn from the generators of the process since they were put back."""
        self.has_drawn = self.has_drawn or self._restored != seeding.state_of_process()

    def forget(self, slot: int) -> None:
        """Note that the reset raised: no episode has begun."""
        self._last[slot] = None
        self.generators.pop(slot, None)

    def count(self, seconds: float) -> None:
        """Add to the time of the envs what a reset or a recorded call has taken: a replay takes it again."""
        self.segment.times[OTHER_SECONDS] += seconds

    def _is_due(self, slot: int) -> bool:
        last = self._last[slot]
        if last is None:
            return True
        number, others, with_payload = last
        words, times = self.segment.words, self.segment.times
        if (words[BUSY] - number) * self.segment.layout.end + self.with_payload - with_payload >= _BYTES:
            return True
        seconds = (words[BUSY] - number) * times[STEP_SECONDS] + times[OTHER_SECONDS] - others
        return seconds >= len(self._envs) * self._cost / self._share
