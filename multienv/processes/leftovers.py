"""Find and kill the processes that a dead worker's envs have started, in any session.

A process started by ``exec`` has the worker's mark in its environment. One that was only forked has not (the kernel
shows the environment of the last ``exec``), but it still carries the worker's title.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from multienv.worker.ends import MARK_VARIABLE


def mark_in(pid: int) -> str:
    """Return the mark in the environment of this process; empty if there is none."""
    begin = f"{MARK_VARIABLE}=".encode()
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(begin):
                return variable.removeprefix(begin).decode(errors="replace")
    return ""


def is_titled(pid: int) -> bool:
    """Tell whether this process carries a worker's title: a snapshot, or a process that an env forked."""
    with contextlib.suppress(OSError):
        title = Path(f"/proc/{pid}/comm").read_text()
        return title.startswith("multienv") and not title.startswith("multienv mon")
    return False


def end_orphans(monitor: int) -> None:
    """Kill what the envs of a dead monitor have started; the kernel kills its workers, and its snapshots end.

    Where the trainer is process 1, as in a container without an init, all of them are its children now, to be reaped.
    """
    orphans: set[int] = set()
    with contextlib.suppress(OSError):
        found = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        orphans = {pid for pid in found if mark_in(pid).startswith(f"{monitor}.")}
    kill(orphans)
    while os.getpid() == 1:
        dead = {pid for pid in children() if is_titled(pid)}  # again: a worker's children come when it has ended
        kill(dead)
        for pid in dead or orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if not dead:
            break


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to these processes; skip those that have ended or belong to other users."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a worker and all it has started: a worker leads a process group, soon after its fork."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def children() -> set[int]:
    """Return the children of this process's main thread, zombies included."""
    with contextlib.suppress(OSError):
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    return set()


def open_descriptors() -> set[int]:
    """Return the numbers of all descriptors of this process."""
    for directory in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return {int(name) for name in os.listdir(directory)}
    return set(range(3, 1024))
