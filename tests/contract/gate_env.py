"""An env whose steps take as long as a test wants. The module imports little: twenty workers import it at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

GO, WAIT = 0, 3


class GateEnv(gymnasium.Env[Any, Any]):
    """Waits in each step with the action ``WAIT``, and in ``wait()``, until the gate is there; says that it does.

    The observation is the step in the episode, a draw, and the last action.
    """

    observation_space = gymnasium.spaces.Box(-1, np.inf, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, directory: Path, name: str = "") -> None:
        self.waits, self.gate = directory / f"waits{name}", directory / "gate"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(-1), {}

    def step(self, action: Any) -> Any:
        if action == WAIT:
            self.wait()
        self.steps += 1
        return self._observe(action), 1.0, False, False, {}

    def wait(self) -> str:
        self.waits.touch()
        while not self.gate.exists():
            time.sleep(0.02)
        return "waited"

    def poke(self) -> int:
        return self.steps

    def _observe(self, action: int) -> Any:
        return np.array([self.steps, self.np_random.random(), action])


def gated_from_the_second_time(directory: Path) -> GateEnv:
    """Build an env: the first time at once, later when the gate is there."""
    env = GateEnv(directory)
    if (directory / "built").exists():
        env.wait()
    (directory / "built").touch()
    return env
