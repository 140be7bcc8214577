"""The monitor: a process that never holds an env.

A single-threaded loop over descriptors. It is the parent of all workers, so their exit status is exact and no zombie
stays; as a subreaper it inherits the processes that a dead worker leaves behind, and kills them. It knows no requests
and no deadlines. When the trainer is gone it kills everything, also a worker that hangs in C code, and ends; it also
ends a second after the last worker and the last kept snapshot.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NoReturn

from multienv.processes.channel import Fate
from multienv.processes.leftovers import belongs_to, children, kill_group, open_descriptors
from multienv.processes.protocol import (
    BRANCH,
    FREE,
    KILL,
    KILL_WITH_STACK,
    LAUNCH,
    STACK,
    WAKE,
    Order,
    close_all,
    receive_with_descriptors,
    send_with_descriptors,
    tell_fate,
    tell_pid,
    tell_stack,
)
from multienv.worker import main as worker_main
from multienv.worker.ends import MARK_VARIABLE, Ends, mark_of
from multienv.worker.snapshots import ANNOUNCEMENT, WAKING

STDERR_TAIL = 4096
STACK_LIMIT = 16_384
# Seconds without workers until the monitor ends.
IDLE = 1.0
# Seconds given to faulthandler, to SIGTERM, to the kernel after SIGKILL, and to workers that were let go of.
STACK_GRACE = 0.3
TERM_GRACE = 0.2
KILL_GRACE = 1.0
ORPHAN_GRACE = 0.5
# A stack is whole when no more of it has come for so many seconds.
QUIET = 0.03
# Seconds given to the reader of the trainer's stderr: no more, or a paused terminal would stop the monitor.
STDERR_PATIENCE = 0.1

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class Stage(Enum):
    """How far the killing of a worker has come."""

    NONE = "not being killed"
    LET_GO = "the trainer has closed the channel; the worker ends by itself, or is killed when the time is over"
    STACK = "asked for its stack; SIGTERM is next"
    TERM = "sent SIGTERM; SIGKILL is next"
    KILL = "sent SIGKILL; if the time is over it is in an uninterruptible system call, and counts as ended"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A forked copy of a worker, frozen; see ``worker.snapshots``."""

    pid: int
    number: int  # of the last request executed in it
    channel: socket.socket  # a message wakes it, closing ends it

    def end(self) -> None:
        """Have it end, also if it has been stopped."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGCONT)
        self.channel.close()


@dataclass(eq=False, slots=True)
class Worker:
    """A worker and the monitor's ends of what connects them."""

    pid: int
    mark: str
    fate: socket.socket
    stderr: int
    stack: int
    announcements: socket.socket
    pipes: frozenset[str] = frozenset()  # stderr and stack, as /proc names them
    snapshot: Snapshot | None = None
    stage: Stage = Stage.NONE
    due: float = float("inf")  # when the stage is over
    stack_due: float = float("inf")  # when a stack that was asked for is sent, whole or not
    tail: bytearray = field(default_factory=bytearray)
    stack_text: bytearray = field(default_factory=bytearray)

    def tell(self, line: bytes, descriptors: tuple[int, ...] = ()) -> bool:
        """Tell the trainer something; false if it has let go of the worker."""
        with contextlib.suppress(OSError):
            send_with_descriptors(self.fate, line, descriptors)
            return True
        return False

    def drop_snapshot(self) -> None:
        """Let its snapshot end."""
        snapshot, self.snapshot = self.snapshot, None
        if snapshot is not None:
            snapshot.end()


