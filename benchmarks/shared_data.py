"""What it costs that envs have captured a large array: memory, and seconds until they are ready.

Each env reads all of the array once. The trainer's memory is what it has more than before, resident; the workers' is
what theirs add up to, where a page that several processes map counts once (PSS). The limit is
the array itself.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import psutil
from gymnasium.vector import AsyncVectorEnv
from rich.console import Console
from rich.table import Table

from multienv import MultiEnv, SubprocessVectorEnv, create_subprocess_envs

Array = np.ndarray[Any, Any]


class TableEnv(gymnasium.Env[Any, Any]):
    """Shows items of an array."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, table: Array) -> None:
        self.table = table

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.array([self.table.mean()]), {}

    def step(self, action: Any) -> Any:
        return self.table[:1], 0.0, False, False, {}


def lists(env_fns: list[Callable[[], Any]]) -> Any:
    """Return a MultiEnv."""
    return MultiEnv(create_subprocess_envs(env_fns, reports=""))


FACES: dict[str, Callable[[list[Callable[[], Any]]], Any]] = {
    "AsyncVectorEnv, fork": partial(AsyncVectorEnv, context="fork"),  # first, or a child has what the others leave
    "SubprocessVectorEnv": partial(SubprocessVectorEnv, envs_per_worker=1, reports=""),
    "MultiEnv": lists,
    "AsyncVectorEnv, forkserver": partial(AsyncVectorEnv, context="forkserver"),
}


def measured(make: Callable[[list[Callable[[], Any]]], Any], table: Array, envs: int) -> tuple[float, float, float]:
    """Return seconds until the first reset is over, and the MB of the trainer and of all its descendants."""
    trainer = psutil.Process()
    before, known, began = trainer.memory_info().rss, set(trainer.children(recursive=True)), time.perf_counter()
    made = make([lambda: TableEnv(table)] * envs)
    try:
        made.reset(seed=0) if isinstance(made, gymnasium.vector.VectorEnv) else made.reset()
        seconds = time.perf_counter() - began
        workers = sum(one.memory_full_info().pss for one in set(trainer.children(recursive=True)) - known)
        return seconds, (trainer.memory_info().rss - before) / 2**20, workers / 2**20
    finally:
        made.close()


def main() -> None:
    """Print a row for each face."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="size of the array")
    parser.add_argument("--envs", type=int, default=8, help="each in a process of its own")
    chosen = parser.parse_args()
    table = np.random.default_rng(0).random(chosen.megabytes * 2**17)
    rows = Table(
        "env class", "ready after s", "trainer +MB", "its processes MB", title=f"{chosen.megabytes} MB × {chosen.envs}"
    )
    for name, make in FACES.items():
        seconds, trainer, workers = measured(make, table, chosen.envs)
        rows.add_row(name, f"{seconds:.2f}", f"{trainer:.0f}", f"{workers:.0f}")
    Console().print(rows)


if __name__ == "__main__":
    main()
