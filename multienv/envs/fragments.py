"""Fragments: many steps of one env or of a batch, as a rollout returns them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from multienv._engine.recovery.rollouts import RolloutReply
from multienv._engine.wire.messages import Rollout
from multienv._engine.wire.reducers import pickled
from multienv.config import checked_count
from multienv.errors import EnvError, UsageError

Array = np.ndarray[Any, Any]
# Observations → actions, or actions and a dict of arrays.
Policy = Callable[[Any], Any]


@dataclass(frozen=True)
class Fragment:
    """Holds many consecutive steps, as ``rollout()`` returns them.

    The first axis of each array is the step, the second the env; a fragment of a single env has no env axis. Values of
    a Dict or Tuple space are a dict or tuple of arrays. For a space without arrays of a fixed shape (Text, Graph,
    Sequence, OneOf), the value is a list with the batch of each step.

    Attributes:
        observations: The observations for which the actions were chosen.
        actions: The actions that the policy returned.
        rewards: Rewards, float64.
        terminations, truncations: Flags, bool.
        extras: Further values that the policy returned, by name.
        final_observations: The observations after the last step, without a step axis. The next step continues from
            them.
        infos: Step → infos, as ``step()`` would return them; steps without infos have no entry.
        resumed: Whether an earlier call was interrupted and this is its outcome.
    """

    observations: Any
    actions: Any
    rewards: Array
    terminations: Array
    truncations: Array
    final_observations: Any
    extras: dict[str, Array]
    infos: Mapping[int, Any]
    resumed: bool = False

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.rewards)


def rollout_message(policy: Policy, steps: int) -> Rollout:
    """Return the request for a rollout.

    Raises:
        UsageError: ``policy`` cannot be pickled, or ``steps`` is no positive integer. Nothing was sent.
    """
    steps = checked_count("rollout(): steps", steps)
    try:
        return Rollout(pickled(policy), steps)
    except Exception as error:  # pickling runs code of the user
        raise UsageError(
            f"rollout(): the policy cannot be pickled: {type(error).__name__}: {error}. It is sent to the worker: keep "
            "envs, locks and open files out of it. Nothing was sent."
        ) from error


def fragment_of_one(reply: RolloutReply, resumed: bool) -> Fragment:
    """Return the fragment of a single env, or raise the error that has it."""
    infos = {step: info for step, ((_, info),) in reply.infos.items()}
    fragment = None if reply.values is None else _fragment_of(reply.values, infos, resumed)
    for error in reply.errors.values():
        if isinstance(error, EnvError):
            error.fragment = fragment
        raise error
    assert fragment is not None
    return fragment


def fragment_of_slot(reply: RolloutReply, slot: int) -> Fragment | None:
    """Return the fragment of one env of several; ``None``: its values cannot be read here."""
    if reply.values is None:
        return None
    values = _of_stacks(lambda array: array[:, slot], lambda items: [item[slot] for item in items], reply.values)
    infos = {step: dict(infos).get(slot) for step, infos in reply.infos.items()}
    return _fragment_of(values, {step: info for step, info in infos.items() if info})


def fragment_of_all(replies: Sequence[RolloutReply], infos: Mapping[int, Any], *, resumed: bool) -> Fragment:
    """Return the fragment of all workers' envs.

    Args:
        replies: One of each worker, with values.
        infos: Of all envs, by step.
        resumed: The call was interrupted.
    """
    if len(replies) == 1:
        return _fragment_of(replies[0].values, infos, resumed)
    values = _of_stacks(
        lambda *arrays: np.concatenate(arrays, axis=1),
        lambda *lists: [tuple(chain.from_iterable(items)) for items in zip(*lists, strict=True)],
        *[reply.values for reply in replies],
    )
    return _fragment_of(values, infos, resumed)


def _fragment_of(values: Any, infos: Mapping[int, Any], resumed: bool = False) -> Fragment:
    """Return the fragment with the values of a reply."""
    observations = values["observations"]
    final = _of_stacks(lambda array: array[-1], lambda items: items[-1], observations)
    before = _of_stacks(lambda array: array[:-1], lambda items: items[:-1], observations)
    return Fragment(**{**values, "observations": before}, final_observations=final, infos=infos, resumed=resumed)


def _of_stacks(of_arrays: Callable[..., Any], of_lists: Callable[..., Any], *stacks: Any) -> Any:
    """Call a function with the matching leaves of some stacks; return the results in the structure of the stacks."""
    first = stacks[0]
    if isinstance(first, dict):
        return {key: _of_stacks(of_arrays, of_lists, *[stack[key] for stack in stacks]) for key in first}
    if isinstance(first, tuple):
        return tuple(_of_stacks(of_arrays, of_lists, *members) for members in zip(*stacks, strict=True))
    return of_arrays(*stacks) if isinstance(first, np.ndarray) else of_lists(*stacks)
