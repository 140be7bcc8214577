"""What a recovery must not overlook or mix up."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from kit import CounterEnv, FailsNthTime, FarewellEnv, SpaceEnv, kill_worker
from multienv import RestartPolicy, SubprocessEnv
from multienv.errors import EnvError, UsageError, WorkerLostError

ENDLESS = partial(CounterEnv, horizon=None)


def test_a_truncated_step_shows_the_last_large_observation_that_the_caller_saw() -> None:
    env_fn = partial(SpaceEnv, observation_space=gymnasium.spaces.Box(0, 1, (5000,), np.float64), horizon=99)
    policy = RestartPolicy(on_crash="truncate", on_timeout="truncate")
    with SubprocessEnv(env_fn, restart=policy) as env:
        env.reset(seed=0)
        action = env.action_space.sample()
        for _ in range(4):
            seen = env.step(action)[0]
            env.get_attr("spec")
            with pytest.raises(UsageError):
                env.step([1, 2, 3])
        kill_worker(env)
        observation, _, _, truncated, _ = env.step(action)
        assert truncated
        np.testing.assert_array_equal(observation, seen)


def test_think_time_does_not_shorten_the_journal() -> None:
    """An env of microseconds, a learner that takes its time between sending and receiving."""
    with SubprocessEnv(ENDLESS, restart=RestartPolicy(replay_limit=1.0)) as env:
        env.reset(seed=0)
        for t in range(1100):
            env.step_async(1)
            if t % 64 > 60 or t % 64 < 3:
                time.sleep(0.005)  # the learner
            env.step_wait()
        kill_worker(env)
        assert env.step(1)[0][0] == 1101
        assert env.statistics().exact_recoveries == 1


def test_env_fn_that_raises_when_a_lost_env_is_built_anew_is_told_with_its_cause(tmp_path: Path) -> None:
    env_fn = FailsNthTime(counter=str(tmp_path / "built"), nth=2)
    with SubprocessEnv(env_fn, restart=RestartPolicy(on_crash="raise")) as env:
        env.reset(seed=0)
        kill_worker(env)
        with pytest.raises(WorkerLostError):
            env.step(0)
        with pytest.raises(EnvError) as caught:
            env.reset(seed=0)
        assert type(caught.value.__cause__) in type(caught.value).__mro__
        env.reset(seed=0)
        assert env.step(1)[0][0] == 1


def test_an_env_that_was_brought_back_is_closed_as_any_other(tmp_path: Path) -> None:
    left = tmp_path / "left"
    with SubprocessEnv(partial(FarewellEnv, left=left)) as env:
        env.reset(seed=0)
        kill_worker(env)
        env.step(1)
        assert not left.exists()
    assert left.exists()
