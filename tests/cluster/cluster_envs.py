"""Envs of the tests on a cluster: the nodes import this module by its name."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from multienv import RayVectorEnv, SerialVectorEnv

ENVS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {},
    "LunarLander-v3": {},
    "HalfCheetah-v5": {"max_episode_steps": 60},
}


def make(name: str) -> gymnasium.Env[Any, Any]:
    return gymnasium.make(name, **ENVS[name])


class CountingEnv(gymnasium.Env[np.ndarray, int]):
    """Counts its steps, and writes a line for each to a file: how often it was really executed.

    An action of 1 hangs if the file ``hangs`` is there, and takes it away: once.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, log: str = os.devnull, hangs: str = "") -> None:
        self.log, self.hangs, self.count = log, hangs, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self._seen(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.count += 1
        with Path(self.log).open("a") as file:
            file.write(f"{self.count}\n")
        if action == 1 and self.hangs and Path(self.hangs).exists():
            Path(self.hangs).unlink()
            time.sleep(1000)
        return self._seen(), float(self.count), False, False, {}

    def _seen(self) -> np.ndarray:
        return np.array([self.count, self.np_random.random()])


class InStep:
    """Steps a batch on the cluster and a serial one beside it, and holds them against each other to the bit."""

    def __init__(self, envs: RayVectorEnv, env_fns: Any, seed: int = 7) -> None:
        self.envs = envs
        self.twin = SerialVectorEnv(env_fns)
        self.actions = self.twin.action_space
        self.actions.seed(seed)
        (shown, _), (expected, _) = envs.reset(seed=seed), self.twin.reset(seed=seed)
        assert shown.tobytes() == expected.tobytes()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            actions = self.actions.sample()
            shown, expected = self.envs.step(actions), self.twin.step(actions)
            for one, other in zip(shown[:4], expected[:4], strict=True):
                assert one.tobytes() == other.tobytes()

    @property
    def recoveries(self) -> list[Any]:
        """The last recovery of each worker that had one."""
        found = [statistics.last_recovery for statistics in self.envs.statistics()]
        return [one for one in found if one is not None]


class Noisy:
    """Is a policy that draws from a generator it carries."""

    def __init__(self, name: str, seed: int = 3) -> None:
        self.space = make(name).action_space
        self.seed = seed

    def __call__(self, observations: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        self.space.seed(self.seed)
        self.seed += 1
        actions = np.stack([self.space.sample() for _ in observations])
        return actions, {"seed": np.full(len(observations), self.seed)}
