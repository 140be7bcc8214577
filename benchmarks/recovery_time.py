"""Time from SIGKILL to the next step's return, and from a fresh start to 32 envs ready, against a peer."""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv

from multienv import RestartPolicy, SubprocessEnv, create_subprocess_envs
from multienv.envs.subprocess_env import close_all
from multienv.reports.store import settle


def cartpole() -> gymnasium.Env:
    """The env of both measurements."""
    return gymnasium.make("CartPole-v1")


def recovery_times(kills: int, policy: RestartPolicy) -> list[float]:
    """Seconds from each kill to the return of the step that meets it."""
    times = []
    generator = np.random.default_rng(0)
    with SubprocessEnv(cartpole, restart=policy) as env:
        env.reset(seed=0)
        for _ in range(kills):
            for _ in range(int(generator.integers(1, 200))):
                _, _, terminated, truncated, _ = env.step(int(generator.integers(2)))
                if terminated or truncated:
                    env.reset()
            begin = time.perf_counter()
            os.kill(env.statistics().pid, signal.SIGKILL)
            _, _, terminated, truncated, _ = env.step(0)
            times.append(time.perf_counter() - begin)
            if terminated or truncated:
                env.reset()
        assert env.statistics().exact_recoveries == kills
    return times


def start_times(num_envs: int) -> tuple[float, float]:
    """Seconds until the envs have stepped once: ours, gymnasium's on forkserver."""
    begin = time.perf_counter()
    envs = create_subprocess_envs([cartpole] * num_envs)
    for env in envs:
        env.reset_async(seed=0)
    for env in envs:
        env.reset_wait()
    ours = time.perf_counter() - begin
    close_all(envs)
    begin = time.perf_counter()
    peer = AsyncVectorEnv([cartpole] * num_envs, context="forkserver")
    peer.reset(seed=0)
    theirs = time.perf_counter() - begin
    peer.close()
    return ours, theirs


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--num-envs", type=int, default=32)
    arguments = parser.parse_args()
    print(f"SIGKILL to the next step's return over {arguments.kills} kills of a CartPole-v1")
    policies = {
        "as it comes": RestartPolicy(),
        "by the journal alone": RestartPolicy(snapshots=False),
        "with a snapshot every 64 steps": RestartPolicy(snapshot_every=64),
    }
    # Reports are written as they come, and not among those of real losses.
    with tempfile.TemporaryDirectory() as os.environ["MULTIENV_REPORTS"]:
        for name, policy in policies.items():
            times = sorted(recovery_times(arguments.kills, policy))
            p99 = times[int(len(times) * 0.99) - 1]
            print(f"  {name:32} median {statistics.median(times) * 1e3:6.1f} ms, p99 {p99 * 1e3:6.1f} ms")
        settle()
    ours, theirs = start_times(arguments.num_envs)
    print(f"{arguments.num_envs} envs ready: {ours:.2f} s, gymnasium {theirs:.2f} s, {ours / theirs:.2f} × its time")


if __name__ == "__main__":
    main()
