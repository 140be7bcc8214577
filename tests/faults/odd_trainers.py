"""Trainers in a state that envs in this process do not mind: see test_odd_trainers.py and trainer_process.py."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

from trainer_process import becomes_true

from kit import CounterEnv, is_alive
from multienv import SubprocessEnv
from multienv.errors import UsageError

CLONE_NEWPID = 0x20000000


def shadowing_directory() -> str:
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory)
    for name in ("json", "logging", "queue", "random", "select", "selectors", "socket", "struct"):
        (Path(directory) / f"{name}.py").write_text("raise ImportError('this is not the library')")
    return directory


ODDITIES = {
    # Of a launcher, or a program that waits by sigwait() or signalfd().
    "sigchld_blocked": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD]),
    "all_signals_blocked": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()),
    # The idiom of a program that is to end when its reader does.
    "ended_by_broken_pipes": lambda: signal.signal(signal.SIGPIPE, signal.SIG_DFL),
    # Passed over by imports.
    "path_objects_in_sys_path": lambda: sys.path.insert(0, Path("/nowhere")),  # type: ignore[arg-type]
    # With files in it that are called as the standard library's, which has long been imported.
    "files_of_libraries_names": lambda: sys.path.insert(0, shadowing_directory()),
    "no_argv": lambda: delattr(sys, "argv"),
}


def train(oddity: str, method: str) -> None:
    """A loss of the worker, one of the monitor with it, and the end."""
    ODDITIES[oddity]()
    env = SubprocessEnv(partial(CounterEnv, horizon=None), context=method).initialize()
    env.reset(seed=0)
    for step in range(9):
        if step in (3, 6):
            pid = env.statistics().pid or 0
            os.kill(pid, signal.SIGKILL)
            assert becomes_true(lambda pid=pid: not is_alive(pid))  # type: ignore[misc]
        if step == 6:
            from kit import monitor_process

            monitor_process().kill()
        assert env.step(step % 4)[0][[0, 3]].tolist() == [step + 1, step % 4]
    assert env.statistics().exact_recoveries == 2
    env.close()


def children_elsewhere(method: str) -> None:
    """Their numbers are those of other processes here: none is started, and none is killed."""
    env = SubprocessEnv(CounterEnv, context=method)
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID):
        print("unshare:", os.strerror(ctypes.get_errno()), flush=True)
        return
    for _ in range(2):
        with contextlib.suppress(UsageError):
            env.initialize()
            raise AssertionError("it has been started")
    env.close()
    print("refused", flush=True)
