"""Mistakes seen in peers that are tested nowhere else: processes that wait and burn a core, as in PufferLib."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kit import CounterEnv, SlowEnv, monitor_pid
from multienv import Deadlines, MultiEnv, create_subprocess_envs


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("who", ["idle workers", "a waiting trainer"])
def test_who_waits_burns_no_core(who: str) -> None:
    env_fn: Any = CounterEnv if who == "idle workers" else partial(SlowEnv, step_seconds=0.6)
    with MultiEnv(create_subprocess_envs([env_fn] * 3, deadlines=Deadlines(step=60))) as multi:
        multi.reset(seed=0)
        everyone = [monitor_pid(), *(env.statistics().pid for env in multi.envs)] if env_fn is CounterEnv else []
        before = [cpu_seconds(pid) for pid in (everyone or [os.getpid()])]
        time.sleep(0.6) if everyone else multi.step([1, 1, 1])
        after = [cpu_seconds(pid) for pid in (everyone or [os.getpid()])]
        assert after == pytest.approx(before, abs=0.2)
