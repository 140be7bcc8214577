"""Double buffering: the policy computes on one half of the envs while the other half steps.

    python examples/pipelined.py

A batch is split in two; each half has workers of its own. While one half's workers step, the policy looks at what the
other half has returned. The gain is what the policy takes: on two cores the two overlap, in lockstep they do not.
"""

from __future__ import annotations

import argparse
import statistics
import time
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
        """The actions for a batch of observations."""
        hidden = observations.astype(np.float32)
        for weights in self._weights:
            hidden = np.tanh(hidden @ weights)
        return hidden


def lockstep(envs: Any, policy: Policy, rounds: int) -> float:
    """All envs, then the policy, in turns; env steps a second."""
    observations, _ = envs.reset(seed=0)
    begin = time.perf_counter()
    for _ in range(rounds):
        observations = envs.step(policy(observations))[0]
    return float(envs.num_envs * rounds / (time.perf_counter() - begin))


def pipelined(halves: Any, policy: Policy, rounds: int) -> float:
    """One half steps while the policy computes for the other; env steps a second."""
    for place, half in enumerate(halves):
        observations, _ = half.reset(seed=place * half.num_envs)
        half.send(policy(observations))
    begin = time.perf_counter()
    for _ in range(rounds):
        for half in halves:
            observations = half.recv()[0]
            half.send(policy(observations))
    spent = time.perf_counter() - begin
    for half in halves:
        half.recv()
    return float(sum(half.num_envs for half in halves) * rounds / spent)


def main() -> None:
    """Measure both in turns, and print what is gained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="BipedalWalker-v3")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--width", type=int, default=512, help="of the policy's hidden layers")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    env_fns = [lambda: gymnasium.make(arguments.env)] * arguments.num_envs
    with_all = SubprocessVectorEnv(env_fns)
    # Each half on all cores: while the other half's workers are idle, these have the machine to themselves.
    in_halves = SubprocessVectorEnv(env_fns, envs_per_worker=max(1, with_all.envs_per_worker[0] // 2))
    halves, policy = in_halves.split(2), Policy(with_all, arguments.width)
    one, other, gains = [], [], []
    for _ in track(range(arguments.repeats), "stepping"):
        one.append(lockstep(with_all, policy, arguments.rounds))
        other.append(pipelined(halves, policy, arguments.rounds))
        gains.append(other[-1] / one[-1])
    table = Table("", "env steps/s", title=f"{arguments.num_envs} × {arguments.env}")
    table.add_row("in lockstep", f"{statistics.median(one):,.0f}")
    table.add_row("double buffered", f"{statistics.median(other):,.0f}")
    table.add_row("gain, median of the ratios", f"{statistics.median(gains):.2f} ×")
    Console().print(table)
    with_all.close()
    in_halves.close()


if __name__ == "__main__":
    main()
