"""The state of an env as bytes: what it is made of comes back to the bit in a copy, or is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest
from gymnasium import wrappers

from kit import CounterEnv, first_difference
from multienv import register_state_hook
from multienv.errors import UsageError
from multienv.worker import seeding, state_hooks, states

gymnasium.register_envs(ale_py)
STICKY = {"repeat_action_probability": 0.25}
EnvFn = Callable[[], Any]


def go_on(env: Any, actions: list[Any]) -> list[Any]:
    """Steps, resets without a seed where they are due, and what is drawn in the end."""
    seen = []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        seen.append((observation, reward, terminated, truncated))
        if terminated or truncated:
            seen.append((env.reset()[0], 0.0, False, False))
    seen.append((np.float64(env.unwrapped.np_random.random()), 0.0, False, False))
    return seen


def agree(one: Any, other: Any) -> None:
    assert len(one) == len(other)
    for place, pair in enumerate(zip(one, other, strict=True)):
        difference = first_difference(*pair)
        assert difference is None, f"at {place}: {difference}"


def transplanted(env_fn: EnvFn, steps: int, actions: list[Any], seed: int = 5) -> tuple[list[Any], list[Any]]:
    """What a fresh env shows that was given the state of another after so many steps, and what that one shows."""
    env = env_fn()
    env.reset(seed=seed)
    before = (actions * steps)[:steps]
    go_on(env, before)
    state, generators = states.capture(env), seeding.capture([env])
    expected = go_on(env, actions)
    copy = env_fn()
    states.warm_up(copy, (seed + 1, None))
    states.restore(copy, state)
    seeding.restore([copy], generators)
    return go_on(copy, actions), expected


def stacked() -> Any:
    env = wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))
    return wrappers.TransformObservation(wrappers.FrameStackObservation(env, 4), lambda seen: seen * 2, None)


def normalized() -> Any:
    env = wrappers.FlattenObservation(gymnasium.make("HalfCheetah-v5", max_episode_steps=90))
    return wrappers.NormalizeReward(wrappers.NormalizeObservation(wrappers.ClipAction(env)))


def atari() -> Any:
    env = gymnasium.make("ALE/Pong-v5", frameskip=1, **STICKY)
    return wrappers.FrameStackObservation(wrappers.AtariPreprocessing(env), 4)


REAL: dict[str, EnvFn] = {
    "Atari as usual": atari,
    "wrapped": stacked,
    "normalized": normalized,
    "counter": CounterEnv,
}


@pytest.mark.parametrize("name", REAL)
def test_a_copy_goes_on_bit_for_bit(name: str) -> None:
    env = REAL[name]()
    env.action_space.seed(1)
    actions = [env.action_space.sample() for _ in range(250)]
    agree(*transplanted(REAL[name], 137, actions))


def test_a_mujoco_model_that_the_env_changes_is_put_back() -> None:
    env, copy = (gymnasium.make("HalfCheetah-v5") for _ in range(2))
    env.reset(seed=1)
    copy.reset(seed=2)
    model = env.unwrapped.model  # type: ignore[attr-defined]
    model.body_mass[:] *= 1.5
    model.opt.gravity[2] = -3.0
    model.opt.timestep = 0.02
    actions = [env.action_space.sample() for _ in range(50)]
    state = states.capture(env)
    expected = go_on(env, actions)
    states.restore(copy, state)
    agree(expected, go_on(copy, actions))


# --- what cannot be had -----------------------------------------------------------------------


class Holding(CounterEnv):
    """Holds something, and shows what its part holds."""

    def __init__(self, part: Callable[[], Any]) -> None:
        super().__init__(horizon=None)
        self.part = part()

    def step(self, action: Any) -> Any:
        self.part.sum += int(action)
        observation, *others = super().step(action)
        observation[3] = self.part.sum
        return (observation, *others)


ACTIONS = [np.int64(index % 4) for index in range(20)]


@pytest.mark.parametrize(
    ("env_fn", "why"),
    [
        (partial(Holding, threading.Lock), "lock"),
        (partial(Holding, lambda: (number for number in range(3))), "generator"),
        (partial(gymnasium.make, "LunarLander-v3"), "Swig"),
    ],
)
def test_what_cannot_be_had_is_refused_and_the_env_goes_on(env_fn: EnvFn, why: str) -> None:
    env = env_fn()
    env.reset(seed=0)
    with pytest.raises(states.NotCapturable, match=why):
        states.capture(env)
    env.reset(seed=0)


def test_objects_that_several_layers_hold_stay_one() -> None:
    def env_fn() -> Any:
        inner = CounterEnv()
        inner.shared = [0]  # type: ignore[attr-defined]
        outer = wrappers.TimeLimit(inner, 30)
        outer.shared = inner.shared  # type: ignore[attr-defined]
        return outer

    env, copy = env_fn(), env_fn()
    env.shared.append(7)
    states.restore(copy, states.capture(env))
    assert copy.shared == [0, 7]
    assert copy.shared is copy.unwrapped.shared
    assert copy.shared is not env.shared


# --- hooks ----------------------------------------------------------------------------------------


class OwnWord(CounterEnv):
    """Says itself what its state is."""

    def get_state(self) -> Any:
        return self.episode_step, self.episode_number

    def set_state(self, state: Any) -> None:
        self.episode_step, self.episode_number = state
        self.asked = True


def test_an_env_with_a_state_of_its_own_is_taken_at_its_word() -> None:
    env_fn: EnvFn = lambda: wrappers.TimeLimit(OwnWord(horizon=None), 30)  # noqa: E731
    agree(*transplanted(env_fn, 17, ACTIONS))
    copy = env_fn()
    copy.reset(seed=0)
    states.restore(copy, states.capture(copy))
    assert copy.unwrapped.asked


class WrapperWithAState(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Answers for what it wraps, which could not be pickled."""

    def get_state(self) -> Any:
        return self.unwrapped.episode_step, self.unwrapped.episode_number  # type: ignore[attr-defined]

    def set_state(self, state: Any) -> None:
        self.unwrapped.episode_step, self.unwrapped.episode_number = state  # type: ignore[attr-defined]


