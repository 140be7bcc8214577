"""An env that nobody has seeded has a generator with a recorded seed: it can be brought back all the same."""

from __future__ import annotations

import os
import random
import signal
from contextlib import closing
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from vector_pairs import beside_gymnasium, expect_same, run_side_by_side

from kit import CounterEnv
from multienv import RestartPolicy, SerialEnv, SerialVectorEnv, SubprocessEnv, SubprocessVectorEnv

SEEDS = (21, 22, 23)
FACES = [SerialVectorEnv, SubprocessVectorEnv]


class SeesSeedEnv(CounterEnv):
    """Shows in each info what seed its reset was given: 0 for none."""

    given = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.given = 0 if seed is None else seed
        return super().reset(seed=seed, options=options)

    def _info(self) -> dict[str, Any]:
        return {"given": self.given}


class OwnGeneratorEnv(CounterEnv):
    """Draws from a generator of its own, made by its constructor without a seed."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.luck = np.random.default_rng()

    def _next_draw(self) -> float:
        return float(self.luck.random())


class ChanceEnv(CounterEnv):
    """Each episode, and each tenth step, draws from a generator that was made without a seed."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.luck = np.random.default_rng()
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.luck = np.random.default_rng()
        return self._lucky(super().reset(seed=seed, options=options))

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps % 10 == 0:
            self.luck = np.random.default_rng()
        observation, reward, *rest = super().step(action)
        return observation, float(reward) + self.luck.random(), *rest

    def _lucky(self, first: tuple[Any, Any]) -> tuple[Any, Any]:
        return first[0] + np.float64(self.luck.random()).astype(first[0].dtype), first[1]


class UnlikeEnv(CounterEnv):
    """Nobody can have it again."""

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, random.SystemRandom().random(), *rest


def seeded_by_its_maker(seed: int) -> gymnasium.Env[Any, Any]:
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=seed)
    return env


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_resets_without_a_seed_are_so_for_each_env_of_a_batch(face: Any, mode: str) -> None:
    with closing(face([partial(SeesSeedEnv, horizon=2)] * 3, autoreset_mode=mode)) as envs:
        given = [envs.reset()[1]["given"]]
        given += [envs.step(np.ones(3, int))[4]["given"] for _ in range(3)]
        assert not np.any(given)
        assert len(set(envs.np_random_seed)) == 3
        assert envs.reset(seed=[None, 5, None])[1]["given"].tolist() == [0, 5, 0]


@pytest.mark.parametrize("face", [SerialEnv, SubprocessEnv])
def test_resets_without_a_seed_are_so_for_a_single_env(face: Any) -> None:
    with closing(face(partial(SeesSeedEnv, horizon=2))) as env:
        env.initialize()
        assert [env.reset(seed=seed)[1]["given"] for seed in (None, None, 4, None)] == [0, 0, 4, 0]


@pytest.mark.parametrize("face", FACES)
def test_what_env_fn_has_seeded_stays_so(face):
    with beside_gymnasium(face, [partial(seeded_by_its_maker, seed) for seed in SEEDS]) as (ours, theirs):
        expect_same(ours.reset(), theirs.reset())
        for step in range(60):
            actions = theirs.action_space.sample()
            expect_same(ours.step(actions), theirs.step(actions), step)
        assert ours.np_random_seed == SEEDS


def test_two_batches_differ_and_so_do_their_envs_and_a_life_from_the_last():
    policy = RestartPolicy(snapshots=False, state_anchors=False)
    seen: list[float] = []
    for _ in range(2):
        with closing(SubprocessVectorEnv([UnlikeEnv] * 4, restart=policy)) as envs:
            seen += envs.reset()[0][:, 2].tolist()
            envs.step(np.zeros(4, int))
            for one in envs.statistics():
                assert one.pid is not None
                os.kill(one.pid, signal.SIGKILL)
            assert envs.step(np.zeros(4, int))[3].all()
            seen += envs.step(np.zeros(4, int))[0][:, 2].tolist()
    assert len(set(seen)) == 16


KEPT = {
    "journal": RestartPolicy(snapshots=False, state_anchors=False),
    "snapshots": RestartPolicy(snapshot_every=3),
}


@pytest.mark.parametrize("mode", ["NextStep", pytest.param("SameStep", marks=pytest.mark.soak)])
@pytest.mark.parametrize("rung", ["journal", "snapshots"])
def test_a_batch_that_was_never_seeded_is_brought_back_exactly(rung: str, mode: str) -> None:
    made = partial(CounterEnv, horizon=7, count_episodes=False)
    killed = SubprocessVectorEnv([made] * 4, envs_per_worker=2, restart=KEPT[rung], autoreset_mode=mode)
    calm = SerialVectorEnv([made] * 4, autoreset_mode=mode)
    with closing(killed), closing(calm):
        expect_same(killed.reset()[0], calm.reset(seed=list(killed.np_random_seed))[0])
        for step in range(60):
            if step % 7 == 3:
                pid = killed.statistics()[step % 2].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            actions = np.full(4, step % 3)
            mine, other = killed.step(actions), calm.step(actions)
            assert "multienv" not in mine[4], mine[4]
            expect_same(mine, other, step)
        assert sum(one.losses for one in killed.statistics()) >= 8


@pytest.mark.parametrize("rung", ["journal", "snapshots"])
@pytest.mark.parametrize("seed", [None, 5])
def test_a_generator_that_the_constructor_makes_without_a_seed_is_brought_back(rung: str, seed: int | None) -> None:
    with SubprocessEnv(partial(OwnGeneratorEnv, horizon=10), restart=KEPT[rung]) as env:
        env.reset(seed=seed)
        for step in range(25):
            if step % 7 == 3:
                pid = env.statistics().pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            _, _, terminated, truncated, info = env.step(1)
            assert not truncated, info
            if terminated:
                env.reset()
        assert env.statistics().exact_recoveries >= 3


@pytest.mark.parametrize("rung", ["journal", "snapshots"])
def test_what_draws_from_outside_comes_back_from_a_snapshot_and_is_truncated_without_one(rung: str) -> None:
    with SubprocessEnv(partial(ChanceEnv, horizon=1000), restart=KEPT[rung]) as env:
        env.reset()
        luck = [float(env.step(1)[1]) for _ in range(5)]
        pid = env.statistics().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        truncated = env.step(1)[3]
        assert truncated is (rung == "journal")
        assert len(set(luck)) == 5


def test_a_checkpoint_brings_the_given_generator_along() -> None:
    def run(env: SubprocessEnv, steps: int) -> list[float]:
        return [float(env.step(1)[1]) for _ in range(steps)]

    first, second = (SubprocessEnv(partial(CounterEnv, horizon=100)) for _ in range(2))
    with closing(first), closing(second):
        first.initialize()
        second.initialize()
        first.reset()
        run(first, 7)
        second.load_state_dict(first.state_dict())
        assert run(second, 25) == run(first, 25)


def test_side_by_side_once_seeded():
    """The seeds that are given are still what counts."""
    with beside_gymnasium(SubprocessVectorEnv, [partial(CounterEnv, horizon=4)] * 3) as (ours, theirs):
        ours.reset()
        run_side_by_side(ours, theirs, 20)
