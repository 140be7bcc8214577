"""The death of a worker, from outside."""

from __future__ import annotations

import os
import signal
from typing import Any


def kill_worker(envs: Any, worker: int = 0) -> None:
    """Send SIGKILL to the worker of an env, or to one of a batch, a list or a manager."""
    told = envs.statistics()
    pid = (told[worker] if isinstance(told, list) else told).pid
    assert pid, "there is no worker to kill"
    os.kill(pid, signal.SIGKILL)
