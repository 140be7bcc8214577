"""A worker process from its first line to its last.

It reads requests from one pipe, has the host answer them, and writes replies to another. It ends when
the request pipe closes (the trainer is gone or has had enough), when it is told to, or when the env ends
it. It ignores SIGINT: Ctrl-C is the trainer's.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from multienv.wire.memory import CONTROL_SIZE, DEADLINE, OBSERVATIONS, Block, Control
from multienv.wire.messages import ARRIVED, MARK_SIZE, NOT_ARRIVED, REQUEST, STEP, Initialize
from multienv.worker.affinity import SAMPLE, Affinity, Scheduler
from multienv.worker.host import Host

# One read takes most requests, and CPython's small-object allocator serves it; the rest of a longer one is
# fetched as its header says.
_CHUNK = 476
# Sent to a worker that hangs: faulthandler then writes the stacks of all threads, also while C code runs.
STACK_SIGNAL = getattr(signal, "SIGUSR2", None)
# In each worker's environment, so that the processes it starts can be told from others'.
WARD_VARIABLE = "MULTIENV_WORKER"


def ward_mark(trainer: int, number: int) -> str:
    """Its value: worker numbers are one trainer's own."""
    return f"{trainer}.{number}"


# The exit code of a worker whose own loop failed, which is a defect of multienv.
LOOP_FAILED = 70


@dataclass(frozen=True, slots=True)
class Ends:
    """The worker's descriptors."""

    requests: int
    replies: int
    memory: int
    stack: int  # where faulthandler writes

    @classmethod
    def parse(cls, text: str) -> Ends:
        """From the command line of a spawned worker."""
        return cls(*map(int, text.split(",")))

    def __str__(self) -> str:
        """For the command line of a spawned worker."""
        return f"{self.requests},{self.replies},{self.memory},{self.stack}"


def main(ends: Ends, env_fn: Callable[[], Any] | None = None) -> NoReturn:
    """Serve requests until the end; never returns."""
    code = LOOP_FAILED
    try:
        _settle(ends)
        control = Control(Block(ends.memory, CONTROL_SIZE))
        host = Host(
            env_fn=env_fn,
            words=control.words,
            on_initialize=lambda message: _find_place(message),
            allocate=lambda size: _allocate(ends.memory, size),
        )
        with contextlib.suppress(BrokenPipeError, EOFError):  # the trainer let go in the middle of a request
            _serve(ends, host, control)
        if not host.closing:
            with contextlib.suppress(Exception):  # nobody is left to hear of it
                host.close_env()
        code = 0
    except SystemExit as exit_:
        code = _exit_code(exit_)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        # Not sys.exit: in a forked worker the trainer's own exit handlers would run a second time.
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(code)


def _serve(ends: Ends, host: Host, control: Control) -> None:
    read, write, times = os.read, os.write, control.times
    unpack, affinity = REQUEST.unpack_from, Affinity(control.words, times, Scheduler.of_this_process())
    last_seq, reply, ahead = -1, b"", b""
    while True:
        frame = ahead or read(ends.requests, _CHUNK)
        if not frame:
            break
        if len(frame) < REQUEST.size:
            frame = _read_rest(ends.requests, frame, REQUEST.size)
        length, seq, kind, _ = unpack(frame)
        if len(frame) < length:
            frame = _read_rest(ends.requests, frame, length)
        ahead = frame[length:]  # a Close, or a mark, may have been sent meanwhile
        if ahead:
            if not length:
                ahead = _answer_mark(ends, frame, reply if seq == last_seq else b"")
                continue
            frame = frame[:length]
        if seq & SAMPLE or kind != STEP:
            reply = host.handle(seq, kind, frame)
        else:
            reply = affinity.timed(host.handle, seq, kind, frame)
        last_seq = seq
        times[DEADLINE] = 0.0
        written = write(ends.replies, reply)
        if written < len(reply):  # a signal came in between
            _write_rest(ends.replies, memoryview(reply)[written:])
        if host.closing:
            return


def _answer_mark(ends: Ends, frame: bytes, reply: bytes) -> bytes:
    """Tell an interrupted trainer where to go on reading; returns what came behind its frame."""
    end = REQUEST.size + MARK_SIZE
    if len(frame) < end:
        frame = _read_rest(ends.requests, frame, end)
    answer = frame[REQUEST.size : end] + (ARRIVED + reply if reply else NOT_ARRIVED)
    _write_rest(ends.replies, memoryview(answer))
    return frame[end:]


def _read_rest(descriptor: int, start: bytes, length: int) -> bytes:
    parts, missing = [start], length - len(start)
    while missing > 0:
        part = os.read(descriptor, min(missing, 2**20))
        if not part:
            raise EOFError("the trainer went away in the middle of a request")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _write_rest(descriptor: int, rest: memoryview) -> None:
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _settle(ends: Ends) -> None:
    """Signals, as a worker wants them."""
    for name in ("SIGTERM", "SIGCHLD", "SIGHUP", "SIGALRM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(ends.stack, all_threads=True)
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, file=ends.stack, all_threads=True, chain=False)


def _find_place(message: Initialize) -> None:
    """See the world as the trainer does: modules, arguments, working directory, environment, registered envs."""
    setting = message.setting
    if setting is None:
        return
    sys.path[:] = setting.path
    sys.argv[:] = setting.arguments
    with contextlib.suppress(OSError):
        os.chdir(setting.directory)
    kept = {WARD_VARIABLE: os.environ[WARD_VARIABLE]} if WARD_VARIABLE in os.environ else {}
    os.environ.clear()
    os.environ.update(setting.environment | kept)


def _allocate(descriptor: int, size: int) -> Block:
    os.ftruncate(descriptor, OBSERVATIONS + size)
    return Block(descriptor, size, OBSERVATIONS)


def _exit_code(exit_: SystemExit) -> int:
    if exit_.code is None:
        return 0
    if isinstance(exit_.code, int):
        return exit_.code & 0xFF
    print(exit_.code, file=sys.stderr)
    return 1
