"""Time that a step takes which meets a loss on a Ray cluster of three nodes on this machine, for each kind of loss.

    python benchmarks/ray_recovery.py --times 5

A killed node is declared dead by Ray within some 3 s here, as the cluster is started with eager health checks. With
Ray's own settings that takes 10 to 25 s. multienv decides before that: the host gives no sign of life.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import time
from collections.abc import Callable

import gymnasium
import psutil
from ray_cluster import RayCluster

from multienv import RayOptions, RayVectorEnv


def cartpole() -> gymnasium.Env:
    """The env of all measurements."""
    return gymnasium.make("CartPole-v1")


def kill_worker(cluster: RayCluster, envs: RayVectorEnv) -> None:
    """Kill a worker: its snapshot is woken on its node."""
    os.kill(envs.statistics()[0].pid, signal.SIGKILL)


def kill_host(cluster: RayCluster, envs: RayVectorEnv) -> None:
    """Kill an actor."""
    cluster.kill_host(random.Random(0))


def kill_node(cluster: RayCluster, envs: RayVectorEnv) -> None:
    """Kill all processes of a node."""
    cluster.kill_node(random.Random(0))


def stop_host(cluster: RayCluster, envs: RayVectorEnv) -> None:
    """Stop an actor and its workers, which then are silent."""
    actor = psutil.Process(envs.statistics()[0].pid).parent().parent()
    for process in [actor, *actor.children(recursive=True)]:
        process.suspend()


FAULTS: dict[str, Callable[[RayCluster, RayVectorEnv], None]] = {
    "a worker is killed": kill_worker,
    "an actor is killed": kill_host,
    "a node is killed": kill_node,
    "a host is stopped": stop_host,
}


def measure(cluster: RayCluster, strike: Callable[[RayCluster, RayVectorEnv], None], times: int) -> list[float]:
    """Seconds from each fault to the return of the step that meets it."""
    found = []
    for _ in range(times):
        with RayVectorEnv([cartpole] * 6, ray=RayOptions(cpus_per_host=2)) as envs:
            envs.reset(seed=0)
            for _ in range(200):
                envs.step(envs.action_space.sample())
            strike(cluster, envs)
            begin = time.perf_counter()
            while not any(one.last_recovery for one in envs.statistics()):
                envs.step(envs.action_space.sample())
            found.append(time.perf_counter() - begin)
            last = [one.last_recovery.outcome for one in envs.statistics() if one.last_recovery]
            assert set(last) <= {"exact", "replayed"}
        cluster.mend()
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="losses of each kind")
    times = parser.parse_args().times
    with RayCluster(nodes=3, cpus=4) as cluster:
        for name, strike in FAULTS.items():
            found = measure(cluster, strike, times)
            shown = ", ".join(f"{seconds:.2f}" for seconds in found)
            print(f"{name:45} median {statistics.median(found):6.2f} s   ({shown})", flush=True)


if __name__ == "__main__":
    main()