def test_a_wrapper_answers_for_all_it_wraps() -> None:
    def env_fn() -> Any:
        inner = CounterEnv(horizon=None)
        inner.lock = threading.Lock()  # type: ignore[attr-defined]
        return wrappers.TimeLimit(WrapperWithAState(inner), 30)

    agree(*transplanted(env_fn, 17, ACTIONS))


class InC:
    """Stands for what holds its state in C: nothing of it is in an attribute."""

    __slots__ = ("_hidden",)

    def __init__(self) -> None:
        self.sum = 0

    sum = property(lambda self: next(self._peek()), lambda self, value: setattr(self, "_hidden", (n for n in [value])))

    def _peek(self) -> Any:
        value = next(self._hidden)
        self._hidden = (n for n in [value])
        return iter([value])


@pytest.fixture
def registry() -> Any:
    before = dict(state_hooks._registered)
    yield
    state_hooks._registered.clear()
    state_hooks._registered.update(before)
    state_hooks.hook_of.cache_clear()


@pytest.mark.usefixtures("registry")
def test_a_registered_type_in_an_attribute_goes_by_its_hook() -> None:
    env_fn = partial(Holding, InC)
    with pytest.raises(states.NotCapturable, match="generator"):
        states.capture(env_fn())
    register_state_hook(InC, lambda part: part.sum, lambda part, state: setattr(part, "sum", state))
    agree(*transplanted(env_fn, 9, ACTIONS))
    env = env_fn()
    env.parts = [InC()]
    with pytest.raises(states.NotCapturable, match="elsewhere than in an attribute"):
        states.capture(env)


@pytest.mark.usefixtures("registry")
def test_hooks_travel_and_do_not_replace_what_is_there() -> None:
    get, set_, other = (lambda part: part.sum), (lambda part, state: None), (lambda part: None)
    register_state_hook(InC, get, set_)
    data = state_hooks.registered_hooks()
    state_hooks._registered.clear()
    register_state_hook(Holding, other, set_)
    state_hooks.register_all(data)
    hook = state_hooks.hook_of(InC)
    assert hook is not None
    part = InC()
    part.sum = 3
    assert hook.get_state(part) == 3
    register_state_hook(InC, other, set_)
    state_hooks.register_all(data)
    assert state_hooks.hook_of(InC).get_state is other  # type: ignore[union-attr]


@pytest.mark.usefixtures("registry")
def test_wrong_registrations_are_refused() -> None:
    with pytest.raises(UsageError, match="give a type"):
        register_state_hook(InC(), len, len)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="set_state is None"):
        register_state_hook(InC, len, None)  # type: ignore[arg-type]
    lock = threading.Lock()
    register_state_hook(InC, lambda part: lock, lambda part, state: None)
    with pytest.raises(UsageError, match="Call it in env_fn"):
        state_hooks.registered_hooks()
