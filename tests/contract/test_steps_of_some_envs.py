"""Envs that share a worker are stepped when they have their actions; those that have none are left alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from contract_envs import DictEnv
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import iterate

from kit import CounterEnv, Fault, FaultyEnv, ForkingPolicy, SpaceEnv, TokenSpace, first_difference, kill_worker
from kit.gates import GO, WAIT, GateEnv
from kit.side_by_side import info_of
from multienv import RestartPolicy, SubprocessVectorEnv
from multienv.errors import EnvsFailedError, WorkerLostError
from multienv.testing import Killer

NUM_ENVS = 4
ENV_FNS = [partial(CounterEnv, horizon=3 + index) for index in range(NUM_ENVS)]
ENDLESS = [partial(CounterEnv, horizon=None)] * NUM_ENVS
WITHOUT_ROWS = [partial(SpaceEnv, observation_space=TokenSpace(), horizon=3 + index) for index in range(NUM_ENVS)]
MODES = ["NextStep", "SameStep", "Disabled"]
shared = partial(SubprocessVectorEnv, envs_per_worker=NUM_ENVS)


def actions_of(envs: Any, steps: Any) -> np.ndarray[Any, Any]:
    return np.array([(step + env) % 4 for env, step in zip(envs, steps, strict=True)])


def rows_of(space: Any, values: Any, infos: Any, count: int) -> list[tuple[Any, ...]]:
    observations, rewards, terminated, truncated = values
    rows = list(iterate(space, observations)) if isinstance(observations, np.ndarray | dict) else observations
    return [
        (rows[place], float(rewards[place]), bool(terminated[place]), bool(truncated[place]), info_of(infos, place))
        for place in range(count)
    ]


def at_random(envs: Any, steps: int, seed: int, between: Callable[[], object] = lambda: None) -> list[list[Any]]:
    """Send to some of the envs that are idle, and receive some that are under way; return each env's trajectory."""
    random, found = Random(seed), [list[Any]() for _ in range(envs.num_envs)]
    envs.reset_async(seed=3)
    while min(map(len, found)) <= steps:
        under_way = envs.num_envs - len(envs.idle_envs)
        if under_way:
            k = random.randint(1, under_way)
            *values, infos, indices = envs.recv(k, at_most=random.randint(k, under_way))
            for env, row in zip(indices, rows_of(envs.observation_space, values, infos, len(indices)), strict=True):
                found[env].append(row)
        idle = [env for env in envs.idle_envs if random.random() < 0.4]
        random.shuffle(idle)
        if idle:
            envs.send(actions_of(idle, [len(found[env]) for env in idle]), idle)
        between()
    return [one[: steps + 1] for one in found]


def in_step(mode: str, steps: int, env_fns: Any) -> list[list[Any]]:
    """The same in gymnasium's own vector env."""
    envs = SyncVectorEnv(env_fns, autoreset_mode=mode)
    observations, infos = envs.reset(seed=3)
    zeros = np.zeros(NUM_ENVS)
    found = [[row] for row in rows_of(envs.observation_space, (observations, zeros, zeros, zeros), infos, NUM_ENVS)]
    for step in range(1, steps + 1):
        *values, infos = envs.step(actions_of(range(NUM_ENVS), [step] * NUM_ENVS))
        for env, row in enumerate(rows_of(envs.observation_space, values, infos, NUM_ENVS)):
            found[env].append(row)
    envs.close()
    return found


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("env_fns", [ENV_FNS, [DictEnv] * NUM_ENVS, WITHOUT_ROWS], ids=["box", "dict", "without rows"])
def test_each_env_returns_what_it_returns_in_step(env_fns: Any, mode: str) -> None:
    with shared(env_fns, autoreset_mode=mode) as envs:
        for seed in range(3):
            assert first_difference(at_random(envs, 20, seed), in_step(mode, 20, env_fns)) is None, seed
            envs.reset(seed=3)


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        (ForkingPolicy(snapshot_every=5), "NextStep"),
        (RestartPolicy(snapshots=False), "SameStep"),
        pytest.param(ForkingPolicy(snapshot_every=5), "SameStep", marks=pytest.mark.ci),
        pytest.param(RestartPolicy(snapshots=False), "NextStep", marks=pytest.mark.ci),
    ],
    ids=str,
)
@pytest.mark.parametrize("env_fns", [ENV_FNS, WITHOUT_ROWS], ids=["box", "without rows"])
def test_each_env_returns_what_it_returns_in_step_while_the_worker_is_killed(
    env_fns: Any, mode: str, policy: RestartPolicy
) -> None:
    with shared(env_fns, autoreset_mode=mode, restart=policy) as envs:
        killer, calls = Killer(envs, seed=1), iter(range(10_000))
        found = at_random(envs, 30, 1, between=lambda: next(calls) % 20 == 7 and killer.strike())
        assert first_difference(found, in_step(mode, 30, env_fns)) is None
        assert envs.statistics()[0].losses >= 3