class Monitor:
    """Launches workers, reports their end, ends with them.

    Args:
        control: The socket that orders come from.
        trainer: The trainer's process.
        spawn_command: Command line of a fresh interpreter that becomes a worker.
        thread_variables: Variables that limit threads and that the user has not set.
    """

    def __init__(
        self, control: socket.socket, trainer: int, spawn_command: list[str], thread_variables: list[str]
    ) -> None:
        self._control = control
        self._trainer = trainer
        self._trainer_fd = -1
        self._spawn_command = spawn_command
        self._thread_variables = thread_variables
        self._workers: dict[int, Worker] = {}  # by pid; alive
        self._bereaved: set[Worker] = set()  # dead, with a snapshot that the trainer may wake
        self._kept: dict[int, Snapshot] = {}  # by token
        self._past: deque[tuple[str, frozenset[str]]] = deque(maxlen=256)  # marks and pipes of the dead
        self._selector = selectors.DefaultSelector()
        self._takes_orders = True
        self._trainer_is_gone = False
        self._ending_at = float("inf")  # the trainer is gone: workers are killed then
        self._idle_since = time.monotonic()
        self._stderr_patience = STDERR_PATIENCE
        prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def run(self) -> None:
        """Serve until there is nothing left to do."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._on_readable(wake_read, lambda: self._reap(wake_read))
        self._control.setblocking(False)
        self._on_readable(self._control.fileno(), self._take_order)
        with contextlib.suppress(OSError, AttributeError):  # without it getppid() is asked once a second
            self._trainer_fd = os.pidfd_open(self._trainer)
            self._on_readable(self._trainer_fd, self._lose_trainer)
        while not self._is_done():
            self._dispatch(self._advance())
        self._end_children()

    def _is_done(self) -> bool:
        if os.getppid() != self._trainer:
            self._lose_trainer()
        if self._workers:
            self._idle_since = float("inf")
        elif self._trainer_is_gone:
            return True
        elif self._bereaved or self._kept:
            self._idle_since = float("inf")
        elif self._idle_since == float("inf"):
            self._idle_since = time.monotonic()
        elif time.monotonic() >= self._idle_since + IDLE:
            if not self._takes_orders:
                return True
            # From now on the trainer finds its orders refused, and launches another monitor. One may have been sent
            # before: it is carried out, and this monitor ends after it.
            self._control.shutdown(socket.SHUT_RD)
            self._takes_orders = False
            self._forget(self._control.fileno())
            while self._take_order():
                pass
            return not (self._workers or self._bereaved or self._kept)
        return False

    def _dispatch(self, timeout: float) -> None:
        """Wait for descriptors and call what is registered with those that are ready.

        What one call has closed is passed over, also if the next descriptor opened has its number and is registered
        too: it is not ready, and reading it would block for as long as nobody writes.
        """
        for key, _ in self._selector.select(timeout):
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def _on_readable(self, descriptor: int, action: Callable[[], object]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def _forget(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(descriptor)

    # --- orders -------------------------------------------------------------------------------

    def _take_order(self) -> bool:
        """Carry out one order from the control socket; false if there is none."""
        try:
            received = Order.receive(self._control)
        except BlockingIOError:
            return False
        if received is None:
            if self._takes_orders:
                self._lose_trainer()
            return False
        order, descriptors = received
        if order.operation == LAUNCH:
            self._launch(order, descriptors)
        elif order.operation == BRANCH:
            self._wake(self._take_kept(order.token), order, descriptors)
        else:
            close_all(descriptors)
            snapshot = self._take_kept(order.token) if order.operation == FREE else None
            if snapshot is not None:
                snapshot.end()
        return True

    def _take_kept(self, token: int) -> Snapshot | None:
        """Return the snapshot kept under this token, and keep it no longer; its announcement may not be read yet."""
        for worker in self._workers.values():
            self._hear(worker)
        return self._kept.pop(token, None)

    def _take_order_of(self, worker: Worker) -> None:
        """Carry out an order that concerns one worker; the end of its socket means that the trainer let go of it."""
        try:
            received = Order.receive(worker.fate)
        except BlockingIOError:
            return
        if received is None:
            self._forget(worker.fate.fileno())
            if worker in self._bereaved:
                self._forsake(worker)
            elif worker.stage is Stage.NONE:
                worker.stage, worker.due = Stage.LET_GO, time.monotonic() + ORPHAN_GRACE
            return
        order, descriptors = received
        if order.operation == WAKE:
            snapshot, worker.snapshot = worker.snapshot, None
            self._forsake(worker)
            self._wake(snapshot, order, descriptors)
            return
        close_all(descriptors)
        if worker in self._bereaved:
            return
        if order.operation == STACK:
            worker.stack_text.clear()
            worker.stack_due = time.monotonic() + (STACK_GRACE if ask_for_stack(worker.pid) else 0.0)
        elif order.operation in (KILL, KILL_WITH_STACK) and worker.stage in (Stage.NONE, Stage.LET_GO):
            with_stack = order.operation == KILL_WITH_STACK and ask_for_stack(worker.pid)
            self._enter(worker, Stage.STACK if with_stack else Stage.TERM)

    def _launch(self, order: Order, descriptors: list[int]) -> None:
        monitor = os.getpid()
        try:
            lines = Lines.make(descriptors)
            pid = os.fork()
        except (OSError, ValueError) as error:
            self._decline(descriptors, error)
            return
        mark = mark_of(self._trainer, order.number)
        if pid == 0:
            become_worker(lines, order, mark, monitor, self._spawn_command, self._thread_variables)
        self._admit(lines, pid, mark)

    def _wake(self, snapshot: Snapshot | None, order: Order, descriptors: list[int]) -> None:
        """Have a snapshot go on as a worker."""
        try:
            lines = Lines.make(descriptors)
            if snapshot is None:
                raise OSError("there is no such snapshot")
            message = WAKING.pack(self._trainer, os.getpid(), order.number)
            handed = [lines.line, lines.memory, lines.stack_write, lines.stderr_write, lines.announcements_write]
            send_with_descriptors(snapshot.channel, message, handed)
        except (OSError, ValueError) as error:
            if snapshot is not None:
                snapshot.end()
            self._decline(descriptors, error)
            return
        snapshot.channel.close()
        self._admit(lines, snapshot.pid, mark_of(self._trainer, order.number))

    @staticmethod
    def _decline(descriptors: list[int], error: Exception) -> None:
        """Tell the trainer, which holds the other ends, why there is no worker; it sees them close, too."""
        with contextlib.suppress(OSError, IndexError):  # not all were received
            os.write(descriptors[2], tell_fate(Fate(None, stderr=f"The monitor cannot launch the worker: {error}")))
        close_all(descriptors)

    def _admit(self, lines: Lines, pid: int, mark: str) -> None:
        """Note a new worker, and tell the trainer its pid."""
        worker = lines.keep(pid, mark)
        pidfd = -1
        with contextlib.suppress(OSError, AttributeError):  # an old kernel, or a sandbox
            pidfd = os.pidfd_open(pid)
        worker.tell(tell_pid(pid), (pidfd,) if pidfd >= 0 else ())
        if pidfd >= 0:
            os.close(pidfd)
        self._workers[pid] = worker
        try:
            self._on_readable(worker.stderr, lambda: self._forward_stderr(worker))
            self._on_readable(worker.stack, lambda: self._collect_stack(worker))
            self._on_readable(worker.fate.fileno(), lambda: self._take_order_of(worker))
            self._on_readable(worker.announcements.fileno(), lambda: self._hear(worker))
        except OSError:  # no memory: it cannot be looked after; its end is heard of
            kill_group(pid, signal.SIGKILL)

    def _hear(self, worker: Worker) -> None:
        """Take note of all snapshots that the worker has announced so far."""
        while worker.announcements.fileno() >= 0:
            try:
                data, descriptors = receive_with_descriptors(worker.announcements, ANNOUNCEMENT.size)
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            if len(data) < ANNOUNCEMENT.size or not descriptors:
                close_all(descriptors)
                self._forget(worker.announcements.fileno())
                worker.announcements.close()
                return
            pid, number, token = ANNOUNCEMENT.unpack(data)
            snapshot = Snapshot(pid, number, socket.socket(fileno=descriptors[0]))
            if token:
                self._kept[token] = snapshot
            else:
                worker.drop_snapshot()
                worker.snapshot = snapshot

    # --- the end of a worker ------------------------------------------------------------------

    def _reap(self, wake: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 4096)
        while True:
            try:
                # Looked at, not yet reaped: as long as it is a zombie its process group cannot be another's.
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                found = None
            if found is None:
                break
            worker = self._workers.get(found.si_pid)
            if worker is not None:
                kill_group(worker.pid, signal.SIGKILL)
            _, status = os.waitpid(found.si_pid, 0)
            if worker is not None:
                self._finish(worker, os.waitstatus_to_exitcode(status))
            else:
                self._kill_adopted()  # what it has started may have come to us
        for worker in list(self._workers.values()):
            if not exists(worker.pid):  # a woken snapshot, reaped by the worker it was taken from
                self._finish(worker, None)

    def _finish(self, worker: Worker, code: int | None) -> None:
        """The worker is dead: tell the trainer, and kill what it has left behind."""
        del self._workers[worker.pid]
        for descriptor in (worker.stderr, worker.stack):
            os.set_blocking(descriptor, False)
        self._forward_stderr(worker)
        self._collect_stack(worker)
        self._hear(worker)
        if self._trainer_is_gone:
            worker.drop_snapshot()
        left = None if worker.snapshot is None else (worker.snapshot.pid, worker.snapshot.number)
        is_heard = worker.tell(tell_fate(Fate(code, text(worker.stack_text), text(worker.tail), left)))
        for descriptor in (worker.stderr, worker.stack, worker.announcements.fileno()):
            self._forget(descriptor)
        os.close(worker.stderr)
        os.close(worker.stack)
        worker.announcements.close()
        if left is None or not is_heard:  # the end of its socket was noticed before: nobody would wake the snapshot
            self._forsake(worker)
        else:
            self._bereaved.add(worker)
        self._past.append((worker.mark, worker.pipes))
        self._kill_adopted()

    def _forsake(self, worker: Worker) -> None:
        """Let go of a dead worker."""
        self._bereaved.discard(worker)
        self._forget(worker.fate.fileno())
        worker.fate.close()
        worker.drop_snapshot()

    def _kill_adopted(self) -> None:
        """Kill processes that came to us when their parent died: a worker, or what one had started.

        While other workers live, only those that are known to be a dead one's.
        """
        known = {*self._workers.values(), *self._bereaved}
        spared = {worker.pid for worker in known} | {worker.snapshot.pid for worker in known if worker.snapshot}
        spared |= {snapshot.pid for snapshot in self._kept.values()}
        for pid in children() - spared:
            if not self._workers or any(belongs_to(pid, mark, pipes) for mark, pipes in self._past):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _end_children(self) -> None:
        """Kill and reap all that is left: where the trainer is process 1, zombies would come to it."""
        until = time.monotonic() + KILL_GRACE
        while time.monotonic() < until:
            for pid in children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.002)
            except ChildProcessError:
                return

    # --- what a worker writes -----------------------------------------------------------------

    def _forward_stderr(self, worker: Worker) -> None:
        data = drain(worker.stderr)
        if not data:
            self._forget(worker.stderr)
            return
        worker.tail += data
        del worker.tail[:-STDERR_TAIL]
        rest = memoryview(data)
        # As much as the reader of the trainer's stderr takes; one that is paused is waited for only once.
        while rest and takes_more(2, self._stderr_patience):
            self._stderr_patience = STDERR_PATIENCE
            try:
                rest = rest[os.write(2, rest[: select.PIPE_BUF]) :]
            except OSError:
                return
        if rest:
            self._stderr_patience = 0.0

    def _collect_stack(self, worker: Worker) -> None:
        data = drain(worker.stack)
        if not data:
            self._forget(worker.stack)
        worker.stack_text += data
        del worker.stack_text[STACK_LIMIT:]
        soon = time.monotonic() + QUIET
        if worker.stage is Stage.STACK:
            worker.due = soon
        if worker.stack_due < float("inf"):
            worker.stack_due = soon

    # --- killing ------------------------------------------------------------------------------

    def _advance(self) -> float:
        """Do what is due by the clock; return the seconds until the next such thing, 1 at most."""
        now = time.monotonic()
        if now >= self._ending_at:
            self._ending_at = now + KILL_GRACE
            for worker in list(self._workers.values()):
                if worker.stage is not Stage.KILL:
                    self._enter(worker, Stage.KILL)
        due = min(self._ending_at, now + IDLE, self._idle_since + IDLE)
        for worker in list(self._workers.values()):
            if now >= worker.stack_due:
                worker.stack_due = float("inf")
                worker.tell(tell_stack(text(worker.stack_text)))
                worker.stack_text.clear()
            if now >= worker.due:
                if worker.stage is Stage.KILL:  # an uninterruptible system call
                    self._finish(worker, None)
                    continue
                self._enter(worker, Stage.KILL if worker.stage is Stage.TERM else Stage.TERM)
            due = min(due, worker.due, worker.stack_due)
        return max(0.0, due - time.monotonic())

    def _enter(self, worker: Worker, stage: Stage) -> None:
        """Have the killing of a worker come as far as this."""
        grace = {Stage.STACK: STACK_GRACE, Stage.TERM: TERM_GRACE, Stage.KILL: KILL_GRACE}[stage]
        worker.stage, worker.due = stage, time.monotonic() + grace
        if stage is Stage.TERM:
            kill_group(worker.pid, signal.SIGTERM)
        elif stage is Stage.KILL:
            kill_group(worker.pid, signal.SIGKILL)

    def _lose_trainer(self) -> None:
        """The trainer is gone: its workers see that themselves, and are killed shortly."""
        if self._trainer_is_gone:
            return
        self._trainer_is_gone = True
        self._ending_at = time.monotonic() + ORPHAN_GRACE
        self._forget(self._control.fileno())
        self._forget(self._trainer_fd)
        for worker in list(self._bereaved):
            self._forsake(worker)
        while self._kept:
            self._kept.popitem()[1].end()


@dataclass(frozen=True, slots=True)
class Lines:
    """Both ends of what connects a worker: three came from the trainer, the others are the monitor's."""

    line: int
    memory: int
    fate: int
    stderr_read: int
    stderr_write: int
    stack_read: int
    stack_write: int
    announcements: int
    announcements_write: int

    @classmethod
    def make(cls, descriptors: list[int]) -> Lines:
        """Make the other ends; each is added to ``descriptors`` at once, to be closed if something fails.

        Raises OSError; ValueError when not all that was sent could be received.
        """
        line, memory, fate = descriptors
        for _ in range(2):
            descriptors += os.pipe()
        one, other = socket.socketpair()
        descriptors += one.detach(), other.detach()
        return cls(line, memory, fate, *descriptors[3:])

    def keep(self, pid: int, mark: str) -> Worker:
        """Let go of the worker's ends, and hold the monitor's."""
        pipes = frozenset(f"pipe:[{os.fstat(end).st_ino}]" for end in (self.stderr_read, self.stack_read))
        close_all([self.line, self.memory, self.stderr_write, self.stack_write, self.announcements_write])
        fate, announcements = socket.socket(fileno=self.fate), socket.socket(fileno=self.announcements)
        fate.setblocking(False)
        announcements.setblocking(False)
        return Worker(pid, mark, fate, self.stderr_read, self.stack_read, announcements, pipes)


