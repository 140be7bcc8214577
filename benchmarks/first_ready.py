"""Steps a second where some envs are slow: of the first ``k`` that are ready, and of all in step; interleaved.

    python benchmarks/first_ready.py                  # 64 envs, a quarter of them ten times as slow, 16 at a time
    python benchmarks/first_ready.py --step 0.0001

A step sleeps. All libraries have a process for each env. In the limit an env that is asked is never idle.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv

from multienv import AsyncSubprocessEnvManager, MultiEnv, SubprocessVectorEnv, create_subprocess_envs


class SleepsEnv(gymnasium.Env[Any, Any]):
    """Sleeps in each step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, seconds: float) -> None:
        self.seconds, self.steps = seconds, 0
        self.observation = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.observation, {}

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        self.steps += 1
        return self.observation, 1.0, self.steps % 200 == 0, False, {}


def in_step(envs: Any, seconds: float) -> float:
    steps, begin, actions = 0, time.perf_counter(), np.ones(envs.num_envs, np.int64)
    while time.perf_counter() - begin < seconds:
        envs.step(actions)
        steps += envs.num_envs
    return steps / (time.perf_counter() - begin)


def first_ready(envs: Any, k: int, actions: Any, seconds: float) -> float:
    steps, begin = 0, time.perf_counter()
    envs.send([1] * envs.num_envs if isinstance(envs, MultiEnv) else np.ones(envs.num_envs, np.int64))
    while time.perf_counter() - begin < seconds:
        indices = envs.recv(k)[-1]
        steps += k
        envs.send(actions, indices)
    envs.recv()
    return steps / (time.perf_counter() - begin)


def by_id(manager: Any, seconds: float) -> float:
    steps, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        steps += len(manager.step(dict.fromkeys(manager.ready_obs, 1)))
    return steps / (time.perf_counter() - begin)


class Tianshou:
    """Steps the envs of a Tianshou vector env that are ready."""

    def __init__(self, envs: Any) -> None:
        self.envs, self.ready = envs, np.arange(envs.env_num)
        envs.reset()

    def __call__(self, seconds: float) -> float:
        steps, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            *_, infos = self.envs.step(np.ones(len(self.ready), np.int64), self.ready)
            self.ready = np.array([info["env_id"] for info in infos])
            steps += len(self.ready)
        return steps / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--step", type=float, default=0.001, help="seconds a step of a fast env takes")
    parser.add_argument("--factor", type=float, default=10.0, help="every fourth env is so many times as slow")
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    slow = [options.step * (options.factor if index % 4 == 3 else 1) for index in range(options.envs)]
    fns = [partial(SleepsEnv, seconds) for seconds in slow]
    k, array = options.k, np.ones(options.k, np.int64)
    rows: dict[str, Callable[[float], float]] = {}
    with ExitStack() as stack:
        envs = stack.enter_context(SubprocessVectorEnv(fns, envs_per_worker=1, reports=""))
        envs.reset(seed=0)
        rows["SubprocessVectorEnv.step"] = partial(in_step, envs)
        rows[f"SubprocessVectorEnv.recv({k})"] = partial(first_ready, envs, k, array)
        lists = stack.enter_context(MultiEnv(create_subprocess_envs(fns, reports="")))
        lists.reset(seed=0)
        rows[f"MultiEnv.recv({k})"] = partial(first_ready, lists, k, [1] * k)
        manager = stack.enter_context(AsyncSubprocessEnvManager(fns, wait_num=k, step_wait_timeout=0.0, reports=""))
        rows["AsyncSubprocessEnvManager"] = partial(by_id, manager)
        other = AsyncVectorEnv(fns, context="forkserver")
        stack.callback(other.close)
        other.reset(seed=0)
        rows["gymnasium AsyncVectorEnv.step"] = partial(in_step, other)
        try:
            from tianshou.env import SubprocVectorEnv
        except ImportError:
            print("Tianshou is not installed.")
        else:
            theirs = SubprocVectorEnv(fns, wait_num=k)
            stack.callback(theirs.close)
            rows[f"Tianshou SubprocVectorEnv(wait_num={k})"] = Tianshou(theirs)
        rates: dict[str, list[float]] = {name: [] for name in rows}
        for turn in range(options.repeats + 1):
            for name, rate in rows.items():
                found = rate(options.seconds)
                if turn:
                    rates[name].append(found)
    limit = sum(1 / seconds for seconds in slow)
    base = rates["SubprocessVectorEnv.step"]
    times = f"{options.step * 1e3:g} and {options.step * options.factor * 1e3:g} ms"
    print(f"{options.envs} envs, steps of {times}: the limit is {limit:,.0f} steps a second")
    for name, found in rates.items():
        ratios = [one / other for one, other in zip(found, base, strict=True)]
        print(
            f"{name:42} {statistics.median(found):9,.0f} steps/s  {statistics.median(ratios):6.2f} x step()"
            f"  ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
