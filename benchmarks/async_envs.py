"""Step a thousand `AsyncEnv`s at once, in one event loop: how long they take to start, how near to the ideal they are.

    python benchmarks/async_envs.py --envs 1000 --seconds 20

A step sleeps for 0.1 to 1 s (`--slowest`). In the ideal nothing but that sleep takes time. The memory of the workers is
what the machine has less available: a process's own figure counts what it shares.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import resource
import time
from functools import partial
from pathlib import Path

import gymnasium

from multienv import AsyncEnv


class SleepsEnv(gymnasium.Env):
    """Sleeps in each step, for so many seconds at the most and a tenth of them at the least; the info says how long."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, slowest):
        self.slowest = slowest

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        seconds = self.slowest * self.np_random.uniform(0.1, 1.0)
        time.sleep(seconds)
        return 0, 1.0, False, False, {"slept": seconds}


def available() -> int:
    """Return how many MiB the machine has left."""
    return int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) >> 10


def status(name: str) -> int:
    """Return a number of this process's own status."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


async def main(num_envs: int, seconds: float, slowest: float) -> None:
    print(f"{num_envs} envs, {os.cpu_count()} cores")
    memory, began, cpu = available(), time.monotonic(), time.process_time()
    envs = [AsyncEnv(partial(SleepsEnv, slowest), env_index=index, reports="") for index in range(num_envs)]
    await asyncio.gather(*(env.reset(seed=index) for index, env in enumerate(envs)))
    print(f"started in {time.monotonic() - began:.1f} s; trainer's CPU time {time.process_time() - cpu:.1f} s")
    print(f"workers: {(memory - available()) / num_envs:.1f} MiB each")

    async def agent(env: AsyncEnv) -> tuple[int, float, float]:
        steps, slept, begun = 0, 0.0, time.monotonic()
        while time.monotonic() < until:
            *_, info = await env.step(0)
            steps, slept = steps + 1, slept + info["slept"]
        return steps, slept, time.monotonic() - begun

    began, cpu = time.monotonic(), time.process_time()
    until = began + seconds
    agents = asyncio.gather(*map(agent, envs))
    await asyncio.sleep(seconds / 2)
    threads = status("Threads")
    steps, slept, awaited = map(sum, zip(*await agents, strict=True))
    took, cpu = time.monotonic() - began, time.process_time() - cpu
    print(f"{steps} steps, {steps / awaited * num_envs:.0f} a second; {slept / awaited:.1%} of the ideal")
    print(f"trainer: {cpu / took:.0%} of a core, {cpu / steps * 1e6:.0f} µs a step, {threads} threads, ", end="")
    print(f"RSS {status('VmRSS') >> 10} MiB, at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")
    began = time.monotonic()
    await asyncio.gather(*(env.close() for env in envs))
    print(f"closed in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--slowest", type=float, default=1.0, help="seconds of the slowest step")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.envs, arguments.seconds, arguments.slowest))
