"""What the envs of a group return, and what is amiss with it."""

from __future__ import annotations

from typing import Any

import numpy as np

from multienv.wire.numbers import NUMBERS
from multienv.worker.failures import wrong_result

# What nobody can change.
_holds_fixed = (NUMBERS | {type(None), str, bytes, np.bool_}).issuperset


class NotBegun(Exception):  # noqa: N818 - internal
    """An episode has ended, and the reset that was to follow in the same step raised.

    Attributes:
        raised: What it raised.
        observation, info: The last ones of the episode that has ended.
    """

    def __init__(self, raised: Exception, observation: Any, info: Any) -> None:
        """Keep them."""
        super().__init__()
        self.raised, self.observation, self.info = raised, observation, info


def of_reset(result: Any) -> tuple[Any, Any]:
    """What a reset has returned, if it is a pair."""
    try:
        observation, info = result
    except (TypeError, ValueError):
        raise wrong_result("reset", "observation, info", result) from None
    return observation, info


def own_info(info: Any) -> dict[str, Any]:
    """The info, if it is a dict, as it is now: envs may share what is in it, and change it with their own steps."""
    if not isinstance(info, dict):
        raise TypeError(f"the env returned {type(info).__name__} {info!r:.200} as info; gymnasium's API wants a dict")
    try:  # a suppress() would cost every step
        if not _holds_fixed(map(type, info.values())):
            return {key: _copied(value) for key, value in info.items()}
    except Exception:  # nested too deep, or of a foreign type that has no hash: told as it is
        return dict(info)
    return dict(info)


def _copied(value: Any) -> Any:
    """What gymnasium merges as it is now. Not deepcopy(): that runs the code of whatever it meets."""
    kind = type(value)
    if kind is np.ndarray:
        return value.copy()
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(map(_copied, value))
    return value
