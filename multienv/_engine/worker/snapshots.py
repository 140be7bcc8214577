"""Forked snapshots: now and then a worker forks itself, and the copy freezes.

The memory of the copy is exact by construction, whatever the env is made of. When the worker is lost, the copy wakes,
receives new descriptors, and executes again the few requests that came after the fork. A snapshot costs the worker a
fork, and memory only for pages that are written to afterwards (copy-on-write).

The copy holds neither end of the worker's wake socket: else the socket would stay open when the worker dies, and nobody
would see the death. It leads a process group of its own. It waits on a socket whose other end only the monitor holds: a
message wakes the copy, and the end of the socket ends it. When the worker is dead, the copy becomes a child of the
monitor, so that the monitor learns its exit status, too.

A fork copies memory, not the world. Each time the module ``census`` looks for what the process has beyond its memory.
Regular files are put back in the copy; if anything else is found, no snapshot is taken, and the control word
``OBSTACLE`` says why. A snapshot is also of no use if the env has asked outside in a request after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import signal
import socket
import struct
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import NoReturn

from multienv._engine.wire.banks import OVERHEAD
from multienv._engine.wire.segment import LOSS_SECONDS, OBSTACLE, SNAPSHOT, SNAPSHOT_SECONDS, SNAPSHOTS, Segment
from multienv._engine.worker.census import (
    CHILDREN,
    FAILED,
    LOCKS,
    OBSTACLES,
    THREADS,
    TIMERS,
    AskedOutside,
    Found,
    census,
    reopen,
    standard_streams,
)
from multienv._engine.worker.descriptors import MARK_VARIABLE, WorkerDescriptors, mark_of

# Process, number of the last request executed in it, and the token it is kept under; 0: the newest, for recoveries.
ANNOUNCEMENT = struct.Struct("<QQQ")
WAKING = struct.Struct("<Q")  # the monitor
# What comes with WAKING: wake socket, memory, stack, announcements, stderr.
_WAKING_DESCRIPTORS = 5

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
# If the census finds these, an older snapshot is still good: the copy starts or takes its own.
_OF_THE_PROCESS = (THREADS, CHILDREN, FAILED, LOCKS, TIMERS)

# Env time between two snapshots: as many times what a fork takes, so that they cost a third of a percent; the pages
# copied afterwards and the copy's own work cost as much again.
_MULTIPLE = 300
# At the least: shorter replays are not worth it.
_SHORTEST = 0.05
# At the most, so that a replay is short; unless they cost more than one percent then.
_LONGEST = 0.5
_LEAST_MULTIPLE = 100
# After a try that found an obstacle, the next one comes after so many times the interval.
_OBSTACLE_FACTOR = 4
# Part of the journal that requests may fill until the next one is due; it is taken after twice as many at the latest.
_PART_OF_JOURNAL = 0.25
_PR_SET_PDEATHSIG = 1
_STDERR = 2
# A snapshot is woken when its parent is dead, or about to be; seconds.
_ORPHANED_WITHIN = 2.0


class Woken(BaseException):
    """Raised in a snapshot that has been woken, to leave the code that the worker was running when it forked.

    Attributes:
        descriptors: The new descriptors.
        number: The last request executed in it.
    """

    def __init__(self, descriptors: WorkerDescriptors, number: int) -> None:
        super().__init__()
        self.descriptors = descriptors
        self.number = number


def flush_streams() -> None:
    """Write out what the standard streams have buffered; they may be the env's, or closed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()


def interval_for(cost: float, mean: float = math.inf) -> float:
    """Return the seconds of the envs' time between two snapshots.

    The longest at which they cost little; or that at which they, and what is repeated after losses, cost the least,
    if it is shorter (Young 1974, Daly 2006). It is at least what a snapshot takes: half of the time goes by in steps.

    Args:
        cost: Seconds that a snapshot takes.
        mean: Seconds of the envs' time between two losses.
    """
    usual = min(max(_SHORTEST, _MULTIPLE * cost), max(_LONGEST, _LEAST_MULTIPLE * cost))
    return min(usual, max(cost, math.sqrt(2 * cost * mean))) if cost else usual


