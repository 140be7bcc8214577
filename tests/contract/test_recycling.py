"""A process that has served its time is replaced between two steps, and nobody can tell by the trajectory."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from contract_envs import LockedEnv, Port
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from kit import (
    CounterEnv,
    Fault,
    FaultyEnv,
    assert_same_trajectory,
    rollout,
)
from kit.gates import GateEnv
from kit.limits import set_limit
from kit.process_table import is_alive
from kit.side_by_side import run_side_by_side
from kit.space_env import SpaceEnv
from kit.trainer_process import becomes_true
from multienv import (
    Deadlines,
    MultiEnv,
    RestartPolicy,
    SubprocessEnv,
    SubprocessVectorEnv,
    SyncSubprocessEnvManager,
    create_subprocess_envs,
)
from multienv.errors import WaitTimeout
from multienv.events import Event, Loss, Recycled


def undisturbed(env_fn: Callable[[], gymnasium.Env[Any, Any]], **options: Any) -> list[Any]:
    return rollout(env_fn(), **options)


@pytest.mark.parametrize(
    "limits",
    [{"recycle_after_steps": 100}, {"recycle_after_episodes": 9}],
)
def test_a_process_that_is_replaced_leaves_no_trace(limits: dict[str, Any]) -> None:
    env_fn = partial(gymnasium.make, "CartPole-v1")
    events: list[Event] = []
    with SubprocessEnv(env_fn, restart=RestartPolicy(**limits), hooks=[events.append]) as env:
        record = rollout(env, num_steps=400, seed=3)
        statistics = env.statistics()
    assert_same_trajectory(record, undisturbed(env_fn, num_steps=400, seed=3))
    assert statistics.recycled >= 1
    assert statistics.losses == statistics.restarts == 0
    outcomes = Counter(event.outcome for event in events if isinstance(event, Recycled))
    counted = [statistics.exact_recyclings, statistics.replayed_recyclings, statistics.reset_recyclings]
    assert counted == [outcomes[outcome] for outcome in ("exact", "replayed", "reset")]
    assert statistics.recycled == sum(counted)
    # Its episodes are short: most limits are noticed when one has ended.
    assert "reset" in outcomes
    assert outcomes.keys() <= {"reset", "exact", "replayed"}


# --- a fresh process at the end of an episode ---------------------------------------------------


calm = partial(CounterEnv, horizon=4, count_episodes=False)
# Ends its process at its second reset, or hangs there.
ends_at_reset, hangs_at_reset = (
    partial(FaultyEnv, fault=Fault(manner, "reset", at=2), horizon=4, count_episodes=False)
    for manner in ("exit", "hang")
)


def calm_twin(envs: int, mode: str) -> Any:
    return closing(SyncVectorEnv([calm] * envs, autoreset_mode=AutoresetMode[mode]))


@pytest.mark.parametrize(
    ("mode", "envs_per_worker", "hangs"),
    [
        ("NEXT_STEP", 1, False),
        ("NEXT_STEP", 2, False),
        ("SAME_STEP", 1, False),
        ("SAME_STEP", 1, True),
        ("SAME_STEP", 2, False),
    ],
)
def test_an_env_whose_reset_ends_its_process_loses_one_step_and_goes_on_in_a_new_one(
    mode: str, envs_per_worker: int, hangs: bool
) -> None:
    """Whatever brings it back has the past that makes the reset fail: so a process without it is tried."""
    env_fns = [hangs_at_reset if hangs else ends_at_reset, calm]
    options: dict[str, Any] = {"restart": RestartPolicy(backoff=0.0)}
    options |= {"deadlines": Deadlines(step=0.8)} if hangs else {}
    with SubprocessVectorEnv(env_fns, envs_per_worker=envs_per_worker, autoreset_mode=mode, **options) as envs:
        envs.reset(seed=5)
        lost: list[int] = []
        for step in range(12 if hangs else 24):
            _, _, _, truncated, _ = envs.step(np.array([1, 1]))
            lost += [step] * int(truncated[0])
            assert not truncated[1]
        # An episode takes 4 steps, its reset one, and the lost step may take the place of the last of an episode.
        assert np.diff(lost).min() >= 4
        assert len(lost) >= (2 if hangs else 4)
        losses = sum(one.losses for one in envs.statistics())
        assert losses <= 4 * len(lost)


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_a_new_process_for_each_episode_of_a_batch_is_bit_for_bit_one_process_for_all(mode: str) -> None:
    options: dict[str, Any] = {"autoreset_mode": mode, "restart": RestartPolicy(recycle_after_episodes=1)}
    with SubprocessVectorEnv([ends_at_reset] * 2, envs_per_worker=1, **options) as envs, calm_twin(2, mode) as twin:
        run_side_by_side(envs, twin, 50)
        assert all(one.recycled > 5 for one in envs.statistics())


def test_a_new_process_for_each_episode_of_single_envs_and_managers() -> None:
    each = RestartPolicy(recycle_after_episodes=1)
    with SubprocessEnv(ends_at_reset, restart=each) as env:
        assert_same_trajectory(rollout(env, num_steps=30, seed=3), undisturbed(calm, num_steps=30, seed=3))
        assert env.statistics().losses == 0
        assert env.statistics().recycled == 30 // 4
    for mode in ("NEXT_STEP", "SAME_STEP"):
        with MultiEnv(create_subprocess_envs([ends_at_reset] * 2, restart=each), autoreset_mode=mode) as envs:
            twin = SyncVectorEnv([calm, calm], autoreset_mode=AutoresetMode[mode])
            assert np.array_equal(envs.reset(seed=5)[0], twin.reset(seed=5)[0])
            for step in range(20):
                values, expected = envs.step([step % 4, 1]), twin.step(np.array([step % 4, 1]))
                assert all(np.array_equal(one, other) for one, other in zip(values[:4], expected[:4], strict=True))
    manager = SyncSubprocessEnvManager([ends_at_reset] * 2, {"episode_num": 3}, restart=each)
    manager.launch()
    while not manager.done:
        manager.step({index: np.int64(1) for index in manager.ready_obs})
    assert [one.losses for one in manager.statistics()] == [0, 0]
    manager.close()


# --- old and new cannot live together ---------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


@pytest.mark.parametrize(
    ("envs_per_worker", "mode"), [pytest.param(1, "SAME_STEP", marks=pytest.mark.ci), (2, "NEXT_STEP")]
)
def test_an_env_that_owns_a_port_is_recycled_once_its_old_process_has_ended(
    envs_per_worker: int, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The new process cannot be built beside the old one: that is a warning, and the old one ends first next time."""
    events: list[Any] = []
    limit, horizons = 200 * 2**20, (150, 190)
    sizes: list[int] = []
    options: dict[str, Any] = {"restart": RestartPolicy(max_rss=limit, backoff=0.0), "hooks": [events.append]}
    ports = [partial(Port, port, horizon) for port, horizon in zip(free_ports(2), horizons, strict=True)]
    counters = [partial(CounterEnv, horizon=horizon, count_episodes=False) for horizon in horizons]
    with (
        SubprocessVectorEnv(ports, envs_per_worker=envs_per_worker, autoreset_mode=mode, **options) as envs,
        closing(SyncVectorEnv(counters, autoreset_mode=AutoresetMode[mode])) as twin,
    ):
        run_side_by_side(
            envs, twin, 1000, before_step=lambda _: sizes.extend(one.rss or 0 for one in envs.statistics())
        )
    recycled = [event for event in events if isinstance(event, Recycled)]
    put_off = [event for event in recycled if event.outcome == "put off"]
    assert len(recycled) - len(put_off) >= 2
    assert not any(isinstance(event, Loss) for event in events)
    if envs_per_worker == 1:  # between two episodes, of which nothing is replayed
        assert not put_off
        assert max(sizes) < limit + 2**20 * (max(horizons) + 64)
    else:
        assert put_off, "in the middle of an episode the new one is tried beside the old one first"
        assert "is not replaced" in caplog.text


