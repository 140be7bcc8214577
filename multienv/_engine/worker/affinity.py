"""Bind a worker to a core and let it poll for requests, while its steps are short and nothing else wants the core.

A step of a few microseconds is over before the scheduler has found a good core for it. The scheduler wakes a worker on
the trainer's core and lets it interrupt the trainer, which has more to send, while another core idles. With each worker
bound to a core and without the right to interrupt (``SCHED_BATCH``), eight CartPoles on two cores make 1.16 times the
steps; with polling before a worker goes to sleep, 1.7 times. For long steps the scheduler is better.

But binding and polling are bad if other threads want the core. The threads of a policy that wait for work without
yielding the core (OpenBLAS, OpenMP) cost a worker that is bound, or that polls, 3 ms a step. A worker that sleeps is
woken at once. The rules are fixed:

- bind after three samples in a row of steps below 1 ms, those of a batch together, if the trainer names a core;
- unbind when a step takes more than 3 ms;
- unbind, and do not poll, when a step waits for the core for more than 0.5 ms, and for more than twice the steps of the
  workers that share it, as the kernel counts it;
- after that do neither for 10 s, the next time for 20 s, and so on.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from multienv._engine.wire.segment import BOUND, CORE, SPINNERS

SHORT = 1e-3
LONG = 3e-3
CROWDED = 0.5e-3
ENOUGH = 3
REST = 10.0


class Affinity:
    """Binds this process to the core that its trainer prefers, or unbinds it.

    Args:
        words: The control words; the trainer's preferences are among them.
        path: The kernel's account of waiting.

    Attributes:
        account: Its descriptor; -1: this system has none, and nothing is bound.
        is_crowded: Something else wants the core: do not look for requests.
    """

    def __init__(self, words: Any, path: str | os.PathLike[str] = "/proc/self/schedstat") -> None:
        self.is_crowded = False
        self._words = words
        self.account = -1
        with contextlib.suppress(OSError):
            self.account = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._samples = 0
        self._is_bound = False
        self._rest, self._rests_until = REST, 0.0
        self._waited: float | None = None
        self.start()

    def start(self) -> None:
        """Store the present cores and scheduling policy of this process, to restore them later."""
        if self.account >= 0:
            self._cores, self._policy = os.sched_getaffinity(0), os.sched_getscheduler(0)

    def consider(self, seconds: float, steps: int) -> None:
        """Bind or unbind the process, after a sample.

        Args:
            seconds: Time of the newest step.
            steps: Number of steps since the last sample.
        """
        sharing, core = self._words[SPINNERS], self._words[CORE]
        if self.account < 0 or not (sharing or self._is_bound):
            return
        before, self._waited = self._waited, self._seconds_waited()
        waited = 0.0 if before is None else (self._waited - before) / steps
        is_resting = time.monotonic() < self._rests_until
        is_crowded = not is_resting and waited > CROWDED + 2 * sharing * seconds
        if is_crowded or (self._is_bound and (seconds > LONG or not core)):
            self._let_go()
            self.is_crowded = is_crowded
            self._samples, self._rests_until = 0, time.monotonic() + self._rest
            self._rest *= 2
        elif not self._is_bound:
            self._samples = self._samples + 1 if seconds < SHORT else 0
            if not is_resting:
                self.is_crowded = False
                if core and self._samples >= ENOUGH:
                    self._bind(core - 1)

    def end(self) -> None:
        """Restore cores and scheduling policy, and close the account."""
        if self.account >= 0:
            self._let_go()
            with contextlib.suppress(OSError):  # the env may have closed all descriptors it found
                os.close(self.account)
            self.account = -1

    def _bind(self, core: int) -> None:
        is_the_envs = os.sched_getaffinity(0) != self._cores or os.sched_getscheduler(0) != self._policy
        if is_the_envs or core not in self._cores or self._policy != os.SCHED_OTHER:
            self._rests_until = float("inf")  # the env has made its own arrangements, or there is no such core
            return
        os.sched_setaffinity(0, {core})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        self._is_bound, self._words[BOUND] = True, 1 + core

    def _let_go(self) -> None:
        if self._is_bound:
            self._is_bound, self._words[BOUND] = False, 0
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._cores)
                os.sched_setscheduler(0, self._policy, os.sched_param(0))

    def _seconds_waited(self) -> float:
        """Return the seconds that this process was ready to run and waited for a core."""
        return int(os.pread(self.account, 128, 0).split()[1]) * 1e-9
