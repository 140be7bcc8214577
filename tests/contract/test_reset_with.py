"""Seed and options of each episode by its number: the same ones whatever processes are lost."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from contract_envs import task_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from multienv import (
    AutoResetWrapper,
    MultiEnv,
    Recovery,
    RestartPolicy,
    SerialVectorEnv,
    SubprocessEnv,
    SubprocessVectorEnv,
)
from multienv.recovery import journal, supervisor
from multienv.testing import worker_pids


@pytest.fixture(params=["from the construction", "from a reset"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "from a reset":
        monkeypatch.setattr(journal, "AFFORDABLE", 0.0)
        lay_out = journal.Journal.lay_out
        monkeypatch.setattr(
            journal.Journal, "lay_out", lambda self, stride, slots, seconds=0.0: lay_out(self, stride, slots)
        )
        monkeypatch.setattr(supervisor, "SHARE", math.inf)
    return str(request.param)


def walked(envs: Any, steps: int, kill: Callable[[int], None] = lambda step: None) -> list[Any]:
    seen = [np.array(envs.reset(seed=7)[0])]
    for step in range(steps):
        kill(step)
        seen.append([np.array(value) for value in envs.step(np.full(2, step % 4))[:4]])
    envs.close()
    return seen


def assert_same(one: list[Any], other: list[Any]) -> None:
    for step, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        for value, expected in zip(mine, theirs, strict=True):
            assert np.array_equal(value, expected), step


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("envs_per_worker", [1, 2])
def test_episodes_of_a_batch_are_the_same_whatever_processes_are_lost(
    mode: Any, envs_per_worker: int, way: str
) -> None:
    events: list[Any] = []
    envs = SubprocessVectorEnv(
        [task_env] * 2,
        envs_per_worker=envs_per_worker,
        autoreset_mode=mode,
        restart=RestartPolicy(snapshots=False, backoff=0.0, max_restarts=100),
        hooks=[events.append],
    )

    def kill(step: int) -> None:
        if step > 20 and step % 3 == 0:
            os.kill(worker_pids(envs)[step % (2 // envs_per_worker)], signal.SIGKILL)

    seen = walked(envs, 60, kill)
    bare = SyncVectorEnv([partial(task_env, index) for index in range(2)], autoreset_mode=mode)
    assert_same(seen, walked(bare, 60))
    assert_same(seen, walked(SerialVectorEnv([task_env] * 2, autoreset_mode=mode), 60))
    outcomes = [event.outcome for event in events if isinstance(event, Recovery)]
    assert len(outcomes) == 13
    assert set(outcomes) == {"exact" if way == "from the construction" else "replayed"}
    tasks = [row[0][:, 0] for row in seen[1:]]
    assert max(task[0] for task in tasks) > 9, "episodes went on being numbered"


def test_resets_of_the_caller_count_and_keep_what_they_say(way: str) -> None:
    with SubprocessEnv(task_env, env_index=3, restart=RestartPolicy(snapshots=False, backoff=0.0)) as env:
        for episode in range(8):
            said = {"options": {"task": -5}} if episode == 4 else {}
            assert env.reset(**said)[0][0] == said.get("options", {}).get("task", 300 + episode)
            for _ in range(3):
                env.step(0)
            os.kill(worker_pids(env)[0], signal.SIGKILL)
        statistics = env.statistics()
        assert statistics.truncated_recoveries == 0


def test_it_works_in_lists_and_in_the_autoreset_wrapper() -> None:
    multi = MultiEnv([SubprocessEnv(task_env, env_index=index) for index in range(2)], autoreset_mode="SameStep")
    single = AutoResetWrapper(SubprocessEnv(task_env, env_index=1), "SameStep")
    bare = AutoResetWrapper(task_env(1), "SameStep")
    with multi:
        assert [observation[0] for observation in multi.reset()[0]] == [0, 100]
        single.env.initialize()  # type: ignore[attr-defined]
        assert single.reset()[0][0] == bare.reset()[0][0] == 100
        tasks = [[multi.step([0, 0])[0][1][0], single.step(0)[0][0], bare.step(0)[0][0]] for _ in range(20)]
    single.close()
    for seen in zip(*tasks, strict=True):
        assert list(dict.fromkeys(seen))[:4] == [100, 101, 102, 103]


def test_it_goes_on_in_a_new_process_for_each_episode() -> None:
    restart = RestartPolicy(recycle_after_episodes=1)
    envs = SubprocessVectorEnv([task_env] * 2, envs_per_worker=1, restart=restart, autoreset_mode="SameStep")
    bare = SyncVectorEnv([partial(task_env, index) for index in range(2)], autoreset_mode=AutoresetMode.SAME_STEP)
    with envs:
        envs.reset(seed=7)
        bare.reset(seed=7)
        for step in range(30):
            mine, theirs = (each.step(np.full(2, step % 4))[:4] for each in (envs, bare))
            assert_same([mine], [theirs])
        assert all(one.recycled > 3 for one in envs.statistics())
