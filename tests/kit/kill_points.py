"""Kill or stop a process at its n-th system call, or inside the native extension, by ptrace (Linux).

The tracer is a program of its own, this file run as a script: a tracing thread of the test's own process would compete
with the test for the stops of the monitor, which the library waits for. It counts the system calls of all threads of
the process, and at the n-th

* ``"before"``: sends SIGKILL at the entry, so that the call is never made,
* ``"after"``: sends SIGKILL at the exit: the call is made, its result never seen,
* ``"stop"``: sends SIGSTOP at the entry and lets go: the process stops in the call, or when the call has been made.

Or, with ``"inside"``, it goes instruction by instruction, counts those of multienv's native extension alone, and sends
SIGKILL before the n-th: so also between any two of its stores into shared memory.

Calls of ``sched_yield`` in a row count as one: that is a process that looks at shared memory again and again.

It says, a line each: ``attached``; ``striking NUMBER`` *before* the signal is sent, with the number of the call;
``struck``; or ``ended COUNT`` when the process has ended by itself. Killed, it lets the process go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HOWS = ("before", "after", "stop", "inside")
# Seconds until a tracer that says nothing counts as stuck.
STUCK_AFTER = 20.0

# ptrace(2), <linux/ptrace.h>
_CONT, _DETACH, _SYSCALL, _SET_OPTIONS, _GET_EVENT_MESSAGE = 7, 17, 24, 0x4200, 0x4201
_SINGLE_STEP, _GET_REGISTERS = 9, 0x4204
_SEIZE, _INTERRUPT, _LISTEN, _GET_SYSCALL_INFO = 0x4206, 0x4207, 0x4208, 0x420E
_MARK_CALLS, _FOLLOW_FORK, _FOLLOW_CLONE = 1, 2, 8  # PTRACE_O_TRACESYSGOOD, _TRACEFORK, _TRACECLONE
_FORKED, _STOPPED = 1, 128  # PTRACE_EVENT_FORK, PTRACE_EVENT_STOP
_ANY_THREAD = 0x40000000  # __WALL
_ENTRY = 1  # PTRACE_SYSCALL_INFO_ENTRY
# Among the general registers, NT_PRSTATUS: which of them points to the next instruction.
_GENERAL, _PROGRAM_COUNTER = 1, {"x86_64": 16}.get(platform.machine(), 32)
_YIELD = {"x86_64": 24}.get(platform.machine(), 124)


# --- the test's side ------------------------------------------------------------------------------


def why_not() -> str:
    """Return why no process can be traced here; empty if one can."""
    if sys.platform != "linux":
        return "ptrace is Linux's"
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            with KillPoint(process.pid, 1, "before"):
                return ""
        except PermissionError as error:
            return f"ptrace is not permitted here ({error}): try as root, or with sysctl kernel.yama.ptrace_scope=0"
        finally:
            process.kill()


class KillPoint:
    """A tracer, attached from the constructor to the end of the ``with`` block.

    Args:
        pid: the process to trace.
        nth: the number of the call, from 1.
        how: one of `HOWS`.
        newborn: trace the next child that the process forks, from its first system call, and not the process.

    Raises:
        PermissionError: the process cannot be traced.
    """

    def __init__(self, pid: int, nth: int, how: str, *, newborn: bool = False) -> None:
        self.pid = 0 if newborn else pid
        self.call = -1  # what it struck at: the number of a system call, see "man 2 syscalls"
        self.calls = -1  # how many there were if the process ended by itself
        self.struck = False
        self._text = b""
        self._is_attached = False
        # Without site-packages and the user's settings: this is to be there soon.
        command = [sys.executable, "-I", "-S", __file__, str(pid), str(nth), how, *["newborn"][: int(newborn)]]
        self._tracer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._tracer.stdout is not None
        self._output = self._tracer.stdout.fileno()
        try:
            self._read(lambda: self._is_attached)
        except BaseException:
            self.__exit__()
            raise

    @property
    def is_due(self) -> bool:
        """Whether the signal has been sent, or is about to be; False says that it has not been sent yet."""
        self._take_lines(0.0)
        return self.call >= 0

    def await_strike(self) -> None:
        """Wait until the signal has been sent, and if it kills, until the process is dead."""
        self._read(lambda: self.struck)

    def await_newborn(self) -> int:
        """Wait until the child has been forked; its pid."""
        self._read(lambda: self.pid > 0)
        return self.pid

    def await_end(self) -> None:
        """Wait until the process has been struck, or has ended by itself."""
        self._read(lambda: self.struck or self.calls >= 0)

    def _read(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STUCK_AFTER
        while not condition():
            is_there = self._take_lines(1.0)
            if not condition() and (not is_there or time.monotonic() > deadline):
                raise AssertionError(f"the tracer of {self.pid} has ended or is stuck; it said {self._text!r}")

    def _take_lines(self, seconds: float) -> bool:
        """Read what the tracer says; False at its end."""
        while select.select([self._output], [], [], seconds)[0]:
            data = os.read(self._output, 4096)
            if not data:
                return False
            seconds = 0.0
            self._text += data
            *lines, self._text = self._text.split(b"\n")
            for line in lines:
                word, _, value = line.decode().partition(" ")
                if word == "refused":
                    raise PermissionError(value)
                if word == "attached":
                    self._is_attached = True
                elif word == "newborn":
                    self.pid = int(value)
                elif word == "striking":
                    self.call = int(value)
                elif word == "struck":
                    self.struck = True
                elif word == "ended":
                    self.calls = int(value)
        return True

    def __enter__(self) -> KillPoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._tracer.kill()
        self._tracer.wait()
        assert self._tracer.stdout is not None
        self._tracer.stdout.close()


# --- the tracer's side ----------------------------------------------------------------------------


class Tracer:
    """Traces one process; to be run in a process without children, by the thread that makes it."""

    def __init__(self, nth: int, how: str) -> None:
        self.nth = nth
        self.how = how
        self.pid = 0
        self.count = 0
        self._native = range(0)  # the addresses of the extension's instructions
        self._last: dict[int, int] = {}  # by thread: the number of its last call
        self._in_nth = 0  # the thread that is inside the n-th call, to be killed at its exit
        self._parent = 0  # whose child is awaited; 0 once it has forked and is let go
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        self._libc.ptrace.restype = ctypes.c_long

    def seize(self, pid: int) -> None:
        """Trace all threads of this process."""
        self.pid = pid
        if self.how == "inside":
            self._native = instructions_of(pid, "/_native.")
        waiting: set[int] = set()
        while new := set(map(int, os.listdir(f"/proc/{pid}/task"))) - waiting:
            for tid in new:
                self._ptrace(_SEIZE, tid, 0, _MARK_CALLS | _FOLLOW_CLONE)
                self._ptrace(_INTERRUPT, tid)
            waiting |= new
        for tid in waiting:
            self._attend(*os.waitpid(tid, _ANY_THREAD))

    def seize_newborn(self, parent: int) -> None:
        """Trace the next child that this process forks."""
        self._parent = parent
        self._ptrace(_SEIZE, parent, 0, _FOLLOW_FORK)

    def run(self) -> None:
        """Trace until the process has been struck, or has ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                self._attend(*os.waitpid(-1, _ANY_THREAD))
        say(f"ended {self.count}")

    def _attend(self, tid: int, status: int) -> None:
        """Look at what a thread has stopped for, and have it go on."""
        if not os.WIFSTOPPED(status):
            return
        number, event = os.WSTOPSIG(status), status >> 16
        request, injected = _SINGLE_STEP if self.how == "inside" else _SYSCALL, 0
        if tid == self._parent:
            request = _CONT
            if event == _FORKED:
                request, self._parent = _DETACH, 0
        elif not self.pid:  # the newborn's first stop
            self.pid = tid
            while self._parent:  # seen before the parent's: were the newborn struck now, nobody would let go of that
                self._attend(*os.waitpid(self._parent, _ANY_THREAD))
            self._ptrace(_SET_OPTIONS, tid, 0, _MARK_CALLS | _FOLLOW_CLONE)
            say(f"newborn {tid}")
        if self.how == "inside" and number == signal.SIGTRAP:
            self._consider_instruction(tid)
        elif number == signal.SIGTRAP | 0x80:
            self._consider(tid)
        elif event == 0:
            injected = number
        elif event == _STOPPED and number != signal.SIGTRAP:
            request = _LISTEN  # stopped by a signal: until SIGCONT
        with contextlib.suppress(ProcessLookupError):  # killed meanwhile
            self._ptrace(request, tid, 0, injected)

    def _consider(self, tid: int) -> None:
        """Count a call at its entry, and strike if it is the one."""
        info = ctypes.create_string_buffer(128)
        try:
            self._ptrace(_GET_SYSCALL_INFO, tid, len(info), ctypes.addressof(info))
        except ProcessLookupError:  # killed meanwhile
            return
        if info.raw[0] != _ENTRY:
            if tid == self._in_nth:
                self._strike(tid)
            return
        call = int.from_bytes(info.raw[24:32], sys.byteorder)
        is_again = call == self._last.get(tid) == _YIELD
        self._last[tid] = call
        self.count += not is_again
        if self.count == self.nth and not is_again:
            self._in_nth = tid
            if self.how != "after":
                self._strike(tid)

    def _consider_instruction(self, tid: int) -> None:
        """Count an instruction of the extension before it is carried out, and strike if it is the one."""
        registers = (ctypes.c_uint64 * 64)()
        vector = (ctypes.c_void_p * 2)(ctypes.addressof(registers), ctypes.sizeof(registers))
        try:
            self._ptrace(_GET_REGISTERS, tid, _GENERAL, ctypes.addressof(vector))
        except ProcessLookupError:  # killed meanwhile
            return
        if registers[_PROGRAM_COUNTER] in self._native:
            self.count += 1
            if self.count == self.nth:
                self._strike(tid)

    def _strike(self, tid: int) -> None:
        """Send the signal and end this program; a killed process is waited for."""
        say(f"striking {self._last.get(tid, 0)}")
        os.kill(self.pid, signal.SIGSTOP if self.how == "stop" else signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while self.how != "stop":
                os.waitpid(-1, _ANY_THREAD)
        say("struck")
        os._exit(0)  # lets go of a stopped process

    def _ptrace(self, request: int, tid: int, address: int = 0, data: int = 0) -> None:
        if self._libc.ptrace(request, tid, address, data) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def instructions_of(pid: int, name: str) -> range:
    """Return the addresses at which a process has mapped the instructions of the file with this in its path."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if name in line and "x" in line.split()[1]:
            first, last = line.split()[0].split("-")
            return range(int(first, 16), int(last, 16))
    return range(0)


def say(line: str) -> None:
    """Tell the test something."""
    os.write(1, f"{line}\n".encode())


def main(pid: str, nth: str, how: str, newborn: str = "") -> None:
    """Be the tracer."""
    tracer = Tracer(int(nth), how)
    try:
        (tracer.seize_newborn if newborn else tracer.seize)(int(pid))
    except OSError as error:
        say(f"refused {error}")
        return
    say("attached")
    tracer.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
