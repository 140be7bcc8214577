"""What ``examples/ppo_torch.py`` makes of an honest truncation: bootstrap before it, and mask it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from multienv import RestartPolicy, SubprocessVectorEnv
from multienv.testing import Killer

pytestmark = pytest.mark.ci

PPO = Path(__file__).parents[2] / "examples" / "ppo_torch.py"
DISCOUNT, TRACE = 0.9, 0.8


@pytest.fixture(scope="module")
def ppo() -> Any:
    spec = importlib.util.spec_from_file_location("ppo_torch", PPO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_lost_step_is_masked_and_the_one_before_it_bootstraps(ppo):
    restart = RestartPolicy(on_crash="truncate")
    with SubprocessVectorEnv(
        [lambda: gymnasium.make("CartPole-v1")] * 2, envs_per_worker=1, restart=restart, reports=""
    ) as envs:
        rollout = ppo.Rollout(5, 2, envs.single_observation_space, "cpu")
        rollout.observations[0] = torch.as_tensor(envs.reset(seed=0)[0])
        for t in range(5):
            if t == 2:
                assert Killer(lambda: [envs.statistics()[1].pid]).strike()
            rollout.add(t, envs.step(np.array([t % 2] * 2)))
    assert rollout.real[:, 0].tolist() == [1, 1, 1, 1, 1]
    assert rollout.real[:, 1].tolist() == [1, 1, 0, 0, 1]  # lost; then the reset
    assert torch.equal(rollout.observations[3, 1], rollout.observations[2, 1])
    values = torch.arange(12.0).reshape(6, 2)
    advantages = rollout.advantages(values, DISCOUNT, TRACE)
    assert advantages[2:4, 1].tolist() == [0.0, 0.0]
    # Nothing flows back from the lost step: only reward and the value of the last observation known.
    assert advantages[1, 1].item() == pytest.approx(1.0 + DISCOUNT * values[2, 1].item() - values[1, 1].item())
    undisturbed = [1.0 + DISCOUNT * values[t + 1, 0].item() - values[t, 0].item() for t in range(5)]
    expected = sum(surprise * (DISCOUNT * TRACE) ** t for t, surprise in enumerate(undisturbed))
    assert advantages[0, 0].item() == pytest.approx(expected)
