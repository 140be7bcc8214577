"""What grows with size and count, beside the peers: descriptors, arrays in infos, large observations, captured data.

Steps of the contenders of a row are taken in turns, in one run: milliseconds of a step of four envs whose infos have an
array of 1 MB each, and of one env with a large observation; the ratio is the median of pairs. Of what the env_fn of 8
workers captures: how many copies the trainer's memory grows by, in a process of its own for each contender. The last
table has no peer: how long the processes of a trainer live after it was killed.

::

    pip install -e ".[bench]" psutil
    python benchmarks/costs.py                        # on an idle machine; about five minutes, and 8 GiB
    python benchmarks/costs.py --workers 100 200 400  # 30 MiB for each worker
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
from gymnasium.vector import AsyncVectorEnv
from rich.console import Console
from rich.table import Table
from stable_baselines3.common.vec_env import SubprocVecEnv

from multienv import SubprocessVectorEnv

OURS, BASE = "SubprocessVectorEnv", "AsyncVectorEnv"
MAKERS: dict[str, Callable[[Sequence[Any]], Any]] = {
    OURS: partial(SubprocessVectorEnv, envs_per_worker=1),
    BASE: AsyncVectorEnv,
    "SubprocVecEnv": SubprocVecEnv,
}


class Large(gymnasium.Env[Any, Any]):
    """Returns observations and infos of these sizes, which cost nothing to make."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, observed: int, told: int) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (observed,), np.uint8)
        self.frames = [np.full(observed, turn, np.uint8) for turn in range(2)]
        self.info = {"array": np.zeros(told, np.uint8)} if told else {}
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.frames[0], dict(self.info)

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.frames[self.steps % 2], 0.0, False, False, dict(self.info)


def seconds_of_steps(num_envs: int, observed: int, told: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each step, by contender."""
    made = {name: make([partial(Large, observed, told)] * num_envs) for name, make in MAKERS.items()}
    found: dict[str, list[float]] = {name: [] for name in made}
    actions = np.zeros(num_envs, int)
    for envs in made.values():
        envs.reset()
    for repeat in range(repeats + 3):
        for name in list(made)[:: 1 if repeat % 2 else -1]:
            began = time.perf_counter()
            made[name].step(actions)
            if repeat >= 3:  # the first ones touch new memory
                found[name].append(time.perf_counter() - began)
    for envs in made.values():
        envs.close()
    return found


def descriptors_of_worker(name: str, num_envs: int) -> float:
    """Return the descriptors that each env costs its trainer."""
    before = len(os.listdir("/proc/self/fd"))
    envs = MAKERS[name]([partial(Large, 4, 0)] * num_envs)
    envs.reset()
    found = len(os.listdir("/proc/self/fd")) - before
    envs.close()
    return found / num_envs


def memory_of_captured(name: str, captured: int, num_envs: int) -> float:
    """Return by how many times what an env_fn captures its trainer grows."""
    data, process = np.ones(captured, np.uint8), psutil.Process()

    def build() -> Large:
        return Large(4 + 0 * len(data), 0)

    before = process.memory_info().rss
    envs = MAKERS[name]([build] * num_envs)
    envs.reset()
    grown = process.memory_info().rss - before
    envs.close()
    return grown / captured


def alone(function: Callable[..., float], *arguments: Any) -> float:
    """Return what the function returns in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def hold(workers: int, connection: Any) -> None:
    """Be a trainer that holds so many workers until it is killed."""
    envs = SubprocessVectorEnv([partial(Large, 4, 0)] * workers, envs_per_worker=1)
    envs.reset()
    connection.send([process.pid for process in psutil.Process().children(recursive=True)])
    time.sleep(600)


def seconds_after_kill(workers: int) -> float:
    """Return how long after the SIGKILL of a trainer the last of its processes has ended."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    trainer = context.Process(target=hold, args=(workers, theirs))
    trainer.start()
    left = [Path(f"/proc/{pid}") for pid in ours.recv()]
    os.kill(trainer.pid or 0, signal.SIGKILL)
    began = time.perf_counter()
    while left:
        left = [one for one in left if one.exists()]
        time.sleep(0.02)
    trainer.join()
    return time.perf_counter() - began


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=30, help="steps of each contender")
    parser.add_argument("--megabytes", type=int, default=100, help="of a large observation")
    parser.add_argument("--captured", type=int, default=200, help="megabytes that an env_fn captures")
    parser.add_argument("--workers", type=int, nargs="*", default=[100], help="of the trainers that are killed")
    given = parser.parse_args()
    table = Table("", *MAKERS, "first / second")
    counts = {name: alone(descriptors_of_worker, name, 16) for name in MAKERS}
    table.add_row("descriptors a worker", *(f"{one:.1f}" for one in counts.values()), _ratio(counts))
    rows = (
        ("infos of 4 MB: ms", (4, 4, 10**6)),
        (f"observation of {given.megabytes} MB: ms", (1, given.megabytes * 10**6, 0)),
    )
    for title, sizes in rows:
        steps = seconds_of_steps(*sizes, given.repeats)
        pairs = [one / other for one, other in zip(steps[OURS], steps[BASE], strict=True)]
        middle = [f"{1e3 * statistics.median(one):.1f}" for one in steps.values()]
        table.add_row(title, *middle, f"{statistics.median(pairs):.2f}")
    grown = {name: alone(memory_of_captured, name, given.captured * 10**6, 8) for name in MAKERS}
    title = f"{given.captured} MB captured: copies"
    table.add_row(title, *(f"{one:.1f}" for one in grown.values()), _ratio(grown))
    Console().print(table)
    ends = Table("workers", "seconds from SIGKILL of the trainer until the last process has ended")
    for workers in given.workers:
        ends.add_row(str(workers), ", ".join(f"{seconds_after_kill(workers):.1f}" for _ in range(3)))
    Console().print(ends)


def _ratio(found: dict[str, float]) -> str:
    return f"{found[OURS] / found[BASE]:.2f}" if found[BASE] > 0.05 else ""


if __name__ == "__main__":
    main()
