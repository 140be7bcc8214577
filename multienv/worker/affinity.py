"""Bind a worker to a core while its steps are short.

A step of a few microseconds is over before the scheduler has found a good core for it: it wakes a worker on the core
it was asked from, lets it interrupt the trainer there, which has more to send, and another core idles. Bound to a core
each and without the right to interrupt (``SCHED_BATCH``), eight CartPoles on two cores make about a third more steps a
second. For long steps the scheduler is better: it moves work to where there is room. And a bound worker suffers when
another process wants its core. The rules are fixed:

- bind after three samples in a row of steps below 1 ms, those of a batch together, if the trainer names a core;
- let go when a step takes more than 3 ms, the wait for the core included, which the kernel keeps account of;
- do not bind again for 10 s after that.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from multienv.wire.segment import CORE

SHORT = 1e-3
LONG = 3e-3
ENOUGH = 3
REST = 10.0


class Affinity:
    """Binds this process to the core its trainer prefers, or lets go of it.

    Args:
        words: The control words; the trainer's preference is among them.
        account: Descriptor of the kernel's account of waiting; -1: this system has none, and nothing is bound.
    """

    def __init__(self, words: Any, account: int) -> None:
        self._words = words
        self._account = account
        self._samples = 0
        self._is_bound = False
        self._rests_until = 0.0
        self._waited = 0.0
        if account >= 0:
            self._cores, self._policy = os.sched_getaffinity(0), os.sched_getscheduler(0)

    @classmethod
    def of_this_process(cls, words: Any) -> Affinity:
        """Make one with what the kernel offers."""
        account = -1
        with contextlib.suppress(OSError):
            account = os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        return cls(words, account)

    def consider(self, seconds: float, steps: int) -> None:
        """Draw conclusions from a sample.

        Args:
            seconds: Time of the newest step.
            steps: Number of steps since the last sample.
        """
        if self._account < 0 or not (self._is_bound or self._words[CORE]):
            return
        if not self._is_bound:
            self._samples = self._samples + 1 if seconds < SHORT else 0
            if self._samples >= ENOUGH and time.monotonic() >= self._rests_until:
                self._bind(self._words[CORE] - 1)
            return
        before, self._waited = self._waited, self._seconds_waited()
        if not self._words[CORE] or seconds + (self._waited - before) / steps > LONG:
            self._let_go()
            self._samples, self._rests_until = 0, time.monotonic() + REST

    def end(self) -> None:
        """Undo what has been done."""
        if self._account >= 0:
            self._let_go()
            with contextlib.suppress(OSError):  # the env may have closed all descriptors it found
                os.close(self._account)
            self._account = -1

    def _bind(self, core: int) -> None:
        is_the_envs = os.sched_getaffinity(0) != self._cores or os.sched_getscheduler(0) != self._policy
        if is_the_envs or core not in self._cores or self._policy != os.SCHED_OTHER:
            self._rests_until = float("inf")  # the env has made its own arrangements, or there is no such core
            return
        os.sched_setaffinity(0, {core})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        self._is_bound, self._waited = True, self._seconds_waited()

    def _let_go(self) -> None:
        if self._is_bound:
            self._is_bound = False
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._cores)
                os.sched_setscheduler(0, self._policy, os.sched_param(0))

    def _seconds_waited(self) -> float:
        """Return the time this process could have run and had no core."""
        return int(os.pread(self._account, 128, 0).split()[1]) * 1e-9
