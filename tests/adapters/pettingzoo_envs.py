"""Parallel envs for the tests of the adapter: PettingZoo's own, and one in which agents are born in the episode."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from gymnasium.utils.seeding import np_random
from pettingzoo import ParallelEnv


class CampEnv(ParallelEnv):
    """Agents of three kinds come and go by chance, to the last episode's end; each kind has spaces of its own.

    Args:
        horizon: Steps of an episode.
        fault: What happens in the step ``at`` of an episode whose reset has ``options={"fault": True}``: "kill",
            "raise".
        render_mode: "rgb_array" or nothing.
    """

    metadata: ClassVar[Any] = {"name": "camp", "render_modes": ["rgb_array"], "render_fps": 10}
    possible_agents: ClassVar[Any] = [f"{kind}_{number}" for kind in ("scout", "smith", "cook") for number in range(4)]
    state_space = spaces.Box(0, 100, (2,), np.int64)
    boxes: ClassVar[Any] = {
        "scout": (spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(3)),
        "smith": (
            spaces.Dict({"ore": spaces.Discrete(5), "fire": spaces.Box(0, 255, (2, 2), np.uint8)}),
            spaces.Box(-1, 1, (2,), np.float32),
        ),
        "cook": (spaces.Box(0, 1, (700,), np.float64), spaces.MultiDiscrete([2, 3])),  # more than 4096 bytes
    }

    def __init__(self, horizon: int = 12, fault: str = "", render_mode: str | None = None) -> None:
        self.horizon, self.fault, self.render_mode = horizon, fault, render_mode
        self.spaces = {agent: self.boxes[agent.partition("_")[0]] for agent in self.possible_agents}
        self.agents: list[str] = []
        self.rng, _ = np_random(None)
        self.gravity, self.is_struck, self.steps = 9.8, False, 0

    def observation_space(self, agent: str) -> Any:
        return self.spaces[agent][0]

    def action_space(self, agent: str) -> Any:
        return self.spaces[agent][1]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng, _ = np_random(seed)
        self.is_struck, self.steps = bool(options and options.get("fault")), 0
        self.agents = ["scout_0", "smith_0"]
        self.unborn = [agent for agent in self.possible_agents if agent not in self.agents]
        return {agent: self._seen(agent) for agent in self.agents}, {
            agent: {"options": options} for agent in self.agents
        }

    def step(self, actions: Mapping[str, Any]) -> Any:
        self.steps += 1
        if self.is_struck and self.steps == 3:
            self._strike()
        weight = {agent: float(np.sum(actions[agent])) for agent in self.agents}
        present, is_late = list(self.agents), self.steps >= self.horizon
        terminations = {agent: bool(self.rng.random() < 0.1) for agent in present}
        observations = {agent: self._seen(agent) for agent in present}
        rewards = {  # of several types
            agent: weight[agent] if place % 2 else np.float32(weight[agent]) for place, agent in enumerate(present)
        }
        self.agents = [agent for agent in present if not terminations[agent] and not is_late]
        infos: dict[str, Any] = {agent: {"step": self.steps} for agent in present}
        if self.agents and self.unborn and self.rng.random() < 0.5:
            born = self.unborn.pop(int(self.rng.integers(len(self.unborn))))
            self.agents.append(born)
            observations[born], rewards[born], terminations[born], infos[born] = self._seen(born), 0, False, {}
        return observations, rewards, terminations, dict.fromkeys(observations, is_late), infos

    def _strike(self) -> None:
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "raise":
            raise ZeroDivisionError("the camp is empty")

    def _seen(self, agent: str) -> Any:
        space = self.observation_space(agent)
        if isinstance(space, spaces.Dict):
            return {"ore": int(self.rng.integers(5)), "fire": self.rng.integers(0, 256, (2, 2), np.uint8)}
        return self.rng.random(space.shape).astype(space.dtype)

    def state(self) -> Any:
        return np.array([self.steps, len(self.agents)])

    def render(self) -> Any:
        return np.full((4, 4, 3), self.steps, np.uint8) if self.render_mode else None

    def weigh(self, factor: float) -> float:
        return self.gravity * factor


def camp(**options: Any) -> ParallelEnv:
    return CampEnv(**options)


def deep_camp(**options: Any) -> ParallelEnv:
    """The same inside wrappers of PettingZoo, behind which its generator is."""
    from pettingzoo.utils import BaseParallelWrapper

    return BaseParallelWrapper(BaseParallelWrapper(CampEnv(**options)))


def generated(**options: Any) -> ParallelEnv:
    """PettingZoo's example of agents, and of kinds of agents, that are not known before."""
    from pettingzoo.test.example_envs import generated_agents_parallel_v0

    return generated_agents_parallel_v0.parallel_env(max_cycles=40, **options)


def rock_paper_scissors(**options: Any) -> ParallelEnv:
    from pettingzoo.classic.rps import rps

    return rps.parallel_env(max_cycles=30, **options)


def zombies(**options: Any) -> ParallelEnv:
    """Four agents that leave one by one; zombies come by chance."""
    from pettingzoo.butterfly.knights_archers_zombies import knights_archers_zombies

    return knights_archers_zombies.parallel_env(spawn_delay=3, max_cycles=100, **options)


def pistons(**options: Any) -> ParallelEnv:
    """Observations of 160 KB each."""
    from pettingzoo.butterfly.pistonball import pistonball

    return pistonball.parallel_env(n_pistons=4, max_cycles=30, **options)
