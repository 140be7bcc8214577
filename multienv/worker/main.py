"""A worker process from its first line to its last.

It reads requests from one pipe, has the host answer them, and writes replies to another. It ends when
the request pipe closes (the trainer is gone or has had enough), when it is told to, or when the env ends
it. It ignores SIGINT: Ctrl-C is the trainer's.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from multienv.wire.memory import CONTROL_SIZE, DEADLINE, OBSERVATIONS, STEP_SECONDS, Block, Control
from multienv.wire.messages import ARRIVED, MARK_SIZE, NOT_ARRIVED, REQUEST, STEP, Initialize
from multienv.worker.affinity import Affinity
from multienv.worker.ends import WARD_VARIABLE, Ends
from multienv.worker.host import Host
from multienv.worker.lookout import Lookout
from multienv.worker.offspring import Offspring
from multienv.worker.snapshots import Snapshots, Woken

# One read takes most requests, and CPython's small-object allocator serves it; the rest of a longer one is
# fetched as its header says.
_CHUNK = 476
# Sent to a worker that hangs: faulthandler then writes the stacks of all threads, also while C code runs.
STACK_SIGNAL = getattr(signal, "SIGUSR2", None)
# The exit code of a worker whose own loop failed, which is a defect of multienv.
LOOP_FAILED = 70


def main(ends: Ends, env_fn: Callable[[], Any] | None = None) -> NoReturn:
    """Serve requests until the end; never returns."""
    code = LOOP_FAILED
    try:
        _take_signals()
        offspring = Offspring()
        control = _settle(ends, offspring)
        snapshots = Snapshots(control.words, ends, lambda seq: host.remember(seq), offspring.fork)
        host = Host(
            env_fn=env_fn,
            words=control.words,
            on_initialize=lambda message: _find_place(message, snapshots),
            allocate=partial(_allocate, ends.memory, offspring),
            arena=lambda size: offspring.keep_block(Block.sized(ends.arena, size)),
            on_branch=snapshots.branch,
        )
        with contextlib.suppress(BrokenPipeError, EOFError):  # the trainer let go in the middle of a request
            _live(ends, host, control, snapshots, offspring)
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


def spawned(ends: str) -> NoReturn:
    """As :func:`main`, in an interpreter of its own: the ends come by the command line."""
    main(Ends.parse(ends))


def _live(ends: Ends, host: Host, control: Control, snapshots: Snapshots, offspring: Offspring) -> None:
    """Answer requests until there are no more; and whenever this is a snapshot that is woken, begin anew as that."""
    affinity, woken = Affinity.of_this_process(control), False
    while True:
        try:
            if woken:
                before, control = control, _settle(ends, offspring)
                host.move(control.words, partial(_allocate, ends.memory, offspring))
                before.close()
                affinity = Affinity.of_this_process(control)
                snapshots.go_on(control.words, ends)
            offspring.keep_ends(ends)
            host.answer_on(ends.replies)
            _serve(ends, host, control, snapshots, affinity)
            return
        except Woken as again:
            ends, woken = again.ends, True
            affinity.end()


def _serve(ends: Ends, host: Host, control: Control, snapshots: Snapshots, affinity: Affinity) -> None:
    """Answer requests until there are no more."""
    read, write, times, unpack, clock = os.read, os.write, control.times, REQUEST.unpack_from, time.perf_counter
    last_seq, reply, ahead = -1, b"", b""
    unseen = 0  # it is not known yet how long a step takes
    lookout, look, replied = Lookout.over(ends.requests, control.words), None, 0.0
    while True:
        if look is not None and not ahead and not look():
            look = None
        frame = ahead or read(ends.requests, _CHUNK)
        if replied:
            look, replied = lookout.after(clock() - replied), 0.0
        if not frame:
            return
        if len(frame) < REQUEST.size:
            frame = _read_rest(ends.requests, frame, REQUEST.size)
        length, seq, kind, _ = unpack(frame)
        if len(frame) < length:
            frame = _read_rest(ends.requests, frame, length)
        ahead = frame[length:]  # a Close, or a mark, may have been sent meanwhile
        if ahead:
            if not length:
                ahead = _answer_mark(ends, frame, reply if seq == last_seq else b"", times)
                continue
            frame = frame[:length]
        sampled = kind == STEP and not seq & unseen
        reply = affinity.timed(host.handle, seq, kind, frame, unseen + 1) if sampled else host.handle(seq, kind, frame)
        last_seq = seq
        times[DEADLINE] = 0.0
        written = write(ends.replies, reply)
        if written < len(reply):  # a signal came in between
            _write_rest(ends.replies, memoryview(reply)[written:])
        if sampled:
            replied = 0.0 if look is not None else clock()
            unseen = min(affinity.unseen, snapshots.unseen(times[STEP_SECONDS]))
            snapshots.consider(seq, times[STEP_SECONDS])
        elif host.closing:
            return


def _answer_mark(ends: Ends, frame: bytes, reply: bytes, times: Any) -> bytes:
    """Tell an interrupted trainer where to go on reading; returns what came behind its frame."""
    if reply:
        times[DEADLINE] = 0.0  # it was set anew: the trainer did not know that there was an answer
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


def _take_signals() -> None:
    """As a worker wants them; the env may have others."""
    for name in ("SIGTERM", "SIGCHLD", "SIGHUP", "SIGALRM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _settle(ends: Ends, offspring: Offspring) -> Control:
    """Where stacks are written, and the control words."""
    faulthandler.enable(ends.stack, all_threads=True)
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, file=ends.stack, all_threads=True, chain=False)
    return Control(offspring.keep_block(Block(ends.memory, CONTROL_SIZE)))


def _find_place(message: Initialize, snapshots: Snapshots) -> None:
    """See the world as the trainer does: modules, arguments, working directory, environment, registered envs."""
    snapshots.begin(message.snapshots, at_once=message.replacement)
    setting = message.setting
    if setting is None:
        return
    multiprocessing.current_process().authkey = setting.authkey
    sys.path[:] = setting.path
    sys.argv[:] = setting.arguments
    with contextlib.suppress(OSError):
        os.chdir(setting.directory)
    kept = {WARD_VARIABLE: os.environ[WARD_VARIABLE]} if WARD_VARIABLE in os.environ else {}
    os.environ.clear()
    os.environ.update(setting.environment | kept)


def _allocate(descriptor: int, offspring: Offspring, size: int) -> Block:
    os.ftruncate(descriptor, OBSERVATIONS + size)
    return offspring.keep_block(Block(descriptor, size, OBSERVATIONS))


def _exit_code(exit_: SystemExit) -> int:
    if exit_.code is None:
        return 0
    if isinstance(exit_.code, int):
        return exit_.code & 0xFF
    print(exit_.code, file=sys.stderr)
    return 1
