"""Teach a policy to fly the drone, and print a fingerprint of the training.

python train.py sync     # gymnasium's SyncVectorEnv; the simulator without bugs
python train.py async    # gymnasium's AsyncVectorEnv; the simulator with its bugs
python train.py          # multienv; the simulator with its bugs
"""

import hashlib
import sys
from functools import partial

import gymnasium
import numpy as np
from drone import Drone

from multienv import Deadlines, RestartPolicy, SubprocessVectorEnv, flat_statistics

NUM_ENVS, STEPS, ITERATIONS = 8, 100, 40
DISCOUNT, RATE = 0.95, 0.3


def make_envs(kind):
    if kind == "sync":
        return gymnasium.vector.SyncVectorEnv([partial(Drone, bugs=False)] * NUM_ENVS)
    if kind == "async":
        return gymnasium.vector.AsyncVectorEnv([Drone] * NUM_ENVS)
    restart = RestartPolicy(max_rss=100 * 2**20)
    return SubprocessVectorEnv(
        [Drone] * NUM_ENVS,
        envs_per_worker=1,
        deadlines=Deadlines(step=1.0, reset=1.0),
        restart=restart,
    )


def train(envs):
    """Train by REINFORCE; return a hash of all that was seen, and of the weights."""
    generator = np.random.default_rng(0)
    weights = np.zeros(2)
    seen = hashlib.sha256()
    observations, _ = envs.reset(seed=0)
    ended = np.zeros(NUM_ENVS, bool)  # the next step only resets these envs
    for iteration in range(ITERATIONS):
        slopes = np.zeros((STEPS, NUM_ENVS, 2))  # of log(probability of the action)
        rewards, going_on, real = np.zeros((3, STEPS, NUM_ENVS))
        for t in range(STEPS):
            chances = 1 / (1 + np.exp(-observations @ weights))
            actions = (generator.random(NUM_ENVS) < chances).astype(np.int64)
            slopes[t] = (actions - chances)[:, None] * observations
            real[t] = ~ended
            observations, rewards[t], terminated, truncated, _ = envs.step(actions)
            ended = terminated | truncated
            going_on[t] = ~ended
            for array in (observations, rewards[t], terminated, truncated):
                seen.update(array.tobytes())
        returns = np.zeros((STEPS + 1, NUM_ENVS))
        for t in reversed(range(STEPS)):
            returns[t] = rewards[t] + DISCOUNT * going_on[t] * returns[t + 1]
        advantages = real * (returns[:-1] - returns[:-1].mean())
        weights += RATE * (advantages[:, :, None] * slopes).sum((0, 1))
        if iteration % 13 == 0:
            print(f"iteration {iteration}: mean reward {rewards.mean():.2f}", flush=True)
    seen.update(weights.tobytes())
    return seen.hexdigest()[:16]


if __name__ == "__main__":
    envs = make_envs(sys.argv[1] if len(sys.argv) > 1 else "multienv")
    print("fingerprint:", train(envs))
    if isinstance(envs, SubprocessVectorEnv):
        numbers = flat_statistics(envs.statistics())
        print("losses:", numbers["losses"])
        print("recovered exactly:", numbers["exact_recoveries"])
        print("truncated:", numbers["truncated_recoveries"])
        print("replaced because of max_rss:", numbers["recycled"])
    envs.close()
