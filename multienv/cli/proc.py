"""Read the kernel's table of processes, ``/proc``. What has ended meanwhile reads as empty."""

from __future__ import annotations

import contextlib
import os
import pwd
import time
from pathlib import Path

PROC = Path("/proc")


def all_processes() -> list[int]:
    """Return the pids of all processes."""
    return sorted(int(name) for name in os.listdir(PROC) if name.isdigit())


def command_of(pid: int) -> str:
    """Return the command line of a process, or the title that it has given itself."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def name_of(pid: int) -> str:
    """Return the name of a process, of which the kernel keeps 15 characters."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "comm").read_text(errors="replace").rstrip("\n")
    return ""


def status_of(pid: int) -> dict[str, str]:
    """Return what the kernel says of a process, by name, such as State, Uid or SigCgt."""
    with contextlib.suppress(OSError):
        lines = (PROC / str(pid) / "status").read_text(errors="replace").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def _stat(pid: int) -> list[str]:
    # pid (name) state ppid … starttime …; the name may hold spaces and brackets.
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if there is none."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def state_of(pid: int) -> str:
    """Return the letter of a process's state; empty if it has ended."""
    return next(iter(_stat(pid)), "")


def start_of(pid: int) -> int:
    """Return when a process was started, in clock ticks since boot; 0 if it has ended, or is a zombie.

    Together with the pid this identifies a process: the kernel gives pids again.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0


def age_of(pid: int) -> float:
    """Return the seconds since a process was started."""
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - start_of(pid) / os.sysconf("SC_CLK_TCK"))


def children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process, zombies included."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(PROC / str(pid) / "task"):
            with contextlib.suppress(OSError):
                found += map(int, (PROC / str(pid) / "task" / task / "children").read_text().split())
    return found


def user_of(pid: int) -> str:
    """Return the name of the user a process belongs to."""
    uid = int(status_of(pid).get("Uid", "-1").split()[0])
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def is_open_to_us(pid: int) -> bool:
    """Tell whether this user may look at the descriptors of a process: the same user and root may."""
    try:
        os.listdir(PROC / str(pid) / "fd")
    except OSError:
        return False
    return True
