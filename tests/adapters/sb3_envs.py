"""Envs for the tests of Stable-Baselines3, in a module that imports no torch: each worker imports it."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from kit import CounterEnv


class MaskedEnv(CounterEnv):
    """Says which actions are allowed at each step, and tells an info that numpy cannot hold."""

    def action_masks(self) -> Any:
        """Allow the actions up to the step in the episode."""
        return np.arange(self.action_space.n) <= self.episode_step

    def _info(self) -> dict[str, Any]:
        return {"episode_step": self.episode_step, "nested": {"pair": (self.episode_step, None)}}


class GoalEnv(gymnasium.Env[Any, Any]):
    """Walks on a line towards a goal; an episode takes ten steps."""

    def __init__(self) -> None:
        line = spaces.Box(-10.0, 10.0, (1,), np.float32)
        self.observation_space = spaces.Dict({"observation": line, "achieved_goal": line, "desired_goal": line})
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.place = self.goal = np.zeros(1, np.float32)
        self.taken = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.taken = 0
        self.place = np.zeros(1, np.float32)
        self.goal = self.np_random.uniform(-3, 3, 1).astype(np.float32)
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.taken += 1
        self.place = (self.place + action).astype(np.float32)
        reward = float(self.compute_reward(self.place, self.goal, {}))
        return self._observe(), reward, False, self.taken >= 10, {}

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return -(np.linalg.norm(achieved - desired, axis=-1) > 0.5).astype(np.float32)

    def _observe(self) -> Any:
        return {"observation": self.place, "achieved_goal": self.place, "desired_goal": self.goal}


class NamedDict(spaces.Dict):
    """A space of somebody's own."""


class ShapesEnv(gymnasium.Env[Any, Any]):
    """Observes and does whatever its spaces sample."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        # Copies: a DummyVecEnv gives all envs the same objects.
        self.observation_space, self.action_space = copy.deepcopy((observation_space, action_space))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), 1.0, bool(self.np_random.random() < 0.2), False, {}


# Ends its process at its second reset.
