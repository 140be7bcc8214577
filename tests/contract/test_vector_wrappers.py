"""make_vec, pictures, and gymnasium's vector wrappers around ours as around its own."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit, TransformReward
from gymnasium.wrappers import vector as wrappers

from kit import CounterEnv
from kit.side_by_side import expect_same
from multienv import (
    BatchOptions,
    Deadlines,
    RayOptions,
    RayVectorEnv,
    SerialVectorEnv,
    SubprocessVectorEnv,
    WorkerOptions,
    make_vec,
)

FACES = [SubprocessVectorEnv, SerialVectorEnv]
both_faces = pytest.mark.parametrize("face", FACES)
CARTPOLE = partial(gymnasium.make, "CartPole-v1", max_episode_steps=6)
DRAWN = partial(CARTPOLE, render_mode="rgb_array")

WRAPPERS = {
    "RecordEpisodeStatistics": wrappers.RecordEpisodeStatistics,
    "NormalizeObservation": wrappers.NormalizeObservation,
    "NormalizeReward": wrappers.NormalizeReward,
    "DictInfoToList": wrappers.DictInfoToList,
    "TransformReward": partial(wrappers.TransformReward, func=lambda reward: reward * 3),
}


def without_time(batch: Any) -> Any:
    """How long an episode took is nobody else's business."""
    batch = copy.deepcopy(batch)
    infos = batch[-1] if isinstance(batch[-1], list) else [batch[-1]]
    for info in infos:
        for key in ("t", "_t"):
            info.get("episode", {}).pop(key, None)
    return batch


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, AutoresetMode.NEXT_STEP) for name in WRAPPERS]
    + [(name, AutoresetMode.SAME_STEP) for name in ("RecordEpisodeStatistics", "NormalizeReward")],
)
def test_vector_wrappers(name, mode):
    make = WRAPPERS[name]
    pair = [make(kind([CARTPOLE] * 3, autoreset_mode=mode)) for kind in (SubprocessVectorEnv, SyncVectorEnv)]
    try:
        expect_same(*(without_time(envs.reset(seed=1)) for envs in pair))
        for step in range(20):
            actions = np.random.default_rng(step).integers(0, 2, 3)
            expect_same(*(without_time(envs.step(actions)) for envs in pair), step)
    finally:
        for envs in pair:
            envs.close()


# --- pictures -----------------------------------------------------------------------------------


@both_faces
def test_pictures_of_all(face):
    theirs = SyncVectorEnv([DRAWN] * 3)
    envs = face([DRAWN] * 3)
    try:
        assert envs.render_mode == "rgb_array"
        theirs.reset(seed=1)
        envs.reset(seed=1)
        expect_same(envs.render(), theirs.render())
        expect_same(envs.call("render"), theirs.call("render"))
        expect_same(envs.get_images(), list(theirs.render()))
    finally:
        theirs.close()
        envs.close()


# --- make_vec -----------------------------------------------------------------------------------------


def run(envs: Any, steps: int = 15) -> list[Any]:
    try:
        batches = [envs.reset(seed=3)]
        for step in range(steps):
            actions = np.random.default_rng(step).integers(0, 2, envs.num_envs)
            batches.append(envs.step(actions))
        return batches
    finally:
        envs.close()


