"""TorchRL's ``GymWrapper`` around one env and around a batch: the same rollouts, whatever dies."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import gymnasium
import pytest
from striking import assert_all_exact

from multienv.testing import Killer

if importlib.util.find_spec("torchrl") is None:
    pytest.skip("TorchRL is not installed: it is of the extra recipes", allow_module_level=True)

import torch
import torchrl_envs
from torchrl.envs import GymWrapper

CARTPOLE = partial(gymnasium.make, "CartPole-v1")


def rollout(env: Any, killer: Killer | None = None) -> Any:
    """Take random actions for some episodes; kill a worker before every 20th step."""
    env.set_seed(3)
    torch.manual_seed(0)
    steps = iter(range(10_000))

    def act(observation: Any) -> Any:
        if next(steps) % 20 == 10 and killer is not None:
            assert killer.strike()
        return env.action_spec.rand()

    return env.rollout(150, act, break_when_any_done=False)


def test_one_env():
    ours, theirs = torchrl_envs.one_env(CARTPOLE), GymWrapper(CARTPOLE())
    try:
        found, expected = rollout(ours, Killer(ours._env, seed=1)), rollout(theirs)
        assert_all_exact(ours._env, deaths=7)
    finally:
        ours.close()
    assert expected["next", "done"].sum() > 3
    assert (found == expected).all()


def test_a_batch():
    ours = torchrl_envs.batch([CARTPOLE] * 3)
    disabled = gymnasium.vector.AutoresetMode.DISABLED
    theirs = GymWrapper(gymnasium.vector.SyncVectorEnv([CARTPOLE] * 3, autoreset_mode=disabled))
    try:
        found, expected = rollout(ours, Killer(ours._env, seed=1)), rollout(theirs)
        assert_all_exact(ours._env, deaths=7)
    finally:
        ours.close()
        theirs.close()
    assert expected["next", "done"].sum() > 9
    assert (found == expected).all()
