"""The monitor: a process that never holds an env.

A single-threaded loop over descriptors. It is the parent of all workers, so their exit status is exact and no zombie
stays; as a subreaper it inherits the processes that a dead worker leaves behind, and kills them. It knows no requests
and no deadlines. When the trainer is gone it kills everything, also a worker that hangs in C code, and ends; it also
ends a second after the last worker and the last kept snapshot.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import math
import os
import select
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from multienv._engine.processes.channel import Fate
from multienv._engine.processes.forked import become_worker
from multienv._engine.processes.leftovers import (
    TRACKER_GRACE,
    children,
    is_starting,
    is_titled,
    is_tracker,
    kill,
    kill_bereaved_group,
    kill_group,
    mapped_by,
    mark_in,
    members,
    parent_of,
    remove_folder,
    shared_memory,
    unlink_unused,
)
from multienv._engine.processes.limits import advice
from multienv._engine.processes.protocol import (
    DROP,
    FREE,
    KILL,
    LAUNCH,
    OWN_DESCRIPTORS,
    PRELOAD,
    STACK,
    WAKE,
    Order,
    close_all,
    fate_line,
    receive_with_descriptors,
    send_with_descriptors,
    stack_line,
    takes_more,
)
from multienv._engine.processes.template import Template
from multienv._engine.worker import imports
from multienv._engine.worker import main as worker_main
from multienv._engine.worker.descriptors import mark_of
from multienv._engine.worker.snapshots import ANNOUNCEMENT, WAKING

STDERR_TAIL = 4096
STACK_LIMIT = 16_384
# Seconds without workers until the monitor takes no more orders, and ends once no resource tracker is left.
IDLE = 1.0
# Seconds between two checks that the trainer is alive. The end of the control socket shows the trainer's death at once,
# unless a process that the trainer forked holds a copy.
LOOK = 0.5
# So many are reaped between two looks at the clock: to reap hundreds takes seconds where the cores are busy.
MOST_REAPED = 16
# Seconds until a process that was starting is looked at again.
SOON = 0.02
# Seconds given to faulthandler, to SIGTERM, to the kernel after SIGKILL, and to workers that the trainer has released.
STACK_GRACE = 0.3
TERM_GRACE = 0.2
KILL_GRACE = 1.0
ORPHAN_GRACE = 0.5
# Seconds within which killed processes end: shared memory that is still in use then is not theirs alone.
NAMES_GRACE = 10.0
# Seconds without new output after which a stack counts as whole.
QUIET = 0.03
# Seconds given to the reader of the trainer's stderr: no more, or a paused terminal would stop the monitor.
STDERR_PATIENCE = 0.1

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class FrozenCopy:
    """Holds a snapshot: a forked copy of a worker, frozen; see ``worker.snapshots``."""

    pid: int
    number: int  # of the last request executed in it
    channel: socket.socket  # a message wakes the snapshot, closing ends it
    launch: int  # the worker's

    def end(self) -> None:
        """End the snapshot, also if it has been stopped: it exits when its channel closes."""
        kill([self.pid], signal.SIGCONT)
        self.channel.close()


@dataclass(eq=False, slots=True)
class MonitoredWorker:
    """Holds a worker, and the monitor's ends of its sockets and pipes."""

    pid: int
    # Number of the launch that it comes from, and name of its folder for temporary files: a woken snapshot goes on with
    # that of the worker it was taken from.
    launch: int
    fate: socket.socket
    stderr: int
    stack: int
    announcements: socket.socket
    snapshot: FrozenCopy | None = None
    # When to send which signals; the last entry: when the worker counts as ended although it has not been reaped.
    kills: list[tuple[float, signal.Signals | None]] = field(default_factory=list)
    stack_due: float = float("inf")  # when a stack that was asked for is sent, whole or not
    tail: bytearray = field(default_factory=bytearray)
    stack_text: bytearray = field(default_factory=bytearray)

    def end(self, after: float = 0.0) -> None:
        """Plan the signals that end the worker and its process group, the first after so many seconds."""
        term = time.monotonic() + after
        # A worker not reaped by the last entry is in an uninterruptible system call, or its own parent has reaped it.
        last = (term + TERM_GRACE + KILL_GRACE, None)
        self.kills = self.kills or [(term, signal.SIGTERM), (term + TERM_GRACE, signal.SIGKILL), last]

    def send_line(self, line: bytes) -> bool:
        """Send a line to the trainer; return false if the trainer has released the worker."""
        with contextlib.suppress(OSError):
            send_with_descriptors(self.fate, line)
            return True
        return False

    def drop_snapshot(self) -> None:
        """End the worker's snapshot, if there is one."""
        snapshot, self.snapshot = self.snapshot, None
        if snapshot is not None:
            snapshot.end()