def doubled(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    return TransformReward(env, lambda reward: float(reward) * 2)


VECTORIZATIONS = {"subprocess": SubprocessVectorEnv, "serial": SerialVectorEnv}


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_make_vec_makes_what_gymnasium_makes(vectorization):
    options: dict[str, Any] = {
        "wrappers": [doubled],
        "vector_kwargs": {"autoreset_mode": AutoresetMode.SAME_STEP},
        "max_episode_steps": 5,
        "sutton_barto_reward": True,
    }
    theirs = gymnasium.make_vec("CartPole-v1", 3, "sync", **options)
    ours = make_vec("CartPole-v1", 3, vectorization, **options)
    assert type(ours) is VECTORIZATIONS[vectorization]
    assert ours.spec.id == theirs.spec.id
    assert ours.spec.max_episode_steps == theirs.spec.max_episode_steps
    told = {key: value for key, value in ours.spec.kwargs.items() if key not in ("vectorization", "wrappers")}
    assert told == {
        key: value for key, value in theirs.spec.kwargs.items() if key not in ("vectorization_mode", "wrappers")
    }
    again = make_vec(ours.spec)
    assert type(again) is type(ours)
    assert again.spec == ours.spec
    expected = run(theirs)
    expect_same(run(ours), expected)
    expect_same(run(again), expected)


def test_make_vec_takes_the_options_of_the_vector_envs_by_name() -> None:
    """Also beside vector_kwargs; an argument of the env that has the name of an option is bound to the function."""
    deadlines = Deadlines(step=3.0)
    options: dict[str, Any] = {"deadlines": deadlines, "envs_per_worker": 1, "merge_infos": False}
    with make_vec("CartPole-v1", 2, vector_kwargs={"copy": False}, sutton_barto_reward=True, **options) as envs:
        assert (envs.envs_per_worker, envs.copy) == ([1, 1], False)
        assert envs.spec.kwargs == {
            "sutton_barto_reward": True, "num_envs": 2, "vectorization": "subprocess",
            "vector_kwargs": {"copy": False, **options},
        }  # fmt: skip
        assert isinstance(envs.reset(seed=0)[1], list)
    with make_vec(partial(Copied, copy=3), 1, "serial", copy=False) as envs:
        assert (envs.get_attr("copied"), envs.copy) == ((3,), False)
    taken = {
        name
        for face in (SubprocessVectorEnv, RayVectorEnv)
        for name, one in inspect.signature(face).parameters.items()
        if one.kind is one.KEYWORD_ONLY
    }
    assert set(BatchOptions.__annotations__) | set(WorkerOptions.__annotations__) < taken
    with pytest.raises(TypeError, match="unexpected keyword argument 'ray'"):
        make_vec("CartPole-v1", 2, ray=RayOptions())


class Copied(CounterEnv):
    def __init__(self, copy: int) -> None:
        super().__init__()
        self.copied = copy


def test_make_vec_in_short():
    envs = make_vec("CartPole-v1", 8)
    assert isinstance(envs, SubprocessVectorEnv)
    assert repr(envs) == "SubprocessVectorEnv(CartPole-v1, num_envs=8)"
    expect_same(run(envs), run(gymnasium.make_vec("CartPole-v1", 8, "sync")))
    one = make_vec("CartPole-v1")
    assert one.num_envs == 1
    one.close()


@pytest.mark.parametrize("vectorization", VECTORIZATIONS)
def test_make_vec_of_a_function(vectorization):
    envs = make_vec(CounterEnv, 2, vectorization, wrappers=[lambda env: TimeLimit(env, 3)], horizon=9)
    assert envs.spec is None
    assert envs.get_attr("horizon") == (9, 9)
    assert [bool(batch[3][0]) for batch in run(envs, 3)[1:]] == [False, False, True]


@pytest.mark.parametrize(
    ("arguments", "options", "face"),
    [
        (("async",), {}, SubprocessVectorEnv),
        (("sync",), {}, SerialVectorEnv),
        ((), {"vectorization_mode": "async"}, SubprocessVectorEnv),
        ((), {"vectorization_mode": gymnasium.VectorizeMode.SYNC}, SerialVectorEnv),
        ((), {"vectorization_mode": None}, SubprocessVectorEnv),
    ],
)
def test_make_vec_in_the_words_of_gymnasium(arguments, options, face):
    envs = make_vec("CartPole-v1", 2, *arguments, **options)
    assert type(envs) is face
    again = make_vec(envs.spec)
    assert type(again) is face
    expect_same(run(again), run(envs))
