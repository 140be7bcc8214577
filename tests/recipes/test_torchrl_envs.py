"""TorchRL's ``GymWrapper`` around one env and around a batch: the same rollouts, whatever dies."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
import torchrl_envs
from striking import assert_all_exact
from torchrl.envs import GymWrapper

from multienv import RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv.testing import Killer

pytestmark = pytest.mark.ci

CARTPOLE = partial(gymnasium.make, "CartPole-v1")


def rollout(env: Any, killer: Killer | None = None) -> Any:
    """Take random actions for some episodes; kill a worker before every 20th step."""
    env.set_seed(3)
    torch.manual_seed(0)
    steps = iter(range(10_000))

    def act(*seen: Any) -> Any:
        if next(steps) % 20 == 10 and killer is not None:
            assert killer.strike()
        return env.action_spec.rand()

    return env.rollout(150, act, break_when_any_done=False)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_rollouts_are_the_same_while_workers_are_killed(num_envs):
    if num_envs == 1:
        ours, theirs = torchrl_envs.one_env(CARTPOLE), GymWrapper(CARTPOLE())
    else:
        ours, disabled = torchrl_envs.batch([CARTPOLE] * 3), gymnasium.vector.AutoresetMode.DISABLED
        theirs = GymWrapper(gymnasium.vector.SyncVectorEnv([CARTPOLE] * 3, autoreset_mode=disabled))
    try:
        found, expected = rollout(ours, Killer(ours._env, seed=1)), rollout(theirs)
        assert_all_exact(ours._env, deaths=7)
    finally:
        ours.close()
        theirs.close()
    assert expected["next", "done"].sum() > 3 * num_envs
    assert (found == expected).all()


@pytest.mark.parametrize("is_batch", [False, True], ids=["one env", "a batch"])
def test_a_step_that_was_lost_is_marked_in_the_tensordict(is_batch):
    truncate = {"restart": RestartPolicy(on_crash="truncate"), "reports": ""}
    if is_batch:
        disabled = gymnasium.vector.AutoresetMode.DISABLED
        env = GymWrapper(SubprocessVectorEnv([CARTPOLE] * 2, envs_per_worker=1, autoreset_mode=disabled, **truncate))
    else:
        env = GymWrapper(SubprocessEnv(CARTPOLE, **truncate).initialize())
    env.set_info_dict_reader(torchrl_envs.LostReader(env.batch_size))
    killer, steps = Killer(env._env), iter(range(10))

    def act(*seen: Any) -> Any:
        assert next(steps) != 4 or killer.strike()
        return env.action_spec.rand()

    try:
        seen = env.rollout(7, act, break_when_any_done=False)["next"]
    finally:
        env.close()
    assert seen["lost"].sum() == 1
    assert torch.equal(seen["lost"], seen["truncated"].squeeze(-1))
    assert seen["lost"].reshape(-1, 7)[:, 4].any()
