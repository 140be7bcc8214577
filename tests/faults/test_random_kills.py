"""Real envs, real SIGKILLs at random moments: bit-equal, or honestly truncated where state outlives an episode."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest

from kit import assert_same_trajectory, rollout
from multienv import SubprocessEnv

gymnasium.register_envs(ale_py)


def actions_for(env_fn: Any, count: int, seed: int) -> list[Any]:
    env = env_fn()
    env.action_space.seed(seed)
    actions = [env.action_space.sample() for _ in range(count)]
    env.close()
    return actions


def undisturbed(env_fn: Any, actions: list[Any]) -> list[Any]:
    env = env_fn()
    try:
        return rollout(env, actions, seed=5)
    finally:
        env.close()


def killed_rollout(env_fn: Any, actions: list[Any], kills: int, seed: int) -> tuple[list[Any], Any]:
    """A rollout whose worker is killed before ``kills`` random steps."""
    moments = set(np.random.default_rng(seed).choice(len(actions), kills, replace=False).tolist())
    with SubprocessEnv(env_fn) as env:

        def strike(step: int) -> None:
            if step in moments:
                os.kill(env.statistics().pid or 0, signal.SIGKILL)

        seen = rollout(env, actions, seed=seed, before_step=strike)
        return seen, env.statistics()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "LunarLander-v3", "Humanoid-v5"])
@pytest.mark.parametrize("kills", [12, pytest.param(125, marks=pytest.mark.soak)])
def test_kills_leave_no_trace(env_id: str, kills: int) -> None:
    env_fn = partial(gymnasium.make, env_id, max_episode_steps=130)
    actions = actions_for(env_fn, 12 * kills, seed=3)
    seen, statistics = killed_rollout(env_fn, actions, kills, seed=5)
    assert_same_trajectory(seen, undisturbed(env_fn, actions))
    assert statistics.losses == kills == statistics.exact_recoveries
    assert statistics.episodes > 1


@pytest.mark.parametrize("env_id", ["BipedalWalker-v3", "ALE/Pong-v5"])
def test_state_that_outlives_an_episode_is_exact_or_truncated(env_id: str) -> None:
    options = {"repeat_action_probability": 0.25} if env_id.startswith("ALE") else {}
    env_fn = partial(gymnasium.make, env_id, max_episode_steps=150, **options)
    actions = actions_for(env_fn, 600, seed=3)
    seen, statistics = killed_rollout(env_fn, actions, 15, seed=5)
    assert statistics.losses == 15 == statistics.exact_recoveries + statistics.truncated_recoveries
    if not statistics.truncated_recoveries:
        assert_same_trajectory(seen, undisturbed(env_fn, actions))
    for transition in seen:
        assert transition.recovery is None or transition.truncated
