"""A worker process from its first line to its last.

It waits for requests and lets the host execute them. It ends when its wake socket ends, because the trainer has ended
or has closed it; after a request to close; or when the env ends the process. It ignores SIGINT, because Ctrl-C is for
the trainer.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import multiprocessing
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from multienv._engine.cores import give_way
from multienv._engine.native import native
from multienv._engine.wire.banks import STEP
from multienv._engine.wire.messages import Build, Setting
from multienv._engine.wire.segment import (
    OTHER_SECONDS,
    PID,
    REPLY,
    REQUEST,
    SHARED,
    SPINNERS,
    STEP_SECONDS,
    TRAINER_SLEEPS,
    WORKER_SLEEPS,
    Segment,
)
from multienv._engine.wire.shared_pickle import SharedPickle
from multienv._engine.worker.affinity import Affinity
from multienv._engine.worker.descriptors import MARK_VARIABLE, WorkerDescriptors
from multienv._engine.worker.imports import noted_files
from multienv._engine.worker.main_module import stand_in
from multienv._engine.worker.module_values import set_module_values
from multienv._engine.worker.replies import exit_code
from multienv._engine.worker.snapshots import Snapshots, Woken, flush_streams

# Sent to a worker that hangs: faulthandler then writes the stacks of all threads, also while C code runs.
STACK_SIGNAL = signal.SIGUSR2
# The exit code of a worker whose own loop failed, which is a defect of multienv.
LOOP_FAILED = 70

# Seconds a worker looks for the next request before it goes to sleep. To be woken takes 20 to 50 µs on a virtual
# machine, as long as several steps of CartPole. At each look it gives the core to any process that wants it.
SPIN_SECONDS = 200e-6
# Milliseconds of the first sleep. "I sleep" is stored and the request is loaded after it; without a fence, which
# Python does not have, the processor may do it the other way round, and a wake-up is lost. After this time the store is
# visible to the trainer.
FIRST_SLEEP_MILLISECONDS = 3
# A mask: of steps whose number has any of these bits the time is not taken; of slow ones it is always taken.
SAMPLE = 63
SLOW = 1e-3
# Weight of a new sample in the time of a step.
_SMOOTHING = 0.1

_AT_ONCE = int(getattr(socket, "MSG_NOSIGNAL", 0)) | int(socket.MSG_DONTWAIT)
_libc = ctypes.CDLL(None)
_PR_SET_NAME = 15


def main(descriptors: WorkerDescriptors, title: str) -> NoReturn:
    """Serve requests until the end; never returns.

    Args:
        descriptors: The worker's descriptors.
        title: What ``ps`` shows.
    """
    code = LOOP_FAILED
    try:
        set_signal_handlers()
        set_title(title)
        _live(descriptors)
        code = 0
    except SystemExit as error:
        code = exit_code(error)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        flush_streams()
        os._exit(code)  # not sys.exit: exit handlers are the monitor's


def spawned(title: str, *numbers: str) -> NoReturn:
    """Run :func:`main` in an interpreter of its own; the descriptors come by the command line."""
    main(WorkerDescriptors.of(*map(int, numbers)), title)


def _live(descriptors: WorkerDescriptors) -> None:
    """Serve requests; when a snapshot of this process is woken, go on here in the copy, with its new descriptors."""
    from multienv._engine.worker.host import Host

    segment, number, woken = _open_segment(descriptors), 0, False
    forks = Forks(segment)
    snapshots = Snapshots(segment, descriptors, forks.fork)
    affinity: Affinity

    def on_build(build: Build) -> None:
        _apply_setting(build, snapshots)
        affinity.start()

    load = partial(_load, _receive_shared(segment, descriptors))
    host = Host(segment, on_build=on_build, on_keep=snapshots.keep, load=load, code=noted_files)
    while True:
        try:
            if woken:
                segment = forks.segment = _open_segment(descriptors)
                host.move(segment)
                snapshots.go_on(segment, descriptors)
                segment.words[REPLY] = number  # tells the trainer that it is up
                _wake(descriptors.wake_socket)
            affinity = Affinity(segment.words)
            snapshots.account = affinity.account
            _serve(descriptors.wake_socket, host, segment, snapshots, forks, affinity)
            break
        except Woken as again:
            descriptors, number, woken = again.descriptors, again.number, True
    if not host.closing:
        with contextlib.suppress(Exception):  # nobody is left to hear of it
            host.close_envs()


def _serve(
    wake_socket: socket.socket, host: Any, segment: Segment, snapshots: Snapshots, forks: Forks, affinity: Affinity
) -> None:
    """Execute requests until the wake socket ends or the host has been closed."""
    # The newest request that was executed. In a woken snapshot it is not the snapshot's: the segment is new, and the
    # trainer may go on with a lower number.
    last = 0
    words, times, clock = segment.words, segment.times, time.perf_counter
    untimed = 0
    wake = partial(_wake, wake_socket)
    try:
        while True:
            spins = not affinity.is_crowded and bool(words[SPINNERS])
            if native is not None:
                last = native.serve(words, host.handle, last, untimed, SPIN_SECONDS if spins else 0.0, forks, wake)
                spins = False  # it has looked
                if forks.is_astray:
                    os._exit(0)
            if words[REQUEST] == last and (host.closing or not _await_request(wake_socket, words, last, spins=spins)):
                return
            number = words[REQUEST]
            is_timed = not number & untimed and segment.banks[number & 1].view[0] == STEP
            began, others = clock(), times[OTHER_SECONDS]
            rolled = host.handle(number)
            seconds = clock() - began - (times[OTHER_SECONDS] - others)
            if forks.is_astray:
                os._exit(0)
            words[REPLY] = last = number
            if words[TRAINER_SLEEPS]:
                wake()
            if rolled is not None:  # many steps: the number of the last one
                number, seconds = rolled
            elif not is_timed:
                continue
            before = times[STEP_SECONDS] or seconds
            smoothed = times[STEP_SECONDS] = before + _SMOOTHING * (seconds - before)
            untimed = 0 if smoothed > SLOW or snapshots.every > 0 else SAMPLE
            if is_timed:
                affinity.consider(seconds, untimed + 1)
            snapshots.consider(number, smoothed)
    finally:
        affinity.end()


def _await_request(wake_socket: socket.socket, words: Any, last: int, *, spins: bool) -> bool:
    """Look for another request than ``last``, then sleep until there is one; false when the wake socket has ended."""
    if spins and _differs(words, last):
        return True
    poller = select.poll()
    poller.register(wake_socket, select.POLLIN)
    patience: int | None = FIRST_SLEEP_MILLISECONDS
    try:
        while True:
            words[WORKER_SLEEPS] = 1
            if words[REQUEST] != last:
                return True
            if poller.poll(patience) and _heard(wake_socket) == b"":
                return bool(words[REQUEST] != last)
            if words[REQUEST] != last:
                return True
            patience = None
    finally:
        words[WORKER_SLEEPS] = 0


def _differs(words: Any, last: int) -> bool:
    """Poll for another request than ``last`` for a while; each time, yield the core to other processes."""
    until = time.perf_counter() + SPIN_SECONDS
    while words[REQUEST] == last:
        if time.perf_counter() > until:
            return False
        give_way()
    return True


def _heard(wake_socket: socket.socket) -> bytes | None:
    """Read wake bytes; ``b""``: the trainer has closed its end; ``None``: there are none."""
    try:
        return wake_socket.recv(4096, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:  # closed before it had read all bytes, or by the env
        return b""


def _wake(wake_socket: socket.socket) -> None:
    """Wake the trainer."""
    with contextlib.suppress(OSError):  # full of bytes, which wake it as well; or it is gone, which is seen next
        wake_socket.send(b"s", _AT_ONCE)


class Forks:
    """Keeps processes that the env forks from acting as the worker.

    If a forked child returns from the env's method, it runs the worker's code, and would go on as a second worker that
    writes to the same shared memory. So a child may only read this memory, and ends where the worker would answer.

    Attributes:
        segment: The memory that a child may not write to.
        is_astray: This process is such a child.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.is_astray = False
        self._is_ours = False
        os.register_at_fork(after_in_child=self._part)

    def fork(self) -> int:
        """Fork as ``os.fork`` does; the copy is a snapshot and may write to the segment."""
        self._is_ours = True
        try:
            return os.fork()
        finally:
            self._is_ours = False

    def _part(self) -> None:
        if self._is_ours or self.is_astray:
            return
        self.is_astray = True
        faulthandler.disable()  # it would write where the worker's stack is looked for
        for view in (memoryview(self.segment.words), *(bank.view for bank in self.segment.banks)):
            first = ctypes.addressof(ctypes.c_char.from_buffer(view))
            start = first - first % mmap.PAGESIZE
            _libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(first + view.nbytes - start), mmap.PROT_READ)


