"""Find and kill the processes that a dead worker's envs have started, in any session; remove the files they leave.

A process started by ``exec`` has the worker's mark in its environment. One that was only forked has not (the kernel
shows the environment of the last ``exec``, as a rule the monitor's), but it still carries the worker's title.

One of them is killed last of all: the resource tracker of Python's ``multiprocessing``. It unlinks the shared memory of
an env, and ends, once all processes that use it have ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path

from multienv._engine.worker.descriptors import MARK_VARIABLE, MONITOR_VARIABLE

# Seconds given to a resource tracker once all that it serves have ended. It takes milliseconds; but some seconds where
# thirty processes want the cores, and a name that it has not unlinked by then stays until the next boot.
TRACKER_GRACE = 10.0
# In the list of a process's mappings, proc(5): shared ones for writing.
_SHARED = re.compile(r"^\S+ rw-s .* (/dev/shm/[^/\n]+)$", re.MULTILINE)  # shm_open(3) makes none in folders


def mark_in(pid: int, variable: str = MARK_VARIABLE) -> str:
    """Return the mark of a worker in the environment of this process, or another variable; empty if there is none."""
    begin = f"{variable}=".encode()
    for line in _read(pid, "environ").split(b"\0"):
        if line.startswith(begin):
            return line.removeprefix(begin).decode(errors="replace")
    return ""


def is_titled(pid: int) -> bool:
    """Tell whether this process carries a worker's title: a snapshot, or a process that an env forked."""
    title = _read(pid, "comm")
    return title.startswith(b"multienv") and not title.startswith(b"multienv mon")


def is_tracker(pid: int) -> bool:
    """Tell whether this process is a resource tracker, of multiprocessing or of joblib's loky; false for a zombie."""
    return b"resource_tracker import main" in _read(pid, "cmdline")


def is_starting(pid: int) -> bool:
    """Tell whether this process is in the middle of ``exec``: what it will be cannot be known yet."""
    return not _read(pid, "cmdline") and _stat(pid)[:1] not in ([], [b"Z"])


def end_orphans(monitor: int, own: str) -> None:
    """Kill what the envs of a dead monitor have started; the kernel kills its workers, and its snapshots end.

    Its own mark shows what was only forked.

    Resource trackers end by themselves, once they have unlinked what they know.
    Where the trainer is process 1, as in a container without an init, all of them are its children now, to be reaped.
    """
    orphans = {
        pid for pid in _processes() if mark_in(pid).startswith(f"{monitor}.") or mark_in(pid, MONITOR_VARIABLE) == own
    }
    kill(pid for pid in orphans if not is_tracker(pid))
    kill(filter(is_tracker, orphans), signal.SIGCONT)  # one that has been stopped would not end by itself
    while os.getpid() == 1:
        dead = {pid for pid in children() if is_titled(pid)}  # again: a worker's children come when it has ended
        kill(dead)
        for pid in dead or orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if not dead:
            break


def kill(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to these processes; skip those that have ended or belong to other users."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a worker and all it has started: a worker leads a process group, soon after its fork."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        kill([pid], number)


def kill_bereaved_group(pid: int) -> None:
    """Kill the process group of a dead worker, except resource trackers and what may become one.

    Where there is one, what another process of the group forks meanwhile is missed here: it is killed when it has lost
    its parent.
    """
    group = members(pid)
    spared = {pid for pid in group if is_tracker(pid) or is_starting(pid)}
    if spared:
        kill(group - spared)
    else:
        kill_group(pid, signal.SIGKILL)


def members(group: int) -> set[int]:
    """Return the processes of this process group."""
    return {pid for pid in _processes() if _group_of(pid) == group}


def _processes() -> set[int]:
    with contextlib.suppress(OSError):
        return {int(name) for name in os.listdir("/proc") if name.isdigit()}
    return set()


def _group_of(pid: int) -> int:
    with contextlib.suppress(OSError):  # it has ended
        return os.getpgid(pid)
    return 0


def parent_of(pid: int) -> int:
    """Return the parent of this process; -1 if there is no such process."""
    return int((_stat(pid) or [b"", b"-1"])[1])


def _stat(pid: int) -> list[bytes]:
    """Return what the kernel tells of this process from its state on, proc(5); nothing if there is no such process."""
    return _read(pid, "stat").rpartition(b")")[2].split()


def _read(pid: int, name: str) -> bytes:
    """Return what the kernel tells of this process in a file; ``b""`` if it has ended, or is another user's."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def children() -> set[int]:
    """Return the children of this process's main thread, zombies included."""
    return set(map(int, _read(os.getpid(), f"task/{os.getpid()}/children").split()))


def shared_memory() -> set[str]:
    """Return the paths of all shared memory that has a name."""
    with contextlib.suppress(OSError):
        return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}  # noqa: S108 - where shm_open(3) has them
    return set()


def mapped_by(pids: set[int]) -> set[str]:
    """Return the paths of named shared memory that these processes map to write to it.

    Empty if a resource tracker is among the processes: it will unlink what it knows, and warns of what is gone by then.
    """
    found: set[str] = set()
    for pid in set() if any(map(is_tracker, pids)) else pids:
        found.update(_SHARED.findall(os.fsdecode(_read(pid, "maps"))))
    return found


def unlink_unused(path: str) -> bool:
    """Unlink shared memory; return false if a process has it open or maps it, no matter whose."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            # fcntl(2): a lease for writing is granted only if nobody else has the file open. If somebody opens it
            # before the close below, the kernel sends this signal instead of SIGIO, which would end this process.
            fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            Path(path).unlink()
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
    return True


def remove_folder(folder: str) -> None:
    """Remove a folder with all that is in it; no link is followed, and a folder in which something is mounted stays."""
    if Path(folder).is_symlink():  # an env has put it there: what is behind it is not ours
        with contextlib.suppress(OSError):
            Path(folder).unlink()
        return
    real = os.path.realpath(folder)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
            mounted = line.split(" ")[4].replace(r"\040", " ")
            if mounted == real or mounted.startswith(f"{real}/"):
                return
    shutil.rmtree(folder, ignore_errors=True)


def open_descriptors() -> set[int]:
    """Return the numbers of all descriptors of this process."""
    with contextlib.suppress(OSError):
        # That of the list itself is closed again.
        return {int(name) for name in os.listdir("/dev/fd") if os.path.lexists(f"/dev/fd/{name}")}
    return set(range(3, 1024))
