"""What the envs of a group return, and what is amiss with it."""

from __future__ import annotations

from typing import Any

import numpy as np

from multienv.worker.failures import wrong_result

# What nobody can change.
_FIXED = frozenset((type(None), bool, int, float, str, bytes, np.float64, np.float32, np.int64, np.int32, np.bool_))
_holds_fixed = _FIXED.issuperset


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
        if _holds_fixed(map(type, info.values())):
            return dict(info)
    except Exception:  # noqa: S110 - foreign types
        pass
    try:
        return {key: _copied(value) for key, value in info.items()}
    except RecursionError:  # told of when all are pickled
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
