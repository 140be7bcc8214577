"""Generators that envs are given for first resets without a seed, and those that are captured and put back."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import wrappers

from multienv.wire.messages import Build
from multienv.wire.segment import SLOT, Segment
from multienv.worker import seeding
from multienv.worker.env_group import EnvGroup


@pytest.fixture(autouse=True)
def process_generators() -> Iterator[None]:
    before = random.getstate(), np.random.get_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])


class Drawing(gymnasium.Env[float, int]):
    """Draws from what it holds; notes the seeds it is reset with."""

    observation_space = gymnasium.spaces.Box(-10, 10)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, **held: Any) -> None:
        self.seeds: list[int | None] = []
        for name, value in held.items():
            setattr(self, name, value)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[float, dict[str, Any]]:
        self.seeds.append(seed)
        super().reset(seed=seed)
        return 0.0, {}

    def draw(self) -> list[float]:
        mine = [value.random() for value in vars(self).values() if hasattr(value, "random")]
        return [*mine, float(self.np_random.random()), float(self.action_space.sample()), random.random()]


# --- first resets -----------------------------------------------------------------------------


def group_of(*envs: Any, draws: tuple[int, ...] = (11, 12), autoreset: str = "") -> EnvGroup:
    return EnvGroup(envs, Build(b"", False, autoreset, None, draws, None), Segment(-1).words)


def first_draws(*envs: Drawing, draws: tuple[int, ...] = (11, 12)) -> list[float]:
    group = group_of(*envs, draws=draws)
    for slot in range(len(envs)):
        group.begin(slot, seed=None, options=None)
    assert all(env.seeds == [None] for env in envs), "the env sees a reset without a seed, as in-process"
    return [float(env.np_random.random()) for env in envs]


def test_a_first_reset_without_a_seed_draws_from_a_generator_that_the_recorded_number_gives_again():
    once = first_draws(Drawing(), Drawing())
    assert once == first_draws(Drawing(), Drawing())
    assert len({*once, *first_draws(Drawing(), Drawing(), draws=(13, 14))}) == 4


def test_a_seed_that_is_given_and_a_generator_of_the_envs_own_are_left_alone():
    seeded, own = Drawing(), Drawing()
    own.np_random = np.random.default_rng(4)
    group = group_of(seeded, own)
    group.begin(0, seed=7, options=None)
    group.begin(1, seed=None, options=None)
    assert (seeded.seeds, own.seeds) == ([7], [None])
    assert (seeded.np_random_seed, own.np_random_seed) == (7, -1)
    assert own.np_random.random() == np.random.default_rng(4).random()


def test_the_given_generator_is_what_a_seeded_reset_would_make():
    env, twin = Drawing(), Drawing()
    group_of(env, draws=(2**64,))
    twin.reset(seed=2**64)
    assert env.np_random_seed == 2**64
    assert env.np_random.random() == twin.np_random.random()


def test_where_nothing_is_recorded_no_generator_is_given():
    env = Drawing()
    group_of(env, draws=())
    assert env._np_random is None


def test_a_reset_of_the_workers_own_marks_the_slot():
    env = Drawing()
    group = group_of(Drawing(), env, autoreset="NEXT_STEP")
    seen = []
    env.reset = lambda **options: seen.append(group.words[SLOT]) or Drawing.reset(env, **options)  # type: ignore[func-returns-value, method-assign]
    group.calls[1](0)
    assert seen == [2]


# --- generators -------------------------------------------------------------------------------


def holding_generators() -> Drawing:
    shared = np.random.default_rng(1)
    env = Drawing(rng=shared, same=shared, old=random.Random(2), legacy=np.random.RandomState(5), words=["a"])
    env.held_elsewhere = [shared]  # type: ignore[attr-defined]
    env.action_space = gymnasium.spaces.Discrete(1000, seed=3)
    env.np_random = np.random.default_rng(4)
    return env


def wrapped(env: Any) -> Any:
    return wrappers.RecordEpisodeStatistics(env)


@pytest.mark.parametrize("outside", [lambda env: env, wrapped], ids=["bare", "wrapped"])
def test_all_generators_of_env_space_and_process_are_put_back(outside: Any) -> None:
    env, copy = holding_generators(), holding_generators()
    for _ in range(5):
        env.draw()
    state = seeding.capture([outside(env)])
    drawn = [env.draw(), float(np.random.random())]
    seeding.restore([outside(copy)], state)
    assert [copy.draw(), float(np.random.random())] == drawn
    assert copy.rng is copy.same is copy.held_elsewhere[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("outside", [lambda env: env, wrapped], ids=["bare", "wrapped"])
def test_a_copy_without_a_generator_gets_one_and_the_seed_beside_it(outside: Any) -> None:
    env, copy = holding_generators(), holding_generators()
    env.reset(seed=7)
    copy._np_random = copy._np_random_seed = None
    seeding.restore([outside(copy)], seeding.capture([outside(env)]))
    assert outside(copy).np_random_seed == 7
    assert copy.np_random.random() == env.np_random.random()


def test_ordinary_envs_keep_their_attributes_in_place() -> None:
    """Before 3.13 the attributes of an object whose ``__dict__`` was asked for are slower ever after."""
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=0)

    def layers_with_a_dict() -> int:
        # The attributes themselves are among the referents, unless they have been moved into a dict.
        return sum(layer.env not in gc.get_referents(layer) for layer in (env, env.env, env.env.env))  # type: ignore[attr-defined]

    before = layers_with_a_dict()
    seeding.capture([env])
    assert layers_with_a_dict() == before
