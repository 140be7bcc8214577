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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from multienv.processes.channel import Fate
from multienv.processes.leftovers import children, is_titled, kill, kill_group, mark_in, open_descriptors
from multienv.processes.protocol import (
    FREE,
    KILL,
    LAUNCH,
    STACK,
    WAKE,
    Order,
    close_all,
    receive_with_descriptors,
    send_with_descriptors,
    tell_fate,
    tell_stack,
)
from multienv.worker import main as worker_main
from multienv.worker.ends import MARK_VARIABLE, Ends, mark_of
from multienv.worker.snapshots import ANNOUNCEMENT, WAKING

STDERR_TAIL = 4096
STACK_LIMIT = 16_384
# Seconds without workers until the monitor ends.
IDLE = 1.0
# Seconds between two looks at whether the trainer is alive. The end of the control socket tells of its death at once,
# unless a process that it forked holds a copy.
LOOK = 0.5
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
    fate: socket.socket
    stderr: int
    stack: int
    announcements: socket.socket
    snapshot: Snapshot | None = None
    # When to send which signals; the last entry: when it counts as ended although it has not been reaped.
    kills: list[tuple[float, signal.Signals | None]] = field(default_factory=list)
    stack_due: float = float("inf")  # when a stack that was asked for is sent, whole or not
    tail: bytearray = field(default_factory=bytearray)
    stack_text: bytearray = field(default_factory=bytearray)

    def end(self, after: float = 0.0) -> None:
        """Have it killed after so many seconds, with all that is in its process group."""
        term = time.monotonic() + after
        # After the last entry it is in an uninterruptible system call; or it was a snapshot, reaped by its own parent.
        last = (term + TERM_GRACE + KILL_GRACE, None)
        self.kills = self.kills or [(term, signal.SIGTERM), (term + TERM_GRACE, signal.SIGKILL), last]

    def tell(self, line: bytes) -> bool:
        """Tell the trainer something; false if it has let go of the worker."""
        with contextlib.suppress(OSError):
            send_with_descriptors(self.fate, line)
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
        spawn_command: Command line of a fresh interpreter that becomes a worker.
        thread_variables: Variables that limit threads and that the user has not set.
    """

    def __init__(self, control: socket.socket, spawn_command: list[str], thread_variables: list[str]) -> None:
        self._control = control
        self._trainer = os.getppid()
        self._spawn_command = spawn_command
        self._thread_variables = thread_variables
        self._workers: dict[int, Worker] = {}  # by pid; alive
        self._bereaved: set[Worker] = set()  # dead, with a snapshot that the trainer may wake
        self._kept: dict[int, Snapshot] = {}  # by token
        self._selector = selectors.DefaultSelector()
        self._takes_orders = True
        self._ends_at = time.monotonic() + IDLE
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
        self._on_readable(self._control.fileno(), self._hear_trainer)
        while not self._is_done():
            self._dispatch(self._advance())
        # Also reaped: where the trainer is process 1, zombies would come to it.
        with contextlib.suppress(ChildProcessError):
            while True:
                kill(children())
                os.waitpid(-1, 0)

    def _is_done(self) -> bool:
        if os.getppid() != self._trainer:
            self._lose_trainer()
        if self._workers or (self._takes_orders and (self._bereaved or self._kept)):
            self._ends_at = time.monotonic() + IDLE
            return False
        if self._takes_orders and time.monotonic() >= self._ends_at:
            # From now on the trainer finds its orders refused, and launches another monitor. One may have been sent
            # before: it is carried out, and this monitor ends after it.
            self._control.shutdown(socket.SHUT_RD)
            self._take_no_more_orders()
            while self._take_order():
                pass
        return not (self._takes_orders or self._workers)

    def _take_no_more_orders(self) -> None:
        self._takes_orders = False
        self._forget(self._control.fileno())

    def _lose_trainer(self) -> None:
        """The trainer is gone: its workers see that themselves, and are killed if they do not end."""
        self._take_no_more_orders()
        for worker in self._workers.values():
            worker.end(after=ORPHAN_GRACE)

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

    def _hear_trainer(self) -> None:
        if not self._take_order():
            self._lose_trainer()

    def _take_order(self) -> bool:
        """Carry out one order from the control socket; false if there will be no more."""
        try:
            received = Order.receive(self._control)
        except BlockingIOError:
            return True
        if received is None:
            return False
        order, descriptors = received
        if order.operation == LAUNCH:
            self._launch(order, descriptors)
        elif order.operation == WAKE:
            self._wake(self._take_kept(order.token), descriptors)
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
            else:
                worker.end(after=ORPHAN_GRACE)
            return
        order, descriptors = received
        if order.operation == WAKE:
            snapshot, worker.snapshot = worker.snapshot, None
            self._forsake(worker)
            self._wake(snapshot, descriptors)
            return
        close_all(descriptors)
        if worker in self._bereaved:
            return
        if order.operation == KILL:
            worker.end()
        elif order.operation == STACK:
            worker.stack_text.clear()
            worker.stack_due = time.monotonic() + STACK_GRACE
            if worker_main.STACK_SIGNAL is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, worker_main.STACK_SIGNAL)

    def _launch(self, order: Order, descriptors: list[int]) -> None:
        monitor = os.getpid()
        try:
            lines = Lines.make(descriptors)
            pid = os.fork()
        except (OSError, ValueError) as error:
            self._decline(descriptors, error)
            return
        if pid == 0:
            become_worker(lines, order, monitor, self._spawn_command, self._thread_variables)
        self._admit(lines, pid)

    def _wake(self, snapshot: Snapshot | None, descriptors: list[int]) -> None:
        """Have a snapshot go on as a worker."""
        try:
            lines = Lines.make(descriptors)
            if snapshot is None:
                raise OSError("there is no such snapshot")
            handed = (*lines.ends, lines.stderr_write)
            send_with_descriptors(snapshot.channel, WAKING.pack(os.getpid()), handed)
        except (OSError, ValueError) as error:
            if snapshot is not None:
                snapshot.end()
            self._decline(descriptors, error)
            return
        snapshot.channel.close()
        self._admit(lines, snapshot.pid)

    @staticmethod
    def _decline(descriptors: list[int], error: Exception) -> None:
        """Tell the trainer, which holds the other ends, why there is no worker; it sees them close, too."""
        with contextlib.suppress(OSError, IndexError):  # not all were received
            os.write(descriptors[2], tell_fate(Fate(None, stderr=f"The monitor cannot launch the worker: {error}")))
        close_all(descriptors)

    def _admit(self, lines: Lines, pid: int) -> None:
        """Look after a new worker."""
        worker = self._workers[pid] = lines.keep(pid)
        self._on_readable(worker.stderr, lambda: self._forward_stderr(worker))
        self._on_readable(worker.stack, lambda: self._collect_stack(worker))
        self._on_readable(worker.fate.fileno(), lambda: self._take_order_of(worker))
        self._on_readable(worker.announcements.fileno(), lambda: self._hear(worker))

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
        # Before the dead are looked for: what has come to us by then has lost its worker, or what that had started, and
        # all snapshots that a dead worker has announced are known when it has been finished.
        adopted = children()
        while True:
            try:
                # Looked at, not yet reaped: as long as it is a zombie its process group cannot be another's.
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if found is None:
                break
            worker = self._workers.get(found.si_pid)
            if worker is not None:
                kill_group(worker.pid, signal.SIGKILL)
            _, status = os.waitpid(found.si_pid, 0)
            if worker is not None:
                self._finish(worker, os.waitstatus_to_exitcode(status))
        self._kill_adopted(adopted)

    def _finish(self, worker: Worker, code: int | None) -> None:
        """The worker is dead: tell the trainer, and kill what it has left behind."""
        del self._workers[worker.pid]
        for descriptor in (worker.stderr, worker.stack):
            os.set_blocking(descriptor, False)
        self._forward_stderr(worker)
        self._collect_stack(worker)
        self._hear(worker)
        if not self._takes_orders:
            worker.drop_snapshot()
        left = None if worker.snapshot is None else worker.snapshot.number
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

    def _forsake(self, worker: Worker) -> None:
        """Let go of a dead worker."""
        self._bereaved.discard(worker)
        self._forget(worker.fate.fileno())
        worker.fate.close()
        worker.drop_snapshot()

    def _kill_adopted(self, adopted: set[int]) -> None:
        """Kill processes that came to us when their parent died: a worker, or what one had started.

        A program that has the mark of a worker alive is spared: a script of the env's may have started it and ended.
        """
        known = {*self._workers.values(), *self._bereaved}
        spared = {worker.pid for worker in known} | {worker.snapshot.pid for worker in known if worker.snapshot}
        spared |= {snapshot.pid for snapshot in self._kept.values()}
        alive = {mark_of(os.getpid(), pid) for pid in self._workers}
        for pid in adopted - spared:
            mark = mark_in(pid)
            if not alive or (mark not in alive if mark else is_titled(pid)):
                kill([pid])

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
        if worker.stack_due < float("inf"):
            worker.stack_due = time.monotonic() + QUIET

    # --- by the clock -------------------------------------------------------------------------

    def _advance(self) -> float:
        """Do what is due by the clock; return the seconds until the next such thing."""
        now = time.monotonic()
        due = min(now + LOOK, self._ends_at)
        for worker in list(self._workers.values()):
            if now >= worker.stack_due:
                worker.stack_due = float("inf")
                worker.tell(tell_stack(text(worker.stack_text)))
                worker.stack_text.clear()
            while worker.kills and now >= worker.kills[0][0]:
                _, number = worker.kills.pop(0)
                if number is None:
                    self._finish(worker, None)
                else:
                    kill_group(worker.pid, number)
            due = min([due, worker.stack_due, *(when for when, _ in worker.kills[:1])])
        return max(0.0, due - time.monotonic())


class Lines(NamedTuple):
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

    @property
    def ends(self) -> tuple[int, int, int, int]:
        """Those that the worker knows of, as `Ends` takes them."""
        return self.line, self.memory, self.stack_write, self.announcements_write

    def keep(self, pid: int) -> Worker:
        """Let go of the worker's ends, and hold the monitor's."""
        close_all([*self.ends, self.stderr_write])
        fate, announcements = socket.socket(fileno=self.fate), socket.socket(fileno=self.announcements)
        fate.setblocking(False)
        announcements.setblocking(False)
        return Worker(pid, fate, self.stderr_read, self.stack_read, announcements)


def become_worker(
    lines: Lines, order: Order, monitor: int, spawn_command: list[str], thread_variables: list[str]
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
        for descriptor in open_descriptors() - {0, 1, 2, *lines.ends}:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        os.environ[MARK_VARIABLE] = mark_of(monitor, os.getpid())
        if not order.fresh:
            worker_main.main(Ends.of(*lines.ends), order.title)
        for name in thread_variables:
            os.environ.pop(name, None)
            if order.native_threads:
                os.environ[name] = str(order.native_threads)
        for descriptor in lines.ends:
            os.set_inheritable(descriptor, True)
        os.execv(spawn_command[0], [*spawn_command, order.title, *map(str, lines.ends)])  # noqa: S606 - our interpreter
    finally:
        os._exit(worker_main.LOOP_FAILED)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process, where there is such a thing."""
    if _libc is not None:
        _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


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


def main(control: int, preload: list[str], spawn_command: list[str], thread_variables: list[str]) -> None:
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
        Monitor(orders, spawn_command, thread_variables).run()
