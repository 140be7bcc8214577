"""Envs that set other spaces in ``reset()``: a level of another size, a team of another number."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from contract_envs import Levels

from kit import kill_worker
from multienv import MultiEnv, SerialEnv, SerialVectorEnv, SubprocessEnv, SubprocessVectorEnv, create_subprocess_envs
from multienv.errors import ActionError, EnvsFailedError


def played(env: Any, kills: Any = ()) -> list[Any]:
    record = [env.reset(seed=3)]
    for step in range(12):
        if step in kills:
            kill_worker(env)
        assert env.observation_space.shape == record[-1][0].shape
        record.append(env.step(np.full(env.action_space.shape, 0.5, np.float32)))
        if record[-1][2]:
            record.append(env.reset())
    return record


@pytest.mark.parametrize("face", [SubprocessEnv, SerialEnv])
def test_spaces_that_came_with_a_reset_are_shown_and_actions_of_them_taken(face: Any) -> None:
    expected = played(Levels())
    with face(Levels) as env:
        assert repr(played(env)) == repr(expected)
        with pytest.raises(AssertionError, match="is not in"):  # the check is the env's own now
            env.step(np.zeros(9, np.float32))


def test_spaces_that_came_with_a_reset_outlive_the_process() -> None:
    with SubprocessEnv(Levels) as env:
        assert repr(played(env, kills=(1, 5, 6, 11))) == repr(played(Levels()))
        assert env.statistics().losses == 4


def test_actions_of_an_env_that_keeps_its_spaces_are_checked() -> None:
    with SubprocessEnv(lambda: gymnasium.make("CartPole-v1")) as env:
        env.reset()
        env.reset()
        with pytest.raises(ActionError):
            env.step(np.zeros(3))


def test_spaces_that_came_with_a_reset_in_a_list_of_envs() -> None:
    with MultiEnv(create_subprocess_envs([Levels] * 2), autoreset_mode="NEXT_STEP") as envs:
        observations, _ = envs.reset()
        for _ in range(10):
            observations, *_ = envs.step([np.zeros(env.action_space.shape, np.float32) for env in envs.envs])
        assert [one.shape for one in observations] == [(4,), (4,)]


@pytest.mark.parametrize("face", [SubprocessVectorEnv, SerialVectorEnv])
def test_other_shapes_in_a_batch_are_a_clear_error(face: Any) -> None:
    with face([Levels] * 2) as envs, pytest.raises(EnvsFailedError, match="The envs of a batch keep their shapes"):
        envs.reset()


def test_other_bounds_in_a_batch_are_no_error() -> None:
    with SubprocessVectorEnv([lambda: Levels(grows=False)] * 2) as envs:
        for _ in range(2):
            envs.reset()
            observations, rewards, *_ = envs.step(np.array([1, 1]))
            assert observations.shape == (2, 2)
            assert rewards.tolist() == [1.0, 1.0]


def test_spaces_are_those_of_the_state_that_is_restored() -> None:
    with SubprocessEnv(Levels) as env:
        env.reset(seed=3)
        snapshot, state = env.snapshot(), env.state_dict()
        for restore in (lambda: env.restore(snapshot), lambda: env.load_state_dict(state)):
            env.reset()
            assert env.action_space.shape == (3,)
            restore()
            assert env.action_space.shape == env.observation_space.shape == (2,)
            env.step(np.zeros(2, np.float32))
