"""The manager of batches: their order, nested spaces, and what the lists are given back as."""

from __future__ import annotations

from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_envs import DictEnv, MisshapenEnv
from gymnasium import spaces

from kit import CounterEnv, SpaceEnv, TokenSpace, digest_value
from kit.gates import GateEnv
from multienv import StackedSubprocessEnvManager
from multienv.errors import EnvError, UsageError
from multienv.managers import EnvState


def test_each_env_gets_its_own_action() -> None:
    with StackedSubprocessEnvManager([CounterEnv] * 4) as manager:
        for form in (list, tuple, np.array, lambda actions: np.array(actions)[:, None][:, 0]):
            assert len(manager.ready_obs) == 4
            timesteps = manager.step(form([3, 0, 2, 1]))
            assert [timestep.observation[3] for timestep in timesteps] == [3, 0, 2, 1]
            assert [timestep.obs is timestep.observation for timestep in timesteps] == [True] * 4


def test_an_env_that_becomes_ready_in_between_does_not_shift_the_batch(tmp_path: Path) -> None:
    fns = [partial(GateEnv, tmp_path, in_reset=True, horizon=1), *[partial(CounterEnv, horizon=None)] * 2]
    with StackedSubprocessEnvManager(fns) as manager:
        assert manager.ready_obs.shape == (3, 4)
        manager.step([1, 1, 1])
        assert manager.ready_obs[:, 0].tolist() == [1, 1]  # env 0 is being reset
        (tmp_path / "gate").touch()
        while manager.env_states[0] != 2:
            assert manager.ready_info  # looks, and finds env 0 ready
        assert manager.ready_obs_id == [1, 2]
        assert manager.random_action().__len__() == 2
        timesteps = manager.step([2, 3])
        assert [(timestep.env_id, timestep.observation[3]) for timestep in timesteps] == [(1, 2), (2, 3)]
        assert manager.ready_obs_id == [0, 1, 2]


def seen(timesteps: list[Any]) -> list[Any]:
    return [timestep.observation[[0, 3]].tolist() for timestep in timesteps]


def test_a_batch_need_not_be_read_after_a_step_that_ends_no_episode_or_a_reset_of_all() -> None:
    """After other steps, and resets, it must be: which envs are ready then is a matter of chance."""
    fns = [partial(CounterEnv, horizon=3), *[partial(CounterEnv, horizon=None)] * 2]
    with StackedSubprocessEnvManager(fns) as manager:
        for reset in (lambda: None, manager.reset, lambda: manager.reset(dict.fromkeys(range(3)))):
            reset()
            for step in (1, 2):
                assert seen(manager.step([3, 0, 2])) == [[step, 3], [step, 0], [step, 2]]
        assert manager.step([3, 0, 2])[0].done
        while manager.env_states[0] != EnvState.RUN:
            assert manager.ready_env
        with pytest.raises(UsageError, match="ready_obs first"):
            manager.step([1, 1, 1])
        assert manager.ready_obs_id == [0, 1, 2]
        manager.reset({0: {"options": {"start": 5}}})
        with pytest.raises(UsageError, match="ready_obs first"):
            manager.step([1, 1, 1])
        assert manager.ready_obs[:, 0].tolist() == [5, 3, 3]


def test_nested_observations() -> None:
    with StackedSubprocessEnvManager([DictEnv] * 3) as manager:
        batch = manager.ready_obs
        assert batch["image"].shape == (3, 16, 16, 3)
        manager.step([1, 2, 3])
        batch = manager.ready_obs
        assert batch["counts"][0].tolist() == [1, 1, 1]
        assert batch["counts"][1][:, 3].tolist() == [1, 2, 3]
        batch["image"][:] = 99
        assert (manager.ready_obs["image"] == 1).all()


ACTION_SPACES = {
    "Dict": spaces.Dict({"a": spaces.Discrete(5), "b": spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Discrete(3)))}),
    "custom": TokenSpace(),
}


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_action_spaces_as_lists_and_as_batches(name: str) -> None:
    space = ACTION_SPACES[name]
    space.seed(3)
    actions: Any = [space.sample() for _ in range(3)]
    with StackedSubprocessEnvManager([partial(SpaceEnv, action_space=space)] * 3) as manager:
        for given in (actions, stacked(space, actions)):
            assert len(manager.ready_obs) == 3
            seen = [timestep.info["action"] for timestep in manager.step(given)]
            assert seen == [digest_value(action) for action in actions]


def test_a_sequence_of_actions_that_is_no_tuple_has_one_for_each_env() -> None:
    space = spaces.Tuple((spaces.Discrete(3), spaces.Discrete(3)))
    actions = [(0, 1), (2, 0)]
    with StackedSubprocessEnvManager([partial(SpaceEnv, action_space=space)] * 2) as manager:
        for given in (actions, deque(actions)):
            assert len(manager.ready_obs) == 2
            seen = [timestep.info["action"] for timestep in manager.step(given)]
            assert seen == [digest_value(action) for action in actions]


def stacked(space: Any, actions: list[Any]) -> Any:
    """One batch, as gymnasium's vector envs take it."""
    if isinstance(space, spaces.Dict):
        return {key: stacked(space[key], [action[key] for action in actions]) for key in space}
    if isinstance(space, spaces.Tuple):
        return tuple(stacked(part, [action[place] for action in actions]) for place, part in enumerate(space))
    return tuple(actions) if isinstance(space, TokenSpace) else np.stack(actions)


def test_observations_that_cannot_be_stacked_come_as_a_tuple() -> None:
    with StackedSubprocessEnvManager([partial(SpaceEnv, observation_space=TokenSpace())] * 2) as manager:
        batch = manager.ready_obs
        assert isinstance(batch, tuple)
        assert len(batch) == 2


def test_an_observation_that_does_not_fit_is_the_failure_of_its_env_alone() -> None:
    with StackedSubprocessEnvManager([CounterEnv, MisshapenEnv, CounterEnv]) as manager:
        assert [len(timestep.observation) for timestep in manager.step([1, 3, 1])] == [4, 2, 4]
        with pytest.raises(EnvError, match="Env 1 has returned the observation") as caught:
            _ = manager.ready_obs
        error: Any = caught.value
        assert list(error.failures) == [1]
        assert [None if result is None else result[0] for result in error.results] == [1, None, 1]
        assert manager.ready_obs[:, 0].tolist() == [1, 1]
        assert manager.env_states[1] == EnvState.ERROR
        manager.reset({1: None})
        assert manager.ready_obs[:, 0].tolist() == [1, 0, 1]
