"""Frames of MuJoCo by Mesa's software renderer: drawn alike after each loss, by forked contexts too, and learnt from."""

from __future__ import annotations

import os
from ctypes.util import find_library
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import AddRenderObservation

from kit import ForkingPolicy
from multienv import RestartPolicy, SubprocessEnv
from multienv.testing import Killer

pytestmark = pytest.mark.ci

ENV = "InvertedPendulum-v5"
ON_THE_CPU = {"LIBGL_ALWAYS_SOFTWARE": "1"}
SERIAL = {**ON_THE_CPU, "LP_NUM_THREADS": "0", "MESA_SHADER_CACHE_DISABLE": "true"}
THREADED = {**ON_THE_CPU, "LP_NUM_THREADS": "2"}


def frames(first_seed: int | None = 0, size: int = 32) -> gymnasium.Env[Any, Any]:
    env = gymnasium.make(ENV, render_mode="rgb_array", width=size, height=size)
    if first_seed is not None:
        env.reset(seed=first_seed)
    return AddRenderObservation(env, render_only=True)


def walk(variables: dict[str, str], kills: tuple[int, ...] = ()) -> tuple[list[np.ndarray], Any]:
    """What is seen in 20 steps, with kills before some of them."""
    restart = ForkingPolicy(snapshot_every=4)
    with SubprocessEnv(frames, worker_env=variables, restart=restart, reports="") as env:
        seen = [env.reset(seed=3)[0]]
        for step in range(20):
            if step in kills:
                assert Killer(env).strike()
            observation, _, terminated, truncated, _ = env.step(np.array([0.1 * (-1) ** step], np.float32))
            seen.append(observation)
            if terminated or truncated:
                seen.append(env.reset()[0])
        return seen, env.statistics()


@pytest.mark.parametrize(
    ("renderer", "variables", "method", "obstacle"),
    [
        ("egl", SERIAL, "snapshot", ""),
        pytest.param(
            *("osmesa", SERIAL, "snapshot", ""),
            marks=pytest.mark.skipif(find_library("OSMesa") is None, reason="newer distributions have no OSMesa"),
        ),
        ("egl", THREADED, "journal", "threads"),
    ],
)
def test_an_opengl_context_comes_back_from_a_snapshot_or_where_it_has_threads_by_replay(
    renderer, variables, method, obstacle
):
    variables = {"MUJOCO_GL": renderer, **variables}
    calm, _ = walk(variables)
    struck, statistics = walk(variables, kills=(11, 17))
    assert statistics.exact_recoveries == 2
    assert statistics.last_recovery.method == method
    assert statistics.no_snapshots == obstacle
    assert len(calm) == len(struck)
    for one, other in zip(calm, struck, strict=True):
        np.testing.assert_array_equal(one, other)
    assert calm[0].std() > 1
    assert any((frame != calm[0]).any() for frame in calm)


def test_a_camera_placed_by_a_reset_that_nobody_seeded_is_an_honest_truncation():
    restart = RestartPolicy(snapshots=False)
    variables = {"MUJOCO_GL": "egl"}
    env_fn = partial(frames, None, size=128)  # of few pixels, another place of the camera may change none
    with SubprocessEnv(env_fn, worker_env=variables, restart=restart, reports="") as env:
        env.reset(seed=3)
        env.step(np.zeros(1, np.float32))
        assert Killer(env).strike()
        *_, truncated, info = env.step(np.zeros(1, np.float32))
    assert truncated
    assert "the observation differs" in info["multienv"]["reason"]


def test_ppo_learns_the_same_from_pixels_while_its_workers_are_killed(monkeypatch):
    import pixels_ppo
    import torch
    from stable_baselines3.common.callbacks import BaseCallback

    class Strikes(BaseCallback):
        def _on_step(self) -> bool:
            if self.n_calls % 7 == 0:
                assert Killer(self.training_env.unwrapped, seed=self.n_calls).strike()
            return True

    monkeypatch.setitem(os.environ, "MUJOCO_GL", "egl")
    torch.set_num_threads(1)
    learnt = []
    for callback in (None, Strikes()):
        envs = pixels_ppo.make_envs(ENV, 2, reports="")
        model = pixels_ppo.train(envs, 32, callback, n_steps=16, batch_size=16, n_epochs=1)
        statistics = envs.statistics()
        model.env.close()
        assert sum(one.exact_recoveries for one in statistics) == sum(one.losses for one in statistics)
        assert (sum(one.losses for one in statistics) > 0) == (callback is not None)
        learnt.append(model.policy.state_dict())
    calm, struck = learnt
    assert all(torch.equal(calm[name], struck[name]) for name in calm)
