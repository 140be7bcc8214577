"""The state of an env as bytes: whatever it is made of comes back to the bit in a copy, or is refused."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces, wrappers
from gymnasium.utils import EzPickle

from multienv import register_state_hook
from multienv.errors import UsageError
from multienv.testing import CounterEnv, first_difference, rollout
from multienv.worker import state_hooks, states
from multienv.worker.attributes import attributes_of

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
    seen.append((np.float64(env.unwrapped.np_random.random()), random.random(), False, False))
    return seen


def agree(one: Any, other: Any) -> None:
    assert len(one) == len(other)
    for place, pair in enumerate(zip(one, other, strict=True)):
        difference = first_difference(*pair)
        assert difference is None, f"at {place}: {difference}"


def transplanted(env_fn: EnvFn, steps: int, actions: list[Any], seed: int = 5) -> tuple[list[Any], list[Any]]:
    """What an env shows after so many steps, and a fresh copy of it that was given its state."""
    env = env_fn()
    env.reset(seed=seed)
    before = (actions * steps)[:steps]
    go_on(env, before)
    state = states.capture(env)
    expected = go_on(env, actions)
    copy = env_fn()
    copy.reset()
    for _ in range(8):  # as the worker does: ALE keeps the last action to itself
        if before and any(copy.step(before[-1])[2:4]):
            break
    random.random()
    states.restore(copy, state)
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
    "CartPole": partial(gymnasium.make, "CartPole-v1", max_episode_steps=80),
    "Pong": partial(gymnasium.make, "ALE/Pong-v5", **STICKY),
    "Breakout": partial(gymnasium.make, "ALE/Breakout-v5", **STICKY),
    "Atari as usual": atari,
    "HalfCheetah": partial(gymnasium.make, "HalfCheetah-v5", max_episode_steps=90),
    "Humanoid": partial(gymnasium.make, "Humanoid-v5"),
    "Pendulum": partial(gymnasium.make, "Pendulum-v1"),
    "Taxi": partial(gymnasium.make, "Taxi-v4"),
    "wrapped": stacked,
    "normalized": normalized,
    "counter": CounterEnv,
}


@pytest.mark.parametrize("steps", [0, 1, 137])
@pytest.mark.parametrize("name", REAL)
def test_a_copy_goes_on_bit_for_bit(name: str, steps: int) -> None:
    env = REAL[name]()
    env.action_space.seed(1)
    actions = [env.action_space.sample() for _ in range(250)]
    agree(*transplanted(REAL[name], steps, actions))


@pytest.mark.parametrize("name", REAL)
def test_to_take_it_changes_nothing(name: str) -> None:
    seen = []
    for interval in (1000, 10):
        env = REAL[name]()
        env.action_space.seed(1)
        actions = [env.action_space.sample() for _ in range(60)]

        def look(step: int, env: Any = env, interval: int = interval) -> None:
            if step % interval == 7:
                states.capture(env)

        record = rollout(env, actions, seed=3, before_step=look)
        seen.append([(one.observation, one.reward, one.terminated, one.truncated) for one in record])
    agree(*seen)


def test_a_copy_of_a_copy() -> None:
    env = REAL["HalfCheetah"]()
    env.reset(seed=1)
    actions = [env.action_space.sample() for _ in range(50)]
    for _ in range(3):
        copy, state = REAL["HalfCheetah"](), states.capture(env)
        expected = go_on(env, actions)
        copy.reset()
        states.restore(copy, state)
        agree(expected, go_on(copy, actions))
        env = copy


def test_a_model_that_is_changed_as_it_goes() -> None:
    """Domain randomization."""
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


def test_each_state_has_the_model_of_its_time() -> None:
    """What is compressed for one is used for the next only if that has the same model."""
    env, other, copy = (gymnasium.make("HalfCheetah-v5") for _ in range(3))
    for each in (env, other, copy):
        each.reset(seed=1)
    other.unwrapped.model.body_mass[:] *= 2  # type: ignore[attr-defined]
    actions = [env.action_space.sample() for _ in range(50)]
    captured = []
    for factor in (1.0, 1.5):
        env.unwrapped.model.body_mass[:] *= factor  # type: ignore[attr-defined]
        captured += [(states.capture(each), go_on(each, actions)) for each in (env, other)]
    for state, expected in captured:
        states.restore(copy, state)
        agree(expected, go_on(copy, actions))


# --- what pickles leave out -----------------------------------------------------------------------


class Forgetful(EzPickle):
    """Its pickle has what it was constructed with, and nothing else."""

    def __init__(self) -> None:
        EzPickle.__init__(self)
        self.sum = 0


class Dropping:
    """Its pickle leaves a part out."""

    def __init__(self) -> None:
        self.sum, self.lock = 0, None

    def __getstate__(self) -> dict[str, Any]:
        return {"lock": None}


class Slotted:
    __slots__ = ("sum",)

    def __init__(self) -> None:
        self.sum = 0

    def __reduce__(self) -> Any:
        return Slotted, ()


class Holding(CounterEnv):
    """Shows what another object holds."""

    def __init__(self, part: Callable[[], Any], **counter: Any) -> None:
        super().__init__(horizon=None, **counter)
        self.parts = {"part": [part()]}

    def step(self, action: Any) -> Any:
        part = self.parts["part"][0]
        part.sum += int(action)
        observation, *others = super().step(action)
        observation[3] = part.sum
        return (observation, *others)


ACTIONS = [np.int64(index % 4) for index in range(20)]


@pytest.mark.parametrize("part", [Forgetful, Dropping, Slotted])
def test_what_a_class_leaves_out_of_its_pickles_is_kept(part: Callable[[], Any]) -> None:
    agree(*transplanted(partial(Holding, part), 9, ACTIONS))


class Sharing(CounterEnv):
    """An attribute is a view of another."""

    def __init__(self, view: Callable[[Any], Any]) -> None:
        super().__init__()
        self.board = np.zeros(9)
        self.corner = view(self.board)


@pytest.mark.parametrize(
    ("env_fn", "why"),
    [
        (partial(Sharing, lambda board: board[:3]), "share memory"),
        (partial(Sharing, lambda board: threading.Lock()), "lock"),
        (partial(Sharing, lambda board: (number for number in board)), "generator"),
        (partial(Sharing, lambda board: gymnasium.make("HalfCheetah-v5").unwrapped.data.qpos), "memory of a PyCapsule"),
        (partial(gymnasium.make, "LunarLander-v3"), "Swig"),
        (partial(gymnasium.make, "BipedalWalker-v3"), "Swig"),
    ],
)
def test_what_cannot_be_had_is_refused(env_fn: EnvFn, why: str) -> None:
    env = env_fn()
    env.reset(seed=0)
    with pytest.raises(states.NotCapturable, match=why):
        states.capture(env)
    env.step(env.action_space.sample())


def test_views_of_different_parts_are_no_obstacle() -> None:
    env = Sharing(lambda board: np.arange(6).reshape(2, 3)[0])
    env.reset(seed=0)
    copy = Sharing(lambda board: None)
    states.restore(copy, states.capture(env))
    np.testing.assert_array_equal(copy.corner, [0, 1, 2])


def test_another_env_is_found_out() -> None:
    env, other = gymnasium.make("CartPole-v1"), gymnasium.make("Pendulum-v1")
    env.reset(seed=0)
    with pytest.raises(TypeError, match="CartPole"):
        states.restore(other, states.capture(env))


def test_attributes_that_were_not_there_go() -> None:
    env, copy = CounterEnv(), CounterEnv()
    env.reset(seed=0)
    copy.later = 1  # type: ignore[attr-defined]
    states.restore(copy, states.capture(env))
    assert not hasattr(copy, "later")


# --- hooks ----------------------------------------------------------------------------------------


class OwnWord(CounterEnv):
    """Says itself what its state is."""

    def get_state(self) -> Any:
        return self.episode_step, self.episode_number

    def set_state(self, state: Any) -> None:
        self.episode_step, self.episode_number = state
        self.asked = True


def test_an_env_is_taken_at_its_word_and_its_generators_are_put_back() -> None:
    """It does not speak of its generator, and the wrapper around it holds a counter of its own."""
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
def test_a_registered_type_wherever_it_lies() -> None:
    env_fn = partial(Holding, InC)
    with pytest.raises(states.NotCapturable, match="generator"):
        states.capture(env_fn())
    register_state_hook(InC, lambda part: part.sum, lambda part, state: setattr(part, "sum", state))
    agree(*transplanted(env_fn, 9, ACTIONS))


@pytest.mark.usefixtures("registry")
def test_hooks_travel_and_do_not_replace_what_is_there() -> None:
    get, set_, other = (lambda part: part.sum), (lambda part, state: None), (lambda part: None)
    register_state_hook(InC, get, set_)
    data = state_hooks.registered_hooks()
    state_hooks._registered.clear()
    register_state_hook(Slotted, other, set_)
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
    with pytest.raises(UsageError, match="Register it in env_fn"):
        state_hooks.registered_hooks()


# --- attributes -----------------------------------------------------------------------------------


class Plain:
    shared = None
    limit = 7

    def __init__(self) -> None:
        self.shared = None
        self.first = self.second = None
        self.numbers = deque([1])
        self.computed = 0

    @property
    def looked(self) -> int:
        self.computed += 1
        return self.computed


class PlainSlots(Plain):
    __slots__ = ("own",)

    def __init__(self) -> None:
        super().__init__()
        self.own = spaces.Discrete(3)


@pytest.mark.parametrize("kind", [Plain, PlainSlots])
@pytest.mark.parametrize("extra", [{}, {"from outside": 5}, {"from_outside": None, "other": "x"}])
def test_all_attributes_are_found_without_running_code(kind: type[Any], extra: dict[str, Any]) -> None:
    holder = kind()
    for name, value in extra.items():
        setattr(holder, name, value)
    found = attributes_of(holder)
    own = {"own": holder.own} if kind is PlainSlots else {}
    expected = {**holder.__dict__, **own}
    for name, value in expected.items():
        if name != "from_outside":  # None hides among others: told by nobody's code
            assert found[name] is value, name
    assert holder.computed == 0
    assert set(found) <= {*expected, "limit"}
