"""A batch in parts that step on their own."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from multienv import SubprocessVectorEnv
from multienv.errors import CallPendingError, UsageError
from multienv.testing import CounterEnv

FNS = [partial(CounterEnv, horizon=5 + index) for index in range(7)]


def actions_of(step: int, num_envs: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(step).integers(0, 4, num_envs)


def expect_equal(batch: Any, expected: Any) -> None:
    for one, other in zip(batch[:4], expected[:4], strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("copy", [False, True])
def test_parts_step_each_at_its_own_pace(copy, kill):
    with_parts = SubprocessVectorEnv(FNS, envs_per_worker=2, copy=copy)
    parts = with_parts.split(2)
    assert [part.num_envs for part in parts] == [4, 3]
    twins = [SyncVectorEnv(FNS[:4]), SyncVectorEnv(FNS[4:])]
    for part, twin in zip(parts, twins, strict=True):
        assert part.observation_space == twin.observation_space
        assert part.action_space == twin.action_space
        assert part.reset(seed=3)[0].tobytes() == twin.reset(seed=3)[0].tobytes()
    for step in range(24):
        first, second = parts
        first.send(actions_of(step, 4))
        if kill and step % 8 == 3:
            pid = first.statistics()[step % 2].pid
            assert pid
            os.kill(pid, signal.SIGKILL)
        for _ in range(step % 3):  # the other goes on at another pace
            actions = actions_of(100 + step, 3)
            second.send(actions)
            expect_equal(second.recv(), twins[1].step(actions))
        expect_equal(first.recv(), twins[0].step(actions_of(step, 4)))
    assert parts[0].call("poke") == (1,) * 4
    parts[0].close()  # leaves the workers to the whole
    assert all(one.state == "running" for one in with_parts.statistics())
    with_parts.close()


def test_the_whole_is_closed_and_nothing_else():
    envs = SubprocessVectorEnv(FNS, envs_per_worker=4)
    envs.reset()
    envs.split()
    for call in (envs.reset, lambda: envs.step(actions_of(0, 7)), lambda: envs.call("poke"), envs.split):
        with pytest.raises(UsageError, match="split"):
            call()
    envs.close()


def test_its_threads_end_with_the_whole():
    envs = SubprocessVectorEnv(FNS, envs_per_worker=2)
    parts = envs.split(2)
    for part in parts:
        part.reset(seed=3)
        os.kill(part.statistics()[0].pid or os.getpid(), signal.SIGKILL)
        part.step(actions_of(0, part.num_envs))
    parts[0].close()
    os.kill(parts[1].statistics()[0].pid or os.getpid(), signal.SIGKILL)
    parts[1].step(actions_of(1, parts[1].num_envs))
    envs.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("multienv-vector")]
    assert len(parts) == 2  # somebody still has them


@pytest.mark.parametrize("parts", [0, 3, True, 1.0])
def test_there_are_not_so_many_workers(parts):
    envs = SubprocessVectorEnv(FNS, envs_per_worker=4)
    with pytest.raises(UsageError, match="2 workers"):
        envs.split(parts)
    envs.reset()
    envs.step_async(actions_of(0, 7))
    with pytest.raises(CallPendingError):
        envs.split()
    envs.step_wait()
    envs.close()


def test_spaces_that_differ():
    fns = [partial(Bounded, index) for index in range(1, 5)]
    envs = SubprocessVectorEnv(fns, envs_per_worker=2, observation_mode="different")
    _, second = envs.split()
    assert second.observation_space.high.ravel().tolist() == [3.0, 4.0]
    envs.close()


class Bounded(gymnasium.Env[Any, Any]):
    def __init__(self, high: float) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, high, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
