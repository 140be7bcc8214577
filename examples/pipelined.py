"""Double buffering: the policy computes actions for one half of the envs while the other half steps.

    pip install -e ".[examples]" && python examples/pipelined.py

There are two vector envs, each with half of the envs. ``step_async`` sends a step and does not wait. While the workers
of one half step, ``step_wait`` collects the results of the other half, and the policy computes its next actions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from multienv import SubprocessVectorEnv


class Policy:
    """A small network: observations in, actions out."""

    def __init__(self, envs: Any, width: int) -> None:
        """Draw the weights."""
        inputs, outputs = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
        generator = np.random.default_rng(0)
        sizes = [(inputs, width), (width, width), (width, outputs)]
        self._weights = [generator.normal(0.0, shape[0] ** -0.5, shape).astype(np.float32) for shape in sizes]

    def __call__(self, observations: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the actions for a batch of observations."""
        hidden = observations.astype(np.float32)
        for weights in self._weights:
            hidden = np.tanh(hidden @ weights)
        return hidden


def lockstep(envs: SubprocessVectorEnv, policy: Policy, rounds: int) -> float:
    """Step all envs, then ask the policy, in turn. Return env steps per second."""
    observations, _ = envs.reset(seed=0)
    begin = time.perf_counter()
    for _ in range(rounds):
        observations = envs.step(policy(observations))[0]
    return envs.num_envs * rounds / (time.perf_counter() - begin)


def pipelined(halves: Sequence[SubprocessVectorEnv], policy: Policy, rounds: int) -> float:
    """Step one half while the policy computes for the other half. Return env steps per second."""
    for place, half in enumerate(halves):
        observations, _ = half.reset(seed=place * half.num_envs)
        half.step_async(policy(observations))
    begin = time.perf_counter()
    for _ in range(rounds):
        for half in halves:
            observations = half.step_wait()[0]
            half.step_async(policy(observations))
    spent = time.perf_counter() - begin
    for half in halves:
        half.step_wait()
    return sum(half.num_envs for half in halves) * rounds / spent


def main() -> None:
    """Measure both in turn, and print the gain."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="BipedalWalker-v3")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--width", type=int, default=512, help="width of the policy's hidden layers")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    env_fns = [lambda: gymnasium.make(arguments.env)] * arguments.num_envs
    middle = arguments.num_envs // 2
    with_all = SubprocessVectorEnv(env_fns)
    halves = [SubprocessVectorEnv(env_fns[:middle]), SubprocessVectorEnv(env_fns[middle:])]
    policy = Policy(with_all, arguments.width)
    one, other, gains = [], [], []
    for _ in track(range(arguments.repeats), "stepping"):
        one.append(lockstep(with_all, policy, arguments.rounds))
        other.append(pipelined(halves, policy, arguments.rounds))
        gains.append(other[-1] / one[-1])
        if not Console().is_terminal:  # a pipe shows no bar
            print(f"double buffered: {gains[-1]:.2f} × the steps", flush=True)
    table = Table("", "env steps/s", title=f"{arguments.num_envs} × {arguments.env}")
    table.add_row("in lockstep", f"{statistics.median(one):,.0f}")
    table.add_row("double buffered", f"{statistics.median(other):,.0f}")
    table.add_row("gain, median of the ratios", f"{statistics.median(gains):.2f} ×")
    Console().print(table)
    for envs in (with_all, *halves):
        envs.close()


if __name__ == "__main__":
    main()
