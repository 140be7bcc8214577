"""RLlib's PPO on a vector env of multienv: register a function that makes all envs of an env runner."""

from typing import Any

import gymnasium
from ray import tune
from ray.rllib.algorithms.ppo import PPOConfig

import multienv


def make_envs(config: dict[str, Any]) -> gymnasium.vector.VectorEnv:
    """Make the envs of one env runner, in its process. RLlib puts ``num_envs`` into the config."""
    return multienv.make_vec(config["id"], config["num_envs"])


def ppo_config(env_id: str) -> PPOConfig:
    tune.register_env("multienv", make_envs)
    return (
        PPOConfig()
        .environment("multienv", env_config={"id": env_id})
        .env_runners(
            num_env_runners=1,
            num_envs_per_env_runner=4,
            gym_env_vectorize_mode=gymnasium.VectorizeMode.VECTOR_ENTRY_POINT,
        )
    )