def become_worker(
    lines: Lines, order: Order, mark: str, monitor: int, spawn_command: list[str], thread_variables: list[str]
) -> NoReturn:
    """In the monitor's child: let go of all that is the monitor's, and turn into a worker."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.setpgid(0, 0)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # follows the thread that forked: the monitor has but one
        if os.getppid() != monitor:
            os._exit(worker_main.LOOP_FAILED)  # it died before the line above
        os.dup2(lines.stderr_write, 2)
        kept = {lines.line, lines.memory, lines.stack_write, lines.announcements_write}
        for descriptor in open_descriptors() - {0, 1, 2} - kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        os.environ[MARK_VARIABLE] = mark
        ends = (lines.line, lines.memory, lines.stack_write, lines.announcements_write)
        if not order.fresh:
            worker_main.main(Ends.of(*ends), order.title)
        for name in thread_variables:
            os.environ.pop(name, None)
            if order.native_threads:
                os.environ[name] = str(order.native_threads)
        for descriptor in ends:
            os.set_inheritable(descriptor, True)
        os.execv(spawn_command[0], [*spawn_command, order.title, *map(str, ends)])  # noqa: S606 - our interpreter
    finally:
        os._exit(worker_main.LOOP_FAILED)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process, where there is such a thing."""
    if _libc is not None:
        _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def ask_for_stack(pid: int) -> bool:
    """Send the signal for which faulthandler writes the stacks; false if the process does not catch it.

    It would be killed by the signal if it has not got so far, or if the env has put back the default.
    """
    number = worker_main.STACK_SIGNAL
    if number is None:
        return False
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt:\t0")
        if not int(caught.split()[1], 16) >> (number - 1) & 1:
            return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def exists(pid: int) -> bool:
    """Tell whether there is such a process; a zombie counts."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def takes_more(descriptor: int, patience: float) -> bool:
    """Tell whether PIPE_BUF bytes can be written without waiting, in so many seconds at the latest."""
    poller = select.poll()  # select.select() knows descriptors below 1024 only
    poller.register(descriptor, select.POLLOUT)
    return bool(poller.poll(1000 * patience))


def drain(descriptor: int) -> bytes:
    """Return what there is to read; empty if that fails."""
    try:
        return os.read(descriptor, 65_536)
    except OSError:
        return b""


def text(data: bytearray) -> str:
    """Decode what a process has written, whatever it is."""
    return data.decode(errors="replace")


def main(control: int, trainer: int, preload: list[str], spawn_command: list[str], thread_variables: list[str]) -> None:
    """Run the monitor process."""
    # The trainer's thread may have blocked SIGCHLD, and a mask is inherited: no death would ever be told.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    while os.open(os.devnull, os.O_RDWR) < 2:  # a daemon's standard streams are closed: none of ours gets their numbers
        pass
    for name in preload:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    worker_main.set_title("multienv monitor")
    gc.collect()
    gc.freeze()  # workers share these objects' pages; a collection would touch and so copy them
    with socket.socket(fileno=control) as orders:
        Monitor(orders, trainer, spawn_command, thread_variables).run()
