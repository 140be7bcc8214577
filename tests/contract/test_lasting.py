"""What recovery must not forget, overlook or mix up."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from kit import CounterEnv, FailsNthTime, SpaceEnv
from multienv import RestartPolicy, SubprocessEnv
from multienv.errors import EnvError, UsageError, WorkerLostError

ENDLESS = partial(CounterEnv, horizon=None)


def kill(env: SubprocessEnv) -> None:
    os.kill(env.statistics().pid or 0, signal.SIGKILL)


class Graded(CounterEnv):
    """The reward is the difficulty, set or called from outside, or by the options of the reset."""

    difficulty = 1.0

    def set_difficulty(self, value: float) -> None:
        self.difficulty = value

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.bonus = (options or {}).get("bonus", 0.0)
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, self.difficulty + self.bonus, terminated, truncated, info


GRADED = partial(Graded, horizon=None)


@pytest.mark.parametrize(
    ("how", "policy"),
    [("set_attr", RestartPolicy(journal_limit=20_000)), ("call", RestartPolicy(on_crash="truncate"))],
)  # fmt: skip
def test_what_was_set_outlives_a_trim_and_a_new_life(how: str, policy: RestartPolicy) -> None:
    with SubprocessEnv(GRADED, restart=policy) as env:
        if how == "call":
            env.call("set_difficulty", 5.0)
        else:
            env.set_attr("difficulty", 5.0)
        for seed in range(4):
            env.reset(seed=seed)
            for _ in range(1100):
                env.step(1)
        for _ in range(2):
            kill(env)
            transition = env.step(1)
            if transition[3]:
                env.reset(seed=9)
                transition = env.step(1)
            assert transition[1] == 5.0


def test_options_are_those_of_the_reset_whatever_the_caller_does_with_them() -> None:
    options = {"bonus": 1.0}
    with SubprocessEnv(GRADED) as env:
        for seed in range(9):
            env.reset(seed=seed, options=options)
            for _ in range(300):
                env.step(1)
        env.reset(seed=9, options=options)
        options["bonus"] = 7.0
        env.step(1)
        kill(env)
        assert env.step(1)[1] == 2.0
        assert env.statistics().exact_recoveries == 1


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
        kill(env)
        observation, _, _, truncated, _ = env.step(action)
        assert truncated
        np.testing.assert_array_equal(observation, seen)


def test_the_journal_keeps_to_its_limit_whatever_else_is_asked_between_steps() -> None:
    with SubprocessEnv(ENDLESS, restart=RestartPolicy(journal_limit=100_000)) as env:
        for seed in range(12):
            env.reset(seed=seed)
            env.get_attr("pokes")
            for _ in range(200):
                env.step(1)
                env.get_attr("pokes")
        assert env.statistics().journal_bytes < 200_000
        assert env.statistics().step_seconds


def test_think_time_does_not_shorten_the_journal() -> None:
    """An env of microseconds, a learner that takes its time between sending and receiving."""
    with SubprocessEnv(ENDLESS, restart=RestartPolicy(replay_limit=1.0)) as env:
        env.reset(seed=0)
        for t in range(1100):
            env.step_async(1)
            if t % 64 > 60 or t % 64 < 3:
                time.sleep(0.02)  # the learner
            env.step_wait()
        kill(env)
        assert env.step(1)[0][0] == 1101
        assert env.statistics().exact_recoveries == 1


def test_env_fn_that_raises_when_a_lost_env_is_built_anew_is_told_with_its_cause(tmp_path: Path) -> None:
    env_fn = FailsNthTime(counter=str(tmp_path / "built"), nth=2)
    with SubprocessEnv(env_fn, restart=RestartPolicy(on_crash="raise")) as env:
        env.reset(seed=0)
        kill(env)
        with pytest.raises(WorkerLostError):
            env.step(0)
        with pytest.raises(EnvError) as caught:
            env.reset(seed=0)
        assert type(caught.value.__cause__) in type(caught.value).__mro__
        env.reset(seed=0)
        assert env.step(1)[0][0] == 1


class Closing(CounterEnv):
    path = ""

    def close(self) -> None:
        with Path(self.path).open("a") as file:
            file.write("closed\n")


def test_an_env_that_was_brought_back_is_closed_as_any_other(tmp_path: Path) -> None:
    path = tmp_path / "said"
    with SubprocessEnv(partial(Closing, horizon=None)) as env:
        env.set_attr("path", str(path))
        env.reset(seed=0)
        kill(env)
        env.step(1)
    assert path.read_text() == "closed\n"
