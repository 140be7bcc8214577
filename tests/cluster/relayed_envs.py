"""Envs for the tests of the relay, in a module of their own: workers import them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kit import CounterEnv


class GateEnv(CounterEnv):
    """Waits in a step with action 3 until a byte is written to a FIFO.

    Args:
        gate: Path of the FIFO.
        counter: The arguments of `CounterEnv`.
    """

    def __init__(self, *, gate: str, **counter: Any) -> None:
        super().__init__(**counter)
        self._gate = gate

    def step(self, action: Any) -> Any:
        if action == 3:
            with Path(self._gate).open("rb") as gate:
                gate.read(1)
        return super().step(action)


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
