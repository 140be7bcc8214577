"""Decide which core each worker runs on, and in which order a batch asks its workers.

A worker on another core than the trainer begins as soon as it is asked; one on the trainer's own core waits until the
trainer waits. So the others are asked first. To be woken takes as long as some steps do, so the trainer first waits for
the worker that was asked last, on its own core: by then most of the others have answered, and the trainer need not
sleep again to read their answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def cores() -> list[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def busy_cores() -> int:
    """Return how many of them may be kept busy at a time: fewer where a container has a quota of CPU time."""
    return max(1, math.ceil(min(len(cores()), quota())))


def quota(root: Path = Path("/")) -> float:
    """Return of how many cores the control groups of this process allow the time; infinite without a limit.

    In a container its own group is the topmost to be seen. Control groups of version 1 are not asked.

    Args:
        root: Where the system's files are.
    """
    mount = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):  # no Linux, no control groups
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                group = mount / line.removeprefix("0::").strip("/")
                return min(map(_limit, [mount, group, *(one for one in group.parents if mount in one.parents)]))
    return math.inf


def _limit(group: Path) -> float:
    with contextlib.suppress(OSError, ValueError):
        limit, period = (group / "cpu.max").read_text().split()
        return math.inf if limit == "max" else int(limit) / int(period)
    return math.inf


def spread(workers: Sequence[Any]) -> None:
    """Deal the workers to the cores in turn; with fewer workers than cores the scheduler knows better which are idle.

    Each looks for its next request before it goes to sleep, and gives the core away at each look. Under a quota of CPU
    time, and on a single core, none is bound and none looks: there looking takes time from the others.

    Args:
        workers: Supervisors.
    """
    available = cores()
    several = 1 < len(available) == busy_cores()
    sharing = -(-len(workers) // len(available)) if several else 0
    for index, worker in enumerate(workers):
        core = available[index % len(available)] if several and len(available) <= len(workers) else None
        worker.prefer(core, sharing=sharing)


# Tells which core the calling thread runs on, and keeps the GIL; -1 where the system does not tell.
current_core: Callable[[], int] = getattr(ctypes.PyDLL(None), "sched_getcpu", lambda: -1)
# Lets other processes have the core. Without sched_yield() (not a POSIX system) a sleep of no time does the same.
give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


def asking_orders(preferred: Mapping[int, int | None]) -> dict[int, tuple[int, ...]]:
    """Return for each core that the trainer may be on the order in which to ask workers; they answer best in reverse.

    Args:
        preferred: For each worker, by its index in the batch, the core that it prefers, or ``None``.

    Returns:
        Orders by core; on a core that is not in it, any order will do.
    """
    return {
        core: tuple(sorted(preferred, key=lambda index: preferred[index] == core))
        for core in set(preferred.values())
        if core is not None and len(preferred) > 1
    }
