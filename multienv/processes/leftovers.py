"""Find and kill what a dead worker leaves behind: processes that its envs started, whatever session they lead.

A process started by ``exec`` has the worker's mark in its environment; one that was only forked has not (the kernel
shows the environment of the last ``exec``), but holds the pipes the worker writes its stderr and stacks to.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from multienv.worker.ends import MARK_VARIABLE


def belongs_to(pid: int, mark: str, pipes: frozenset[str] = frozenset()) -> bool:
    """Tell whether the worker with this mark and these pipes has started this process."""
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        if f"{MARK_VARIABLE}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
            return True
    with contextlib.suppress(OSError):
        for descriptor in (process / "fd").iterdir() if pipes else ():
            with contextlib.suppress(OSError):
                if str(descriptor.readlink()) in pipes:
                    return True
    return False


def kill_marked(mark: str) -> list[int]:
    """Kill every process with this mark; return those killed. Used when the monitor is dead and cannot do it."""
    killed = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid() and belongs_to(int(name), mark):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(name), signal.SIGKILL)
                    killed.append(int(name))
    return killed


def orphaned_snapshots() -> set[int]:
    """Return the children of this process that carry a worker's title: snapshots whose monitor is dead."""
    found = set()
    for pid in children():
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text()
            if name.startswith("multienv") and not name.startswith("multienv mon"):
                found.add(pid)
    return found


def reap(pids: set[int], seconds: float) -> None:
    """Reap those of these processes that are children of this one and end within so many seconds."""
    until = time.monotonic() + seconds
    while pids and time.monotonic() < until:
        for pid in list(pids):
            try:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    pids.discard(pid)
            except ChildProcessError:
                pids.discard(pid)
        time.sleep(0.001 if pids else 0)


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


def kill_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a worker and all it has started: a worker leads a process group, soon after its fork."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
