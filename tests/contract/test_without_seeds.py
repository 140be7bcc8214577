"""An env that nobody has seeded has a generator with a recorded seed: it can be recovered all the same."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
from contract_envs import OwnGeneratorEnv, SeesSeedEnv, seeded_by_its_maker

from kit import CounterEnv, ForkingPolicy, kill_worker
from kit.side_by_side import beside_gymnasium, expect_same
from multienv import RestartPolicy, SerialEnv, SerialVectorEnv, SubprocessEnv, SubprocessVectorEnv

SEEDS = (21, 22, 23)
FACES = [SerialVectorEnv, SubprocessVectorEnv]


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


KEPT = {
    "journal": RestartPolicy(snapshots=False),
    "snapshots": ForkingPolicy(snapshot_every=3),
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
                kill_worker(killed, step % 2)
            actions = np.full(4, step % 3)
            mine, other = killed.step(actions), calm.step(actions)
            assert "multienv" not in mine[4], mine[4]
            expect_same(mine, other, step)
        assert sum(one.losses for one in killed.statistics()) >= 8


@pytest.mark.parametrize(("seed", "rung"), [(None, "journal"), (5, "snapshots")])
def test_a_generator_that_the_constructor_makes_without_a_seed_is_brought_back(rung: str, seed: int | None) -> None:
    with SubprocessEnv(partial(OwnGeneratorEnv, horizon=10), restart=KEPT[rung]) as env:
        env.reset(seed=seed)
        for step in range(25):
            if step % 7 == 3:
                kill_worker(env)
            _, _, terminated, truncated, info = env.step(1)
            assert not truncated, info
            if terminated:
                env.reset()
        assert env.statistics().exact_recoveries >= 3
