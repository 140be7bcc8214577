"""Which core a worker runs on, and how eagerly.

A step of a few microseconds is over before the scheduler has found a good core for it: it wakes a worker on the
core it was asked from, lets it interrupt the trainer there, which has more to send, and another core idles.
Bound to a core each in turn and without the right to interrupt (``SCHED_BATCH``), eight CartPoles on two cores
make about a third more steps a second. For long steps the scheduler is better: it moves work to where there is room.

And whoever is bound suffers when somebody else wants the core: with ``SCHED_BATCH`` one busy process beside it
makes a step a hundred times as long. So a worker binds itself while its steps are short, and looks at what
the kernel keeps account of, how long it waited for its core; when that is too long it frees itself for a while.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from time import perf_counter
from typing import Any

from multienv.wire.memory import CORE, STEP_SECONDS, Control

# One step in so many is looked at.
SAMPLE = 63
# A step is short below this, in seconds.
_SHORT = 200e-6
# A bound worker's steps may become so long, or wait so long for their core, before it frees itself. Its siblings
# on the core make it wait too: a dozen of CartPole's steps and more.
_LONG = 800e-6
# Weight of a new sample in the time of a step.
_SMOOTHING = 0.1
# So many samples decide.
_ENOUGH = 3
# After so many samples a worker that freed itself tries again; each time it waits four times as long.
_PATIENCE = 256


class Affinity:
    """Binds this process to the core its trainer prefers, as long as that is good for it.

    Args:
        words: The control words; the trainer's preference is among them.
        times: The same as floats: the time of a step is told there.
        scheduler: What the kernel offers, or ``None`` where it does not.
        clock: Tells seconds.
    """

    def __init__(
        self, words: Any, times: Any, scheduler: Scheduler | None = None, clock: Callable[[], float] = perf_counter
    ) -> None:
        """Run anywhere, to begin with."""
        self._words, self._times = words, times
        self._scheduler = scheduler
        self._clock = clock
        self._bound = False
        self._evidence = 0
        self._patience, self._rest = _PATIENCE, 0
        self._waited = 0.0

    @classmethod
    def of_this_process(cls, control: Control) -> Affinity:
        """With what the kernel offers."""
        return cls(control.words, control.times, Scheduler.of_this_process())

    def timed(
        self, handle: Callable[[int, int, bytes], bytes], seq: int, kind: int, frame: bytes, steps: int = SAMPLE + 1
    ) -> bytes:
        """Take the step, which stands for so many; draw conclusions from how long it took."""
        began = self._clock()
        reply = handle(seq, kind, frame)
        seconds = self._clock() - began
        before = self._times[STEP_SECONDS] or seconds
        self._times[STEP_SECONDS] = before + _SMOOTHING * (seconds - before)
        if self._scheduler is not None and self._words[CORE]:
            self._consider(seconds, steps, self._scheduler)
        return reply

    def _consider(self, seconds: float, steps: int, scheduler: Scheduler) -> None:
        before, self._waited = self._waited, scheduler.waited()
        if self._rest:
            self._rest -= 1
            return
        waited = (self._waited - before) / steps
        telling = seconds + waited > _LONG if self._bound else seconds < _SHORT
        self._evidence = self._evidence + 1 if telling else max(0, self._evidence - 1)
        if self._evidence < _ENOUGH:
            return
        self._evidence = 0
        if self._bound:
            scheduler.free()
            self._bound = False
            self._rest, self._patience = self._patience, 4 * self._patience
        else:
            self._bound = scheduler.bind(self._words[CORE] - 1)
            if not self._bound:
                self._scheduler = None

    def end(self) -> None:
        """In a copy of the process, which another one looks after from now on: undo what has been done."""
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            if self._bound:
                scheduler.free()
            scheduler.close()


class Scheduler:
    """The kernel's, as far as it concerns this process."""

    def __init__(self) -> None:
        """Raises OSError or AttributeError where this is not Linux, or keeps no account of waiting."""
        self._account = os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._cores, self._policy = os.sched_getaffinity(0), os.sched_getscheduler(0)

    @classmethod
    def of_this_process(cls) -> Scheduler | None:
        """The scheduler, where there is one to talk to."""
        with contextlib.suppress(OSError, AttributeError):
            return cls()
        return None

    def waited(self) -> float:
        """For so many seconds this process could have run and had no core."""
        return int(os.pread(self._account, 128, 0).split()[1]) * 1e-9

    def bind(self, core: int) -> bool:
        """Run on this core alone, and interrupt nobody. False if the env has made its own arrangements."""
        theirs = os.sched_getaffinity(0) != self._cores or os.sched_getscheduler(0) != self._policy
        if theirs or core not in self._cores or self._policy != os.SCHED_OTHER:
            return False
        os.sched_setaffinity(0, {core})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return True

    def free(self) -> None:
        """Undo it."""
        os.sched_setaffinity(0, self._cores)
        os.sched_setscheduler(0, self._policy, os.sched_param(0))

    def close(self) -> None:
        """Let go of the kernel's account."""
        os.close(self._account)