class Monitor:
    """Launches workers, reports their end, ends with them.

    Args:
        control: The socket that orders come from.
        spawn_command: Command line of a fresh interpreter that becomes a worker.
        thread_variables: Variables that limit threads and that the user has not set.
        folder: Made here, to hold a folder for the temporary files of each worker; ``""``: they use the trainer's.
    """

    def __init__(
        self, control: socket.socket, spawn_command: list[str], thread_variables: list[str], folder: str
    ) -> None:
        self._control = control
        self._folder = ""
        with contextlib.suppress(OSError):
            Path(folder).mkdir(mode=0o700)
            self._folder = folder
        self._numbers = count()  # names of the workers' folders
        self._launches: dict[str, int] = {}  # by the mark of a worker: the number of the launch that it comes from
        # By name of shared memory: number of the first launch when it was there. Such as data that the trainer has
        # copied: it belongs to no worker of that launch or a later one.
        self._older: dict[str, int] = {}
        self._names: dict[str, float] = {}  # shared memory of processes that were killed: until when it may be unlinked
        self._trainer = os.getppid()
        self._spawn_command = spawn_command
        self._thread_variables = thread_variables
        self._workers: dict[int, MonitoredWorker] = {}  # by pid; alive
        self._bereaved: set[MonitoredWorker] = set()  # dead, with a snapshot that the trainer may wake
        self._kept: dict[int, FrozenCopy] = {}  # by token
        self._templates: dict[int, Template] = {}  # by token; what a launch with this token is forked from
        self._freed: set[int] = set()  # tokens of those that were not there to be freed: they may be announced later
        self._selector = selectors.DefaultSelector()
        self._takes_orders = True
        self._ends_at = time.monotonic() + IDLE
        self._some_start = False  # some process is not known yet: look again soon
        self._stderr_patience = STDERR_PATIENCE
        self._reserve = os.open(os.devnull, os.O_RDONLY)  # closed while an order with descriptors is received
        worker_main.prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def run(self) -> None:
        """Serve until there are no workers and no more orders can come; then kill and reap all other children."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._on_readable(wake_read, lambda: self._reap(wake_read, wake_write))
        self._control.setblocking(False)
        self._on_readable(self._control.fileno(), self._on_control_readable)
        while not self._is_done():
            self._dispatch(self._advance())
        # Also reaped: where the trainer is process 1, zombies would come to it.
        with contextlib.suppress(ChildProcessError):
            while True:
                kill(children())
                os.waitpid(-1, 0)
        self._unlink_names()
        remove_folder(self._folder)

    def _is_done(self) -> bool:
        if os.getppid() != self._trainer:
            self._on_trainer_gone()
        if self._is_needed() or (self._takes_orders and (self._bereaved or self._kept)):
            self._ends_at = time.monotonic() + IDLE
            return False
        if self._takes_orders and time.monotonic() >= self._ends_at:
            # From now on the trainer finds its orders refused, and launches another monitor. An order that was sent
            # before is carried out, and this monitor ends after that.
            self._control.shutdown(socket.SHUT_RD)
            self._refuse_orders()
            while self._carry_out_next_order():
                pass
        if self._takes_orders or self._is_needed():
            return False
        self._kill_adopted(children())
        # Killed ones are waited for in run() without a limit; a resource tracker, which ends by itself, for so long.
        left = children() - self._spared()
        kill(left, signal.SIGCONT)  # one that has been stopped would not end by itself
        return not left or time.monotonic() >= self._ends_at + TRACKER_GRACE

    def _is_needed(self) -> bool:
        """Tell whether there are workers, or some are to be launched once a template is ready."""
        return bool(self._workers) or any(template.waiting for template in self._templates.values())

    def _refuse_orders(self) -> None:
        self._takes_orders = False
        self._forget(self._control.fileno())

    def _on_trainer_gone(self) -> None:
        """Take no more orders, because the trainer has ended; kill the workers that do not end by themselves."""
        self._refuse_orders()
        for worker in self._workers.values():
            worker.end(after=ORPHAN_GRACE)
        for token in list(self._templates):
            self._drop_template(token)

    def _dispatch(self, timeout: float) -> None:
        """Wait for descriptors and call what is registered with those that are ready.

        A descriptor that one of these calls has closed is skipped, also if a new one with the same number is registered
        by then: the new one may not be ready, and reading it would block.
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

    def _on_control_readable(self) -> None:
        if not self._carry_out_next_order():
            self._on_trainer_gone()

    def _carry_out_next_order(self) -> bool:
        """Carry out one order from the control socket; return false if no more will come."""
        reserve, self._reserve = self._reserve, -1
        if reserve >= 0:
            os.close(reserve)
        try:
            received = Order.receive(self._control)
            if received is not None:
                self._carry_out(*received)
        except BlockingIOError:
            return True
        finally:
            with contextlib.suppress(OSError):
                self._reserve = os.open(os.devnull, os.O_RDONLY)
        return received is not None

    def _carry_out(self, order: Order, descriptors: list[int]) -> None:
        if order.operation == LAUNCH:
            self._launch(order, descriptors)
        elif order.operation == WAKE:
            self._wake(self._pop_kept(order.token), descriptors)
        elif order.operation == PRELOAD:
            self._preload(order, descriptors)
        else:
            close_all(descriptors)
            if order.operation == FREE:
                self._free(order.token)
            elif order.operation == DROP:
                self._drop_template(order.token)

    def _free(self, token: int) -> None:
        """End the snapshot kept under this token; one that is being taken, or woken, ends when it is announced."""
        snapshot = self._pop_kept(token)
        if snapshot is None:
            self._freed.add(token)
        else:
            snapshot.end()

    def _pop_kept(self, token: int) -> FrozenCopy | None:
        """Remove and return the snapshot kept under this token, after reading all announcements that wait."""
        for worker in self._workers.values():
            self._read_announcements(worker)
        return self._kept.pop(token, None)

    def _carry_out_order_of(self, worker: MonitoredWorker) -> None:
        """Carry out an order for one worker; if its socket has ended, the trainer has released it: end the worker."""
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
            kill([worker.pid], worker_main.STACK_SIGNAL)

    def _launch(self, order: Order, descriptors: list[int]) -> None:
        """Fork a worker, from its template if that is good; or have it wait until that is known."""
        monitor = os.getpid()
        adopt_streams(descriptors)
        template = self._templates.get(order.token)
        try:
            refuse_incomplete(descriptors)
            if template is not None and not template.pid and not template.refusal:
                self._start_template(template)
            if template is not None and template.pid and not template.can_fork:
                self._have_wait(template, order, descriptors)
                return
            ends = make_lines(descriptors)
            number = next(self._numbers)
            self._older = {name: self._older.get(name, number) for name in shared_memory()}
            folder = self._folder and f"{self._folder}/{number}"
            order = replace(order, folder=number)
            forked = template.fork(order, ends, self._spared()) if template else 0
            pid = forked or os.fork()
        except OSError as error:
            self._decline(descriptors, f"The monitor cannot launch the worker: {error}. {advice(error)}")
            return
        if pid == 0:
            become_worker(ends, order, monitor, folder, self._spawn_command, self._thread_variables)
        self._admit(descriptors, ends, pid, number)

    def _remove_folders(self) -> None:
        """Remove the folders of workers that have ended and have left no snapshot."""
        known = {*self._workers.values(), *self._bereaved}
        launches = {one.launch for one in known} | {one.launch for one in self._kept.values()}
        used = {f"{self._folder}/{launch}" for launch in launches}
        with contextlib.suppress(OSError):  # not behind a link that an env has put in the place of the folder
            names = [] if Path(self._folder).is_symlink() else os.listdir(self._folder)
            for folder in [f"{self._folder}/{name}" for name in names if name.isdigit()]:  # the others are of imports
                if folder not in used:
                    remove_folder(folder)

    def _note_shared_memory(self, dying: set[int], mark: str) -> None:
        """Note the shared memory of processes that are killed next: it is unlinked when they have ended.

        What was there before their worker is spared.

        Args:
            dying: The processes.
            mark: Of the worker; if it is not known, what was there before any worker is spared.
        """
        launch, until = self._launches.get(mark, math.inf), time.monotonic() + NAMES_GRACE
        older = {name for name, first in self._older.items() if first <= launch}
        self._names |= dict.fromkeys(mapped_by(dying) - older, until)

    def _unlink_names(self) -> None:
        now = time.monotonic()
        left = {name: until for name, until in self._names.items() if not unlink_unused(name)}
        self._names = {name: until for name, until in left.items() if now < until}

    # --- templates ----------------------------------------------------------------------------

    def _preload(self, order: Order, descriptors: list[int]) -> None:
        """Begin a template; one with this token begins anew, because there is more to import."""
        self._ends_at = time.monotonic() + IDLE  # a launch follows: to end before it would be an import in vain
        template = self._templates.get(order.token)
        if template is None:
            template = self._templates[order.token] = Template(order.title, self._folder)
        adopt_streams(descriptors, own=1)
        template.read_imports(descriptors)
        if template.refusal:
            return
        self._end_template(template)
        self._launch_waiting(template)
        with contextlib.suppress(OSError):  # a launch tries it again
            self._start_template(template)

    def _start_template(self, template: Template) -> None:
        """Begin the process of a template, and listen to it. Raises OSError."""
        template.start()
        self._on_readable(template.fileno(), lambda: self._on_template_imported(template))

    def _have_wait(self, template: Template, order: Order, descriptors: list[int]) -> None:
        def on_given_up() -> None:  # by the trainer: before there is a worker, nothing else makes its socket readable
            template.waiting.remove((order, descriptors))
            self._decline_waiting(descriptors)

        template.waiting.append((order, descriptors))
        self._on_readable(descriptors[0], on_given_up)

    def _decline_waiting(self, descriptors: list[int]) -> None:
        self._forget(descriptors[0])
        self._decline(descriptors, "The worker was not launched: it was given up while its preload was being imported.")

    def _on_template_imported(self, template: Template) -> None:
        self._forget(template.fileno())
        template.read_outcome()
        if template.can_fork:
            self._launch_waiting(template)
        else:
            kill([template.pid])  # _reap() goes on

    def _on_template_ended(self, template: Template, code: int) -> None:
        """Note that a template has ended, and launch the workers that wait for it, without it.

        If it was good, or was killed, the next launch begins another. If a package has spoilt it, it begins again at
        once, and leaves that package out. If anything else has, later workers do without.
        """
        self._forget(template.fileno())
        why = template.note_end(code)
        if why and takes_more(2, STDERR_PATIENCE):
            with contextlib.suppress(OSError):
                os.write(2, f"multienv: {why}\n".encode())
        self._launch_waiting(template)
        if why and not template.refusal:
            with contextlib.suppress(OSError):
                self._start_template(template)

    def _launch_waiting(self, template: Template) -> None:
        waiting, template.waiting = template.waiting, []
        for order, descriptors in waiting:
            self._forget(descriptors[0])
            self._launch(order if template.can_fork else replace(order, token=0), descriptors)

    def _drop_template(self, token: int) -> None:
        """End the template with this token, because no env needs it."""
        template = self._templates.pop(token, None)
        if template is None:
            return
        for _, descriptors in template.waiting:
            self._decline_waiting(descriptors)
        self._end_template(template)

    def _end_template(self, template: Template) -> None:
        if template.pid:
            self._forget(template.fileno())
            template.end()

    # --- snapshots ----------------------------------------------------------------------------

    def _wake(self, snapshot: FrozenCopy | None, descriptors: list[int]) -> None:
        """Wake a snapshot, which becomes a worker."""
        try:
            ends = make_lines(descriptors)
            if snapshot is None:
                raise OSError("there is no such snapshot")
            send_with_descriptors(snapshot.channel, WAKING.pack(os.getpid()), ends)
        except OSError as error:
            if snapshot is not None:
                snapshot.end()
            self._decline(descriptors, f"The monitor cannot wake the snapshot: {error}. {advice(error)}")
            return
        snapshot.channel.close()
        self._admit(descriptors, ends, snapshot.pid, snapshot.launch)

    @staticmethod
    def _decline(descriptors: list[int], why: str) -> None:
        """Tell the trainer why there is no worker, and close the descriptors that came with the order."""
        with contextlib.suppress(OSError, IndexError):  # not all were received
            os.write(descriptors[0], fate_line(Fate(None, stderr=why)))
        close_all(descriptors)

    def _admit(self, descriptors: list[int], ends: list[int], pid: int, launch: int) -> None:
        """Close the ends of a new worker, and register the monitor's."""
        self._launches[mark_of(os.getpid(), pid)] = launch
        close_all(ends)
        fate, stderr, stack, announcements = (one for one in descriptors if one not in ends)
        worker = self._workers[pid] = MonitoredWorker(
            pid, launch, socket.socket(fileno=fate), stderr, stack, socket.socket(fileno=announcements)
        )
        worker.fate.setblocking(False)
        worker.announcements.setblocking(False)
        self._on_readable(worker.stderr, lambda: self._forward_stderr(worker))
        self._on_readable(worker.stack, lambda: self._collect_stack(worker))
        self._on_readable(worker.fate.fileno(), lambda: self._carry_out_order_of(worker))
        self._on_readable(worker.announcements.fileno(), lambda: self._read_announcements(worker))

    def _read_announcements(self, worker: MonitoredWorker) -> None:
        """Read the announcements of all snapshots that the worker has taken so far.

        The env can write there, too: after what is no announcement, none is read any more.
        """
        while worker.announcements.fileno() >= 0:
            descriptors: list[int] = []
            try:
                data, descriptors = receive_with_descriptors(worker.announcements, ANNOUNCEMENT.size)
                pid, number, token = ANNOUNCEMENT.unpack(data)
                channel = socket.socket(fileno=descriptors.pop(0))
            except BlockingIOError:
                return
            except (OSError, struct.error, IndexError):
                close_all(descriptors)
                self._forget(worker.announcements.fileno())
                worker.announcements.close()
                return
            close_all(descriptors)
            snapshot = FrozenCopy(pid, number, channel, worker.launch)
            if pid in self._spared() or parent_of(pid) not in (worker.pid, os.getpid()):  # it has ended, or never was
                channel.close()
            elif token in self._freed:
                snapshot.end()
            elif token:
                self._kept[token] = snapshot
            else:
                worker.drop_snapshot()
                worker.snapshot = snapshot

    # --- the end of a worker ------------------------------------------------------------------

    def _reap(self, wake_read: int, wake_write: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(wake_read, 4096)
        # Listed before the dead are looked for: a child that is no worker has lost its parent by now, a worker or a
        # process that one had started; and _finish() reads all snapshots that a dead worker has announced.
        adopted = children()
        for _ in range(MOST_REAPED):
            try:
                # Not yet reaped: while the worker is a zombie, no other process group can get its number.
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if found is None:
                break
            worker = self._workers.get(found.si_pid)
            if worker is not None:
                if children() - self._spared():  # its env, or another's, has started programs
                    self._note_shared_memory(members(worker.pid), mark_of(os.getpid(), worker.pid))
                    kill_bereaved_group(worker.pid)
                else:
                    kill_group(worker.pid, signal.SIGKILL)
            _, status = os.waitpid(found.si_pid, 0)
            code = os.waitstatus_to_exitcode(status)
            if worker is not None:
                self._finish(worker, code)
            for template in list(self._templates.values()):
                if template.pid == found.si_pid:
                    self._on_template_ended(template, code)
        else:  # signals may be due to those that do not end by themselves: the others are reaped after these
            with contextlib.suppress(BlockingIOError):  # full: it wakes as well
                os.write(wake_write, b"\0")
        self._kill_adopted(adopted)
        self._unlink_names()
        self._remove_folders()

    def _finish(self, worker: MonitoredWorker, code: int | None) -> None:
        """Tell the trainer how a worker ended, and close the worker's descriptors; keep the snapshot it may leave."""
        del self._workers[worker.pid]
        for descriptor in (worker.stderr, worker.stack):
            os.set_blocking(descriptor, False)
        self._forward_stderr(worker)
        self._collect_stack(worker)
        self._read_announcements(worker)
        if not self._takes_orders:
            worker.drop_snapshot()
        left = None if worker.snapshot is None else worker.snapshot.number
        is_heard = worker.send_line(fate_line(Fate(code, text(worker.stack_text), text(worker.tail), left)))
        for descriptor in (worker.stderr, worker.stack, worker.announcements.fileno()):
            self._forget(descriptor)
        os.close(worker.stderr)
        os.close(worker.stack)
        worker.announcements.close()
        if left is None or not is_heard:  # the trainer closed the socket before: it wakes no snapshot
            self._forsake(worker)
        else:
            self._bereaved.add(worker)

    def _forsake(self, worker: MonitoredWorker) -> None:
        """Forget a dead worker: close its socket and end its snapshot."""
        self._bereaved.discard(worker)
        self._forget(worker.fate.fileno())
        worker.fate.close()
        worker.drop_snapshot()

    def _kill_adopted(self, adopted: set[int]) -> None:
        """Kill processes that became our children when their parent died: a worker, or a process that one had started.

        A program with the mark of a live worker is spared: a script of the env's may have started it and ended. So is a
        resource tracker: it ends by itself, as a rule; run() kills it in the end. One that starts is looked at again.
        """
        self._some_start = False
        alive = {mark_of(os.getpid(), pid) for pid in self._workers.keys() | self._template_pids()}
        for pid in adopted - self._spared():
            mark = mark_in(pid)
            is_left = not alive or (mark not in alive if mark else is_titled(pid))
            if is_left and is_starting(pid):
                self._some_start = True
            elif is_left and not is_tracker(pid):
                self._note_shared_memory({pid}, mark)
                kill([pid])

    def _spared(self) -> set[int]:
        """Return the processes that are workers or templates, or snapshots of which one may be woken."""
        known = {*self._workers.values(), *self._bereaved}
        spared = {worker.pid for worker in known} | {worker.snapshot.pid for worker in known if worker.snapshot}
        return spared | {snapshot.pid for snapshot in self._kept.values()} | self._template_pids()

    def _template_pids(self) -> set[int]:
        return {template.pid for template in self._templates.values() if template.pid}

    # --- what a worker writes -----------------------------------------------------------------

    def _forward_stderr(self, worker: MonitoredWorker) -> None:
        data = drain(worker.stderr)
        if not data:
            self._forget(worker.stderr)
            return
        worker.tail += data
        del worker.tail[:-STDERR_TAIL]
        rest = memoryview(data)
        # As much as the reader of the trainer's stderr takes; a paused reader is waited for only once.
        while rest and takes_more(2, self._stderr_patience):
            self._stderr_patience = STDERR_PATIENCE
            try:
                rest = rest[os.write(2, rest[: select.PIPE_BUF]) :]
            except OSError:
                return
        if rest:
            self._stderr_patience = 0.0

    def _collect_stack(self, worker: MonitoredWorker) -> None:
        data = drain(worker.stack)
        if not data:
            self._forget(worker.stack)
        worker.stack_text += data
        del worker.stack_text[STACK_LIMIT:]
        if worker.stack_due < float("inf"):
            worker.stack_due = time.monotonic() + QUIET

    # --- by the clock -------------------------------------------------------------------------

    def _advance(self) -> float:
        """Send the stacks and signals that are due; return the seconds until the next ones are."""
        now = time.monotonic()
        if self._some_start:
            self._kill_adopted(children())
        due = now + (SOON if self._some_start else LOOK)
        if now < self._ends_at:  # else a resource tracker is waited for
            due = min(due, self._ends_at)
        kill([template.pid for template in self._templates.values() if template.waiting], signal.SIGCONT)
        for worker in list(self._workers.values()):
            if now >= worker.stack_due:
                worker.stack_due = float("inf")
                worker.send_line(stack_line(text(worker.stack_text)))
                worker.stack_text.clear()
            while worker.kills and now >= worker.kills[0][0]:
                _, number = worker.kills.pop(0)
                if number == signal.SIGKILL:
                    kill([worker.pid])  # and its group when it is dead: see _reap()
                elif number is not None:
                    self._note_shared_memory(members(worker.pid), mark_of(os.getpid(), worker.pid))
                    kill_group(worker.pid, number)
                else:
                    kill_group(worker.pid, signal.SIGKILL)
                    self._finish(worker, None)
            due = min([due, worker.stack_due, *(when for when, _ in worker.kills[:1])])
        return max(0.0, due - time.monotonic())


def make_lines(descriptors: list[int]) -> list[int]:
    """Make stderr, stack and announcements of a worker, of which the trainer has sent fate, wake socket and memory.

    Both ends of each are added to ``descriptors`` at once, to be closed if something fails. Returns those that are the
    worker's, in the order in which `become_worker` takes them. Raises OSError, also when not all that was sent could be
    received.
    """
    refuse_incomplete(descriptors)
    for _ in range(2):
        descriptors += os.pipe()
    one, other = socket.socketpair()
    descriptors += one.detach(), other.detach()
    _, wake_socket, memory, _, stderr, _, stack, _, announcements = descriptors
    return [wake_socket, memory, stack, announcements, stderr]


def refuse_incomplete(descriptors: list[int]) -> None:
    """Raise OSError if not all descriptors that were sent with an order could be received."""
    if len(descriptors) < OWN_DESCRIPTORS:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def adopt_streams(descriptors: list[int], own: int = OWN_DESCRIPTORS) -> None:
    """Take the trainer's stdout and stderr from the end of those of an order, and have them in place of the monitor's.

    The first ``own`` descriptors are others. A worker inherits stdout; what all workers write to stderr is written to
    the newest stderr.
    """
    streams = descriptors[own:]
    del descriptors[own:]
    for number, stream in zip((1, 2), streams, strict=False):
        os.dup2(stream, number)
        os.close(stream)


def drain(descriptor: int) -> bytes:
    """Return the bytes that are there to read, at most 65,536; ``b""`` if reading fails."""
    try:
        return os.read(descriptor, 65_536)
    except OSError:
        return b""


def text(data: bytearray) -> str:
    """Decode the output of a process; bytes that are not UTF-8 are replaced."""
    return data.decode(errors="replace")


def main(control: int, preload: list[str], spawn_command: list[str], thread_variables: list[str], folder: str) -> None:
    """Run the monitor process."""
    # The trainer's thread may have blocked SIGCHLD, and a mask is inherited: no death would ever be told.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    while os.open(os.devnull, os.O_RDWR) < 2:  # a daemon's standard streams are closed: none of ours gets their numbers
        pass
    began = time.time_ns()
    for name in preload:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    imports.note_files(began)
    worker_main.set_title("multienv monitor")
    gc.collect()
    gc.freeze()  # workers share these objects' pages; a collection would touch and so copy them
    signal.setitimer(signal.ITIMER_REAL, 0.0)  # set by the launcher: from here on the loop looks for the trainer
    with socket.socket(fileno=control) as orders:
        Monitor(orders, spawn_command, thread_variables, folder).run()
