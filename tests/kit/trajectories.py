"""Record what an environment does, and compare two records bit by bit."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np


@dataclass(frozen=True)
class Transition:
    """The result of one reset (`is_reset`, without an action) or one step."""

    observation: Any
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    action: Any = None
    is_reset: bool = False

    @property
    def ended(self) -> bool:
        """Whether the episode ended here."""
        return self.terminated or self.truncated

    @property
    def recovery(self) -> Any:
        """What multienv says in the info about a recovery that could not be shown exact; None if nothing."""
        return self.info.get("multienv")


def rollout(
    env: gymnasium.Env[Any, Any],
    actions: Iterable[Any] | None = None,
    *,
    num_steps: int | None = None,
    seed: int | None = None,
    before_step: Callable[[int], object] = bool,
) -> list[Transition]:
    """Run an env, resetting it whenever an episode ends, and record every reset and step.

    Args:
        env: It is not closed.
        actions: Over all episodes; None: ``num_steps`` samples from a copy of the action space.
        num_steps: How many, without ``actions``.
        seed: Of the first reset. Later ones have none, so that the env's RNG goes on from episode to episode.
        before_step: Called with the number of each step (from 0) before it is taken: the place for a kill.

    Returns:
        The resets and steps in order; observations are copies.
    """
    if actions is None:
        space = copy.deepcopy(env.action_space)
        space.seed(0)
        actions = (space.sample() for _ in range(num_steps or 0))
    transitions = [_reset(env, seed)]
    for step, action in enumerate(actions):
        if transitions[-1].ended:
            transitions.append(_reset(env, None))
        before_step(step)
        taken = copy.deepcopy(action)
        observation, reward, terminated, truncated, info = env.step(action)
        flags = bool(terminated), bool(truncated)
        transitions.append(Transition(copy.deepcopy(observation), float(reward), *flags, dict(info), taken))
    return transitions


def _reset(env: gymnasium.Env[Any, Any], seed: int | None) -> Transition:
    observation, info = env.reset(seed=seed)
    return Transition(copy.deepcopy(observation), info=dict(info), is_reset=True)


def observations_equal(first: Any, second: Any) -> bool:
    """Whether two observations agree in structure, types, shapes, dtypes and every bit (so NaN equals itself)."""
    return first_difference(first, second) is None


def first_difference(first: Any, second: Any, where: str = "value") -> str | None:
    """Where and how two observations differ, or None.

    Understands arrays, numpy scalars, mappings (of any type; the order of keys does not matter), tuples (named ones
    included), lists, floats, and whatever can be compared with ``==``. A float is equal to one of the same bits only.
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        if first.keys() != second.keys():
            return f"{where}: keys {sorted(first, key=repr)} against {sorted(second, key=repr)}"
        return _first(first_difference(first[key], second[key], f"{where}[{key!r}]") for key in first)
    if type(first) is not type(second):
        return f"{where}: {type(first).__name__} against {type(second).__name__}: {first!r} against {second!r}"
    if isinstance(first, tuple | list):
        if len(first) != len(second):
            return f"{where}: length {len(first)} against {len(second)}"
        pairs = enumerate(zip(first, second, strict=True))
        return _first(first_difference(*pair, f"{where}[{index}]") for index, pair in pairs)
    if isinstance(first, np.ndarray | np.generic):
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return f"{where}: {first.dtype} of {first.shape} against {second.dtype} of {second.shape}"
        if first.dtype.hasobject:
            return first_difference(np.ravel(first).tolist(), np.ravel(second).tolist(), where)
        if first.tobytes() == second.tobytes():
            return None
        places = (place for place in np.ndindex(first.shape) if first[place].tobytes() != second[place].tobytes())
        place = next(places)
        return f"{where}{list(place) or ''}: {first[place]!r} against {second[place]!r}"
    if isinstance(first, float):
        return None if struct.pack("d", first) == struct.pack("d", second) else f"{where}: {first!r} against {second!r}"
    return None if first == second else f"{where}: {first!r} against {second!r}"


def _first(differences: Iterable[str | None]) -> str | None:
    return next((one for one in differences if one is not None), None)


def assert_same_trajectory(
    actual: Sequence[Transition], expected: Sequence[Transition], *, compare_info: bool = False
) -> None:
    """Fail unless two records agree bit by bit; infos only if asked for, as they may hold wall-clock values."""
    names = ["is_reset", "action", "observation", "reward", "terminated", "truncated", *["info"][: int(compare_info)]]
    for index, (one, other) in enumerate(zip(actual, expected, strict=False)):
        found = _first(first_difference(getattr(one, name), getattr(other, name), name) for name in names)
        assert found is None, f"entry {index} (actual against expected): {found}"
    assert len(actual) == len(expected), "those before agree"


def _counter_clock(observation: Any) -> tuple[int, int]:
    """Episode number and step in the episode, as `CounterEnv` shows them."""
    return int(observation[1]), int(observation[0])


def assert_no_splice(
    transitions: Sequence[Transition], *, clock: Callable[[Any], tuple[int, int]] = _counter_clock
) -> None:
    """Fail unless consecutive entries belong to one episode, or the first one ended it, or the second is a reset.

    Args:
        transitions: A record of an env whose observation tells the time.
        clock: Reads the number of the episode and the step in it from an observation.

    A step that multienv truncated (`Transition.recovery`) must repeat the last observation; every other one must
    show the same episode and the next step.
    """
    for index, (before, after) in enumerate(pairwise(transitions), start=1):
        if after.is_reset:
            continue
        assert not before.ended, f"entry {index} is a step, but the entry before ended its episode"
        episode, step = clock(before.observation)
        repeated = after.truncated and after.recovery is not None
        assert clock(after.observation) == (episode, step + (not repeated)), f"entry {index} does not follow"