@pytest.mark.parametrize("kind", [np.array, list])
def test_a_worker_steps_an_env_at_once_and_those_that_come_meanwhile_when_it_is_free(kind: Any, tmp_path: Path) -> None:
    with shared([partial(GateEnv, tmp_path)] * NUM_ENVS) as envs:
        envs.reset(seed=3)
        envs.send(np.array([WAIT]), [2])
        actions = kind([GO, 1])
        envs.send(actions, [0, 3])
        actions[0] = actions[1] = 2  # the worker gets what was sent
        (tmp_path / "gate").touch()
        *_, indices = envs.recv(1)
        assert indices.tolist() == [2]
        observations, *_, indices = envs.recv(2)
        assert {env: row[[0, 3]].tolist() for env, row in zip(indices, observations, strict=True)} == {
            0: [1, GO],
            3: [1, 1],
        }
        assert envs.step(np.array([GO] * NUM_ENVS))[0][:, 0].tolist() == [2, 1, 2, 2]


def test_a_reset_of_one_env_and_steps_of_others_are_asked_one_after_the_other() -> None:
    with shared(ENDLESS, autoreset_mode="Disabled") as envs:
        envs.reset(seed=3)
        for number in range(1, 21):
            envs.reset_async(options={"reset_mask": np.array([True, False, False, False])})
            envs.send(np.array([1]), [1])
            envs.send(np.array([1]), [2])
            observations, *_, indices = envs.recv()
            steps = {env: row[0] for env, row in zip(indices.tolist(), observations, strict=True)}
            assert steps == {0: 0, 1: number, 2: number}
        assert envs.step(np.array([1] * NUM_ENVS))[0][:, 0].tolist() == [1, 21, 21, 1]


def lose_in_a_step_of(envs: Any, env: int) -> None:
    envs.reset(seed=3)
    envs.step(np.array([0] * NUM_ENVS))
    kill_worker(envs)
    envs.send(np.array([1]), [env])


@pytest.mark.parametrize("mode", MODES)
def test_a_truncation_is_told_to_each_env_by_its_own_next_step_and_once(mode: str) -> None:
    with shared(ENDLESS, autoreset_mode=mode, restart=RestartPolicy(on_crash="truncate")) as envs:
        lose_in_a_step_of(envs, 2)
        truncated, seen = np.zeros(NUM_ENVS, int), {0: [1.0], 1: [1.0], 2: [1.0], 3: [1.0]}
        for env in (2, 2, 2, 0, 2, 0, 1, 0, 2, 3, 1, 1, 3, 3, 0):
            if env != 2 or truncated[2]:
                envs.send(np.array([1]), [env])
            observations, rewards, _, truncations, infos, indices = envs.recv()
            assert indices.tolist() == [env]
            if truncations[0]:
                truncated[env] += 1
                assert rewards[0] == 0
                info = info_of(infos, 0)
                assert info.get("final_info", info)["multienv"]["recovery"] == "truncated"
                assert info.get("final_obs", observations[0])[0] == 1, "what was seen last"
                if mode == "Disabled":
                    envs.reset_async(options={"reset_mask": np.arange(NUM_ENVS) == env})
                    observations, *_ = envs.recv()
            seen[env].append(observations[0][0])
        begun = [1.0, 1, 0] if mode == "NextStep" else [1.0, 0]
        assert seen == {
            0: [*begun, 1, 2, 3][:5],
            1: [*begun, 1, 2][:4],
            2: [*begun, 1, 2, 3, 4][:6],
            3: [*begun, 1, 2][:4],
        }
        assert truncated.tolist() == [1] * NUM_ENVS


