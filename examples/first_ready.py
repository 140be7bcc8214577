"""A2C on environments whose step times differ tenfold: act for the first ready ones, do not wait for the slow ones.

    python examples/first_ready.py            # learn twice: with the first ready environments, and with all in step
    python examples/first_ready.py --chaos    # ... while workers are killed at random

Every fourth environment takes ten times as long per step as the others. Think of a scene with more objects, a remote
machine, or a simulator that swaps. With ``step()``, all environments wait for the slow ones. With ``send()`` and
``recv(k)`` (EnvPool's asynchronous mode), the learner acts for the environments that are ready. It learns from
fragments of 16 steps, as the environments complete them. An action in a fragment may be some updates old when the
learner uses it, as in A3C. Slow environments contribute fewer steps.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from actor_critic import HORIZON, ActorCritic, Rollout

from multienv import SubprocessVectorEnv
from multienv.testing import Killer

Array = np.ndarray[Any, Any]


class TakesTime(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Makes each step take longer.

    Args:
        env: An env.
        seconds: How much longer.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], seconds: float) -> None:
        super().__init__(env)
        self.seconds = seconds

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        return self.env.step(action)


def make_env(seconds: float) -> gymnasium.Env[Any, Any]:
    return TakesTime(gymnasium.make("CartPole-v1"), seconds)


class Fragments:
    """Collects the steps of each environment, and hands out batches of fragments of ``HORIZON`` steps.

    Args:
        envs: Number of environments.
        batch: Number of fragments in a batch.
    """

    def __init__(self, envs: int, batch: int) -> None:
        self.steps: list[list[tuple[Any, ...]]] = [[] for _ in range(envs)]
        self.first: list[Any] = [None] * envs  # the observation before the first of the steps
        self.has_ended = [False] * envs  # whether the latest step ended the episode
        self.total = [0.0] * envs  # return so far of the running episode
        self.batch, self.complete = batch, list[tuple[Any, list[tuple[Any, ...]]]]()
        self.taken, self.returns = 0, list[float]()

    def add(self, env: int, action: int, outcome: tuple[Any, ...]) -> None:
        """Add a step of an environment. ``outcome`` is observation, reward, terminated and truncated."""
        is_real = not self.has_ended[env]  # otherwise the step only reset the environment
        self.steps[env].append((action, *outcome, is_real))
        self.taken += is_real
        self.total[env] += outcome[1]
        self.has_ended[env] = bool(outcome[2] or outcome[3])
        if self.has_ended[env]:
            self.returns.append(self.total[env])
            self.total[env] = 0.0
        if len(self.steps[env]) == HORIZON:
            self.complete.append((self.first[env], self.steps[env]))
            self.first[env], self.steps[env] = outcome[0], []

    def rollout(self) -> Rollout | None:
        """Return a batch of fragments, or None if too few are complete."""
        if len(self.complete) < self.batch:
            return None
        chosen, self.complete = self.complete[: self.batch], self.complete[self.batch :]
        rollout = Rollout(self.batch, len(chosen[0][0]))
        for column, (first, steps) in enumerate(chosen):
            actions, observations, rewards, terminated, truncated, real = zip(*steps, strict=True)
            rollout.observations[:, column] = [first, *observations]
            rollout.actions[:, column], rollout.rewards[:, column] = actions, rewards
            rollout.terminated[:, column], rollout.truncated[:, column] = terminated, truncated
            rollout.real[:, column] = real
        return rollout


def first_ready(envs: SubprocessVectorEnv, k: int, learner: ActorCritic, seed: int) -> Iterator[tuple[Any, ...]]:
    """Step the environments that are ready, ``k`` at a time. Yield each step with the index of its environment."""
    actions = np.zeros(envs.num_envs, np.intp)
    envs.reset_async(seed=seed)
    while True:
        observations, rewards, terminations, truncations, _, indices = envs.recv(k)
        yield from zip(indices, actions[indices], observations, rewards, terminations, truncations, strict=True)
        actions[indices] = learner.act(observations)
        envs.send(actions[indices], indices)


def in_step(envs: SubprocessVectorEnv, learner: ActorCritic, seed: int) -> Iterator[tuple[Any, ...]]:
    """Step all environments together. Yield the same as :func:`first_ready`."""
    every, zeros = np.arange(envs.num_envs), np.zeros(envs.num_envs)
    observations, _ = envs.reset(seed=seed)
    yield from zip(every, every, observations, zeros, zeros, zeros, strict=True)
    while True:
        actions = learner.act(observations)
        observations, rewards, terminations, truncations, _ = envs.step(actions)
        yield from zip(every, actions, observations, rewards, terminations, truncations, strict=True)


def train(options: argparse.Namespace, *, waits: bool) -> tuple[float, float, int]:
    """Learn for some seconds. Return steps per second, mean return of the last 50 episodes, and deaths of workers."""
    slow = [0.001 * (options.factor if index % 4 == 3 else 1) for index in range(options.num_envs)]
    env_fns = [partial(make_env, seconds) for seconds in slow]
    with SubprocessVectorEnv(env_fns, envs_per_worker=1, reports="") as envs:
        learner = ActorCritic(envs.single_observation_space, envs.single_action_space, options.seed)
        fragments = Fragments(envs.num_envs, batch=8)
        killer = Killer(envs, interval=(0.1, 0.5), seed=options.seed) if options.chaos else contextlib.nullcontext()
        steps = in_step(envs, learner, options.seed) if waits else first_ready(envs, 4, learner, options.seed)
        with killer:
            begin = time.monotonic()
            for env, action, *outcome in steps:
                if fragments.first[env] is None:  # this is the reset, not a step
                    fragments.first[env] = outcome[0]
                    continue
                fragments.add(env, action, tuple(outcome))
                rollout = fragments.rollout()
                if rollout is not None:
                    learner.learn(rollout, remaining=1.0)
                if time.monotonic() > begin + options.seconds:
                    break
        deaths = sum(one.losses for one in envs.statistics())
        return fragments.taken / options.seconds, float(np.mean(fragments.returns[-50:])), deaths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="training time of each of the two runs")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--factor", type=float, default=10.0, help="how many times slower every fourth env is")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chaos", action="store_true", help="kill about three workers per second")
    options = parser.parse_args()
    if options.chaos:
        logging.getLogger("multienv").setLevel(logging.ERROR)  # no warnings about intended deaths
    rates = []
    for name, waits in (("first ready", False), ("in step", True)):
        rate, mean, deaths = train(options, waits=waits)
        rates.append(rate)
        print(f"{name:25} {rate:6.0f} steps per second; mean return {mean:5.1f}; {deaths} workers died", flush=True)
    print(f"Without waiting for the slow environments: {rates[0] / rates[1]:.1f} times as many steps.")


if __name__ == "__main__":
    main()
