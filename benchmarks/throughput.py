"""Steps a second of MultiEnv against its peers, interleaved in one run; ratios, because machines are noisy.

Run it with ``pip install -e ".[bench]"`` on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv

from multienv import MultiEnv, RestartPolicy, create_subprocess_envs

Bench = Callable[[int], float]


def timed(step: Callable[[Any], object], actions: list[Any], num_envs: int, rounds: int) -> float:
    """Env steps a second."""
    begin = time.perf_counter()
    for index in range(rounds):
        step(actions[index & 1])
    return num_envs * rounds / (time.perf_counter() - begin)


def contenders(env_id: str, num_envs: int) -> tuple[dict[str, Bench], list[Callable[[], object]]]:
    """Name → function that steps so many rounds; and what to close."""

    def env_fn() -> gymnasium.Env[Any, Any]:
        return gymnasium.make(env_id)

    space = env_fn().action_space
    space.seed(0)
    lists = [[space.sample() for _ in range(num_envs)] for _ in range(2)]
    arrays = [np.asarray(actions) for actions in lists]
    benches: dict[str, Bench] = {}
    closers: list[Callable[[], object]] = []

    def multi(name: str, *, max_workers: int | None = None, **options: Any) -> None:
        m = MultiEnv(create_subprocess_envs([env_fn] * num_envs, **options), max_workers=max_workers)
        m.reset(seed=0)
        benches[name] = lambda rounds: timed(m.step, lists, num_envs, rounds)
        closers.append(m.close)

    multi("multienv.MultiEnv")
    multi("multienv.MultiEnv, recovery off", restart=RestartPolicy(on_crash="raise", on_timeout="raise"))
    multi("multienv.MultiEnv, 2 shares", max_workers=2)
    gym_async = AsyncVectorEnv([env_fn] * num_envs)
    gym_async.reset(seed=0)
    benches["gymnasium.AsyncVectorEnv"] = lambda rounds: timed(gym_async.step, arrays, num_envs, rounds)
    closers.append(gym_async.close)
    try:
        from stable_baselines3.common.vec_env import SubprocVecEnv
    except ImportError:
        print('Stable-Baselines3 is not installed: pip install "multienv[bench]"')
    else:
        sb3 = SubprocVecEnv([env_fn] * num_envs, start_method="forkserver")
        sb3.reset()
        benches["SB3.SubprocVecEnv"] = lambda rounds: timed(sb3.step, arrays, num_envs, rounds)
        closers.append(sb3.close)
    return benches, closers


def main() -> None:
    """Print medians and the median of the ratios to AsyncVectorEnv."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    benches, closers = contenders(arguments.env, arguments.num_envs)
    rates: dict[str, list[float]] = {name: [] for name in benches}
    for repeat in range(arguments.repeats + 1):
        for name, bench in benches.items():
            rate = bench(arguments.rounds)
            if repeat:  # the first warms up
                rates[name].append(rate)
    for close in closers:
        close()
    base = rates["gymnasium.AsyncVectorEnv"]
    print(f"{arguments.num_envs} × {arguments.env}")
    for name, values in rates.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(values, base, strict=True))
        print(f"  {name:34} {statistics.median(values):10,.0f} steps/s   {ratio:5.2f} × AsyncVectorEnv")


if __name__ == "__main__":
    main()
