"""Every generator an env holds is found, and the env is none the worse for it."""

from __future__ import annotations

import gc
import random
from typing import Any

import gymnasium
import numpy as np
import pytest

from multienv.worker import generators


class Drawing(gymnasium.Env[float, int]):
    """Draws from what it holds."""

    observation_space = gymnasium.spaces.Box(-10, 10)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, **held: Any) -> None:
        for name, value in held.items():
            setattr(self, name, value)

    def draw(self) -> list[float]:
        mine = [value.random() for value in vars(self).values() if hasattr(value, "random")]
        return [*mine, float(self.np_random.random()), float(self.action_space.sample()), random.random()]


def beginning() -> Drawing:
    shared = np.random.default_rng(1)
    env = Drawing(rng=shared, same=shared, old=random.Random(2), words=["a"])
    env.action_space = gymnasium.spaces.Discrete(1000, seed=3)
    env.np_random = np.random.default_rng(4)
    return env


@pytest.mark.parametrize("wrapped", [False, True])
def test_put_back(wrapped: bool) -> None:
    before = random.getstate(), np.random.get_state()
    try:
        env, copy = beginning(), beginning()
        outer: Any = gymnasium.wrappers.RecordEpisodeStatistics(env) if wrapped else env
        outer_copy: Any = gymnasium.wrappers.RecordEpisodeStatistics(copy) if wrapped else copy
        for _ in range(5):
            env.draw()
        state = generators.capture(outer)
        drawn = [env.draw(), float(np.random.random())]
        generators.restore(outer_copy, state)
        assert [copy.draw(), float(np.random.random())] == drawn
        assert copy.rng is copy.same
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@pytest.mark.parametrize("wrapped", [False, True])
def test_asking_for_the_seed_afterwards_draws_no_new_one(wrapped: bool) -> None:
    env, copy = beginning(), beginning()
    env.reset(seed=7)
    outer: Any = gymnasium.wrappers.RecordEpisodeStatistics(env) if wrapped else env
    outer_copy: Any = gymnasium.wrappers.RecordEpisodeStatistics(copy) if wrapped else copy
    copy._np_random = copy._np_random_seed = None
    generators.restore(outer_copy, generators.capture(outer))
    assert outer_copy.np_random_seed == 7
    assert copy.np_random.random() == env.np_random.random()


def test_a_property_that_raises_is_no_obstacle() -> None:
    class Odd(Drawing):
        @property
        def action_space(self) -> Any:  # type: ignore[override]
            raise RuntimeError("not yet")

    assert generators.capture(Odd(rng=np.random.default_rng(0)))


def test_ordinary_envs_keep_their_attributes_in_place() -> None:
    """Before 3.13 the attributes of an object whose ``__dict__`` was asked for are slower ever after."""
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=0)

    def layers_with_a_dict() -> int:
        # The attributes themselves are among the referents, unless they have been moved into a dict.
        return sum(layer.env not in gc.get_referents(layer) for layer in (env, env.env, env.env.env))  # type: ignore[attr-defined]

    before = layers_with_a_dict()
    generators.capture(env)
    assert layers_with_a_dict() == before
    assert "_np_random" in generators._names(env.unwrapped)
