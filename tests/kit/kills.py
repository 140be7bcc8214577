"""The death of a worker, from outside."""

from __future__ import annotations

import os
import signal
from typing import Any

from kit.process_table import descendants


def kill_worker(envs: Any, worker: int = 0) -> None:
    """Send SIGKILL to the worker of an env, or to one of a batch, a list or a manager."""
    told = envs.statistics()
    pid = (told[worker] if isinstance(told, list) else told).pid
    assert pid, "there is no worker to kill"
    os.kill(pid, signal.SIGKILL)


def busy_workers(trainer: int) -> list[int]:
    """The workers of a trainer that is another process, as far as they have a snapshot: envs of theirs are at work."""
    found = descendants(trainer)
    parents = {one.parent for one in found.values()}
    monitors = {one.pid for one in found.values() if one.command.startswith("multienv monitor")}
    return [one.pid for one in found.values() if one.parent in monitors and one.pid in parents and not one.is_zombie]
