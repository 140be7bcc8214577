"""Masks that come with the steps: MaskablePPO learns the same as if it asked for them, and asks no worker."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest

from kit import CounterEnv
from multienv.testing import Killer

pytestmark = pytest.mark.ci

OPTIONS: dict[str, Any] = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "policy_kwargs": {"net_arch": [8]}}


class MaskedEnv(CounterEnv):
    """Allows other actions at each step; more than 64 of them fill two integers."""

    def action_masks(self) -> Any:
        return (np.arange(self.action_space.n) + self.episode_step) % 3 > 0


@pytest.mark.parametrize("num_actions", [4, 64, 70])
def test_maskable_ppo_learns_the_same_from_masks_in_infos_while_its_workers_are_killed(num_actions: int) -> None:
    maskable_ppo = pytest.importorskip("maskable_ppo")
    import torch
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    torch.set_num_threads(1)
    env_fns = [partial(MaskedEnv, num_actions=num_actions, horizon=5 + index) for index in range(2)]
    with closing(DummyVecEnv(env_fns)) as envs:
        asked = MaskablePPO("MlpPolicy", envs, seed=0, device="cpu", **OPTIONS).learn(48).policy.state_dict()
    with closing(maskable_ppo.make_envs(env_fns, envs_per_worker=1)) as envs:
        vec_env = envs.venv
        calls: list[str] = []
        vec_env.env_method = lambda name, *_, **__: calls.append(name)
        killer = Killer(vec_env, seed=1)
        strikes = iter(range(1000))

        def strike(*_: Any) -> bool:
            return next(strikes) % 7 != 3 or killer.strike()

        learnt = maskable_ppo.train(envs, 48, strike, **OPTIONS).policy.state_dict()
        told = vec_env.statistics()
    assert calls == []
    assert killer.delivered > 2
    assert sum(one.exact_recoveries for one in told) == sum(one.losses for one in told) > 0
    assert all(torch.equal(learnt[name], asked[name]) for name in asked)


def test_masks_are_those_of_the_envs_with_indices_and_at_the_ends_of_episodes() -> None:
    maskable_ppo = pytest.importorskip("maskable_ppo")
    env_fns = [partial(MaskedEnv, num_actions=4, horizon=2 + index) for index in range(2)]
    with closing(maskable_ppo.make_envs(env_fns)) as envs:
        envs.reset()
        for _ in range(6):
            given, asked = envs.env_method("action_masks"), envs.venv.env_method("action_masks")
            assert np.array_equal(given, asked)
            assert np.array_equal(envs.env_method("action_masks", indices=[1]), asked[1:])
            envs.step([0, 0])
