"""A PettingZoo parallel env as one gymnasium env: dicts by agent in, dicts by agent out."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class ParallelAsEnv(gymnasium.Env[dict[str, Any], dict[str, Any]]):
    """Presents a parallel env to multienv, which knows envs of one agent only.

    Observations and actions are dicts of all agents there may be. Of an agent that has left the observation is the last
    one that it saw, and its action is ignored. The reward is the sum of all; ``info["agents"]`` has who is there, and
    ``info["rewards"]``, ``info["terminations"]``, ``info["truncations"]`` and ``info["infos"]`` what the parallel env
    returned. The episode ends when nobody is left.

    Args:
        env: A parallel env of PettingZoo's.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.metadata, self.render_mode = env.metadata, env.render_mode
        self.observation_space = spaces.Dict({agent: env.observation_space(agent) for agent in env.possible_agents})
        self.action_space = spaces.Dict({agent: env.action_space(agent) for agent in env.possible_agents})
        self._seen: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if seed is None:  # PettingZoo's envs do not all go on with the generator that they have
            seed = int(self.np_random.integers(2**31))
        self._seen, infos = self.env.reset(seed=seed, options=options)
        for agent in set(self.env.possible_agents) - set(self._seen):  # not there from the beginning
            self._seen[agent] = _nothing(self.observation_space[agent])
        return dict(self._seen), {"agents": list(self.env.agents), "infos": infos}

    def step(self, action: dict[str, Any]) -> Any:
        observations, rewards, terminations, truncations, infos = self.env.step(
            {agent: action[agent] for agent in self.env.agents}
        )
        self._seen.update(observations)
        info = {
            "agents": list(self.env.agents),
            "rewards": rewards,
            "terminations": terminations,
            "truncations": truncations,
            "infos": infos,
        }
        is_over = not self.env.agents
        is_truncated = is_over and all(truncations.values())
        return dict(self._seen), float(sum(rewards.values())), is_over and not is_truncated, is_truncated, info

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


def _nothing(space: spaces.Space[Any]) -> Any:
    return np.zeros(space.shape, space.dtype)
