"""Envs for the tests of the relay, in a module of their own: workers import them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kit import CounterEnv


class PictureEnv(CounterEnv):
    """Shows its counts as a picture.

    Args:
        side: Pixels.
        counter: The arguments of `CounterEnv`.
    """

    def __init__(self, *, side: int, **counter: Any) -> None:
        import gymnasium

        super().__init__(**counter)
        self.observation_space = gymnasium.spaces.Box(0, 255, (side, side), np.uint8)

    def _observe(self) -> Any:
        shape = self.observation_space.shape
        assert shape is not None
        shown = np.arange(shape[0] * shape[1], dtype=np.uint32) * (7 + self.episode_step) + int(self._draw * 1e6)
        return (shown % 251).astype(np.uint8).reshape(shape)


class WritingEnv(CounterEnv):
    """Writes to a file in its fourth step, and keeps nothing open."""

    def step(self, action: Any) -> Any:
        if self.episode_step == 3:
            Path("/dev/full").open("wb").close()
        return super().step(action)