def set_signal_handlers() -> None:
    """Set the signal handlers of a worker, before the env may set its own."""
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _open_segment(descriptors: WorkerDescriptors) -> Segment:
    """Open the file where stacks are written for the monitor, and map the segment."""
    faulthandler.enable(descriptors.stack, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=descriptors.stack, all_threads=True, chain=False)
    segment = Segment(descriptors.memory)
    segment.words[PID] = os.getpid()
    return segment


def _receive_shared(segment: Segment, descriptors: WorkerDescriptors) -> int:
    """Receive the descriptor of the file that the workers share; -1: this one needs none, or the trainer is gone."""
    if segment.words[SHARED]:
        _, received, _, _ = socket.recv_fds(descriptors.wake_socket, 1, 1)
        for descriptor in received:
            os.set_inheritable(descriptor, False)
            return descriptor
    return -1


def _load(shared: int, env_fns: bytes | SharedPickle) -> Any:
    """Unpickle what builds the envs, from the shared file if it lies there; the file is closed, and stays mapped."""
    if not isinstance(env_fns, SharedPickle):
        return cloudpickle.loads(env_fns)
    try:
        return env_fns.load(shared)
    finally:
        if shared >= 0:  # else the trainer has ended
            os.close(shared)


def _apply_setting(build: Build, snapshots: Snapshots) -> None:
    """Plan snapshots; set main module and surroundings as they are in the trainer."""
    snapshots.plan(build.snapshots, at_once=build.replacement, journal=build.journal)
    setting = build.setting
    if setting is None:
        return
    stand_in(setting.main)
    tempfile.tempdir = None  # it may have been worked out before
    if not _has_surroundings:
        apply_surroundings(setting)
    elif "TMPDIR" in setting.variables:  # else it is the folder that the monitor has made
        os.environ["TMPDIR"] = setting.variables["TMPDIR"]
    set_module_values(setting.values)


