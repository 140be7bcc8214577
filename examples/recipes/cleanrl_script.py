"""How a CleanRL-style script makes and steps its envs. Only the line with ``SubprocessVectorEnv`` is changed."""

from typing import Any

import gymnasium as gym
import numpy as np

import multienv


def make_env(env_id: str, gamma: float = 0.99) -> Any:
    def thunk() -> Any:
        env = gym.make(env_id)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        if isinstance(env.action_space, gym.spaces.Box):  # as the scripts for continuous actions do
            env = gym.wrappers.ClipAction(env)
            env = gym.wrappers.NormalizeObservation(env)
            env = gym.wrappers.TransformObservation(env, lambda obs: np.clip(obs, -10, 10), env.observation_space)
            env = gym.wrappers.NormalizeReward(env, gamma=gamma)
            env = gym.wrappers.TransformReward(env, lambda reward: float(np.clip(reward, -10, 10)))
        return env

    return thunk


def make_envs(env_id: str, num_envs: int) -> gym.vector.VectorEnv:
    # Before: return gym.vector.SyncVectorEnv([make_env(env_id) for _ in range(num_envs)])
    return multienv.SubprocessVectorEnv([make_env(env_id) for _ in range(num_envs)])


def run(envs: gym.vector.VectorEnv, steps: int, seed: int) -> list[tuple[int, float, int]]:
    """Take random actions. Return for each episode the step at which it ended, its return and its length."""
    episodes = []
    envs.action_space.seed(seed)
    envs.reset(seed=seed)
    for step in range(steps):
        _, _, _, _, infos = envs.step(envs.action_space.sample())
        if "episode" in infos:
            returns, lengths = infos["episode"]["r"], infos["episode"]["l"]
            episodes += [(step, float(returns[i]), int(lengths[i])) for i in np.flatnonzero(infos["_episode"])]
    return episodes
