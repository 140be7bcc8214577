"""Forked snapshots: now and then a worker forks itself, and the copy freezes.

The copy is exact by construction, whatever the env is made of, and it is a hot standby: when the worker is lost it
wakes, is handed new pipes and runs the few requests again that came since. It costs the worker a fork, and memory only
where the two come to differ (copy-on-write).

It holds none of the worker's pipes, which would hide a death, and leads a process group of its own. It waits for a
message on a socket whose other end the warden alone holds: the message wakes it, the socket's end is its own. Once the
worker is dead it is the warden's child, which reaps its exact exit status too.

An env with threads, child processes, sockets, a GPU or shared memory would not survive the fork whole; then none is
taken, and `NO_SNAPSHOTS` says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import signal
import socket
import struct
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from multienv.wire.memory import NO_SNAPSHOTS, PID, SHARED_NAME, SNAPSHOTS
from multienv.wire.messages import SEQ_MASK
from multienv.worker.affinity import SAMPLE
from multienv.worker.ends import WARD_VARIABLE, Ends, ward_mark

# Process, number of the last request it has executed, and the token it is kept under; 0: it is the standby.
ANNOUNCEMENT = struct.Struct("<QQQ")
WAKING = struct.Struct("<QQQ")  # trainer, warden, number of the worker it is from now on
# What comes with it: requests (read), replies (write), memory, stack (write), stderr (write), announcements.
WAKING_DESCRIPTORS = 6

# Why there are none; control word NO_SNAPSHOTS is an index.
OBSTACLES = ("", "threads", "child processes", "sockets", "devices", "the fork failed", "shared memory")
_THREADS, _CHILDREN, _SOCKETS, _DEVICES, _FAILED, _SHARED = range(1, 7)
# Pygame starts it, and needs it for callbacks by the clock alone, which no env asks for that is to be deterministic.
_HARMLESS_THREADS = ("SDLTimer\n",)
_DEVICE_PREFIXES = ("/dev/nvidia", "/dev/dri", "/dev/kfd", "/dev/infiniband")
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
# In the kernel's list of mappings: memory that a copy would go on sharing with its worker, unless it is ours.
_WRITTEN_BY_ALL = re.compile(rb" .w.s .*(?<!/memfd:%s \(deleted\))\n" % SHARED_NAME.encode())
# Env time between two, in multiples of what the fork takes: it has to pay for the pages that are copied afterwards too,
# and for the copy's own work, on another core or not.
_MULTIPLE = 300
# Env time between two at the least, seconds: shorter replays are not worth it.
_SHORTEST = 0.05
# Steps that take longer, in seconds, are looked at each.
_SLOW = 1e-3
# Times as long for each try that found an obstacle.
_PATIENCE = 4
_PR_SET_PDEATHSIG = 1
# It is woken when its parent is dead, or about to be; seconds.
_ORPHANED_WITHIN = 2.0


class Woken(BaseException):
    """Raised in a snapshot that has been woken, out of whatever the worker was doing when it was taken."""

    def __init__(self, ends: Ends) -> None:
        """Tell what it has been handed."""
        super().__init__()
        self.ends = ends


class Snapshots:
    """When a worker takes snapshots, and how.

    Args:
        words: The worker's control words.
        ends: Its descriptors. Without a socket to the warden among them none are taken.
        remember: Called before each fork with the number of the last request, to keep what the copy would not have for
            itself.
        fork: Makes the copy.
        clock: Tells seconds.
    """

    def __init__(
        self,
        words: Any,
        ends: Ends,
        remember: Callable[[int], None] = lambda seq: None,
        fork: Callable[[], int] = os.fork,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take none by itself until told how often."""
        self._seq = 0  # of the last one; in a woken copy: of the last request it has executed
        self._token = 0
        self._every = -1
        self._words = words
        self._ends = ends
        self._remember = remember
        self._fork = fork
        self._clock = clock
        self._interval = _SHORTEST
        self._cost = 0.0
        self._pids: set[int] = set()

    def begin(self, every: int, *, at_once: bool = False) -> None:
        """Take one every so many steps; 0 finds out how often is good, -1 is never."""
        self._every = every if self._possible() else -1
        self._interval = 0.0 if at_once else _SHORTEST

    def _possible(self) -> bool:
        return sys.platform == "linux" and self._ends.announcements >= 0

    def unseen(self, step_seconds: float) -> int:
        """A mask: a step whose number has any of these bits need not be looked at."""
        if step_seconds > _SLOW or 0 < self._every <= SAMPLE:
            return 0
        return SAMPLE

    def consider(self, seq: int, step_seconds: float) -> None:
        """After a step: take one if it is time. In the copy `Woken` is raised when it is woken."""
        if self._every < 0:
            return
        steps = (seq - self._seq) & SEQ_MASK
        if steps >= self._every if self._every else self._is_due(seq, steps, step_seconds):
            obstacle = self._take(seq, 0)
            self._words[NO_SNAPSHOTS] = obstacle
            if obstacle:  # it may go away: try again later
                self._interval = _PATIENCE * max(_SHORTEST, self._interval)

    def _is_due(self, seq: int, steps: int, step_seconds: float) -> bool:
        """At steps whose numbers are round: those who are stepped together then fork together, and wait once.

        But no later than after four times as many as are enough: calls have numbers too, perhaps all the round ones.
        """
        enough = self._interval / max(step_seconds, 1e-9)
        is_round = seq % (1 << max(0, int(enough).bit_length() - 1)) == 0
        return steps >= enough and (is_round or steps >= 4 * enough)

    def branch(self, seq: int, token: int) -> str:
        """Take one to be kept under this token. What is in the way, or nothing. `Woken` as above."""
        if not self._possible():
            return "the start method"
        return OBSTACLES[self._take(seq, token)]

    def _take(self, seq: int, token: int) -> int:
        if not token:
            self._seq = seq
        self._reap()
        began = self._clock()
        try:
            obstacle = self._obstacle()
            if obstacle:
                return obstacle
            ours, theirs = socket.socketpair()
        except OSError:  # no descriptor is left
            return _FAILED
        for stream in (sys.stdout, sys.stderr):  # or the copy would write it a second time
            with contextlib.suppress(Exception):
                stream.flush()
        drawn = random.getstate()  # Python seeds it anew in a forked child
        timers = [signal.getitimer(which) for which in _TIMERS]  # and a child has none
        self._remember(seq)
        try:
            pid = self._fork()
        except OSError:
            ours.close()
            theirs.close()
            return _FAILED
        if pid == 0:
            ours.close()
            random.setstate(drawn)
            self._seq, self._token = seq, token
            self._freeze(theirs, timers)
        theirs.close()
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # whoever comes first
        self._announce(ANNOUNCEMENT.pack(pid, seq, token), ours)
        self._note(pid, self._clock() - began)
        return 0

    # --- in the worker --------------------------------------------------------------------------

    def _announce(self, message: bytes, channel: socket.socket) -> None:
        """To the warden, who lets go of the one before. Without its ear the copy sees the socket end."""
        with channel, contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._ends.announcements)) as warden:
            # Not by socket.send_fds(): CPython ignores the flags it is given.
            handed = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [channel.fileno()]))
            warden.sendmsg([message], [handed], socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0))

    def _note(self, pid: int, seconds: float) -> None:
        self._pids.add(pid)
        self._words[SNAPSHOTS] += 1
        self._cost = max(seconds, 0.75 * self._cost)
        self._interval = max(_SHORTEST, _MULTIPLE * self._cost)

    def _reap(self) -> None:
        for pid in list(self._pids):
            try:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    self._pids.discard(pid)
            except ChildProcessError:  # the env reaps whichever child it finds
                self._pids.discard(pid)

    def _obstacle(self) -> int:
        """What would not survive a fork, or 0."""
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                if int(task) != os.getpid():
                    if Path(f"/proc/self/task/{task}/comm").read_text() not in _HARMLESS_THREADS:
                        return _THREADS
                elif set(map(int, Path(f"/proc/self/task/{task}/children").read_text().split())) - self._pids:
                    return _CHILDREN
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - a Path costs ten times as much
                if target.startswith("socket:") and int(descriptor) != self._ends.announcements:
                    return _SOCKETS
                if target.startswith(_DEVICE_PREFIXES):
                    return _DEVICES
        return _SHARED if _WRITTEN_BY_ALL.search(Path("/proc/self/maps").read_bytes()) else 0

    # --- in the copy ----------------------------------------------------------------------------

    def _freeze(self, channel: socket.socket, timers: list[tuple[float, float]]) -> NoReturn:
        """Let go of what is the worker's, and wait."""
        try:
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            for descriptor in self._ends.descriptors():
                os.close(descriptor)
            self._pids.clear()
            with channel:
                message, descriptors, _, _ = socket.recv_fds(channel, WAKING.size, WAKING_DESCRIPTORS)
            if len(message) < WAKING.size or len(descriptors) < WAKING_DESCRIPTORS:
                os._exit(0)  # nobody needs it any more
            ends = self._get_up(message, descriptors)
            for which, timer in zip(_TIMERS, timers, strict=True):
                if timer[0]:
                    signal.setitimer(which, *timer)
        except BaseException:
            os._exit(0)
        raise Woken(ends)

    def _get_up(self, message: bytes, descriptors: list[int]) -> Ends:
        trainer, warden, number = WAKING.unpack(message)
        requests, replies, memory, stack, stderr, announcements = descriptors
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(9), 0, 0, 0)
        # Asked: nothing tells a process that it has another parent. The old one is dead, or about to be.
        until = time.monotonic() + _ORPHANED_WITHIN
        while os.getppid() != warden:
            if time.monotonic() > until:
                os._exit(0)
            time.sleep(0.001)
        os.dup2(stderr, 2)
        os.close(stderr)
        os.environ[WARD_VARIABLE] = ward_mark(trainer, number)
        return Ends(requests, replies, memory, stack, announcements)

    def go_on(self, words: Any, ends: Ends) -> None:
        """In a woken copy, with control words and ends of its own: leave another in its place, first of all."""
        self._words, self._ends = words, ends
        words[PID] = os.getpid()
        self._take(self._seq, self._token)
        self._token = 0
        self._interval = 0.0  # and a newer one soon: what was lost may well be lost again
