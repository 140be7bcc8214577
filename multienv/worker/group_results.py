"""What the envs of a group return, and what is amiss with it."""

from __future__ import annotations

from typing import Any

from multienv.worker.failures import wrong_result


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


def as_info(info: Any) -> dict[str, Any]:
    """The info, if it is a dict."""
    if not isinstance(info, dict):
        raise TypeError(f"the env returned {type(info).__name__} {info!r:.200} as info; gymnasium's API wants a dict")
    return info
