"""Envs that crash and hang by chance, with nothing but deadlines given: what becomes of their losses.

4 envs × 500 steps of 2 ms × 4 seeds, as lists and as a batch. A step crashes (SIGSEGV) once in 300 and hangs once in
500; the chance comes from the system, so that a repeat is not the same. Each run is compared with a calm one. Exits
with 1 if one differs without a truncation, or more than one loss in 300 ends an episode.

``--table`` prints for some rates of crashes, and some costs of a snapshot, the share of time that snapshots and
repeated steps take, beside the least that is possible with snapshots at equal distances: √(2C/M) (Young 1974).
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from multienv import Deadlines, MultiEnv, SubprocessEnv, SubprocessVectorEnv, create_subprocess_envs
from multienv.events import Recovery

NUM_ENVS, EPISODE = 4, 200
DEADLINES = Deadlines(step=1.0, reset=10.0)


class Chancy(gymnasium.Env[Any, Any]):
    """Draws what it shows from its generator; crashes and hangs by a chance that it does not.

    Args:
        crashes, hangs: Once in so many steps; 0: never.
        seconds: Of a step.
        folder: Where it counts its steps and forks, in all processes; ``""``: nowhere.
        fork_seconds: How much longer a fork takes, as that of a large process does.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = spaces.Discrete(3)

    def __init__(
        self, crashes: int = 0, hangs: int = 0, seconds: float = 0.002, folder: str = "", fork_seconds: float = 0.0
    ) -> None:
        self.rates, self.seconds = [1 / one if one else 0.0 for one in (crashes, hangs)], seconds
        self.steps = Path(folder, "steps").open("ab", buffering=0) if folder else None  # noqa: SIM115
        if folder:
            forks = Path(folder, "forks").open("ab", buffering=0)  # noqa: SIM115
            os.register_at_fork(before=lambda: (forks.write(b"."), time.sleep(fork_seconds)))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin an episode."""
        super().reset(seed=seed)
        self.state, self.taken = self.np_random.normal(size=4), 0
        return self.state.copy(), {}

    def step(self, action: Any) -> Any:
        """Take a step, if chance allows it."""
        until = time.perf_counter() + self.seconds
        if self.steps is not None:
            self.steps.write(b".")
        while time.perf_counter() < until:
            pass
        die = int.from_bytes(os.urandom(6), "little") / 2**48
        if die < self.rates[0]:
            os.kill(os.getpid(), signal.SIGSEGV)
        elif die < sum(self.rates):
            time.sleep(3600)
        self.taken += 1
        self.state = np.cos(3 * self.state + action) + self.np_random.normal(size=4)
        return self.state.copy(), float(self.state[0]), self.taken >= EPISODE, False, {}


def lists(env_fn: Callable[[], Any], hook: Any) -> Any:
    """Make envs that take and return lists."""
    envs = create_subprocess_envs([env_fn] * NUM_ENVS, deadlines=DEADLINES, hooks=[hook], reports="")
    return MultiEnv(envs, autoreset_mode="NEXT_STEP")


def batch(env_fn: Callable[[], Any], hook: Any) -> Any:
    """Make a vector env."""
    return SubprocessVectorEnv([env_fn] * NUM_ENVS, deadlines=DEADLINES, hooks=[hook], reports="")


def play(make: Any, env_fn: Callable[[], Any], seed: int, steps: int) -> tuple[list[Any], list[Recovery]]:
    """Return all that a run showed, and its recoveries."""
    seen, events, dice = [], list[Any](), np.random.default_rng(seed)
    with make(env_fn, events.append) as envs:
        envs.reset(seed=seed)
        for _ in range(steps):
            actions = dice.integers(3, size=NUM_ENVS)
            told = envs.step(list(actions) if make is lists else actions)
            seen.append([np.asarray(one).tobytes() for one in told[:4]])
    return seen, [event for event in events if isinstance(event, Recovery)]


def compare(arguments: argparse.Namespace) -> int:
    """Print a row for each face; return the exit code."""
    outcomes, silent = Counter[str](), 0
    for make in (lists, batch):
        equal, mine, attempts = 0, Counter[str](), 0
        for seed in range(arguments.seeds):
            calm, _ = play(make, Chancy, seed, arguments.steps)
            crazy = partial(Chancy, arguments.crashes, arguments.hangs)
            seen, recoveries = play(make, crazy, seed, arguments.steps)
            mine.update(one.outcome for one in recoveries)
            attempts = max([attempts, *(one.attempts for one in recoveries)])
            equal += seen == calm
            silent += seen != calm and all(one.outcome == "exact" for one in recoveries)
        outcomes += mine
        told = ", ".join(f"{count} {outcome}" for outcome, count in mine.items())
        print(
            f"{make.__name__}: {equal} of {arguments.seeds} runs equal the calm one; {told}; at most {attempts} tries"
        )
    ended = outcomes.total() - outcomes["exact"]
    print(f"{outcomes.total()} losses, {ended} not exact")
    return int(silent > 0 or 300 * outcomes["truncated"] > outcomes.total())


def share_lost(crashes: int, fork_seconds: float, steps: int) -> tuple[float, float, float, float]:
    """Return what a snapshot costs, the share of time lost, the least share, and the interval in the end."""
    step = 0.002
    with tempfile.TemporaryDirectory() as folder:
        make = partial(Chancy, crashes, 0, step, folder, fork_seconds)
        with SubprocessEnv(make, reports="") as env:
            env.reset(seed=0)
            costs = []
            for _ in range(5):
                began = time.perf_counter()
                env.snapshot()
                costs.append(time.perf_counter() - began)
            counted = [Path(folder, name) for name in ("steps", "forks")]
            before = [path.stat().st_size for path in counted]
            ended = False
            for _ in range(steps):
                _, _, ended, _, _ = (*env.reset(), 0, 0, 0) if ended else env.step(0)
            taken, forks = [path.stat().st_size - size for path, size in zip(counted, before, strict=True)]
            interval = env.statistics().snapshot_seconds or 0.0
    cost, useful = statistics.median(costs), steps * (1 - 1 / EPISODE) * step
    lost = forks * cost + taken * step - useful
    least = math.sqrt(2 * cost / (crashes * step))
    return cost, lost / (lost + useful), least / (1 + least), interval


def table(arguments: argparse.Namespace) -> None:
    """Print a row for each rate and cost."""
    print("| a crash in | a snapshot takes | time lost | the least | interval in the end |\n|---|---|---|---|---|")
    for crashes in (1000, 300, 100):
        for fork_seconds in (0.0, 0.008, 0.03):
            cost, lost, least, interval = share_lost(crashes, fork_seconds, arguments.table)
            cells = f"{1e3 * cost:.1f} ms | {lost:.1%} | {least:.1%} | {interval:.2f} s"
            print(f"| {crashes} steps of 2 ms | {cells} |", flush=True)


def main() -> None:
    """Compare runs, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--crashes", type=int, default=300, help="a step crashes once in so many")
    parser.add_argument("--hangs", type=int, default=500, help="a step hangs once in so many")
    parser.add_argument("--table", type=int, nargs="?", const=4000, default=0, help="steps for each row of the table")
    arguments = parser.parse_args()
    logging.getLogger("multienv").setLevel(logging.ERROR)
    if arguments.table:
        table(arguments)
        return
    sys.exit(compare(arguments))


if __name__ == "__main__":
    main()
