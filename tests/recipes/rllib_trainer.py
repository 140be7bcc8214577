"""A trainer for test_rllib_ppo.py: one iteration of PPO, undisturbed and under kills; what came of each as JSON."""

from __future__ import annotations

import json
from typing import Any

import ray
import rllib_ppo
from ray.rllib.callbacks.callbacks import RLlibCallback

from multienv.testing import Killer


class Strikes(RLlibCallback):
    """Kills a worker of the env runner at the end of each episode."""

    def on_episode_end(self, *, env: Any, **others: Any) -> None:
        Killer(env.unwrapped, seed=others["env_index"]).strike()  # strikes none where two episodes end at once


def counted(runner: Any) -> list[tuple[int, int]]:
    return [(one.exact_recoveries, one.truncated_recoveries) for one in runner.env.unwrapped.statistics()]


def iteration(killed: bool) -> dict[str, Any]:
    config = rllib_ppo.ppo_config("CartPole-v1").debugging(seed=3).rl_module(model_config={"fcnet_hiddens": [16]})
    config.training(train_batch_size=400, minibatch_size=100, num_epochs=1)
    if killed:
        config.callbacks(Strikes)
    algorithm = config.build_algo()
    try:
        told = algorithm.train()["env_runners"]
        (counts,) = algorithm.env_runner_group.foreach_env_runner(counted, local_env_runner=False)
    finally:
        algorithm.stop()
    return {
        "episodes": int(told["num_episodes"]),
        "return": float(told["episode_return_mean"]),
        "exact": sum(exact for exact, _ in counts),
        "truncated": sum(truncated for _, truncated in counts),
    }


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        print(json.dumps([iteration(False), iteration(True)]))
    finally:
        ray.shutdown()
