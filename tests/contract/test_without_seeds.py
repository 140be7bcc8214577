"""A reset without a seed is one for the env too; and what it leaves to chance is recorded all the same."""

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

from multienv import MultiEnv, RestartPolicy, SerialEnv, SerialVectorEnv, SubprocessEnv, SubprocessVectorEnv
from multienv.testing import CounterEnv

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


class ChanceEnv(CounterEnv):
    """Each episode, and each tenth step, draws from a generator that was made without a seed; so do its spaces."""

    def __init__(self, *, dies_of: int = -1, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.dies_of = dies_of
        self.luck = np.random.default_rng()
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.luck = np.random.default_rng()
        return self._lucky(super().reset(seed=seed, options=options))

    def step(self, action: Any) -> Any:
        self.steps += 1
        if action == self.dies_of:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps % 10 == 0:
            self.luck = np.random.default_rng()
        observation, reward, *rest = super().step(action)
        return observation, float(reward) + self.luck.random() + float(self.action_space.sample()), *rest

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
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_no_env_of_a_batch_is_given_a_seed_that_the_caller_has_not_given(face, mode):
    with beside_gymnasium(face, [partial(SeesSeedEnv, horizon=2)] * 3, autoreset_mode=mode) as (ours, theirs):
        expect_same(ours.reset()[1], theirs.reset()[1])
        for step in range(6):
            results = [envs.step(np.ones(3, int)) for envs in (ours, theirs)]
            told = [[infos.get("given"), infos.get("final_info", {}).get("given")] for *_, infos in results]
            expect_same(*told, step)
            ended = results[0][2] | results[0][3]
            if mode == "Disabled" and ended.any():
                expect_same(*(envs.reset(options={"reset_mask": ended})[1] for envs in (ours, theirs)), step)
        expect_same(ours.reset(seed=[None, 5, None])[1]["given"], np.array([0, 5, 0]))


@pytest.mark.parametrize("face", [SerialEnv, SubprocessEnv])
def test_nor_is_a_single_one(face):
    with closing(face(partial(SeesSeedEnv, horizon=2))) as env:
        env.initialize()
        assert [env.reset()[1]["given"] for _ in range(2)] == [0, 0]
        assert env.reset(seed=4)[1]["given"] == 4
        assert env.reset()[1]["given"] == 0
    with MultiEnv([face(SeesSeedEnv)]) as m:
        assert m.reset()[1][0]["given"] == 0


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
    "states": RestartPolicy(snapshots=False, replay_limit=1e-4),
    "snapshots": RestartPolicy(snapshot_every=3),
}


@pytest.mark.parametrize("mode", ["NextStep", pytest.param("SameStep", marks=pytest.mark.soak)])
@pytest.mark.parametrize("rung", KEPT)
def test_killed_and_undisturbed_are_equal_without_any_seed(rung, mode):
    """To the bit, for what is seeded anew in the middle of episodes, and however many are in a process."""
    made = partial(ChanceEnv, horizon=7)
    common: dict[str, Any] = {"autoreset_mode": mode, "_entropy": 77}
    killed = SubprocessVectorEnv([made] * 4, envs_per_worker=2, restart=KEPT[rung], **common)
    calm = SubprocessVectorEnv([made] * 4, envs_per_worker=4, **common)
    with closing(killed), closing(calm):
        for envs in (killed, calm):  # their spaces were drawn from while they were built, or will be
            envs.call("action_space.seed", 3)
        expect_same(killed.reset(), calm.reset())
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


def test_an_env_that_is_left_out_takes_no_luck_from_the_others():
    culprit = partial(ChanceEnv, dies_of=3, horizon=50)
    made = partial(ChanceEnv, horizon=50)
    policy = RestartPolicy(snapshots=False, state_anchors=False)
    ours = SubprocessVectorEnv([made, culprit, made], envs_per_worker=3, restart=policy, _entropy=5)
    calm = SubprocessVectorEnv([made] * 3, envs_per_worker=1, _entropy=5)
    with closing(ours), closing(calm):
        ours.call("action_space.seed", 3)
        calm.call("action_space.seed", 3)
        expect_same(ours.reset(), calm.reset())
        truncated = 0
        for step in range(30):
            actions = np.array([1, 3 if step == 5 else 1, 1])
            mine, other = ours.step(actions), calm.step(actions)
            truncated += int(mine[3][1])
            for one, another in zip(mine[:4], other[:4], strict=True):
                expect_same(one[[0, 2]], another[[0, 2]], step)
        assert truncated == 1


def test_a_single_env_goes_on_as_it_was():
    env = SubprocessEnv(partial(ChanceEnv, horizon=1000), restart=KEPT["journal"])
    twin = SubprocessEnv(partial(ChanceEnv, horizon=1000))
    twin._supervisor._healer.seeds = env._supervisor._healer.seeds
    with closing(env), closing(twin):
        for one in (env, twin):
            one.initialize()
        expect_same(env.reset(), twin.reset())
        for step in range(40):
            if step % 9 == 4:
                pid = env.statistics().pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            mine, other = env.step(1), twin.step(1)
            assert not mine[3]
            expect_same(mine, other, step)
        assert env.statistics().losses == 4


def test_a_checkpoint_brings_it_along():
    def run(env: SubprocessEnv, steps: int) -> list[float]:
        return [float(env.step(1)[1]) for _ in range(steps)]

    first, second = (SubprocessEnv(partial(ChanceEnv, horizon=100)) for _ in range(2))
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
