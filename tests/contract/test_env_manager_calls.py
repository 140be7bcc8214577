"""What the env managers pass on to their envs, hand out, and refuse."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from contract_envs import DictEnv
from manager_envs import counters

from kit import CounterEnv, Fault, FaultyEnv, PidEnv
from kit.faults import FaultError
from kit.gates import GatedEnv, opened_meanwhile
from multienv import AsyncSubprocessEnvManager


def test_a_launch_that_fails_closes_all(manager_of: Any) -> None:
    for moment in ("construct", "reset"):
        manager = manager_of([CounterEnv, partial(FaultyEnv, fault=Fault("raise", moment, at=1))])
        with pytest.raises(FaultError):
            manager.launch()
        assert manager.closed


# --- the envs' own --------------------------------------------------------------------------------


def test_attributes_and_methods_of_all_envs(manager_of: Any) -> None:
    with manager_of([partial(PidEnv, render_mode="rgb_array")] * 3) as manager:
        pids = manager.get_attr("pid")
        assert len(set(pids)) == 3
        assert os.getpid() not in pids
        assert manager.get_attr("pokes") == [0, 0, 0]
        assert manager.call("poke", 0.5) == [1, 1, 1]
        assert manager.call("poke", amount=0.5) == [2, 2, 2]
        manager.set_attr("offset", 100.0)
        assert manager.get_attr("offset") == [100.0] * 3
        assert [image.shape for image in manager.ready_imgs.values()] == [(8, 8, 3)] * 3
        assert [image.shape for image in manager.render()] == [(8, 8, 3)] * 3
        assert manager.get_attr("render_mode") == ["rgb_array"] * 3


def test_calls_wait_for_what_is_under_way(gate: Path) -> None:
    fns = [partial(GatedEnv, step_gate=str(gate)), *counters(1)]
    with AsyncSubprocessEnvManager(fns, wait_num=1, step_wait_timeout=0.0) as manager:
        assert set(manager.step({0: 3, 1: 3})) == {1}
        with opened_meanwhile(gate):
            assert manager.get_attr("episode_step") == [1, 1]
        assert set(manager.step({})) == {0}  # nothing was lost


def test_env_ref_without_an_env_in_the_trainer(manager_of: Any) -> None:
    def env_fn() -> Any:
        assert os.getpid() != trainer, "an env in the trainer"
        env = PidEnv(num_actions=7, render_mode="ansi")
        env.reward_space = env.action_space  # type: ignore[attr-defined]
        return env

    trainer = os.getpid()
    manager = manager_of([env_fn])
    assert manager.action_space.n == 7
    assert manager.env_ref.observation_space == manager.observation_space == PidEnv(num_actions=7).observation_space
    assert manager.reward_space.n == 7
    assert manager.env_ref.render_mode == "ansi"
    assert manager.env_num == 1
    assert manager.closed


# --- what is handed out ---------------------------------------------------------------------------


def test_observations_handed_out_are_the_callers_own(manager_of: Any) -> None:
    with manager_of([DictEnv]) as manager:
        first = manager.ready_obs[0]
        first["image"][:] = 77
        first["counts"][1][:] = 77
        assert not manager.ready_obs[0]["image"].any()
        timestep = manager.step({0: 1})[0]
        timestep.observation["image"][:] = 77
        timestep.observation["counts"][1][:] = 77
        assert (manager.ready_obs[0]["image"] == 1).all()
        assert manager.ready_obs[0]["counts"][1][0] == 1


def test_without_copies_the_same_array_is_handed_out_twice(manager_of: Any) -> None:
    with manager_of([CounterEnv], copy_on_get=False) as manager:
        timestep = manager.step({0: 1})[0]
        assert manager.ready_obs[0] is timestep.observation
        before = timestep.observation.copy()
        manager.step({0: 2})
        assert (timestep.observation == before).all()  # yet never overwritten
