"""Stable-Baselines3's PPO learns CartPole on environments whose workers may be killed at any moment.

    python examples/ppo_sb3.py            # learn
    python examples/ppo_sb3.py --chaos    # ... while workers are killed at random

In your own script, change one line: ``vec_env_cls=SubprocessVecEnv``. The kills do not change the result: with the same
``--seed``, both commands above end with the same return.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys

import gymnasium
import numpy as np

from multienv import Deadlines
from multienv.testing import Killer

try:
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecMonitor

    from multienv.adapters.stable_baselines3 import SubprocessVecEnv
except ImportError as error:
    sys.exit(f'{error} This example needs Stable-Baselines3; in a checkout, run pip install -e ".[sb3]"')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--total-steps", type=int, default=40_000)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chaos", action="store_true", help="kill about three workers per second")
    options = parser.parse_args()

    if options.chaos:
        logging.getLogger("multienv").setLevel(logging.ERROR)  # each loss logs a warning; this example counts them
    torch.set_num_threads(1)  # faster for small networks, and leaves the other cores to the workers
    envs = SubprocessVecEnv(
        [lambda: gymnasium.make("CartPole-v1")] * options.num_envs,
        deadlines=Deadlines(step=10.0, reset=10.0),  # replaces hung workers too
        reports="" if options.chaos else None,  # no crash reports for intended deaths
    )
    monitored = VecMonitor(envs)  # in the trainer: it counts each step once, also if workers die
    model = PPO("MlpPolicy", monitored, n_steps=128, batch_size=256, learning_rate=1e-3, seed=options.seed)
    chaos = Killer(envs, interval=(0.1, 0.5), seed=options.seed) if options.chaos else contextlib.nullcontext()
    returns: list[float] = []
    with contextlib.closing(monitored), chaos:
        while model.num_timesteps < options.total_steps:
            model.learn(options.total_steps // 5, reset_num_timesteps=False)
            returns.append(float(np.mean([episode["r"] for episode in model.ep_info_buffer])))
            workers = envs.statistics()
            deaths = sum(one.losses for one in workers)
            exact = sum(one.exact_recoveries + one.replayed_recoveries for one in workers)
            print(
                f"{model.num_timesteps:7} steps: mean return {returns[-1]:6.1f}; {deaths} workers died, {exact} "
                "episodes went on",
                flush=True,
            )
    print(f"The return went from {returns[0]:.1f} to {returns[-1]:.1f}; {deaths} workers died meanwhile.")
    if returns[-1] <= returns[0]:
        sys.exit("The return did not go up.")


if __name__ == "__main__":
    main()
