"""The trainer's side of a worker: one ``Worker`` per process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import termios
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, starmap
from typing import Any

from multienv.errors import UsageError
from multienv.processes import descriptors, leftovers
from multienv.processes.client import WardenClient, guard, reap, warden, workers
from multienv.processes.environment import refuse_other_namespace, worker_environment
from multienv.processes.protocol import (
    FORK,
    FORKSERVER,
    KILL,
    LAUNCH,
    SPAWN,
    UNKNOWN_FATE,
    WATCH,
    Fate,
)
from multienv.wire.memory import CONTROL_SIZE, DEADLINE, Block, Control
from multienv.worker import main as worker
from multienv.worker.ends import WARD_VARIABLE, Ends, ward_mark

METHODS = {"forkserver": FORKSERVER, "spawn": SPAWN, "fork": FORK}
# How long the warden may take to report the end of a worker that is known to be dead.
FATE_TIMEOUT = 5.0
# Seconds until who waits for the end of a worker looks whether another thread has been told of it.
_BOTH_WAIT = 0.05
# How long a worker whose pipe has ended may take to be dead too; then it is killed.
ENDED_PIPE_TIMEOUT = 1.0
# A warden that was launched less than so many seconds ago may still be importing what it preloads.
_UP_WITHIN = 30.0
# Bytes of a reply that nobody waits for any more.
_DROPPED_AT_ONCE = 2**20

_numbers = count(1)
# Forked workers that were let go of while they lived, and whose they were: our children, so ours to reap.
_unreaped: dict[int, Launch] = {}


def method_of(context: Any) -> int:
    """The start method named by ``context``: a name, ``None`` for the best, or a multiprocessing context."""
    name = context if context is None or isinstance(context, str) else getattr(context, "_name", context)
    if name is None:
        return FORKSERVER if sys.platform == "linux" else SPAWN
    if not isinstance(name, str) or name not in METHODS:
        raise UsageError(f"context is {context!r}; choose one of {', '.join(map(repr, METHODS))}, or None.")
    return METHODS[name]


def milliseconds(seconds: float) -> float:
    """For ``poll``, which counts no further than 24 days: long enough to count as waiting for ever."""
    return float(min(max(0.0, seconds) * 1000, 2.0**31 - 1))


def reap_strays(launch: Launch | None = None, patience: float = 0.0) -> None:
    """Take note of their ends; those launched by this that are still to end may take so many seconds."""
    until = time.monotonic() + patience
    while True:
        for pid in list(_unreaped):
            try:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    _unreaped.pop(pid, None)
            except ChildProcessError:
                _unreaped.pop(pid, None)
        if all(one is not launch for one in list(_unreaped.values())) or time.monotonic() >= until:
            return
        time.sleep(0.001)  # see Worker._reap_own_child


@dataclass(frozen=True, slots=True)
class Launch:
    """How to launch the processes of one env: the same for the first and for each that replaces it."""

    method: int
    env_fn: Callable[[], Any]
    shortest_deadline: float
    native_threads: int | None = 1
    arena: int = -1  # descriptor of the memory that several workers share
    guarded: bool = False  # its requests have deadlines, which are to hold though nobody enforces them


class Worker:
    """One worker process, seen from the trainer: two pipes, a control block, and its fate.

    Attributes:
        requests: Descriptor to write requests to; does not block.
        replies: Descriptor to read replies from; blocks, and is always woken.
        memory: Descriptor of the shared memory.
        ended: Descriptor that becomes readable when the process has ended; see :meth:`wait`.
        control: The control words.
    """

    # Until they are made: an interruption may come first.
    requests = replies = memory = ended = unread = -1

    def __init__(self, launch: Launch, start_deadline: float | None, snapshot: tuple[int, int] | None = None) -> None:
        """Launch the process, or wake a snapshot: the order and the number to give; does not wait for it."""
        self.number = next(_numbers)
        self.pid: int | None = None
        self.fate: Fate | None = None
        self._launch, self._method = launch, launch.method
        self._warden: WardenClient | None = None
        self._owner = os.getpid()
        self._told: list[bytes] = []  # its end, as the warden tells it
        self._untold = UNKNOWN_FATE  # what is known of it without
        self._reading = threading.RLock()  # a signal handler may come in between
        self._theirs: list[int] = []
        self._tokens: dict[str, object] = {}
        reap_strays()
        with descriptors.lock:
            try:
                self._make_ends()
                self.control.times[DEADLINE] = time.monotonic() + start_deadline if start_deadline else 0.0
                self._start(launch, snapshot)
            except BaseException:
                self._discard()
                raise
            finally:
                for descriptor in self._theirs:
                    os.close(descriptor)
        workers.add(self)
        if launch.guarded:
            guard.attend(self.number, self)

    def _make_ends(self) -> None:
        """Each is noted as soon as it is made: the next one may be one too many for the system."""
        block, self.memory = Block.create(CONTROL_SIZE)
        self._own("memory")
        self.control = Control(block)
        requests_read, self.requests = os.pipe()
        self._theirs.append(requests_read)
        self._own("requests")
        if signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL:
            # Who wants to be ended by a broken pipe means that of its output: this one is not to break.
            self.unread = os.dup(requests_read)
            self._own("unread")
        self.replies, replies_write = os.pipe()
        self._theirs.append(replies_write)
        self._own("replies")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.ended = ours.detach()
        self._theirs.append(theirs.detach())
        self._own("ended")
        os.set_blocking(self.requests, False)
        os.set_blocking(self.ended, False)

    def _own(self, name: str) -> None:
        self._tokens[name] = descriptors.own(getattr(self, name))

    def _start(self, launch: Launch, snapshot: tuple[int, int] | None) -> None:
        requests, replies, fate = self._theirs
        if snapshot is not None:
            order, which = snapshot
            ends = (requests, replies, self.memory, fate)
            self._warden = warden()
            self._warden.order(order, number=self.number, pid=which, shortest=launch.shortest_deadline, fds=ends)
            return
        if launch.method == FORK:
            self._fork(launch, requests, replies, fate)
            return
        for attempt in (1, 2):
            try:
                self._warden = warden()
                self._warden.order(
                    LAUNCH,
                    number=self.number,
                    method=launch.method,
                    shortest=launch.shortest_deadline,
                    fds=(requests, replies, self.memory, fate, *([launch.arena] if launch.arena >= 0 else [])),
                )
                return
            except OSError:
                if attempt == 2:
                    raise
                reap()  # so that a new one is launched

    def _fork(self, launch: Launch, requests: int, replies: int, fate: int) -> None:
        """Fork the worker off the trainer itself; the warden watches over it from beside."""
        refuse_other_namespace()
        watcher = self._warden = warden()
        ours: list[int] = []
        forked: list[int] = []
        try:
            for _ in range(2):
                ours += os.pipe()
            stderr_read, stderr_write, stack_read, stack_write = ours
            ends = Ends(requests, replies, self.memory, stack_write, arena=launch.arena)
            forked.extend(starmap(os.fork, [()]))  # one stroke: no interruption comes between the child and its number
            self.pid = forked[0]
            if self.pid == 0:
                _become_forked_worker(ends, launch, stderr_write, {stderr_read, stack_read, fate}, self.number)
            try:
                watcher.order(
                    WATCH,
                    number=self.number,
                    pid=self.pid,
                    shortest=launch.shortest_deadline,
                    fds=(replies, self.memory, fate, stderr_read, stack_read),
                )
            except OSError:
                os.kill(self.pid, signal.SIGKILL)  # the warden is gone; and it may have no group of its own yet
        except BaseException:  # a signal handler raised: nobody watches over it
            if 0 in forked:  # this is the child
                os._exit(worker.LOOP_FAILED)
            self.pid = forked[0] if forked else None
            raise
        finally:
            for descriptor in ours:
                os.close(descriptor)

    def kill(self) -> None:
        """Have the process killed: SIGTERM, then SIGKILL, children included."""
        if self.fate is None and self._owner == os.getpid():
            try:
                if self._warden is not None:  # its own, and without a lock: a signal handler's close() comes here
                    self._warden.order(KILL, number=self.number)
            except OSError:
                self._kill_directly()

    def _kill_directly(self) -> None:
        if self.pid and self.pid > 1:  # by its own account: 1 would be everybody
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            if self._method == FORK:  # it may have no group of its own yet
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(self.pid, signal.SIGKILL)

    def overdue(self) -> float:
        """The deadline that has passed, and nobody has told of its end; else 0."""
        if self.fate is not None or self._owner != os.getpid():
            return 0.0
        with contextlib.suppress(ValueError, OSError):  # it is being released
            deadline = self.control.times[DEADLINE]
            if 0 < deadline < time.monotonic() and not self._is_told():
                return float(deadline)
        return 0.0

    def _is_told(self) -> bool:
        """Its end; or the warden's, with which all end but those that the trainer has forked."""
        if self._told or not self._wait_readable(self.ended, 0.0):
            return bool(self._told)
        if self._method != FORK:
            return True
        left = array("i", [0])
        fcntl.ioctl(self.ended, termios.FIONREAD, left)
        return bool(left[0])

    def rouse(self) -> None:
        """Have the warden go on if it has been stopped."""
        if self._warden is not None:
            self._warden.process.send_signal(signal.SIGCONT)

    def end_overdue(self) -> None:
        """The warden does not, so it goes too; unless it may not have got that far itself."""
        if self._warden is not None and self._warden.launched + _UP_WITHIN < time.monotonic():
            self._warden.process.kill()
        if self._warden is None or self._warden.process.poll() is not None:
            self._untold = Fate(None, overdue=True)
            self._kill_directly()

    def wait(self, timeout: float) -> Fate | None:
        """How the process ended, or ``None`` if it has not within ``timeout`` seconds."""
        if self.fate is None:
            until = time.monotonic() + timeout
            while not self._told:
                # By and by: another thread, closing, may take what both are waiting for.
                left = until - time.monotonic()
                readable = self._wait_readable(self.ended, max(0.0, min(left, _BOTH_WAIT)))
                if readable:
                    with self._reading, contextlib.suppress(BlockingIOError):
                        if not self._told:
                            # At one stroke: what an interruption keeps from being noted is told only once.
                            self._told.extend(map(os.read, (self.ended,), (65_536,)))
                elif left <= _BOTH_WAIT:
                    return None
            line = self._told[0]
            # Without a line the warden is dead, and took the worker with it.
            self.fate = Fate.decode(line) if line else self._untold
            if not line:
                reap()
                self._kill_directly()
                leftovers.kill(ward_mark(self._owner, self.number))
            if self._method == FORK and self.pid:
                self._reap_own_child()
        return self.fate

    def ends_within(self, timeout: float) -> bool:
        """Whether it ends by itself. Its replies are read meanwhile: one may be more than the pipe takes."""
        until = time.monotonic() + timeout
        poller = select.poll()
        poller.register(self.ended, select.POLLIN)
        poller.register(self.replies, select.POLLIN)
        while self.fate is None:
            ready = dict(poller.poll(milliseconds(until - time.monotonic())))
            if self.ended in ready:
                self.wait(0.0)
            elif not ready:
                return False
            elif not os.read(self.replies, _DROPPED_AT_ONCE):
                poller.unregister(self.replies)
        return True

    @staticmethod
    def _wait_readable(descriptor: int, timeout: float) -> bool:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(milliseconds(timeout)))

    def _reap_own_child(self) -> None:
        """It is dead, or about to be."""
        assert self.fate is not None
        assert self.pid is not None
        pid, until = 0, time.monotonic() + ENDED_PIPE_TIMEOUT
        try:
            while not pid and time.monotonic() < until:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    code = os.waitstatus_to_exitcode(status)
                    self.fate = Fate(code, self.fate.overdue, self.fate.stack, self.fate.stderr)
                else:
                    # Asked, for the moment that SIGKILL takes: whom the warden has told of is a zombie already. A pidfd
                    # could be waited for, and be lost to an interruption.
                    time.sleep(0.001)
        except ChildProcessError:
            pid = self.pid  # the trainer reaps whichever child it finds
        finally:
            if not pid:
                _unreaped[self.pid] = self._launch

    def end_requests(self) -> None:
        """End the request pipe: the worker ends once it has answered what it was asked."""
        with descriptors.lock, contextlib.suppress(OSError):
            if descriptors.holds(self._tokens["requests"]):
                # Not closed: a step in an exit handler would write to whoever was given its number.
                read, broken = os.pipe()
                if self.unread >= 0:
                    os.dup2(read, self.unread, inheritable=False)
                os.close(read)
                os.dup2(broken, self.requests, inheritable=False)
                os.close(broken)

    def __del__(self) -> None:
        """Nobody holds it any more: its launch was interrupted."""
        if self.ended >= 0 and not sys.is_finalizing():
            self._discard()

    def _discard(self) -> None:
        if self._method == FORK and self.pid and self.fate is None and os.getpid() == self._owner:
            os.kill(self.pid, signal.SIGKILL)  # our own child: nobody else can have reaped it
            os.waitpid(self.pid, 0)
            self.fate = UNKNOWN_FATE
        self.release()

    def release(self) -> None:
        """Close the trainer's ends. A process that is still there ends by itself, or is killed shortly."""
        guard.leave(self.number)
        if max(self.requests, self.replies, self.memory, self.ended) < 0:
            return
        if os.getpid() == self._owner and descriptors.holds(self._tokens.get("ended")):
            reap()
            self.wait(0.0)  # if the warden is dead nobody else looks after its end
            # A forked child of the trainer may hold copies of all this. A shutdown reaches through copies.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.ended)) as fate:
                fate.shutdown(socket.SHUT_RDWR)
        if self._method == FORK and self.pid and self.fate is None:
            _unreaped[self.pid] = self._launch
        descriptors.close(*self._tokens.values())
        self.requests = self.replies = self.ended = self.memory = self.unread = -1
        if hasattr(self, "control"):
            self.control.close()


def _above_standard(descriptor: int) -> int:
    """It, or a copy if its number is that of a standard stream."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3) if 0 <= descriptor < 3 else descriptor


def _become_forked_worker(ends: Ends, launch: Launch, stderr: int, not_ours: set[int], number: int) -> None:
    """In the forked child. Never returns."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        os.setpgid(0, 0)
        # Where the trainer's own are closed, some of ours have their numbers.
        taken = {0, 1} & {*ends.descriptors(), *not_ours, stderr}
        ends, own_stderr = ends.moved(_above_standard), _above_standard(stderr)
        descriptors.close_inherited({ends.memory, ends.arena})
        for descriptor in not_ours:
            os.close(descriptor)
        os.dup2(own_stderr, 2)
        os.close(own_stderr)
        null = os.open(os.devnull, os.O_RDWR)
        for one in {0} | taken:
            os.dup2(null, one)
        if null:
            os.close(null)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the old one may have read ahead
        environment = worker_environment(launch.native_threads)
        os.environ.clear()
        os.environ.update(environment | {WARD_VARIABLE: ward_mark(os.getppid(), number)})
        worker.main(ends, launch.env_fn)
    finally:
        os._exit(worker.LOOP_FAILED)
