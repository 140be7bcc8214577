"""Every kind of space in a batch: laid out in shared memory, pickled, and looked at without copying."""

from __future__ import annotations

import tracemalloc
from functools import partial

import gymnasium
import numpy as np
import pytest
from contract_envs import BrokenFirstEnv, bounded, space_env
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from kit import SpaceEnv
from kit.side_by_side import beside_gymnasium, expect_same, run_side_by_side
from multienv import SerialVectorEnv, SubprocessVectorEnv
from multienv.errors import EnvsFailedError, ResetNeededError

FACES = [SubprocessVectorEnv, SerialVectorEnv]
both_faces = pytest.mark.parametrize("face", FACES)
CARTPOLE = partial(gymnasium.make, "CartPole-v1")


# --- observation_mode ---------------------------------------------------------------------------


@both_faces
def test_different_spaces(face):
    env_fns = [partial(bounded, high) for high in (1.0, 2.0, 3.0)]
    with beside_gymnasium(face, env_fns, observation_mode="different") as pair:
        assert pair[0].observation_space.high[:, 0].tolist() == [1.0, 2.0, 3.0]
        run_side_by_side(*pair, 8)
    with pytest.raises(RuntimeError, match="observation_mode='different'.*env 1 has the observation space"):
        face(env_fns)


@both_faces
def test_spaces_of_the_callers_own(face):
    single = spaces.Box(0.0, 5.0, (2,), np.float32)
    batched = spaces.Box(0.0, 5.0, (3, 2), np.float32)
    env_fns = [partial(bounded, high) for high in (1.0, 2.0, 3.0)]
    with beside_gymnasium(face, env_fns, observation_mode=(batched, single)) as pair:
        assert pair[0].single_observation_space is single
        run_side_by_side(*pair, 8)


@both_faces
@pytest.mark.parametrize("mode", ["same", "different"])
@pytest.mark.parametrize("width", [3000])
def test_spaces_that_do_not_fit_one_batch(face, mode, width):
    """Also where they take other memory than the first env's, which all processes lay out as they know it."""
    env_fns = [partial(bounded, 1.0), partial(bounded, 1.0), partial(bounded, 1.0, width=width)]
    with pytest.raises(RuntimeError, match="env 2 has the observation space"):
        face(env_fns, observation_mode=mode)
    with pytest.raises(RuntimeError, match="env 1 has the observation space"):
        face([partial(bounded, 1.0, width=width), partial(bounded, 1.0)], observation_mode=mode)


# --- without copying ------------------------------------------------------------------------------


@both_faces
def test_views_hold_until_the_next_step_but_one(face):
    with beside_gymnasium(face, [CARTPOLE] * 3, {"copy": False}) as (ours, theirs):
        seen = [(ours.reset(seed=1)[0], theirs.reset(seed=1)[0])]
        for step in range(12):
            actions = np.random.default_rng(step).integers(0, 2, 3)
            ours.call("get_wrapper_attr", "length")  # nor does a call overwrite them
            seen.append((ours.step(actions)[0], theirs.step(actions)[0]))
            for view, expected in seen[-2:]:
                expect_same(view.copy(), expected, step)
        assert np.shares_memory(seen[-1][0], seen[-3][0])
        assert not np.shares_memory(seen[-1][0], seen[-2][0])


@both_faces
@pytest.mark.parametrize("kind", ["dict", "box_float32"])
def test_views_outlive_the_envs(face, kind):
    envs = face([partial(space_env, kind)] * 2, copy=False)
    observations, _ = envs.reset(seed=3)
    leaf = observations
    while not isinstance(leaf, np.ndarray):
        leaf = next(iter(leaf.values())) if isinstance(leaf, dict) else leaf[0]
    before = leaf.copy()
    envs.close()
    del envs, observations
    assert leaf.tobytes() == before.tobytes()
    leaf[:] = 0  # it is the caller's now
    del leaf


# --- what has no observation yet --------------------------------------------------------------------


@both_faces
def test_an_env_that_fails_before_it_has_shown_anything(face):
    envs = face([partial(BrokenFirstEnv, broken=broken) for broken in (0, 2)])
    with pytest.raises(EnvsFailedError, match="not yet") as caught:
        envs.reset(seed=0)
    assert list(caught.value.failures) == [1]
    with pytest.raises(OSError, match="not yet"):
        envs.step(np.zeros(2, int))  # begins it anew, in vain
    observations, rewards, *_ = envs.step(np.zeros(2, int))
    assert all(one.startswith("token") for one in observations)
    assert rewards[0] > 0 == rewards[1]
    envs.close()


@both_faces
def test_a_first_reset_of_some(face):
    mask = np.array([True, False])
    envs = face([partial(space_env, "custom")] * 2, autoreset_mode=AutoresetMode.DISABLED)
    observations, _ = envs.reset(options={"reset_mask": mask})
    assert observations[0] is not None
    assert observations[1] is None
    envs.close()
    envs = face([CARTPOLE] * 2, autoreset_mode=AutoresetMode.DISABLED)
    observations, _ = envs.reset(seed=1, options={"reset_mask": mask})
    assert observations[0].any()
    assert not observations[1].any()
    theirs = SyncVectorEnv([CARTPOLE] * 2)
    theirs.reset(seed=1)
    with pytest.raises(ResetNeededError) as refused:
        envs.step(np.zeros(2, int))
    expect_same(refused.value.results[0][0], theirs.step(np.zeros(2, int))[0][0])
    assert list(refused.value.failures) == [1]
    envs.reset(seed=1, options={"reset_mask": ~mask})
    theirs.reset(seed=1, options={"reset_mask": ~mask})
    expect_same(envs.step(np.zeros(2, int)), theirs.step(np.zeros(2, int)))
    envs.close()


@pytest.mark.parametrize("copy", [False, True])
def test_with_copy_false_no_step_allocates_observations(copy: bool) -> None:
    env_fn = partial(SpaceEnv, observation_space=spaces.Box(0, 255, (160, 160, 3), np.uint8))
    envs = SubprocessVectorEnv([env_fn] * 4, copy=copy)
    envs.reset(seed=0)
    for _ in range(4):
        envs.step(np.zeros(4, np.int64))
    size = 4 * 160 * 160 * 3
    tracemalloc.start()
    try:
        for _ in range(6):
            envs.step(np.zeros(4, np.int64))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        envs.close()
    assert (peak > size) == copy, f"{peak} bytes"


def test_batch_of_more_than_4_mib_is_the_callers() -> None:
    """Put together in another way than a small one: by numpy, which gets huge pages for it."""
    space = spaces.Dict({"frame": spaces.Box(0, 255, (860, 860, 3), np.uint8), "count": spaces.Discrete(9)})
    env_fns = [partial(SpaceEnv, observation_space=space, seed=seed) for seed in (1, 2)]
    with beside_gymnasium(SubprocessVectorEnv, env_fns, {"envs_per_worker": 1}) as (ours, theirs):
        expect_same(ours.reset(seed=1), theirs.reset(seed=1))
        kept = [ours.step(np.zeros(2, int))[0] for _ in range(4)]
        expect_same(kept[0], theirs.step(np.zeros(2, int))[0])  # no later step has overwritten it
