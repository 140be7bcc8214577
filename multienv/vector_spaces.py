"""The spaces of a batch: those of its envs, held against each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium import spaces
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space, create_empty_array, iterate

from multienv.errors import NotShareableError, SpaceMismatchError

Space = spaces.Space[Any]

# What gymnasium, too, can share. The variable ones among them travel in the replies here.
_SHAREABLE = (
    spaces.Box,
    spaces.Discrete,
    spaces.MultiBinary,
    spaces.MultiDiscrete,
    spaces.Text,
    spaces.OneOf,
)


def observation_spaces(mode: Any, found: Sequence[Space]) -> tuple[Space, Space]:
    """The batched and the single observation space, by ``observation_mode``."""
    if isinstance(mode, tuple):
        return mode
    if mode == "different":
        return batch_differing_spaces(list(found)), found[0]
    return batch_space(found[0], len(found)), found[0]


def check_spaces(face: str, mode: Any, members: Sequence[tuple[Space, Space]]) -> None:
    """Raise unless the spaces of all envs fit one batch.

    Args:
        face: The name of the class, for messages.
        mode: The ``observation_mode``.
        members: Observation and action space of each env.
    """
    single = mode[1] if isinstance(mode, tuple) else members[0][0]
    actions = members[0][1]
    for index, (observation_space, action_space) in enumerate(members):
        if mode == "same" and observation_space != single:
            raise SpaceMismatchError(
                f"{face}(..., observation_mode='same') however some of the sub-environments observation spaces are not "
                "equivalent. If this is intentional, use `observation_mode='different'` instead. "
                f"Here env {index} has the observation space {observation_space}, not {single}."
            )
        if mode != "same" and not _are_alike(observation_space, single):
            raise SpaceMismatchError(
                f"{face}(..., observation_mode='different' or custom space) however the sub-environment's observation "
                "spaces do not share a common shape and dtype. Wrap the envs so that they agree: "
                f"env {index} has the observation space {observation_space}, not {single}."
            )
        if action_space != actions:
            raise SpaceMismatchError(
                f"Some environments have an action space different from `{actions}`. In order to batch actions, the "
                f"action spaces from all environments must be equal: env {index} has {action_space}."
            )


def _are_alike(one: Space, other: Space) -> bool:
    """Whether they share shape and dtype; of custom spaces nothing is known but what they say themselves."""
    try:
        return is_space_dtype_shape_equiv(one, other)
    except NotImplementedError:
        return one == other


def blank(space: Space) -> Any:
    """What stands for an observation where there has been none, as zeros do in an array; ``None`` in a custom space."""
    batch: Any = create_empty_array(space, 1)
    return None if batch is None else next(iter(iterate(batch_space(space, 1), batch)))


def check_shareable(space: Space) -> None:
    """Raise if ``shared_memory=True`` has been asked for and cannot be had."""
    if not _is_shareable(space):
        kind = DynamicShapeError if _has_any(space, (spaces.Graph, spaces.Sequence)) else NotShareableError
        raise kind(
            f"shared_memory=True: {space} has a dynamic shape so its not possible to make a static shared memory. "
            "Leave shared_memory out, and its observations travel pickled."
        )


class DynamicShapeError(NotShareableError, TypeError):
    """There is a graph or a sequence in the space; a TypeError for gymnasium."""


def _has_any(space: Space, kinds: tuple[type, ...]) -> bool:
    if isinstance(space, spaces.Dict):
        return any(_has_any(one, kinds) for one in space.spaces.values())
    if isinstance(space, spaces.Tuple):
        return any(_has_any(one, kinds) for one in space.spaces)
    return isinstance(space, kinds)


def _is_shareable(space: Space) -> bool:
    if isinstance(space, spaces.Dict):
        return all(map(_is_shareable, space.spaces.values()))
    if isinstance(space, spaces.Tuple):
        return all(map(_is_shareable, space.spaces))
    return isinstance(space, _SHAREABLE)