# Whether this process was forked from a template, which has them, and whose imports may have changed them since.
_has_surroundings = False


def apply_surroundings(setting: Setting) -> None:
    """Set arguments, and on the trainer's machine import path, working directory, limits and environment."""
    global _has_surroundings
    _has_surroundings = True
    multiprocessing.current_process().authkey = setting.authkey
    sys.argv[:] = setting.arguments
    if setting.environment is None:  # on another machine
        os.environ.update(setting.variables)
        return
    sys.path[:] = setting.path
    with contextlib.suppress(OSError):
        os.chdir(setting.directory)
    for kind, soft in setting.limits.items():
        with contextlib.suppress(OSError, ValueError):  # a sandbox does not allow it
            resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))
    mark, folder = ({name: os.environ[name]} if name in os.environ else {} for name in (MARK_VARIABLE, "TMPDIR"))
    os.environ.clear()
    os.environ.update({**setting.environment, **folder, **setting.variables, **mark})


def prctl(option: int, value: int | bytes) -> None:
    """Set an attribute of this process on Linux; do nothing elsewhere."""
    with contextlib.suppress(AttributeError):
        _libc.prctl(option, ctypes.c_ulong(value) if isinstance(value, int) else value, 0, 0, 0)


def set_title(title: str) -> None:
    """Show ``title`` in ``ps``: as the name, of which the kernel keeps 15 characters, and as the command line."""
    data = title.encode()
    prctl(_PR_SET_NAME, data[:15])
    with contextlib.suppress(OSError, ValueError, IndexError):
        # proc(5): where the command line lies in this process's memory, and where it ends; numbers 48 and 49.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        if start and end - start > len(data):
            ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)
