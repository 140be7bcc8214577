"""Fragments: what a rollout returns, many steps of one env or of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from multienv.config import integer
from multienv.envs.pickling import pickled
from multienv.errors import EnvError, UsageError
from multienv.recovery.rollouts import RolloutReply, split
from multienv.wire.messages import Rollout
from multienv.wire.rollouts import Values, joined, slot_of

Array = np.ndarray[Any, Any]
# Observations → actions, or actions and a dict of arrays.
Policy = Callable[[Any], Any]


@dataclass(frozen=True)
class Fragment:
    """Holds many steps in a row, as ``rollout()`` returns them.

    The first axis of each array is that of the steps, the second that of the envs; a fragment of a single env has no
    second one. Values of a Dict or Tuple space are a dict or tuple of arrays. Where a space has no arrays of a fixed
    shape (Text, Graph, Sequence, OneOf), there is a list with the batch of each step.

    Attributes:
        observations: Those that the actions were chosen for.
        actions: What the policy returned.
        rewards: float64.
        terminations, truncations: bool.
        extras: What the policy returned beside the actions, by name.
        final_observations: Those after the last step, without an axis of steps. The next step goes on from them.
        infos: Step → what ``step()`` would have returned as infos; only the steps in which there is any.
        resumed: An earlier call was interrupted, and this is its outcome.
    """

    observations: Any
    actions: Any
    rewards: Array
    terminations: Array
    truncations: Array
    final_observations: Any
    extras: dict[str, Array] = field(default_factory=dict)
    infos: Mapping[int, Any] = field(default_factory=dict)
    resumed: bool = False

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.rewards)


def rollout_message(policy: Policy, steps: int) -> Rollout:
    """Return the request for a rollout.

    Raises:
        UsageError: ``policy`` cannot be called or pickled, or ``steps`` is no positive integer. Nothing was sent.
    """
    count = integer(steps)
    if count is None or count < 1:
        raise UsageError(f"rollout(): steps is {steps!r:.100}; give an integer of at least 1.")
    if not callable(policy):
        raise UsageError(f"rollout(): the policy {policy!r:.100} cannot be called; give observations -> actions.")
    try:
        return Rollout(pickled(policy), count)
    except Exception as error:  # pickling runs foreign code
        raise UsageError(
            f"rollout(): the policy cannot be pickled: {type(error).__name__}: {error}. It is sent to the worker: keep "
            "envs, locks and open files out of it. Nothing was sent."
        ) from error


def fragment_of_one(reply: RolloutReply, resumed: bool) -> Fragment | Exception:
    """Return the fragment of a single env, or the error to raise, which has it."""
    fragment = _fragment_of(reply, resumed=resumed)
    for error in reply.errors.values():
        if isinstance(error, EnvError):
            error.fragment = fragment
        return error
    assert fragment is not None
    return fragment


def _fragment_of(reply: RolloutReply, *, resumed: bool = False) -> Fragment | None:
    values = reply.values
    if values is None:
        return None
    observations, final = split(values)
    return Fragment(
        observations,
        values.actions,
        values.rewards,
        values.terminated,
        values.truncated,
        final,
        values.extras,
        {step: dict(infos)[0] for step, infos in reply.infos.items() if dict(infos).get(0)},
        resumed,
    )


def fragment_of_slot(reply: RolloutReply, slot: int) -> Fragment | None:
    """Return the fragment of one env of several; ``None``: its values cannot be read here."""
    values = reply.values
    if values is None:
        return None
    own = Values(
        slot_of(values.observations, slot),
        slot_of(values.actions, slot),
        {name: extra[:, slot] for name, extra in values.extras.items()},
        values.rewards[:, slot],
        values.terminated[:, slot],
        values.truncated[:, slot],
        {},
    )
    infos: dict[int, Any] = {step: [(0, dict(infos).get(slot))] for step, infos in reply.infos.items()}
    return _fragment_of(RolloutReply(own, infos))


def fragment_of_all(replies: Sequence[RolloutReply], infos: Mapping[int, Any], *, resumed: bool) -> Fragment:
    """Return the fragment of all workers' envs.

    Args:
        replies: One of each worker, with values.
        infos: Of all envs, by step.
        resumed: The call was interrupted.
    """
    parts = [reply.values for reply in replies if reply.values is not None]
    values = Values(
        joined([part.observations for part in parts]),
        joined([part.actions for part in parts]),
        {name: joined([part.extras[name] for part in parts]) for name in parts[0].extras},
        joined([part.rewards for part in parts]),
        joined([part.terminated for part in parts]),
        joined([part.truncated for part in parts]),
        {},
    )
    fragment = _fragment_of(RolloutReply(values), resumed=resumed)
    assert fragment is not None
    return replace(fragment, infos=infos)
