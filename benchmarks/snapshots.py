"""What forked snapshots cost: throughput with and without, interleaved in one run; memory of the frozen copy; one fork.

``--fork`` prints what one snapshot costs the worker, with the census of what it has beyond its memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import gymnasium
import psutil

from multienv import MultiEnv, RestartPolicy, SubprocessEnv, create_subprocess_envs
from multienv._engine.recovery.way_back import ForkingPolicy


def private_bytes(pid: int) -> int:
    """Memory that the process shares with nobody."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def descendants_of(pid: int) -> list[int]:
    """Return the processes that a process and its children have started."""
    return [one.pid for one in psutil.Process(pid).children(recursive=True)]


def batch(env_id: str, num_envs: int, policy: RestartPolicy) -> MultiEnv:
    """Envs with this policy, ready to step."""
    m = MultiEnv(create_subprocess_envs([lambda: gymnasium.make(env_id)] * num_envs, restart=policy))
    m.reset(seed=0)
    return m


def rate(m: MultiEnv, actions: list[list[Any]], rounds: int) -> float:
    """Env steps a second."""
    begin = time.perf_counter()
    for index in range(rounds):
        m.step(actions[index % len(actions)])
    return m.num_envs * rounds / (time.perf_counter() - begin)


def measure(env_id: str, num_envs: int, rounds: int, repeats: int) -> None:
    """Print one env's row."""
    batches = [
        batch(env_id, num_envs, policy)
        for policy in (
            RestartPolicy(),
            RestartPolicy(snapshots=False),
            RestartPolicy(on_crash="raise", on_timeout="raise"),
        )
    ]
    batches[0].action_space.seed(0)
    actions = [[batches[0].action_space.sample() for _ in range(num_envs)] for _ in range(64)]
    rates: list[list[float]] = [[], [], []]
    for repeat in range(repeats + 1):
        for mine, m in zip(rates, batches, strict=True):
            value = rate(m, actions, rounds)
            if repeat:  # the first warms up
                mine.append(value)
    on, without, off = rates
    snapshots = statistics.median(one / other for one, other in zip(on, without, strict=True))
    recovery = statistics.median(one / other for one, other in zip(on, off, strict=True))
    workers = [one.pid or 0 for one in batches[0].statistics() if one]
    frozen = [pid for worker in workers for pid in descendants_of(worker)]
    taken = sum(one.snapshots for one in batches[0].statistics() if one)
    print(
        f"{num_envs} × {env_id:18} {statistics.median(on):9,.0f} steps/s   {snapshots:5.3f} × without snapshots   "
        f"{recovery:5.3f} × recovery off   snapshots taken {taken}"
    )
    if frozen:
        own = statistics.mean(map(private_bytes, frozen)) / 2**20
        worker = statistics.mean(map(private_bytes, workers)) / 2**20
        print(f"    memory of its own, MiB: a worker {worker:.1f}, its frozen copy {own:.1f}")
    for m in batches:
        m.close()


class Opens(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Keeps many files open."""

    def __init__(self, env: Any, count: int) -> None:
        super().__init__(env)
        self.files = [Path(gymnasium.__file__).open() for _ in range(count)]  # noqa: SIM115


def build(env_id: str) -> Any:
    """Build an env; ``"CartPole-v1+200"`` keeps 200 files open."""
    name, _, count = env_id.partition("+")
    if name.startswith("ALE/"):
        import ale_py

        gymnasium.register_envs(ale_py)
    return Opens(gymnasium.make(name), int(count)) if count else gymnasium.make(name)


def measure_fork(env_id: str, repeats: int) -> None:
    """Print what a snapshot adds to the steps, after each tenth of them; medians of blocks, in turns with none."""
    every = 10  # so that one copy has ended, and the next one is ready, before there is another
    with (
        SubprocessEnv(lambda: build(env_id), restart=ForkingPolicy(snapshot_every=every)) as forks,
        SubprocessEnv(lambda: build(env_id), restart=RestartPolicy(snapshots=False)) as never,
    ):
        costs = []
        for env in (forks, never):
            env.action_space.seed(0)
            env.reset(seed=0)
        for repeat in range(repeats + 1):
            seconds = []
            for env in (forks, never):
                begin = time.perf_counter()
                for _ in range(20 * every):
                    _, _, terminated, truncated, _ = env.step(env.action_space.sample())
                    time.sleep(1e-3)  # as a policy takes
                    if terminated or truncated:
                        env.reset()
                seconds.append((time.perf_counter() - begin) / 20)
            if repeat:
                costs.append(seconds[0] - seconds[1])
        taken = forks.statistics().snapshots
        print(f"{env_id:18} {1e3 * statistics.median(costs):6.2f} ms a snapshot ({taken} taken)")


def main() -> None:
    """Print a row for each env."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("envs", nargs="*", default=["CartPole-v1", "LunarLander-v3", "HalfCheetah-v5"])
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--fork", action="store_true", help="what one snapshot costs")
    arguments = parser.parse_args()
    if arguments.fork:
        for env_id in ("CartPole-v1", "HalfCheetah-v5", "ALE/Pong-v5", "CartPole-v1+200"):
            measure_fork(env_id, arguments.repeats)
        return
    for env_id in arguments.envs:
        measure(env_id, arguments.num_envs, arguments.rounds, arguments.repeats)


if __name__ == "__main__":
    main()
