"""One test for each mistake seen in a peer that is tested nowhere else. Named after peer and mistake.

The others are held down by the tests of the invariants, and by a few of this folder:

| peer | mistake | where |
|---|---|---|
| gymnasium | a stale reply answers the next step; orphans of a killed trainer | 4; 7 |
| gymnasium | after one env's exception the next step fails; a killed worker is a bare EOFError | 1, 6; 9 |
| Stable-Baselines3 | the message of the env is lost; close() raises EOFError | 9; test_close.py |
| gymnasium, gym3 | after a killed worker, or one failure, every later call fails | 1, 6 |
| baselines | reset() during a pending step reads its reply; surplus actions are dropped | 4; contract/test_multi_env.py |
| baselines, actorcritic | the terminal or the reset observation is lost | contract/test_autoreset.py |
| actorcritic | a spliced episode; Ctrl-C restarts envs; a failing env_fn goes unnoticed; one numpy state | 1; 8; 6; 10 |
| DI-engine | an exception with a constructor of its own; stuck envs closed one after another | 6; 5 |
| PufferLib | recv() spins for ever when a worker dies; a forgotten close() hangs at the end | 9; test_odd_trainers.py |
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kit import (
    CounterEnv,
    SlowEnv,
    monitor_pid,
)
from multienv import Deadlines, MultiEnv, RestartPolicy, create_subprocess_envs
from multienv.errors import (
    EnvsFailedError,
)

RAISE = RestartPolicy(on_crash="raise", on_timeout="raise")


def pid_of(env: Any) -> int:
    pid = env.statistics().pid
    assert pid is not None
    return int(pid)


@pytest.mark.parametrize("victim", [0, 1])
def test_stable_baselines3_no_sibling_holds_the_dead_workers_end(victim: int) -> None:
    envs = create_subprocess_envs([CounterEnv] * 3, restart=RAISE)
    with MultiEnv(envs) as multi:
        multi.reset(seed=0)
        os.kill(pid_of(envs[victim]), signal.SIGKILL)
        with pytest.raises(EnvsFailedError) as caught:
            multi.step([1, 1, 1])
        assert list(caught.value.failures) == [victim]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_pufferlib_idle_workers_burn_no_core() -> None:
    with MultiEnv(create_subprocess_envs([CounterEnv] * 3, deadlines=Deadlines(step=60))) as multi:
        multi.reset(seed=0)
        multi.step([1, 1, 1])
        pids = [monitor_pid(), *map(pid_of, multi.envs)]
        before = [cpu_seconds(pid) for pid in pids]
        time.sleep(1.0)
        assert [cpu_seconds(pid) - was for pid, was in zip(pids, before, strict=True)] == pytest.approx(
            [0] * 4, abs=0.1
        )


def test_pufferlib_a_waiting_trainer_burns_no_core() -> None:
    with MultiEnv(create_subprocess_envs([partial(SlowEnv, step_seconds=1.0)] * 3)) as multi:
        multi.reset(seed=0)
        before = cpu_seconds(os.getpid())
        multi.step([1, 1, 1])
        assert cpu_seconds(os.getpid()) - before < 0.3


def test_rllib_one_env_is_rebuilt_and_no_other() -> None:
    with MultiEnv(create_subprocess_envs([CounterEnv] * 3)) as multi:
        multi.reset(seed=0)
        multi.step([1, 1, 1])
        before = [pid_of(env) for env in multi.envs]
        os.kill(before[1], signal.SIGKILL)
        assert [int(observation[0]) for observation in multi.step([1, 1, 1])[0]] == [2, 2, 2]
        after = [pid_of(env) for env in multi.envs]
        assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
