"""Steps a second with a policy between the steps, alone, with two trainers on one machine, and under a quota.

The policy is a fixed amount of matrix products that took 0.1, 1 or 10 ms when nothing else ran, with numpy or with
torch and its threads. SubprocessVectorEnv and AsyncVectorEnv take turns. "CPU" is the time of all cores that trainer
and workers took for a step of one env: what the workers burn while they look for the next request is in it.

    python benchmarks/with_policy.py                      # alone
    python benchmarks/with_policy.py --trainers 2         # two trainers at the same time
    python benchmarks/with_policy.py --quota 1.0          # as much time as one core has (root; control groups, v1)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv

from multienv import SubprocessVectorEnv

FACES: dict[str, Callable[..., Any]] = {
    "SubprocessVectorEnv": SubprocessVectorEnv,
    "AsyncVectorEnv": AsyncVectorEnv,
}
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
WIDTH = 256


def product(library: str) -> Callable[[], object]:
    """Return a function that multiplies two matrices once."""
    if library == "numpy":
        numbers = np.ones((8, WIDTH), np.float32), np.ones((WIDTH, WIDTH), np.float32)
        return lambda: numbers[0] @ numbers[1]
    import torch

    tensors = torch.ones((64, WIDTH)), torch.ones((WIDTH, WIDTH))
    return lambda: tensors[0] @ tensors[1]


def policy_of(library: str, seconds: float) -> Callable[[], None]:
    """Return a function with a fixed amount of work that takes so long now."""
    multiply, count, begin = product(library), 0, time.perf_counter()
    while time.perf_counter() - begin < 0.2:
        multiply()
        count += 1
    times = max(1, round(count * seconds / 0.2))

    def policy() -> None:
        for _ in range(times):
            multiply()

    return policy


def cpu_seconds() -> float:
    """Return the processor time that this process and its descendants have taken."""
    new, total = {os.getpid()}, 0.0
    while new:
        later: set[int] = set()
        for pid in new:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                for path in Path(f"/proc/{pid}/task").glob("*/children"):
                    later.update(map(int, path.read_text().split()))
        new = later
    return total


def measure(env_id: str, num_envs: int, library: str, seconds: float, turn: float, repeats: int) -> dict[str, Any]:
    """Return of each face the medians of steps a second and of CPU microseconds a step."""
    policy = policy_of(library, seconds)
    fns = [partial(gymnasium.make, env_id)] * num_envs
    envs = {name: face(fns) for name, face in FACES.items()}
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in envs}
    for each in envs.values():
        each.reset(seed=0)
    for repeat in range(repeats + 1):
        for name, each in envs.items():
            rounds, actions = 0, np.asarray(each.action_space.sample())
            cpu, begin = cpu_seconds(), time.perf_counter()
            while (spent := time.perf_counter() - begin) < turn:
                each.step(actions)
                policy()
                rounds += 1
            if repeat:  # the first warms up
                steps = rounds * num_envs
                rows[name].append((steps / spent, (cpu_seconds() - cpu) / steps * 1e6))
    for each in envs.values():
        each.close()
    ours, theirs = (rows[name] for name in FACES)
    return {
        "ratio": statistics.median(one[0] / other[0] for one, other in zip(ours, theirs, strict=True)),
        "rate": {name: statistics.median(rate for rate, _ in rows[name]) for name in rows},
        "cpu": {name: statistics.median(cpu for _, cpu in rows[name]) for name in rows},
    }


@contextlib.contextmanager
def limited(cores: float | None) -> Iterator[None]:
    """Give this process, and what it starts, the time of so many cores."""
    if cores is None:
        yield
        return
    group = CPU_GROUPS / "multienv-benchmark"
    group.mkdir(exist_ok=True)
    (group / "cpu.cfs_period_us").write_text("100000")
    (group / "cpu.cfs_quota_us").write_text(str(round(100_000 * cores)))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (CPU_GROUPS / "cgroup.procs").write_text(str(os.getpid()))


def run(arguments: argparse.Namespace, results: Any = None) -> list[dict[str, Any]]:
    """Measure all rows; put them into ``results``, if given."""
    rows = []
    for library in arguments.libraries:
        for seconds in (1e-4, 1e-3, 1e-2):
            row = measure(arguments.env, arguments.num_envs, library, seconds, arguments.seconds, arguments.repeats)
            rows.append({"library": library, "seconds": seconds, **row})
    if results is not None:
        results.put(rows)
    return rows


def main() -> None:
    """Print a line for each library and length of the policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--libraries", nargs="+", default=["numpy", "torch"])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each turn")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--quota", type=float, help="cores' worth of time that all have together")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with limited(arguments.quota):
        if arguments.trainers == 1:
            every = [run(arguments)]
        else:
            context = multiprocessing.get_context("spawn")
            results = context.Queue()
            trainers = [context.Process(target=run, args=(arguments, results)) for _ in range(arguments.trainers)]
            for trainer in trainers:
                trainer.start()
            every = [results.get() for _ in trainers]
            for trainer in trainers:
                trainer.join()
    for same in zip(*every, strict=True):
        print(f"{same[0]['library']}, {same[0]['seconds'] * 1e3:g} ms", end="")
        for row in same:
            ours, theirs = row["cpu"].values()
            print(f"   {row['ratio']:5.2f} × AsyncVectorEnv, CPU {ours:.0f} against {theirs:.0f} µs a step", end="")
        print(flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(every, indent=1))


if __name__ == "__main__":
    main()