def test_env_whose_constructor_waits_for_the_old_one_is_tried_once_for_replay_limit_and_all_workers_learn_it(
    tmp_path: Path,
) -> None:
    events: list[Any] = []
    policy = RestartPolicy(recycle_after_steps=40, replay_limit=1.5, snapshots=False, backoff=0.0)
    env_fns = [partial(LockedEnv, tmp_path / str(index), horizon=500) for index in range(2)]
    options: dict[str, Any] = {"deadlines": Deadlines(start=30.0), "hooks": [events.append]}
    slowest = []
    for env in create_subprocess_envs(env_fns, restart=policy, **options):
        env.reset(seed=5)
        times = [time.monotonic()]
        for step in range(70):
            assert env.step(1)[0][0] == step + 1
            times.append(time.monotonic())
        slowest.append(max(after - before for before, after in pairwise(times)))
        env.close()
    assert 1.5 <= slowest[0] < 15.0
    assert [(event.env_index, event.outcome) for event in events] == [(0, "put off"), (1, "exact")]


def test_no_process_is_ended_by_plan_in_an_episode_that_cannot_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that can only be replaced by ending it first, and remembers more than a replay gives back, goes on."""
    # No reset but the first is told of, whatever it costs: else a replay from a later one might be tried.
    set_limit(monkeypatch, "LARGE_SHARE", 1e-12)
    events: list[Any] = []
    env_fns = [partial(Port, port, horizon, leaks=False) for port, horizon in zip(free_ports(2), (50, 70), strict=True)]
    policy = RestartPolicy(recycle_after_steps=70, backoff=0.0, journal_limit=12_000)
    with SubprocessVectorEnv(env_fns, envs_per_worker=2, restart=policy, hooks=[events.append]) as envs:
        envs.reset(seed=5)
        assert not any(envs.step(np.array([1, 1]))[3].any() for _ in range(600))
    assert "put off" in {event.outcome for event in events if isinstance(event, Recycled)}
    assert not any(isinstance(event, Loss) for event in events)


def test_wait_that_is_broken_off_between_an_end_and_its_reset_keeps_the_end(tmp_path: Path) -> None:
    policy = RestartPolicy(recycle_after_episodes=1000)
    env_fn = partial(GateEnv, tmp_path, in_reset=True, horizon=4, count_episodes=False)
    with SubprocessVectorEnv([env_fn], autoreset_mode="SAME_STEP", restart=policy) as envs:
        envs.reset(seed=5)
        for _ in range(3):
            envs.step(np.array([1]))
        envs.step_async(np.array([1]))
        with pytest.raises(WaitTimeout):
            envs.step_wait(timeout=0.1)
        (tmp_path / "gate").touch()
        observations, rewards, terminated, _, infos = envs.step_wait()
        assert (observations[0][0], infos["final_obs"][0][0]) == (0, 4)
        assert terminated.tolist() == [True]
        assert rewards[0] != 0.0


def test_final_observation_of_a_box_without_dimensions_is_an_array_as_in_gymnasium() -> None:
    env_fn = partial(SpaceEnv, observation_space=Box(-1.0, 1.0, ()), horizon=1)
    policy = RestartPolicy(recycle_after_episodes=1000)
    with SubprocessVectorEnv([env_fn], autoreset_mode="SAME_STEP", restart=policy) as envs:
        envs.reset(seed=5)
        *_, infos = envs.step(np.array([1]))
        assert type(infos["final_obs"][0]) is np.ndarray


def test_a_reset_that_ends_processes_loses_nothing_between_two_requests_of_same_step() -> None:
    """With any limit of recycling and one env a process: the step that ends the episode is answered before its reset."""
    policy = RestartPolicy(recycle_after_episodes=1000, backoff=0.0)
    options: dict[str, Any] = {"autoreset_mode": "SAME_STEP", "restart": policy}
    with SubprocessVectorEnv([ends_at_reset], **options) as envs, calm_twin(1, "SAME_STEP") as twin:
        run_side_by_side(envs, twin, 20)
        assert envs.statistics()[0].losses >= 4


def test_envs_that_are_recycled_and_not_closed_end_with_the_last_reference_to_them() -> None:
    gc.disable()
    try:
        policy = RestartPolicy(recycle_after_episodes=5)
        envs = SubprocessVectorEnv([calm], autoreset_mode="SAME_STEP", restart=policy)
        envs.reset(seed=5)
        pid = envs.statistics()[0].pid or 0
        del envs
        assert becomes_true(lambda: not is_alive(pid))
    finally:
        gc.enable()


def test_calls_that_end_the_process_of_new_envs_are_left_out_of_a_replacement_by_plan_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new process for each episode; poking an env ends every process but the first."""
    policy = RestartPolicy(recycle_after_episodes=1, snapshots=False, backoff=0.0)
    with SubprocessEnv(partial(PokedOnce, tmp_path / "built", horizon=2), env_index=0, restart=policy) as env:
        for _ in range(2):
            env.reset(seed=1)
            env.step(1)
            if not caplog.records:
                env.call("poke", 0.5)
            env.step(1)
    assert "what was called and set is left out: repeating it has ended a process" in caplog.text


class PokedOnce(CounterEnv):
    def __init__(self, marker: Path, **counter: Any) -> None:
        super().__init__(**counter)
        self.is_first = not marker.exists()
        marker.touch()

    def poke(self, amount: float) -> Any:
        if not self.is_first:
            os._exit(3)
        return super().poke(amount)
