"""What connects a worker with its trainer and with the warden; and how the warden's child takes its ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import NoReturn

from multienv.processes.protocol import FORKSERVER
from multienv.processes.ward import Ward, open_descriptors, pair, pipe
from multienv.wire.memory import CONTROL_SIZE, Block, Control
from multienv.worker import main as worker
from multienv.worker.ends import WARD_VARIABLE, Ends, ward_mark

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process, where there is such a thing."""
    if _libc is not None:
        _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Lines:
    """The ends of one worker's lines: the trainer has handed four of them on, the warden has made the others."""

    ends: Ends  # the worker's
    stderr_write: int  # the worker's too
    stderr_read: int
    stack_read: int
    announcements: int
    fate: int
    control: Control

    @classmethod
    def make(cls, descriptors: list[int]) -> Lines:
        """From what the trainer has handed on. What is made is noted there, to be closed if something fails.

        Raises OSError, and ValueError when not all that was sent could be received.
        """
        requests, replies, memory, fate, *arena = descriptors
        stderr_read, stderr_write = pipe(descriptors)
        stack_read, stack_write = pipe(descriptors)
        heard, told = pair(descriptors)
        ends = Ends(requests, replies, memory, stack_write, told, *arena)
        return cls(ends, stderr_write, stderr_read, stack_read, heard, fate, Control(Block(memory, CONTROL_SIZE)))

    def ward(self, number: int, pid: int, shortest_deadline: float) -> Ward:
        """The process ``pid`` has its ends: let go of them, and hold the others."""
        ends = self.ends
        for descriptor in {*ends.descriptors(), self.stderr_write} - {ends.replies}:
            os.close(descriptor)
        return Ward(
            number,
            pid,
            is_child=True,
            replies=ends.replies,
            control=self.control,
            fate=socket.socket(fileno=self.fate),
            stderr=self.stderr_read,
            stack=self.stack_read,
            shortest_deadline=shortest_deadline,
            announcements=socket.socket(fileno=self.announcements),
        )


def become_worker(
    lines: Lines, method: int, number: int, *, trainer: int, warden: int, spawn_command: list[str]
) -> NoReturn:
    """In the warden's child: let go of everything of the warden's and turn into a worker."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.setpgid(0, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != warden:
            os._exit(worker.LOOP_FAILED)  # it died before the line above
        os.dup2(lines.stderr_write, 2)
        ends = lines.ends
        kept = {0, 1, 2, *ends.descriptors()}
        for descriptor in open_descriptors() - kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        os.environ[WARD_VARIABLE] = ward_mark(trainer, number)
        if method == FORKSERVER:
            worker.main(ends)
        for descriptor in ends.descriptors():
            os.set_inheritable(descriptor, True)
        os.execv(spawn_command[0], [*spawn_command, str(ends)])  # noqa: S606 - our own interpreter
    finally:
        os._exit(worker.LOOP_FAILED)
