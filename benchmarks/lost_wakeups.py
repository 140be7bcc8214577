"""Ring a doorbell a great many times, and look for wake-ups that were lost.

Both sides go to sleep after one look, so that nearly every round goes through "I sleep" on one side while the other
stores its number: the one moment at which a wake-up can be lost. A round without a loss takes microseconds; one with a
loss takes until the first sleep ends by itself, 2 ms in the trainer and 3 ms in the worker. More than that it never
takes: that is what is to be shown. A round may also be long because the machine did something else; so first sleeps
that came to their end are counted by themselves.

    python benchmarks/lost_wakeups.py --rounds 100_000_000
"""

from __future__ import annotations

import argparse
import random
import select
import time
import types
from collections import Counter
from typing import Any

import gymnasium
import numpy as np

from multienv import SubprocessEnv
from multienv._engine.processes import channel, worker_process
from multienv._engine.worker import main as worker_main

SELECT = types.SimpleNamespace(POLLIN=select.POLLIN)


class Poll:
    """Does what ``select.poll()`` does, and counts how often nothing came in time."""

    ended = 0

    def __init__(self) -> None:
        """Make the poll object."""
        self._poll = select.poll()
        self.register = self._poll.register

    def poll(self, milliseconds: float | None) -> list[tuple[int, int]]:
        """Wait."""
        found = self._poll.poll(milliseconds)
        if not found:
            Poll.ended += 1
        return found


SELECT.poll = Poll


class NothingEnv(gymnasium.Env[Any, Any]):
    """Does nothing; its worker looks once before it sleeps."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        """Have the worker sleep at once, and count."""
        worker_main.SPIN_SECONDS = 0.0
        worker_main.select = SELECT
        self._observation = np.zeros(1, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode without end."""
        super().reset(seed=seed)
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return how many sleeps of the worker came to their end."""
        return self._observation, float(Poll.ended), False, False, {}


def main() -> None:
    """Print how long rounds took, in powers of two of a microsecond, and how many first sleeps came to their end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=60.0, help="at the most")
    arguments = parser.parse_args()
    channel.Channel.spins = 1
    worker_process.select = SELECT  # type: ignore[attr-defined]
    lengths: Counter[int] = Counter()
    longest, dice, clock = 0.0, random.Random(0), time.perf_counter
    until, rounds = clock() + 60 * arguments.minutes, 0
    with SubprocessEnv(NothingEnv) as env:
        env.reset(seed=0)
        step = env.step
        while rounds < arguments.rounds and clock() < until:
            for _ in range(10_000):
                for _ in range(dice.randrange(64)):  # the trainer comes at any moment of the worker's way to sleep
                    pass
                began = clock()
                _, ended, *_ = step(1)
                took = clock() - began
                lengths[int(took * 1e6).bit_length()] += 1
                longest = max(longest, took)
            rounds += 10_000
    print(f"{rounds:,} rounds; the longest took {longest * 1e3:.2f} ms")
    print(f"first sleeps that came to their end: {int(ended)} of the worker, {Poll.ended} of the trainer")
    for power, count in sorted(lengths.items()):
        print(f"  below {2**power:9,} µs  {count:12,}")


if __name__ == "__main__":
    main()
