"""How the cost of a batched step grows: with the number of envs, the size of an observation, the length of a step.

One quantity at a time is varied over an env that does nothing but keep its core busy. What is printed is what the batch
adds to a step of one env, in microseconds of a core: the cores' time a step takes, less the env's own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from multienv import SubprocessVectorEnv


class BusyEnv(gymnasium.Env[Any, Any]):
    """Computes for so many seconds in each step, and shows so many bytes."""

    def __init__(self, seconds: float, size: int) -> None:
        """Lay out the observation, once."""
        self.observation_space = gymnasium.spaces.Box(0, 255, (size // 4,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._observation = np.zeros(size // 4, np.float32)
        self._seconds = seconds

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode without end."""
        super().reset(seed=seed)
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Keep the core busy."""
        until = time.perf_counter() + self._seconds
        self._observation[0] += 1.0
        while time.perf_counter() < until:
            pass
        return self._observation, 1.0, False, False, {}


def own_seconds(seconds: float, size: int) -> float:
    """What a step of the env alone takes."""
    env = BusyEnv(seconds, size)
    steps = max(10, int(0.05 / (seconds + 1e-6)))
    begin = time.perf_counter()
    for _ in range(steps):
        env.step(0)
    return (time.perf_counter() - begin) / steps


def measure(num_envs: int, size: int, seconds: float, budget: float, repeats: int) -> float:
    """Seconds of a core that a step of one env costs beside the env's own."""
    cores = len(os.sched_getaffinity(0))
    # A worker for each core, however long the steps are: who shares a core keeps its clock running while it waits.
    envs_per_worker = -(-num_envs // cores)
    with_envs = SubprocessVectorEnv(
        [partial(BusyEnv, seconds, size)] * num_envs, envs_per_worker=envs_per_worker, copy=False
    )
    with_envs.reset()
    actions = np.zeros(num_envs, np.int64)
    busy = min(cores, num_envs)
    costs = []
    for repeat in range(repeats + 1):
        own, rounds, begin = own_seconds(seconds, size), 0, time.perf_counter()
        while (spent := time.perf_counter() - begin) < budget or rounds < 3:
            with_envs.step(actions)
            rounds += 1
        if repeat:  # the first warms up
            costs.append(spent * busy / (rounds * num_envs) - own)
    with_envs.close()
    return statistics.median(costs)


def plot(tables: dict[str, dict[str, float]], path: Path) -> None:
    """Draw a panel for each table."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(tables), figsize=(4 * len(tables), 4.0), layout="constrained")
    for axes, (title, rows) in zip(panels, tables.items(), strict=True):
        axes.plot(list(rows), [1e6 * cost for cost in rows.values()], marker="o")
        axes.set_xlabel(title)
        axes.set_ylabel("overhead of an env step, µs of CPU time")
        axes.set_ylim(bottom=0)
        axes.tick_params(axis="x", rotation=45)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Print three tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    tables: dict[str, dict[str, float]] = {}

    def table(title: str, rows: dict[str, tuple[int, int, float]]) -> None:
        print(title)
        tables[title] = {}
        for name, (num_envs, size, seconds) in rows.items():
            cost = measure(num_envs, size, seconds, arguments.seconds, arguments.repeats)
            tables[title][name] = cost
            print(f"  {name:>8}  {1e6 * cost:9.2f} µs", flush=True)

    table(
        "number of envs (steps of 10 µs)",
        {str(count): (count, 16, 10e-6) for count in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)},
    )
    sizes = {"4 B": 4, "64 B": 64, "1 KiB": 2**10, "16 KiB": 2**14, "128 KiB": 2**17, "1 MiB": 2**20}
    table("size of an observation (8 envs)", {name: (8, size, 100e-6) for name, size in sizes.items()})
    lengths = {"1 µs": 1e-6, "10 µs": 10e-6, "100 µs": 100e-6, "1 ms": 1e-3, "10 ms": 10e-3}
    table("length of an env step (32 envs)", {name: (32, 16, seconds) for name, seconds in lengths.items()})
    if arguments.json:
        arguments.json.write_text(json.dumps(tables, indent=1))
    if arguments.plot:
        plot(tables, arguments.plot)


if __name__ == "__main__":
    main()
