"""What the scripts of ``scripts_of_users.py`` import: the base of their envs, and what they show of them."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

# Some scripts set them.
gravity = 1.0


class SmallEnv(gymnasium.Env[Any, Any]):
    """Observes what ``value()`` returns for an action."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(3)
    x = 0.0
    mass = 1.0

    def value(self, a: int) -> float:
        return float(a)

    def info(self) -> dict[str, Any]:
        return {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x = 0.0
        return np.array([self.x]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.x = float(self.value(int(action)))
        return np.array([self.x]), self.x, False, False, self.info()


def trajectory(envs: Any) -> str:
    """Step some envs; return what they showed."""
    try:
        shown = [envs.reset(seed=1)[0].tolist()]
        for action in (1, 2):
            observations, rewards, _, _, infos = envs.step(np.array([action]))
            shown += [observations.tolist(), rewards.tolist(), {key: str(infos[key]) for key in sorted(infos)}]
        return json.dumps(shown)
    finally:
        envs.close()


def fingerprint(name: str, make: Callable[[], Any]) -> None:
    """Print a line: the script's name, what its env shows in the processes of ``VECTOR``, and in this very process."""
    vector = os.environ["VECTOR"]
    try:
        if vector == "async":
            shown = trajectory(gymnasium.vector.AsyncVectorEnv([make], context="forkserver"))
        else:
            from multienv import SubprocessVectorEnv

            shown = trajectory(SubprocessVectorEnv([make]))
    except Exception as error:  # told to the test
        traceback.print_exc()
        shown = f"{type(error).__name__}: {error}"
    print(json.dumps([name, shown, trajectory(gymnasium.vector.SyncVectorEnv([make]))]))
    sys.stdout.flush()