class Snapshots:
    """Decides when a worker takes snapshots, and takes them.

    Args:
        segment: The worker's segment.
        descriptors: The worker's descriptors.
        fork: Makes the copy.

    Attributes:
        account: A further descriptor of multienv; see ``affinity``.
        every: As planned; if it is positive, :meth:`consider` is to be called after each step.
    """

    def __init__(self, segment: Segment, descriptors: WorkerDescriptors, fork: Callable[[], int] = os.fork) -> None:
        self.account = -1
        self._segment = segment
        self._descriptors = descriptors
        self._fork = fork
        self._standard = standard_streams()
        self._asked = AskedOutside(segment.words)
        self._number = 0  # of the last request executed in the newest snapshot; in a woken copy: in the copy
        self._token = 0
        self.every = -1
        self._journal = 0
        self._interval = _SHORTEST
        self._cost = 0.0
        self._pids: set[int] = set()
        self._newest = 0  # pid of the newest snapshot for recoveries

    def plan(self, every: int, *, at_once: bool = False, journal: int = 0) -> None:
        """Plan snapshots.

        Args:
            every: Take one every so many steps; 0: at the best interval; -1: never.
            at_once: Take the first at once.
            journal: Bytes that the trainer's journal may take: what it forgets must not be needed; 0: not known.
        """
        self.every = every
        self._journal = journal
        self._interval = 0.0 if at_once else _SHORTEST

    def consider(self, number: int, step_seconds: float) -> None:
        """Take a snapshot after the step with this number, if one is due. A copy that is woken raises `Woken` here."""
        if self.every < 0:
            return
        steps, times = number - self._number, self._segment.times
        times[SNAPSHOT_SECONDS] = interval = self._present_interval()
        if steps >= self.every if self.every else self._is_due(number, steps, interval / max(step_seconds, 1e-9)):
            obstacle = self._asked.pop_obstacle() or self._take(number, 0)
            self._segment.words[OBSTACLE] = obstacle
            if obstacle:  # the obstacle may go away: try again later
                self._number = number
                self._interval = _OBSTACLE_FACTOR * max(_SHORTEST, self._interval)
                if obstacle not in _OF_THE_PROCESS:
                    self._drop()

    def _present_interval(self) -> float:
        """Return the seconds of the envs' time between two snapshots: fewer if processes are often lost."""
        mean = self._segment.times[LOSS_SECONDS]
        if not mean or self._segment.words[OBSTACLE]:
            return self._interval
        return min(self._interval, interval_for(self._cost, mean))

    def _is_due(self, number: int, steps: int, enough: float) -> bool:
        """Tell whether a snapshot is due: at round numbers, so that workers stepped together also fork together.

        At the latest after twice as many steps as are enough: other requests may have all the round numbers.
        """
        if self._journal:  # a quick env fills it before the interval is over
            enough = min(enough, _PART_OF_JOURNAL * self._journal / (self._segment.layout.end + OVERHEAD))
        is_round = number % (1 << max(0, int(enough).bit_length() - 1)) == 0
        return steps >= enough and (is_round or steps >= 2 * enough)

    def keep(self, number: int, token: int) -> str:
        """Take a snapshot during request ``number``, kept under ``token``; return the obstacle in words, or ``""``.

        With token 0 it is one for recoveries, taken in a replay.
        """
        return OBSTACLES[(not token and self._asked.pop_obstacle()) or self._take(number, token)]

    def go_on(self, segment: Segment, descriptors: WorkerDescriptors) -> None:
        """Take over segment and descriptors in a woken copy, and take another snapshot in its place."""
        self._segment, self._descriptors = segment, descriptors
        # Standard error is new; what the env has put in the place of the others is the env's still.
        self._standard |= {one for one in standard_streams() if one[0] == _STDERR}
        self._asked.move(segment.words)
        self._take(self._number, self._token)
        self._token = 0
        self._interval = 0.0  # take a newer one soon: the worker may well be lost again

    # --- in the worker --------------------------------------------------------------------------

    def _take(self, number: int, token: int) -> int:
        """Take a snapshot; return the obstacle, an index of OBSTACLES, or 0."""
        if not token:
            self._number = number
        self._reap()
        began = time.perf_counter()
        try:
            files = []
            ours = {*self._descriptors.descriptors(), self.account}
            for found in census(ours, self._pids, self._standard):
                if found.obstacle:
                    return found.obstacle
                files.append(found)
            channel, theirs = socket.socketpair()
        except OSError:  # no descriptor is left
            return FAILED
        flush_streams()  # or the copy would write the buffered text again
        drawn = random.getstate()  # Python seeds `random` anew in a forked child
        timers = [signal.getitimer(which) for which in _TIMERS]  # and a child has none
        try:
            pid = self._fork()
        except OSError:
            channel.close()
            theirs.close()
            return FAILED
        if pid == 0:
            channel.close()
            random.setstate(drawn)
            self._number, self._token = number, token
            self._freeze(theirs, timers, files)
        theirs.close()
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # worker and copy both do this, because either may be first
        is_announced = self._announce(ANNOUNCEMENT.pack(pid, number, token), channel)
        self._pids.add(pid)
        if not token and is_announced:  # what was recorded since the one before is needed no more
            self._segment.words[SNAPSHOT], self._newest = number, pid
        self._segment.words[SNAPSHOTS] += 1
        self._cost = max(time.perf_counter() - began, 0.75 * self._cost)
        self._interval = interval_for(self._cost)
        return 0

    def _announce(self, message: bytes, channel: socket.socket) -> bool:
        """Announce a snapshot to the monitor, which ends the one before; return whether that succeeded.

        If it fails, the copy's socket ends.
        """
        handed = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [channel.fileno()]))
        with channel, contextlib.suppress(OSError):
            self._descriptors.announcements.sendmsg([message], [handed], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            return True
        return False

    def _reap(self) -> None:
        for pid in list(self._pids):
            try:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    self._pids.discard(pid)
            except ChildProcessError:  # the env reaps every child it finds
                self._pids.discard(pid)

    def _drop(self) -> None:
        """End the newest snapshot, because what it would repeat is not only in its memory."""
        self._segment.words[SNAPSHOT] = 0
        if self._newest in self._pids:  # else its number may be that of another process by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._newest, signal.SIGKILL)

    # --- in the copy ----------------------------------------------------------------------------

    def _freeze(
        self, channel: socket.socket, timers: Sequence[tuple[float, float]], files: Sequence[Found]
    ) -> NoReturn:
        """Close what is the worker's, and wait; raise `Woken` when woken, exit when no longer needed.

        Files are put back at once: a copy that kept those of the worker would keep its locks, too.
        """
        try:
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            self._descriptors.close()
            self._segment.close()
            self._pids.clear()
            reopen(files)
            with channel:
                message, received, _, _ = socket.recv_fds(channel, WAKING.size, _WAKING_DESCRIPTORS)
            if len(message) < WAKING.size or len(received) < _WAKING_DESCRIPTORS:
                os._exit(0)  # this copy is no longer needed
            own = self._descriptors_after_waking(message, received)
            for which, timer in zip(_TIMERS, timers, strict=True):
                if timer[0]:
                    signal.setitimer(which, *timer)
        except BaseException:
            os._exit(0)
        raise Woken(own, self._number)

    @staticmethod
    def _descriptors_after_waking(message: bytes, received: list[int]) -> WorkerDescriptors:
        (monitor,) = WAKING.unpack(message)
        *own, stderr = received
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        # Polled: nothing tells a process that its parent has changed.
        until = time.monotonic() + _ORPHANED_WITHIN
        while os.getppid() != monitor:
            if time.monotonic() > until:
                os._exit(0)
            time.sleep(0.001)
        os.dup2(stderr, _STDERR)
        os.close(stderr)
        os.environ[MARK_VARIABLE] = mark_of(monitor, os.getpid())
        return WorkerDescriptors.of(*own)
