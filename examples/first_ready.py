"""A2C with environments whose step times differ by ten times: act for the first that are ready, wait for no slow one.

    python examples/first_ready.py            # the same learner twice: with the first that are ready, and in step
    python examples/first_ready.py --chaos    # ... while workers are killed at random

Every fourth environment takes ten times as long for a step as the others: a scene with more objects, a remote machine,
a simulator that swaps. With ``step()`` all wait for these. With ``send()`` and ``recv(k)``, EnvPool's asynchronous
mode, the learner acts for whichever are ready. It learns from the fragments of 16 steps that the environments complete.
An action in one may be some updates old when it is learned from, as in A3C; the slow environments contribute less.
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
        seconds: By so much.
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
        envs: How many environments there are.
        batch: How many fragments are learned from at once.
    """

    def __init__(self, envs: int, batch: int) -> None:
        self.steps: list[list[tuple[Any, ...]]] = [[] for _ in range(envs)]
        self.first: list[Any] = [None] * envs  # the observation before the steps
        self.has_ended = [False] * envs  # with the step before them
        self.total = [0.0] * envs  # reward of the running episode
        self.batch, self.complete = batch, list[tuple[Any, list[tuple[Any, ...]]]]()
        self.taken, self.returns = 0, list[float]()

    def add(self, env: int, action: int, outcome: tuple[Any, ...]) -> None:
        """Add a step of an environment: its observation, reward, terminated and truncated."""
        is_real = not self.has_ended[env]  # else it only reset the environment
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
        """Return a batch of fragments, or None as long as too few are complete."""
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
    """Step whichever environments are ready, ``k`` at a time; yield each step and the env that made it."""
    actions = np.zeros(envs.num_envs, np.intp)
    envs.reset_async(seed=seed)
    while True:
        observations, rewards, terminations, truncations, _, indices = envs.recv(k)
        yield from zip(indices, actions[indices], observations, rewards, terminations, truncations, strict=True)
        actions[indices] = learner.act(observations)
        envs.send(actions[indices], indices)


def in_step(envs: SubprocessVectorEnv, learner: ActorCritic, seed: int) -> Iterator[tuple[Any, ...]]:
    """Step all environments at once; yield as :func:`first_ready` does."""
    every, zeros = np.arange(envs.num_envs), np.zeros(envs.num_envs)
    observations, _ = envs.reset(seed=seed)
    yield from zip(every, every, observations, zeros, zeros, zeros, strict=True)
    while True:
        actions = learner.act(observations)
        observations, rewards, terminations, truncations, _ = envs.step(actions)
        yield from zip(every, actions, observations, rewards, terminations, truncations, strict=True)


def train(options: argparse.Namespace, *, waits: bool) -> tuple[float, float, int]:
    """Learn for so many seconds; return steps a second, mean return of the last 50 episodes, and deaths of workers."""
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
                if fragments.first[env] is None:  # what came is the reset
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
    parser.add_argument("--seconds", type=float, default=15.0, help="for which each of both learns")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--factor", type=float, default=10.0, help="every fourth env is so many times as slow")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chaos", action="store_true", help="kill workers, about three a second")
    options = parser.parse_args()
    if options.chaos:
        logging.getLogger("multienv").setLevel(logging.ERROR)  # deaths that are wanted
    rates = []
    for name, waits in (("the first that are ready", False), ("in step", True)):
        rate, mean, deaths = train(options, waits=waits)
        rates.append(rate)
        print(f"{name:25} {rate:6.0f} steps a second; mean return {mean:5.1f}; {deaths} workers died", flush=True)
    print(f"{rates[0] / rates[1]:.1f} times as many steps for the one that waits for no slow environment.")


if __name__ == "__main__":
    main()
