"""Parallel PettingZoo envs in processes; several envs step at the same time."""

from collections.abc import Callable
from typing import Any

from multienv.adapters.pettingzoo import SubprocessParallelEnv


def make_envs(env_fn: Callable[[], Any], num_envs: int, **options: Any) -> list[SubprocessParallelEnv]:
    # Without processes: return [env_fn() for _ in range(num_envs)], stepped one after the other.
    envs = [SubprocessParallelEnv(env_fn, env_index=index, **options).start() for index in range(num_envs)]
    return [env.initialize() for env in envs]  # all envs are built at the same time


def run(envs: list[SubprocessParallelEnv], steps: int, seed: int) -> list[tuple[int, str, float]]:
    """Let random agents act. Return for each agent's stay the index of its env, the agent, and its return."""
    stays, returns = [], [dict[str, float]() for _ in envs]
    for index, env in enumerate(envs):
        env.reset(seed=seed + index)
        for place, agent in enumerate(env.possible_agents):
            env.action_space(agent).seed(seed + place)
    for _ in range(steps):
        for env in envs:
            env.step_async({agent: env.action_space(agent).sample() for agent in env.agents})
        for index, env in enumerate(envs):
            _, rewards, terminations, truncations, infos = env.step_wait()
            for agent, reward in rewards.items():
                returns[index][agent] = returns[index].get(agent, 0.0) + reward
                is_lost = "reason" in infos[agent].get("multienv", {})  # the outcome is unknown
                if (terminations[agent] or truncations[agent]) and not is_lost:
                    stays.append((index, agent, returns[index].pop(agent)))
            if not env.agents:
                env.reset()
                returns[index] = {}
    return stays
