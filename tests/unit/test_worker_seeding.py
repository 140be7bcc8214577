"""Generators that are told of and put back."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import wrappers

from multienv._engine.worker import seeding


@pytest.fixture(autouse=True)
def process_generators() -> Iterator[None]:
    before = random.getstate(), np.random.get_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])


class Drawing(gymnasium.Env[float, int]):
    """Draws from what it holds."""

    observation_space = gymnasium.spaces.Box(-10, 10)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, **held: Any) -> None:
        for name, value in held.items():
            setattr(self, name, value)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[float, dict[str, Any]]:
        super().reset(seed=seed)
        return 0.0, {}

    def draw(self) -> list[float]:
        mine = [value.random() for value in vars(self).values() if hasattr(value, "random")]
        return [*mine, float(self.np_random.random()), float(self.action_space.sample()), random.random()]


def holding_generators() -> Drawing:
    shared = np.random.default_rng(1)
    env = Drawing(rng=shared, same=shared, old=random.Random(2), legacy=np.random.RandomState(5), words=["a"])
    env.held_elsewhere = [shared]  # type: ignore[attr-defined]
    env.action_space = gymnasium.spaces.Discrete(1000, seed=3)
    env.np_random = np.random.default_rng(4)
    return env


def wrapped(env: Any) -> Any:
    return wrappers.RecordEpisodeStatistics(env)


def told_of(env: Any) -> bytes:
    return seeding.states_of(env)


@pytest.mark.parametrize("outside", [lambda env: env, wrapped], ids=["bare", "wrapped"])
def test_all_generators_of_env_space_and_process_are_put_back(outside: Any) -> None:
    env, copy = holding_generators(), holding_generators()
    for _ in range(5):
        env.draw()
    state = told_of(outside(env))
    drawn = [env.draw(), float(np.random.random())]
    for _ in range(2):
        seeding.restore(outside(copy), state)
        assert [copy.draw(), float(np.random.random())] == drawn
    assert copy.rng is copy.same is copy.held_elsewhere[0]  # type: ignore[attr-defined]
    env.reset(seed=7)
    copy._np_random = copy._np_random_seed = None
    seeding.restore(outside(copy), told_of(outside(env)))
    assert outside(copy).np_random_seed == 7
    assert copy.np_random.random() == env.np_random.random()


@pytest.mark.parametrize("kind", ["PCG64", "MT19937", "RandomState", "Random"])
@pytest.mark.parametrize("held_before", ["the same kind", "another kind", "nothing"])
def test_a_generator_under_two_names_is_one_again_whatever_its_kind(kind: str, held_before: str) -> None:
    def make(seed: int) -> Any:
        if kind in ("Random", "RandomState"):
            return random.Random(seed) if kind == "Random" else np.random.RandomState(seed)
        return np.random.Generator(getattr(np.random, kind)(seed))

    generator, other = make(1), {"the same kind": make(2), "another kind": np.random.Generator(np.random.SFC64(2))}
    draw = generator.gauss if kind == "Random" else generator.normal
    draw(0, 1)  # of some kinds the second normal number is kept beside the state
    env = Drawing(one=generator, two=generator)
    copy = Drawing(one=other.get(held_before), two=other.get(held_before))
    state = told_of(env)
    drawn = [draw(0, 1) for _ in range(3)]
    seeding.restore(copy, state)
    assert copy.one is copy.two  # type: ignore[attr-defined]
    draw = copy.one.gauss if kind == "Random" else copy.one.normal  # type: ignore[attr-defined]
    assert [draw(0, 1) for _ in range(3)] == drawn


class Showing(Drawing):
    """Keeps its generator in an object of its own, and shows it as ``np_random``, as shimmy does with dm_control's."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.task = SimpleNamespace(drawing=np.random.RandomState(seed))

    @property
    def np_random(self) -> Any:
        return self.task.drawing


def test_a_generator_that_is_only_shown_is_put_back_where_it_is() -> None:
    env = wrapped(Showing(1))
    told = told_of(env)
    drawn = [env.unwrapped.np_random.random() for _ in range(2)]
    other = wrapped(Showing(2))
    task, generator = other.unwrapped.task, other.unwrapped.task.drawing
    seeding.restore(other, told)
    assert [generator.random() for _ in range(2)] == drawn
    assert (other.unwrapped.task, task.drawing) == (task, generator)


def test_what_the_system_draws_is_left_alone() -> None:
    env = Drawing(rng=random.SystemRandom())
    seeding.restore(env, told_of(env))
    assert 0 <= env.rng.random() < 1  # type: ignore[attr-defined]


# gauss() and normal() keep a second number.
DRAWS = [
    int,
    random.random,
    partial(random.gauss, 0, 1),
    np.random.random,
    np.random.normal,
    partial(np.random.seed, 5),
]


def test_generators_of_the_process_are_told_as_they_are_now_whatever_has_been_drawn_since() -> None:
    env = Drawing()
    for draw in DRAWS:
        draw()
        state = seeding.states_of(env)
        drawn = [random.gauss(0, 1), np.random.normal(), np.random.random(), random.random()]
        seeding.restore(Drawing(), state)
        assert [random.gauss(0, 1), np.random.normal(), np.random.random(), random.random()] == drawn
        seeding.restore(Drawing(), state)


def test_a_renewed_env_draws_otherwise_than_any_other() -> None:
    envs = [Drawing() for _ in range(3)]
    for env in envs:
        seeding.ensure_generator(env, 7)
    for env in envs[1:]:
        seeding.renew(wrapped(env))
    assert len({float(env.np_random.random()) for env in envs}) == 3
    assert envs[1].np_random_seed != envs[2].np_random_seed


def test_ordinary_envs_keep_their_attributes_in_place() -> None:
    """Before 3.13 the attributes of an object whose ``__dict__`` was asked for are slower ever after."""
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=0)

    def layers_with_a_dict() -> int:
        # The attributes themselves are among the referents, unless they have been moved into a dict.
        return sum(layer.env not in gc.get_referents(layer) for layer in (env, env.env, env.env.env))  # type: ignore[attr-defined]

    before = layers_with_a_dict()
    told_of(env)
    assert layers_with_a_dict() == before
