"""Training code writes to the spaces it is given (CleanRL sets a dtype); recovery goes by what the env said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from fault_envs import Float64Env
from gymnasium import spaces

from kit import ForkingPolicy, kill_worker, reports_written
from multienv import SerialVectorEnv, SubprocessEnv, SubprocessVectorEnv

POLICY = ForkingPolicy(snapshot_every=20)


def set_dtype(space: spaces.Dict) -> None:
    space["a"].dtype = np.float32  # a class, and no dtype, as CleanRL has it


def narrow(space: spaces.Dict) -> None:
    space["a"].low[:] = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("write", [set_dtype, narrow])
def test_a_loss_after_it(write: Callable[[Any], None], tmp_path: Path) -> None:
    bare = Float64Env()
    bare.reset(seed=1)
    with SubprocessEnv(Float64Env, restart=POLICY, reports=tmp_path) as env:
        env.reset(seed=1)
        write(env.observation_space)
        for _ in range(30):
            bare.step(np.array([0.3]))
            env.step(np.array([0.3]))
        kill_worker(env)
        expected, shown = bare.step(np.array([0.3])), env.step(np.array([0.3]))
        np.testing.assert_array_equal(shown[0]["a"], expected[0]["a"], strict=True)
        assert shown[1:] == expected[1:]
        saved = env.state_dict()
        expected = bare.step(np.array([0.3]))
        env.load_state_dict(saved)
        np.testing.assert_array_equal(env.step(np.array([0.3]))[0]["a"], expected[0]["a"], strict=True)
    reports_written()
    assert len(list(tmp_path.glob("*.json"))) == 1


@pytest.mark.parametrize("mode", ["same", "custom"])
def test_a_loss_in_a_batch_after_it(mode: str) -> None:
    single = Float64Env().observation_space
    pair: Any = (gymnasium.vector.utils.batch_space(single, 2), single)
    options = {"observation_mode": pair if mode == "custom" else mode, "restart": POLICY}
    fns = [Float64Env] * 2
    with SerialVectorEnv(fns) as calm, SubprocessVectorEnv(fns, envs_per_worker=1, **options) as envs:
        calm.reset(seed=1), envs.reset(seed=1)
        for space in (envs.single_observation_space, envs.observation_space, single):
            set_dtype(space)  # type: ignore[arg-type]
        envs.single_action_space.dtype = np.dtype(np.float32)
        for step in range(30):
            if step in (2, 28):
                kill_worker(envs)
            expected, shown = calm.step([np.array([0.3])] * 2), envs.step([np.array([0.3])] * 2)
            np.testing.assert_array_equal(shown[0]["a"], expected[0]["a"], strict=True)
            np.testing.assert_array_equal(shown[1], expected[1], strict=True)
            assert not shown[3].any()
