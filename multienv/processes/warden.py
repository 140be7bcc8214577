"""The warden: a process that never holds an env.

A single-threaded loop over descriptors. It is the parent of all workers but the forked ones, so their exit
status is exact and no zombie stays; as a subreaper it inherits the processes that a dead worker leaves
behind, and kills them. It outlives the trainer by a moment: just long enough to kill what is left, also a
worker that hangs in C code.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable

from multienv.processes import killing, leftovers
from multienv.processes.killing import KILL_GRACE, ORPHAN_GRACE
from multienv.processes.lines import PR_SET_CHILD_SUBREAPER, Lines, become_worker, prctl
from multienv.processes.protocol import (
    FREE,
    KILL,
    LAUNCH,
    ORDER,
    STACK_LIMIT,
    STDERR_TAIL,
    WAKE,
    WAKE_TOKEN,
    WATCH,
    Fate,
)
from multienv.processes.ward import (
    Standby,
    Ward,
    children,
    decline,
    dispatch,
    drain,
    kill_group,
    takes_more,
    tell_gone,
    text,
)
from multienv.wire.memory import CONTROL_SIZE, Block, Control
from multienv.worker.ends import ward_mark
from multienv.worker.snapshots import WAKING

# Seconds given to the reader of the trainer's stderr. No more: those who need watching over cannot wait either.
PATIENCE = 0.1


class Warden:
    """Launches workers, watches over them, reports their end."""

    def __init__(self, control: socket.socket, trainer: int, spawn_command: list[str]) -> None:
        """Take orders from ``control`` for the process ``trainer``."""
        self._control = control
        self._trainer = trainer
        self._spawn_command = spawn_command
        self._wards: dict[int, Ward] = {}
        self._selector = selectors.DefaultSelector()
        self._bereaved: dict[int, Ward] = {}  # dead, with a snapshot that their trainer may want
        self._tokens: dict[int, Standby] = {}  # snapshots that the trainer may come back to
        self._lifelines: list[int] = []
        self._ending_at = float("inf")
        self._patience = PATIENCE
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    def run(self) -> None:
        """Serve until the trainer is gone and every worker with it."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._lifelines = [self._control.fileno()]
        self._on_readable(self._control.fileno(), self._take_order)
        self._on_readable(wake_read, lambda: self._reap(wake_read))
        if hasattr(os, "pidfd_open"):
            try:
                trainer_fd = os.pidfd_open(self._trainer)
            except OSError:
                self._trainer_gone()  # before we had come so far
            else:
                self._lifelines.append(trainer_fd)
                self._on_readable(trainer_fd, self._trainer_gone)
            if os.getppid() != self._trainer:
                self._trainer_gone()  # the number may be another process's by now
        while not (self._ending_at < float("inf") and not self._wards):
            dispatch(self._selector, self._advance())
        self._kill_adopted(lambda pid: True)

    def _on_readable(self, descriptor: int, action: Callable[[], object]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    # --- orders -------------------------------------------------------------------------------

    def _take_order(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, ORDER.size, 8)
        except OSError:
            data, descriptors = b"", []
        if len(data) < ORDER.size:
            self._trainer_gone()
            return
        operation, method, number, pid, shortest = ORDER.unpack(data)
        if operation == LAUNCH:
            self._launch(method, number, shortest, descriptors)
        elif operation == WATCH:
            self._watch(number, pid, shortest, descriptors)
        elif operation == WAKE:
            ward, snapshot = self._bereaved.get(pid), None
            if ward is not None:
                snapshot, ward.standby = ward.standby, None
                self._forsake(ward)
            self._wake(snapshot, number, shortest, descriptors)
        elif operation == WAKE_TOKEN:
            self._wake(self._announced(pid), number, shortest, descriptors)
        elif operation == FREE:
            snapshot = self._announced(pid)
            if snapshot is not None:
                snapshot.end()
        elif operation == KILL and number in self._wards:
            killing.begin(self._wards[number], with_stack=False)

    def _announced(self, token: int) -> Standby | None:
        """The snapshot kept under this token, no longer kept; its announcement may still be waiting to be heard."""
        for ward in self._wards.values():
            if ward.announcements is not None:
                ward.hear(self._tokens)
        return self._tokens.pop(token, None)

    def _launch(self, method: int, number: int, shortest: float, descriptors: list[int]) -> None:
        warden = os.getpid()
        try:
            lines = Lines.make(descriptors)
            pid = os.fork()
        except (OSError, ValueError) as error:
            decline(descriptors, 1, 3, error)
            return
        if pid == 0:
            become_worker(
                lines, method, number, trainer=self._trainer, warden=warden, spawn_command=self._spawn_command
            )
        ward = lines.ward(number, pid, shortest)
        try:
            self._admit(ward)
        except OSError:
            kill_group(pid, signal.SIGKILL)  # it cannot be watched over; its end will be heard of

    def _wake(self, snapshot: Standby | None, number: int, shortest: float, descriptors: list[int]) -> None:
        """Have a snapshot, whose worker is dead, go on as another one."""
        try:
            lines = Lines.make(descriptors)
            if snapshot is None:
                raise OSError("there is no such snapshot")
            message, ends = WAKING.pack(self._trainer, os.getpid(), number), lines.ends
            handed = [ends.requests, ends.replies, ends.memory, ends.stack, lines.stderr_write, ends.announcements]
            with snapshot.channel:
                socket.send_fds(snapshot.channel, [message], handed)
        except (OSError, ValueError) as error:
            if snapshot is not None:
                snapshot.end()
            decline(descriptors, 1, 3, error)
            return
        ward = lines.ward(number, snapshot.pid, shortest)
        try:
            self._admit(ward)
            ward.pidfd = os.pidfd_open(ward.pid)  # its parent may yet be another, who would be told of its end
            self._on_readable(ward.pidfd, lambda: self._end_of_woken(ward))
        except ProcessLookupError:
            self._finish(ward, None)
        except OSError:
            kill_group(ward.pid, signal.SIGKILL)

    def _end_of_woken(self, ward: Ward) -> None:
        self._reap_children()
        self._finish(ward, None)  # if it was not among them

    def _forsake(self, ward: Ward) -> None:
        """Let go of a dead worker's snapshot, and of the line to whom it may concern."""
        self._bereaved.pop(ward.number, None)
        self._forget(ward.fate.fileno())
        ward.fate.close()
        ward.drop_standby()

    def _watch(self, number: int, pid: int, shortest: float, descriptors: list[int]) -> None:
        try:
            replies, memory, fate, stderr, stack = descriptors
            control = Control(Block(memory, CONTROL_SIZE))
        except (OSError, ValueError) as error:
            kill_group(pid, signal.SIGKILL)
            decline(descriptors, 0, 2, error)
            return
        os.close(memory)
        ward = Ward(number, pid, False, replies, control, socket.socket(fileno=fate), stderr, stack, shortest)
        try:
            self._admit(ward)
            ward.pidfd = os.pidfd_open(pid)
            self._on_readable(ward.pidfd, lambda: self._finish(ward, None))
        except (OSError, AttributeError):  # already gone and reaped by the trainer, or it cannot be watched over
            self._finish(ward, None)

    def _admit(self, ward: Ward) -> None:
        self._wards[ward.number] = ward
        self._on_readable(ward.stderr, lambda: self._forward_stderr(ward))
        self._on_readable(ward.stack, lambda: self._collect_stack(ward))
        self._on_readable(ward.fate.fileno(), lambda: self._abandoned(ward))
        if ward.announcements is not None:
            self._on_readable(ward.announcements.fileno(), lambda: self._hear(ward))

    def _hear(self, ward: Ward) -> None:
        assert ward.announcements is not None
        if not ward.hear(self._tokens):
            self._forget(ward.announcements.fileno())

    # --- the end of a worker ------------------------------------------------------------------

    def _reap(self, wake: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 4096)
        self._reap_children()

    def _reap_children(self) -> None:
        by_pid = {ward.pid: ward for ward in self._wards.values() if ward.is_child}
        while True:
            try:
                # Looked at, not yet reaped: as long as it is a zombie its process group cannot be another's.
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            ward = by_pid.get(found.si_pid)
            if ward is not None:
                kill_group(ward.pid, signal.SIGKILL)
            _, status = os.waitpid(found.si_pid, 0)
            if ward is not None:
                self._finish(ward, os.waitstatus_to_exitcode(status))

    def _finish(self, ward: Ward, code: int | None) -> None:
        """The worker is dead: say so on every channel, and kill what it left behind."""
        if self._wards.pop(ward.number, None) is None:
            return
        if not ward.is_child:
            kill_group(ward.pid, signal.SIGKILL)
        for descriptor in (ward.stderr, ward.stack):
            os.set_blocking(descriptor, False)
        self._forward_stderr(ward)
        self._collect_stack(ward)
        standby = self._last_standby(ward)
        left = None if standby is None else (standby.pid, standby.seq)
        fate = Fate(code, ward.overdue, text(ward.stack_text), text(ward.tail), left)
        with contextlib.suppress(OSError):
            ward.fate.send(fate.encode(), socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0))
        tell_gone(ward.replies)
        for descriptor in (ward.stderr, ward.stack, ward.fate.fileno(), ward.pidfd):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(descriptor)
        for descriptor in (ward.stderr, ward.stack, ward.replies, ward.pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        ward.control.close()
        if standby is None:
            ward.fate.close()
        else:
            self._bereaved[ward.number] = ward
            self._on_readable(ward.fate.fileno(), lambda: self._forsake(ward))
        mark = ward_mark(self._trainer, ward.number)
        self._kill_adopted(lambda pid: not self._wards or leftovers.belongs_to(pid, mark, ward.pipes))
        if not ward.is_child:  # what it left behind came to its own reaper, not to us
            leftovers.kill(mark, self._trainer, ward.pipes)

    def _last_standby(self, ward: Ward) -> Standby | None:
        if ward.announcements is None:
            return None
        self._forget(ward.announcements.fileno())
        ward.hear(self._tokens)
        ward.announcements.close()
        if self._ending_at < float("inf"):
            ward.drop_standby()
        return ward.standby

    def _kill_adopted(self, condemned: Callable[[int], bool]) -> None:
        """Kill processes that came to us when their parent, a worker, died."""
        known = [*self._wards.values(), *self._bereaved.values()]
        spared = {ward.pid for ward in known} | {ward.standby.pid for ward in known if ward.standby}
        spared |= {snapshot.pid for snapshot in self._tokens.values()}
        for pid in children() - spared:
            if condemned(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                # Its SIGCHLD, if it is not dead yet, finds us in the loop again.
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _forward_stderr(self, ward: Ward) -> None:
        data = drain(ward.stderr)
        if not data:
            self._forget(ward.stderr)
            return
        ward.tail += data
        del ward.tail[:-STDERR_TAIL]
        self._pass_on(memoryview(data))

    def _pass_on(self, data: memoryview) -> None:
        """To the trainer's stderr, as much as its reader takes; one that is paused is waited for only once."""
        while data and takes_more(2, self._patience):
            self._patience = PATIENCE
            try:
                data = data[os.write(2, data[: select.PIPE_BUF]) :]
            except OSError:
                return
        if data:
            self._patience = 0.0

    def _collect_stack(self, ward: Ward) -> None:
        data = drain(ward.stack)
        if not data:
            self._forget(ward.stack)
        ward.stack_text += data
        del ward.stack_text[STACK_LIMIT:]
        killing.stack_written(ward)

    def _forget(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(descriptor)

    # --- killing ------------------------------------------------------------------------------

    def _advance(self) -> float | None:
        """Do what is due by the clock; the seconds until the next such thing."""
        now = time.monotonic()
        if now >= self._ending_at:
            self._ending_at = now + KILL_GRACE
            for ward in list(self._wards.values()):
                if ward.stage == "kill":
                    self._finish(ward, None)  # not even SIGKILL ends it: an uninterruptible system call
                else:
                    killing.enter(ward, "kill", now)
        due = self._ending_at
        for ward in list(self._wards.values()):
            look_again = killing.advance(ward, now)
            if look_again is None:
                self._finish(ward, None)
            else:
                due = min(due, look_again)
        # A day at most: the kernel counts in milliseconds, and not for ever.
        return None if due == float("inf") else min(max(0.0, due - time.monotonic()), 86_400.0)

    def _abandoned(self, ward: Ward) -> None:
        """The trainer let go of this worker."""
        self._forget(ward.fate.fileno())
        killing.abandon(ward)

    def _trainer_gone(self) -> None:
        """Kill everything shortly; also workers forked by the trainer of which we have not read yet."""
        if self._ending_at < float("inf"):
            return
        self._ending_at = time.monotonic() + ORPHAN_GRACE
        for ward in list(self._bereaved.values()):
            self._forsake(ward)
        while self._tokens:
            self._tokens.popitem()[1].end()
        for descriptor in self._lifelines:
            self._forget(descriptor)
        self._control.setblocking(False)
        with contextlib.suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(self._control, ORDER.size, 8)
                if len(data) < ORDER.size:
                    return
                operation, _, number, pid, shortest = ORDER.unpack(data)
                if operation == WATCH:
                    self._watch(number, pid, shortest, descriptors)
                else:
                    for descriptor in descriptors:
                        os.close(descriptor)


def main(control: int, trainer: int, preload: list[str], spawn_command: list[str]) -> None:
    """The warden process."""
    # The trainer's thread may have blocked SIGCHLD, and a mask is inherited: no death would ever be told.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    for name in preload:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # workers share these objects' pages; a collection would touch and so copy them
    with socket.socket(fileno=control) as orders:
        Warden(orders, trainer, spawn_command).run()
