"""What comes of a rollout: what its worker answers, and how the values of many steps are put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from gymnasium import spaces

from multienv.wire.messages import Failure


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """Answers a :class:`Rollout`. Each step, and each reset of a single env, is a request with a number of its own.

    Attributes:
        entries: Journal entries of these requests.
        steps: How many of them are steps.
        ends: Each step that ended episodes, and their slots.
        seen: What the caller then saw last, as ``standing()`` of the answers returns it; ``None``: nothing new.
        is_running: A single env: an episode runs.
        mails: Of steps: what their replies carry beside the rows, see ``infos.unpack_extras``.
        raised: Of a single env: the failure of a step that raised, pickled.
        begun: Of a single env: what the reply to the reset that followed a step carries.
        truncated_errors: Step and slot of what an env raised and ``on_error="truncate"`` made a truncation of.
        values: What the caller gets, pickled: see ``Values``.
        failure: What ended it early, or ``None``.
        by_policy: That was the policy.
    """

    entries: tuple[bytes, ...]
    steps: int
    ends: tuple[tuple[int, tuple[int, ...]], ...]
    seen: dict[str, Any] | None
    is_running: bool
    mails: dict[int, bytes]
    raised: dict[int, bytes]
    begun: dict[int, bytes]
    truncated_errors: frozenset[tuple[int, int]]
    values: bytes
    failure: Failure | None = None
    by_policy: bool = False

    def numbers(self, first: int) -> list[int]:
        """Return the number of each step; ``first`` is that of the first. A reset of a single env takes one as well."""
        numbers, number = [], first
        for step in range(self.steps):
            numbers.append(number)
            number += 2 if step in self.begun else 1
        return numbers


@dataclass(frozen=True, slots=True)
class Values:
    """Holds what came of a rollout: stacks, in which the first axis is that of steps and the second that of slots.

    What has no array of a fixed shape is a list with an item for each step. Of a single env there is no second axis.

    Attributes:
        observations: Those that actions were chosen for, and at the end those after the last step.
        actions, extras: What the policy returned.
        rewards, terminated, truncated: Of each step.
        ending: Of a single env: step → the last observation of the episode that ended with it.
    """

    observations: Any
    actions: Any
    extras: dict[str, Any]
    rewards: Any
    terminated: Any
    truncated: Any
    ending: dict[int, Any]


def stacked(space: Any, values: Sequence[Any]) -> Any:
    """Return one stack of the values of all steps, in the structure of the space; a list of what does not stack.

    Args:
        space: Of each value, or of each row of it.
        values: One for each step.
    """
    if isinstance(space, spaces.Dict) and all(isinstance(value, dict) for value in values):
        return {key: stacked(member, [value[key] for value in values]) for key, member in space.spaces.items()}
    if isinstance(space, spaces.Tuple) and all(isinstance(value, tuple) for value in values):
        members = enumerate(space.spaces)
        return tuple(stacked(member, [value[place] for value in values]) for place, member in members)
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)):
        arrays = [np.asarray(value) for value in values]
        if len({array.shape for array in arrays}) == 1:
            return np.stack(arrays)
    return list(values)


def joined(parts: Sequence[Any]) -> Any:
    """Return the stacks of all workers as one."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, dict):
        return {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        return tuple(map(joined, zip(*parts, strict=True)))
    if isinstance(first, np.ndarray):
        return np.concatenate(parts, 1)
    return [tuple(chain.from_iterable(items)) for items in zip(*parts, strict=True)]


def steps_of(stack: Any, which: Any) -> Any:
    """Return the steps of a stack that an index or a slice names."""
    return _each(stack, lambda array: array[which], lambda items: items[which])


def slot_of(stack: Any, slot: int) -> Any:
    """Return what of a stack is one slot's."""
    return _each(stack, lambda array: array[:, slot], lambda items: [item[slot] for item in items])


def _each(stack: Any, of_array: Any, of_list: Any) -> Any:
    if isinstance(stack, dict):
        return {key: _each(member, of_array, of_list) for key, member in stack.items()}
    if isinstance(stack, tuple):
        return tuple(_each(member, of_array, of_list) for member in stack)
    return of_array(stack) if isinstance(stack, np.ndarray) else of_list(stack)
