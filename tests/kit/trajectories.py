"""Record what an environment does, and compare two records bit by bit."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np

__all__ = [
    "Transition",
    "assert_no_splice",
    "assert_same_trajectory",
    "counter_clock",
    "first_difference",
    "observations_equal",
    "rollout",
]


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
    before_step: Callable[[int], object] | None = None,
) -> list[Transition]:
    """Run an env, resetting it whenever an episode ends, and record every reset and step.

    Args:
        env: the env; it is not closed.
        actions: the actions, over all episodes. If None, they are sampled from a copy of the action space.
        num_steps: how many steps; None for as many as there are actions.
        seed: of the first reset.
            Later resets have none, so that the env's RNG goes on from episode to episode.
        before_step: called with the number of each step (from 0) before it is taken: the place for a kill.

    Returns:
        The resets and steps in order; observations are copies. An episode that ends with the last step is not
        followed by a reset.
    """
    if actions is None and num_steps is None:
        raise ValueError("rollout() needs actions or num_steps")
    chosen = iter(_policy(env) if actions is None else actions)
    transitions = [_reset(env, seed)]
    step = 0
    while num_steps is None or step < num_steps:
        try:
            action = next(chosen)
        except StopIteration:
            break
        if transitions[-1].ended:
            transitions.append(_reset(env, None))
        if before_step is not None:
            before_step(step)
        transitions.append(_step(env, action))
        step += 1
    return transitions


def _policy(env: gymnasium.Env[Any, Any]) -> Iterable[Any]:
    space = copy.deepcopy(env.action_space)
    space.seed(0)
    while True:
        yield space.sample()


def _reset(env: gymnasium.Env[Any, Any], seed: int | None) -> Transition:
    observation, info = env.reset(seed=seed)
    return Transition(copy.deepcopy(observation), info=dict(info), is_reset=True)


def _step(env: gymnasium.Env[Any, Any], action: Any) -> Transition:
    taken = copy.deepcopy(action)
    observation, reward, terminated, truncated, info = env.step(action)
    return Transition(
        copy.deepcopy(observation), float(reward), bool(terminated), bool(truncated), info=dict(info), action=taken
    )


def observations_equal(first: Any, second: Any) -> bool:
    """Whether two observations agree in structure, types, shapes, dtypes and every bit (so NaN equals itself)."""
    return first_difference(first, second) is None


def first_difference(first: Any, second: Any, where: str = "") -> str | None:
    """Where and how two observations differ, or None.

    Understands arrays, numpy scalars, mappings (of any type; the order of keys does not matter), tuples (named ones,
    as `gymnasium.spaces.GraphInstance`, included), lists, floats, and whatever can be compared with ``==``. A float
    is equal to one of the same bits only: NaN to itself, but 0.0 not to -0.0.
    """
    place = where or "value"
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return _mapping_difference(first, second, where)
    if type(first) is not type(second):
        return f"{place}: {type(first).__name__} against {type(second).__name__}: {first!r} against {second!r}"
    if isinstance(first, np.ndarray | np.generic):
        return _array_difference(np.asarray(first), np.asarray(second), where)
    if isinstance(first, tuple | list):
        return _sequence_difference(first, second, where)
    same = _bits(first) == _bits(second) if isinstance(first, float) else bool(first == second)
    return None if same else f"{place}: {first!r} against {second!r}"


def _bits(number: float) -> bytes:
    return struct.pack("<d", number)


def _mapping_difference(first: Mapping[Any, Any], second: Mapping[Any, Any], where: str) -> str | None:
    if first.keys() != second.keys():
        return f"{where or 'value'}: keys {sorted(first, key=repr)} against {sorted(second, key=repr)}"
    for key in first:
        difference = first_difference(first[key], second[key], f"{where}[{key!r}]")
        if difference is not None:
            return difference
    return None


def _sequence_difference(first: Sequence[Any], second: Sequence[Any], where: str) -> str | None:
    if len(first) != len(second):
        return f"{where or 'value'}: length {len(first)} against {len(second)}"
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        difference = first_difference(one, other, f"{where}[{index}]")
        if difference is not None:
            return difference
    return None


def _array_difference(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any], where: str) -> str | None:
    place = where or "value"
    if first.dtype != second.dtype:
        return f"{place}: dtype {first.dtype} against {second.dtype}"
    if first.shape != second.shape:
        return f"{place}: shape {first.shape} against {second.shape}"
    if first.dtype.hasobject:
        return _sequence_difference(first.ravel().tolist(), second.ravel().tolist(), where)
    if first.tobytes() == second.tobytes():
        return None
    for index in np.ndindex(first.shape):
        one, other = first[index], second[index]
        if one.tobytes() != other.tobytes():
            at = f"[{', '.join(map(str, index))}]" if index else ""
            return f"{where}{at or ('' if where else 'value')}: {one!r} against {other!r}"
    return None


def assert_same_trajectory(
    actual: Sequence[Transition], expected: Sequence[Transition], *, compare_info: bool = False
) -> None:
    """Fail unless two records agree bit by bit.

    Compared are the kind of each entry, the action, the observation, the reward (as float64) and both flags; infos
    only if asked for, as they may hold wall-clock values.

    Raises:
        AssertionError: naming the first entry that differs, and how.
    """
    for index, (one, other) in enumerate(zip(actual, expected, strict=False)):
        difference = _transition_difference(one, other, compare_info=compare_info)
        if difference is not None:
            raise AssertionError(
                f"entry {index} ({_name(actual, index)}) differs (actual against expected): {difference}"
            )
    if len(actual) != len(expected):
        raise AssertionError(f"{len(actual)} entries against {len(expected)} expected; those before agree")


def _transition_difference(one: Transition, other: Transition, *, compare_info: bool) -> str | None:
    names = ["is_reset", "action", "observation", "reward", "terminated", "truncated"]
    for name in [*names, "info"] if compare_info else names:
        difference = first_difference(getattr(one, name), getattr(other, name), name)
        if difference is not None:
            return difference
    return None


def _name(transitions: Sequence[Transition], index: int) -> str:
    resets = [place for place in range(index + 1) if transitions[place].is_reset]
    if not resets:
        return f"step {index + 1}"
    what = "reset" if resets[-1] == index else f"step {index - resets[-1]}"
    return f"{what} of episode {len(resets) - 1}"


def counter_clock(observation: Any) -> tuple[int, int]:
    """Episode number and step in the episode, as `CounterEnv` shows them."""
    return int(observation[1]), int(observation[0])


def assert_no_splice(
    transitions: Sequence[Transition], *, clock: Callable[[Any], tuple[int, int]] = counter_clock
) -> None:
    """Fail unless consecutive entries belong to one episode, or the first one ended it, or the second is a reset.

    Args:
        transitions: a record of an env whose observation tells the time.
        clock: reads the number of the episode and the step in it from an observation.

    A step that multienv truncated (`Transition.recovery`) must repeat the last observation; every other one must
    show the same episode and the next step.

    Raises:
        AssertionError: naming the first entry that does not follow from the one before.
    """
    for index in range(1, len(transitions)):
        before, after = transitions[index - 1], transitions[index]
        if after.is_reset:
            continue
        name = f"entry {index} ({_name(transitions, index)})"
        if before.ended:
            raise AssertionError(f"{name} is a step, but the entry before ended its episode")
        episode, step = clock(before.observation)
        repeated = after.truncated and after.recovery is not None
        follows = (episode, step) if repeated else (episode, step + 1)
        if clock(after.observation) != follows:
            shown = clock(after.observation)
            raise AssertionError(f"{name} shows (episode, step) {shown}, but {follows} follows from the entry before")
