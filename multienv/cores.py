"""How many cores there are to use: those the process may run on, or fewer where a container has a quota of time."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from pathlib import Path


def cores() -> list[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def busy_cores() -> int:
    """How many of them may be kept busy at a time."""
    return max(1, math.ceil(min(len(cores()), quota())))


def quota(root: Path = Path("/")) -> float:
    """Of how many cores the control groups of this process allow the time; infinite without a limit.

    Args:
        root: Where the system's files are.
    """
    found = math.inf
    with contextlib.suppress(OSError, ValueError):  # no Linux, no control groups
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                found = min(found, _least(root / "sys/fs/cgroup", path, _of_version_2))
            elif "cpu" in controllers.split(","):
                found = min(found, _least(root / "sys/fs/cgroup" / controllers, path, _of_version_1))
    return found


def _least(mount: Path, path: str, read: Callable[[Path], float]) -> float:
    """Of a group and all that it is in; in a container its own is the topmost that can be seen."""
    group = mount / path.strip("/")
    return min(map(read, [mount, group, *(one for one in group.parents if mount in one.parents)]))


def _of_version_2(group: Path) -> float:
    with contextlib.suppress(OSError, ValueError):
        limit, period = (group / "cpu.max").read_text().split()
        return math.inf if limit == "max" else int(limit) / int(period)
    return math.inf


def _of_version_1(group: Path) -> float:
    with contextlib.suppress(OSError, ValueError):
        limit, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return math.inf if limit < 0 else limit / period
    return math.inf
