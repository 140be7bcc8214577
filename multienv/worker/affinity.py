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

# A mask: steps whose numbers have none of these bits are looked at, one in so many and one.
SAMPLE = 63
# After it has bound itself a worker looks more often, and less and less so as long as that goes well: where somebody
# else wants the core, each step may wait for a whole slice of the scheduler's.
_PROBATION = 3
# Later on about every so many seconds, which a look at the kernel's account is a thousandth of.
_LOOK = 1e-3
# A step is short below this, in seconds.
_SHORT = 200e-6
# A bound worker's steps may become so long, or wait so long for their core, before it frees itself. Its siblings
# on the core make it wait too: a dozen of CartPole's steps and more.
_LONG = 800e-6
# Weight of a new sample in the time of a step.
_SMOOTHING = 0.1
# So many samples decide.
_ENOUGH = 3
# After so many seconds a worker that freed itself tries again; each time it waits four times as long.
_PATIENCE = 1.0


class Affinity:
    """Binds this process to the core its trainer prefers, as long as that is good for it.

    Args:
        words: The control words; the trainer's preference is among them.
        times: The same as floats: the time of a step is told there.
        scheduler: What the kernel offers, or ``None`` where it does not.
        clock: Tells seconds.

    Attributes:
        unseen: A mask: a step whose number has any of these bits need not be looked at.
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
        self._patience, self._rests_until = _PATIENCE, 0.0
        self._waited = 0.0
        self.unseen = SAMPLE

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
        waited = (self._waited - before) / steps
        if self._bound:
            self._look_out(seconds, waited, scheduler)
        elif seconds < _SHORT:
            if self._clock() >= self._rests_until:
                self._evidence += 1
        else:
            self._evidence = max(0, self._evidence - 1)
        if not self._bound and self._evidence >= _ENOUGH:
            self._evidence = 0
            self._bound = scheduler.bind(self._words[CORE] - 1)
            self.unseen = _PROBATION
            if not self._bound:
                self._scheduler, self.unseen = None, SAMPLE

    def _look_out(self, seconds: float, waited: float, scheduler: Scheduler) -> None:
        """While bound: let go when that is no good."""
        if seconds + waited > _LONG:
            self._evidence += max(1, int(waited / _LONG))
        else:
            self._evidence = max(0, self._evidence - 1)
        if self._evidence >= _ENOUGH:
            self._evidence = 0
            scheduler.free()
            self._bound, self.unseen = False, SAMPLE
            self._rests_until, self._patience = self._clock() + self._patience, 4 * self._patience
        elif 2 * (self.unseen + 1) * self._times[STEP_SECONDS] < _LOOK or self.unseen < _PROBATION:
            self.unseen = min(SAMPLE, 2 * self.unseen + 1)

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
