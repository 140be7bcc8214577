"""Bind a worker to a core while its steps are short, and have it look for requests, where nothing else wants the core.

A step of a few microseconds is over before the scheduler has found a good core for it: it wakes a worker on the core
it was asked from, lets it interrupt the trainer there, which has more to send, and another core idles. Bound to a core
each and without the right to interrupt (``SCHED_BATCH``), eight CartPoles on two cores make 1.16 times the steps; and
1.7 times, because each looks for its next request before it goes to sleep. For long steps the scheduler is better.

But whatever else wants the core is in the way: the threads of a policy that wait for their next product without giving
the core away (OpenBLAS, OpenMP) cost a worker that is bound, or that looks, 3 ms a step. One that sleeps is woken at
once. The rules are fixed:

- bind after three samples in a row of steps below 1 ms, those of a batch together, if the trainer names a core;
- let go when a step takes more than 3 ms;
- let go, and do not look, when a step waits for the core for more than 0.5 ms, and more than twice the steps of the
  workers that share it; the kernel keeps account of that;
- do neither again for 10 s after that, then for 20 s, and so on.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from multienv.wire.segment import CORE, LOOKS

SHORT = 1e-3
LONG = 3e-3
CROWDED = 0.5e-3
ENOUGH = 3
REST = 10.0


class Affinity:
    """Binds this process to the core its trainer prefers, or lets go of it.

    Args:
        words: The control words; the trainer's preferences are among them.
        account: Descriptor of the kernel's account of waiting; -1: this system has none, and nothing is bound.

    Attributes:
        is_crowded: Something else wants the core: do not look for requests.
    """

    def __init__(self, words: Any, account: int) -> None:
        self.is_crowded = False
        self._words = words
        self._account = account
        self._samples = 0
        self._is_bound = False
        self._rest, self._rests_until = REST, 0.0
        self._waited: float | None = None
        self.start()

    @classmethod
    def of_this_process(cls, words: Any) -> Affinity:
        """Make one with what the kernel offers."""
        account = -1
        with contextlib.suppress(OSError):
            account = os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        return cls(words, account)

    def start(self) -> None:
        """Take the cores and the scheduling policy of this process, as they are now, for those it was given."""
        if self._account >= 0:
            self._cores, self._policy = os.sched_getaffinity(0), os.sched_getscheduler(0)

    def consider(self, seconds: float, steps: int) -> None:
        """Draw conclusions from a sample.

        Args:
            seconds: Time of the newest step.
            steps: Number of steps since the last sample.
        """
        sharing, core = self._words[LOOKS], self._words[CORE]
        if self._account < 0 or not (sharing or self._is_bound):
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
        self._is_bound = True

    def _let_go(self) -> None:
        if self._is_bound:
            self._is_bound = False
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._cores)
                os.sched_setscheduler(0, self._policy, os.sched_param(0))

    def _seconds_waited(self) -> float:
        """Return the time this process could have run and had no core."""
        return int(os.pread(self._account, 128, 0).split()[1]) * 1e-9