def test_a_loss_that_is_raised_for_one_env_is_told_to_the_others_by_a_truncation() -> None:
    mask = np.array([True, False, False, False])
    with shared(ENDLESS, restart=RestartPolicy(on_crash="raise")) as envs:
        lose_in_a_step_of(envs, 0)
        with pytest.raises(EnvsFailedError) as caught:
            envs.recv()
        assert {env: type(error) for env, error in caught.value.failures.items()} == {0: WorkerLostError}
        assert "the next reset() starts a new process" in str(caught.value.failures[0])
        envs.reset_async(options={"reset_mask": mask})
        assert envs.recv()[-1].tolist() == [0]
        observations, _, _, truncations, _ = envs.step(np.array([1] * NUM_ENVS))
        assert (observations[:, 0].tolist(), truncations.tolist()) == ([1] * NUM_ENVS, [False, True, True, True])
        observations, _, _, truncations, _ = envs.step(np.array([1] * NUM_ENVS))
        assert (observations[:, 0].tolist(), truncations.any()) == ([2, 0, 0, 0], False)


@pytest.mark.parametrize("mode", MODES)
def test_an_env_that_raises_is_truncated_alone(mode: str) -> None:
    raises = partial(FaultyEnv, fault=Fault("raise", "step", action=3), horizon=None)
    with shared([raises] * NUM_ENVS, autoreset_mode=mode, restart=RestartPolicy(on_error="truncate")) as envs:
        envs.reset(seed=3)
        envs.send(np.array([3, 1]), [1, 2])
        *_, truncations, _, indices = envs.recv()
        assert dict(zip(indices.tolist(), truncations.tolist(), strict=True)) == {1: True, 2: False}
        envs.send(np.array([1, 1]), [0, 3])
        observations, *_, truncations, _, _ = envs.recv()
        assert (observations[:, 0].tolist(), truncations.any()) == ([1, 1], False)
        if mode == "Disabled":
            envs.reset(options={"reset_mask": np.array([False, True, False, False])})
        observations, *_ = envs.step(np.array([1] * NUM_ENVS))
        assert observations[:, 0].tolist() == [2, 0 if mode == "NextStep" else 1, 2, 2]


def test_an_error_tells_the_step_of_the_episode_of_its_own_env() -> None:
    raises = partial(FaultyEnv, fault=Fault("raise", "step", action=3), horizon=None)
    with shared([raises] * NUM_ENVS) as envs:
        envs.reset(seed=3)
        for env in (0, 1, 0, 0, 2, 1, 0):
            envs.send(np.array([1]), [env])
            envs.recv()
        envs.send(np.array([3, 3, 3]), [0, 1, 3])
        with pytest.raises(EnvsFailedError) as caught:
            envs.recv()
        assert {env: error.step for env, error in caught.value.failures.items()} == {0: 4, 1: 2, 3: 0}  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_an_env_whose_reset_ends_its_process_goes_on_in_a_new_one_though_the_other_is_stepped_meanwhile(
    mode: str,
) -> None:
    ends_at_reset = partial(FaultyEnv, fault=Fault("exit", "reset", at=2), horizon=4, count_episodes=False)
    env_fns = [ends_at_reset, partial(CounterEnv, horizon=4, count_episodes=False)]
    with SubprocessVectorEnv(
        env_fns, envs_per_worker=2, autoreset_mode=mode, restart=RestartPolicy(backoff=0.0)
    ) as envs:
        envs.reset(seed=5)
        lost: list[int] = []
        for step in range(24):
            for env in (0, 1):
                envs.send(np.array([1]), [env])
                *_, truncations, _, _ = envs.recv()
                assert not (env and truncations[0])
                lost += [step] * int(truncations[0])
        assert np.diff(lost).min() >= 4
        assert len(lost) >= 4
        assert envs.statistics()[0].losses <= 4 * len(lost)
