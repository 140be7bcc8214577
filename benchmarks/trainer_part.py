"""The trainer's own part of a round, by the number of workers: what one process has to do however many cores there are.

A worker has one env that does nothing. All are asked, the trainer sleeps until all answers are there, and collects
them. What counts is the CPU time of the trainer's thread while it asks and while it collects. "Asleep": each worker has
gone to sleep before it is asked, as with a slow policy, and must be woken. "Awake": it still looks for the next
request, as with a fast policy on a machine that has a core for each worker; here they are made to look for long. The
trainer has the first core for itself, and the workers share the others.

Peers that are not installed are left out. ``--json`` keeps the figures, ``--plot`` draws them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv

from multienv import SubprocessVectorEnv
from multienv._engine.native import native
from multienv._engine.wire.segment import REPLY, REQUEST, WORKER_SLEEPS

AWAKE, ASLEEP = "awake", "asleep"
CORES = sorted(os.sched_getaffinity(0))
# Ask, wait until all answers are there, collect; whether the workers are as they should be before that.
Ask = Callable[[], object]


class StillEnv(gymnasium.Env[Any, Any]):
    """Takes no time."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    shown = np.zeros(4, np.float32)

    def __init__(self, looking: float | None = None) -> None:
        """Have the worker that builds it look so many seconds for its next request, and leave the trainer its core."""
        os.sched_setaffinity(0, CORES[1:] or CORES)
        if looking is not None:
            from multienv._engine.worker import affinity, main

            main.SPIN_SECONDS, affinity.CROWDED = looking, math.inf

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.shown, {}

    def step(self, action: Any) -> Any:
        return self.shown, 0.0, False, False, {}


class Contender:
    """Takes rounds.

    Args:
        ask, collect: The halves of a step.
        are_there: Whether all answers are there.
        are_ready: Whether the workers may be asked.
    """

    def __init__(self, ask: Ask, collect: Ask, are_there: Callable[[], bool], are_ready: Callable[[], bool]) -> None:
        self.halves, self.are_there, self.are_ready = (ask, collect), are_there, are_ready

    def round(self) -> float:
        """Return the CPU seconds of one round."""
        while not self.are_ready():
            time.sleep(0.0005)
        ask, collect = self.halves
        begin = time.thread_time()
        ask()
        spent = time.thread_time() - begin
        while not self.are_there():
            time.sleep(0.0005)
        begin = time.thread_time()
        collect()
        return spent + time.thread_time() - begin


def of_words(supervisors: list[Any], how: str) -> tuple[Callable[[], bool], Callable[[], bool]]:
    """Return what looks at the control words of these workers: are all answers there, are all awake or asleep."""
    words = [supervisor.segment.words for supervisor in supervisors]
    asleep = how == ASLEEP

    def are_there() -> bool:
        return all(each[REPLY] == each[REQUEST] for each in words)

    return are_there, lambda: are_there() and all(each[WORKER_SLEEPS] == asleep for each in words)


@contextmanager
def vector_env(count: int, how: str) -> Iterator[Contender]:
    """Our batch, a worker an env."""
    env_fn = partial(StillEnv, 3600.0 if how == AWAKE else None)
    envs = SubprocessVectorEnv([env_fn] * count, envs_per_worker=1)
    envs.reset(seed=0)
    actions = np.zeros(count, np.int64)
    yield Contender(lambda: envs.step_async(actions), envs.step_wait, *of_words(envs._workers, how))
    envs.close()


@contextmanager
def async_vector_env(count: int, how: str) -> Iterator[Contender]:
    """That of gymnasium: its workers always sleep."""
    envs = AsyncVectorEnv([StillEnv] * count, context="forkserver")
    envs.reset(seed=0)
    actions, poller = np.zeros(count, np.int64), select.poll()
    for pipe in envs.parent_pipes:
        poller.register(pipe.fileno(), select.POLLIN)
    yield Contender(
        lambda: envs.step_async(actions), envs.step_wait, lambda: len(poller.poll(0)) == count, lambda: True
    )
    envs.close()


FACES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "SubprocessVectorEnv": (vector_env, (AWAKE, ASLEEP)),
    "AsyncVectorEnv": (async_vector_env, (ASLEEP,)),
}


def measure(face: str, how: str, count: int, rounds: int) -> float:
    """Return the median of the trainer's part of a round, in µs."""
    make, _ = FACES[face]
    with make(count, how) as contender:
        os.sched_setaffinity(0, CORES[:1])
        try:
            for _ in range(20):
                contender.round()
            return 1e6 * statistics.median(contender.round() for _ in range(rounds))
        finally:
            os.sched_setaffinity(0, CORES)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3, help="in turns; the median counts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    rows = [(face, how) for face, (_, hows) in FACES.items() for how in hows]
    print(f"{len(CORES)} cores; native extension: {'yes' if native else 'no'}; µs a round, median")
    print("workers   " + "".join(f"{face + ', ' + how:>32}" for face, how in rows))
    figures: dict[str, dict[int, float]] = {f"{face}, {how}": {} for face, how in rows}
    for count in arguments.workers:
        turns = [[measure(face, how, count, arguments.rounds) for face, how in rows] for _ in range(arguments.repeats)]
        medians = [statistics.median(column) for column in zip(*turns, strict=True)]
        for name, value in zip(figures, medians, strict=True):
            figures[name][count] = value
        print(f"{count:<10}" + "".join(f"{value:>32.0f}" for value in medians), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"native": native is not None, "us": figures}, indent=1))
    if arguments.plot:
        plot(figures, arguments.plot)


def plot(figures: dict[str, dict[int, float]], path: Path) -> None:
    """Draw the figures."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, values in figures.items():
        axes.plot(list(values), list(values.values()), marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="trainer's part of a round, µs")
    axes.legend()
    axes.grid(which="both", alpha=0.3)
    figure.savefig(path, bbox_inches="tight", dpi=110)


if __name__ == "__main__":
    main()
