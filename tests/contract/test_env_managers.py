"""The env managers by id: episodes, seeds, states, what they pass on to their envs, and what they hand out."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_envs import DictEnv
from manager_envs import FailingResetEnv, SeenResetEnv, counters

from kit import CounterEnv, Fault, FaultyEnv, NondeterministicEnv, PidEnv, kill_worker
from kit.faults import FaultError
from kit.gates import GateEnv, gated_from_the_second_time, opened_meanwhile
from kit.trainer_process import becomes_true
from multienv import AsyncSubprocessEnvManager, RestartPolicy, SyncSubprocessEnvManager
from multienv.errors import (
    CallPendingError,
    ClosedError,
    EnvError,
    EnvsFailedError,
    ResetNeededError,
)
from multienv.managers import EnvState


def play(manager: Any, action: int = 1) -> dict[int, list[Any]]:
    """Until all are done: the timesteps by id."""
    seen: dict[int, list[Any]] = {index: [] for index in range(manager.env_num)}
    while not manager.done:
        for index, timestep in manager.step(dict.fromkeys(manager.ready_obs, action)).items():
            assert timestep.env_id == index
            seen[index].append(timestep)
    return seen


# --- episodes -------------------------------------------------------------------------------------


def test_reset_inplace(manager_of: Any) -> None:
    with manager_of(counters(2, horizon=2), reset_inplace=True, episode_num=2) as manager:
        for _ in range(2):
            timesteps = manager.step({0: 1, 1: 1})
        for timestep in timesteps.values():
            assert timestep.terminated
            assert timestep.observation[:2].tolist() == [0, 1]
            assert timestep.info["final_obs"][:2].tolist() == [2, 0]
        assert manager.ready_env == [0, 1]
        for _ in range(2):
            timesteps = manager.step({0: 1, 1: 1})
        assert manager.done  # nothing was reset
        assert timesteps[0].observation.tolist() == timesteps[0].info["final_obs"].tolist()


def test_without_auto_reset_the_caller_resets(manager_of: Any) -> None:
    with manager_of(counters(2, horizon=1), auto_reset=False, episode_num=2) as manager:
        assert manager.step({0: 1, 1: 1})[0].done
        assert manager.env_states == {0: EnvState.NEED_RESET, 1: EnvState.NEED_RESET}
        assert manager.ready_obs == {}
        with pytest.raises(ResetNeededError, match=r"reset\(\{0: None\}\)"):
            manager.step({0: 1})
        manager.reset({1: None})
        assert list(manager.ready_obs) == [1]
        manager.step({1: 1})
        assert [manager.env_state_done(index) for index in (0, 1)] == [False, True]
        assert not manager.done


def test_an_env_that_was_done_counts_anew_after_a_reset(manager_of: Any) -> None:
    with manager_of(counters(2, horizon=2), episode_num=2) as manager:
        assert list(map(len, play(manager).values())) == [4, 4]
        assert manager.env_states == dict.fromkeys(range(2), EnvState.DONE)
        assert manager.ready_obs == {}
        assert manager.ready_env == manager.active_env == []
        manager.reset()
        assert not manager.done
        assert list(map(len, play(manager).values())) == [4, 4]


def test_reset_in_the_middle_drops_the_episode_and_does_not_count_it(manager_of: Any) -> None:
    with manager_of(counters(2, horizon=3), episode_num=1) as manager:
        manager.step({0: 1, 1: 1})
        manager.reset({0: {"options": {"start": 1}}})
        assert manager.ready_obs[0][0] == 1
        assert manager.ready_obs[1][0] == 1
        assert list(map(len, play(manager).values())) == [2, 2]


# --- what resets are given ------------------------------------------------------------------------


def resets_seen(manager: Any, episodes: int) -> dict[int, list[Any]]:
    """Seed and options of the resets of each env."""
    return {index: [step.info["reset"] for step in steps] for index, steps in play(manager).items()}


def test_reset_param_is_remembered_and_used_again(manager_of: Any) -> None:
    options = {"start": 0, "deep": [1]}
    with manager_of([partial(SeenResetEnv, horizon=1)] * 2, episode_num=3) as manager:
        manager.close()
        manager.launch({0: {"seed": 5, "options": options}})
        options["deep"].append(2)  # type: ignore[attr-defined] - the caller's, who may change it
        assert manager.ready_info[0]["reset"] == (5, {"start": 0, "deep": [1]})
        seen = resets_seen(manager, 3)
    assert seen[0] == [(5, {"start": 0, "deep": [1]})] * 3
    assert all(options is None for _, options in seen[1])


def test_none_clears_what_is_remembered(manager_of: Any) -> None:
    with manager_of([partial(SeenResetEnv, horizon=1)], episode_num=1) as manager:
        manager.reset({0: {"seed": 5}})
        manager.reset()
        assert manager.ready_info[0]["reset"] == (5, None)
        manager.reset({0: None})
        assert manager.ready_info[0]["reset"] == (None, None)


@pytest.mark.parametrize(
    ("seed", "firsts"), [(np.array(3), [3, 4, 5]), ([9, 8, 7], [9, 8, 7]), ({2: 4}, [None, None, 4])]
)
def test_seeds(manager_of: Any, seed: Any, firsts: list[Any]) -> None:
    manager = manager_of([partial(SeenResetEnv, horizon=1)] * 3, episode_num=3)
    manager.seed(seed)
    seen = []
    for _ in range(2):
        manager.launch()
        try:
            seen.append({index: [one for one, _ in both] for index, both in resets_seen(manager, 3).items()})
        finally:
            manager.close()
    for index, first in enumerate(firsts):
        if first is None:
            assert seen[0][index] == [None, None, None]
            continue
        assert seen[0][index][0] == first
        assert len(set(seen[0][index])) == 3
        assert seen[0][index] == seen[1][index]


# --- whichever is ready ---------------------------------------------------------------------------


def test_asynchronous_takes_what_is_ready(tmp_path: Path) -> None:
    fns = [partial(GateEnv, tmp_path), *counters(3)]
    with AsyncSubprocessEnvManager(fns, wait_num=2, step_wait_timeout=0.0) as manager:
        waiting = manager.step(dict.fromkeys(range(4), 3))
        got = set(waiting)
        assert len(got) >= 2
        assert 0 not in got
        assert 0 in manager.active_env
        assert 0 not in manager.ready_env
        with pytest.raises(CallPendingError, match="env 0"):
            manager.step({0: 1})
        while got != {1, 2, 3}:
            got |= set(manager.step(dict.fromkeys(manager.ready_obs, 1)))
            assert 0 not in got
        (tmp_path / "gate").touch()
        while 0 not in (timesteps := manager.step(dict.fromkeys(manager.ready_obs, 1))):
            pass
        assert timesteps[0].observation[[0, 3]].tolist() == [1, 3]


def test_asynchronous_waits_for_more_as_long_as_told(tmp_path: Path) -> None:
    """None: for all of them, however little is asked for."""
    fns = [partial(GateEnv, tmp_path), *counters(1)]
    with AsyncSubprocessEnvManager(fns, wait_num=1, step_wait_timeout=None) as manager:
        manager.step({0: 1, 1: 1})
        with opened_meanwhile(tmp_path):
            assert set(manager.step({0: 3, 1: 3})) == {0, 1}


def test_asynchronous_waits_for_no_more_than_it_was_given_actions(tmp_path: Path) -> None:
    """So that the last of the fast ones does not wait for the slow one."""
    fns = [partial(GateEnv, tmp_path), *counters(2)]
    with AsyncSubprocessEnvManager(fns, wait_num=2, step_wait_timeout=0.0) as manager:
        assert set(manager.step({0: 3, 1: 1, 2: 1})) == {1, 2}
        assert set(manager.step({1: 1})) == {1}
        assert set(manager.step({1: 1, 2: 1})) == {1, 2}
        (tmp_path / "gate").touch()
        assert set(manager.step({})) == {0}


def test_synchronous_steps_exactly_the_ids_it_is_given() -> None:
    with SyncSubprocessEnvManager(counters(4)) as manager:
        for ids in ([0], [1, 3], [3, 0], [2], [0, 1, 2, 3]):
            assert set(manager.step({np.int64(index): 1 for index in ids})) == set(ids)
        assert [observation[0] for observation in manager.ready_obs.values()] == [3, 2, 2, 3]


def test_an_env_being_reset_keeps_no_other_from_going_on(manager_of: Any, tmp_path: Path) -> None:
    fns = [partial(GateEnv, tmp_path, in_reset=True, horizon=1), *counters(1, horizon=None)]
    with manager_of(fns) as manager:
        assert manager.step({0: 1, 1: 1})[0].done
        for step in range(1, 20):
            assert list(manager.ready_obs) == [1]
            assert manager.step({1: 1})[1].observation[0] == step + 1
        assert manager.env_states[0] == EnvState.RESET
        with pytest.raises(ResetNeededError, match="env 0 is being reset"):
            manager.step({0: 1})
        (tmp_path / "gate").touch()
        while 0 not in manager.ready_obs:
            manager.step({1: 1})
        assert manager.ready_obs[0][:2].tolist() == [0, 1]


# --- what envs raise ------------------------------------------------------------------------------


def test_an_action_that_its_env_refuses_ends_that_episode_alone(manager_of: Any) -> None:
    with manager_of(counters(2)) as manager:
        with pytest.raises(EnvsFailedError) as caught:
            manager.step({0: 1, 1: 99})
        assert isinstance(caught.value.failures[1], EnvError)
        assert caught.value.results[0].observation[0] == 1
        manager.reset({1: None})
        while 1 not in manager.ready_env:
            assert manager.ready_obs
        assert [timestep.observation[0] for timestep in manager.step({0: 1, 1: 1}).values()] == [2, 1]


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


def test_calls_wait_for_what_is_under_way(tmp_path: Path) -> None:
    fns = [partial(GateEnv, tmp_path), *counters(1)]
    with AsyncSubprocessEnvManager(fns, wait_num=1, step_wait_timeout=0.0) as manager:
        assert set(manager.step({0: 3, 1: 3})) == {1}
        with opened_meanwhile(tmp_path):
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


# --- workers that are lost, and the end ---------------------------------------------------------


def test_one_envs_recovery_holds_up_no_other(tmp_path: Path) -> None:
    """Env 0 cannot be built again until the other one has gone on for a while."""
    fns = [partial(gated_from_the_second_time, tmp_path), partial(CounterEnv, horizon=None)]
    options: Any = {"wait_num": 1, "step_wait_timeout": 0.0, "restart": RestartPolicy(snapshots=False)}
    with AsyncSubprocessEnvManager(fns, **options) as manager:
        kill_worker(manager, 0)
        seen = dict(manager.step({0: 1, 1: 1}))
        for _ in range(50):
            assert 0 not in seen
            assert list(manager.ready_obs) == [1]
            seen = manager.step({1: 1})
        with opened_meanwhile(tmp_path):  # that it is lost is noticed here at the latest
            while 0 not in seen:
                seen = manager.step(dict.fromkeys(manager.ready_obs, 1))
        assert seen[0].observation[0] == 1
        assert manager.statistics()[0].exact_recoveries == 1


class AbnormalEnv(CounterEnv):
    def __init__(self, value: Any) -> None:
        super().__init__(horizon=2)
        self.value = value

    def step(self, action: Any) -> Any:
        *returned, info = super().step(action)
        return *returned, {**info, "abnormal": self.value}


@pytest.mark.parametrize(("value", "is_counted"), [(0, True), ([], True), ([False], False), (np.zeros(2), False)])
def test_an_episode_whose_last_info_is_abnormal_in_any_way_is_not_counted(value: Any, is_counted: bool) -> None:
    with AsyncSubprocessEnvManager([partial(AbnormalEnv, value)], episode_num=1) as manager:
        for _ in range(2):
            manager.step(dict.fromkeys(manager.ready_obs, 1))
        assert manager.done == is_counted


def test_an_episode_that_cannot_be_brought_back_is_not_counted(manager_of: Any) -> None:
    options: Any = {"episode_num": 1, "restart": RestartPolicy(snapshots=False)}
    with manager_of([partial(NondeterministicEnv, horizon=4)], **options) as manager:
        manager.step({0: 1})
        kill_worker(manager, 0)
        assert manager.step({0: 1})[0].info["abnormal"]
        steps = 0
        while not manager.done:
            steps += len(manager.step(dict.fromkeys(manager.ready_obs, 1)))
        assert steps == 4


@pytest.mark.parametrize(
    ("what", "how"),
    [("launch", "thread"), ("launch", "signal handler"), ("step", "signal handler"), ("retry", "thread")],
)
def test_close_ends_what_a_manager_waits_for(manager_of: Any, what: str, how: str, tmp_path: Path) -> None:
    """The building of an env, its step, or the pause between two tries of a reset: none would ever end."""
    begun, errors = tmp_path / "begun", tmp_path / "errors"
    if what == "retry":
        failing = partial(FailingResetEnv, errors=str(errors), horizon=1)
        manager = manager_of([failing], max_retry=3, retry_waiting_time=3600.0)
    else:
        moment: Any = "construct" if what == "launch" else what
        manager = manager_of([partial(FaultyEnv, fault=Fault("hang", moment, once=begun))])
    is_waiting = begun.exists if what != "retry" else lambda: errors.exists() and errors.read_text() == "twice"
    trainer = threading.get_ident()
    before = signal.signal(signal.SIGUSR1, lambda *_: manager.close())

    def close() -> None:
        assert becomes_true(is_waiting)
        manager.close() if how == "thread" else signal.pthread_kill(trainer, signal.SIGUSR1)

    thread = threading.Thread(target=close)
    thread.start()
    try:
        with pytest.raises(ClosedError):
            manager.launch()
            errors.write_text("once\ntwice")
            manager.step(dict.fromkeys(range(manager.env_num), 1))
            _ = manager.ready_obs
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert manager.closed
    assert becomes_true(lambda: not [one for one in threading.enumerate() if one.name.startswith("multienv_")])
