"""Steps a second of the managers by id, the slowest of 8 envs being ten times as slow as the others; interleaved."""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

from multienv import AsyncSubprocessEnvManager, SyncSubprocessEnvManager
from multienv.testing import FaultyEnv


class SlowEnv(FaultyEnv):
    """Sleeps in each step."""

    def __init__(self, *, step_seconds: float, horizon: int) -> None:
        super().__init__(horizon=horizon)
        self.step_seconds = step_seconds

    def step(self, action: Any) -> Any:
        """Sleep, and take a step."""
        time.sleep(self.step_seconds)
        return super().step(action)


def rate(manager: Any, seconds: float) -> float:
    """Env steps a second."""
    steps, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        steps += len(manager.step(dict.fromkeys(manager.ready_obs, 1)))
    return steps / (time.perf_counter() - begin)


def main() -> None:
    """Print medians and the median of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--step", type=float, default=0.001, help="seconds a step takes")
    parser.add_argument("--factor", type=float, default=10.0, help="the slowest takes so many times as long")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    fast = partial(SlowEnv, step_seconds=arguments.step, horizon=200)
    fns = [*[fast] * (arguments.envs - 1), partial(fast, step_seconds=arguments.step * arguments.factor)]
    fns_alike = [fast] * arguments.envs
    for name, envs in ((f"one of {arguments.envs} envs {arguments.factor:g} × slower", fns), ("all alike", fns_alike)):
        with (
            SyncSubprocessEnvManager(envs) as synchronous,
            AsyncSubprocessEnvManager(envs, wait_num=1, step_wait_timeout=0.0) as asynchronous,
        ):
            pairs = [
                (rate(synchronous, arguments.seconds), rate(asynchronous, arguments.seconds))
                for _ in range(arguments.repeats + 1)
            ][1:]
        ratio = statistics.median(fast / slow for slow, fast in pairs)
        medians = [statistics.median(rates) for rates in zip(*pairs, strict=True)]
        print(f"{name:26} synchronous {medians[0]:8,.0f} steps/s   asynchronous {medians[1]:8,.0f}   {ratio:5.2f} ×")


if __name__ == "__main__":
    main()
