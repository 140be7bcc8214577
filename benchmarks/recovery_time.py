"""Time from SIGKILL to the next step's return, and from a fresh start to 32 envs ready, against a peer.

First kills that follow each other closely, of one env. Then kills after histories of different lengths, of 8 envs that
begin their episodes by themselves, on an idle machine and beside processes that keep the cores busy. Each worker is
killed once there, in envs that are made anew, because a snapshot that has been woken takes another one at once; without
snapshots several times. The more ``--seconds``, the more kills: of fewer than 100 the longest counts as p99.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv

from multienv import MultiEnv, RestartPolicy, SubprocessEnv, SubprocessVectorEnv, create_subprocess_envs
from multienv._engine.recovery.way_back import ForkingPolicy
from multienv._engine.reports.store import being_written
from multienv.envs.subprocess_env import close_all
from multienv.events import Event, Recovery

FACES = {
    "SubprocessVectorEnv": SubprocessVectorEnv,
    "MultiEnv": lambda fns, **options: MultiEnv(create_subprocess_envs(fns, **options)),
}
LOADS = ("idle", "busy")
NUM_ENVS = 8
LEAST = 2  # kills under each load
AGAIN = 5  # kills of each worker without snapshots

Processes = Sequence[subprocess.Popen[bytes]]


def cartpole() -> gymnasium.Env:
    """The env of all measurements."""
    return gymnasium.make("CartPole-v1")


def told(times: Sequence[float]) -> str:
    """Return median and p99 in milliseconds."""
    longest = sorted(times)[math.ceil(len(times) * 0.99) - 1]
    return f"{statistics.median(times) * 1e3:6.1f} /{longest * 1e3:7.1f}"


# --- one env --------------------------------------------------------------------------------------


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
        told = env.statistics()
        assert told.exact_recoveries + told.replayed_recoveries == kills
    return times


# --- by history -----------------------------------------------------------------------------------


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[Processes]:
    """Start processes that compute for ever, and stop them until :func:`computing`."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        tell(processes, signal.SIGSTOP)
        yield processes
    finally:
        tell(processes, signal.SIGKILL)
        for process in processes:
            process.wait()


@contextlib.contextmanager
def computing(processes: Processes) -> Iterator[None]:
    """Have them compute meanwhile."""
    tell(processes, signal.SIGCONT)
    try:
        yield
    finally:
        tell(processes, signal.SIGSTOP)


def tell(processes: Processes, number: signal.Signals) -> None:
    for process in processes:
        process.send_signal(number)


def walk(envs: Any, steps: int, generator: np.random.Generator) -> None:
    """Step with random actions."""
    for _ in range(steps):
        envs.step(generator.integers(2, size=NUM_ENVS))


class Kills:
    """Kills workers that have taken so many steps.

    Args:
        face: A name of ``FACES``.
        policy: Of the envs.
        steps: Taken before.
        seconds: After them no envs are made anew, and no worker is killed again.
        processes: Those that compute where the load is ``"busy"``.

    Attributes:
        times: Seconds from each kill to the return of the step that meets it, by load.
        recoveries: What was told of them.
    """

    def __init__(self, face: str, policy: RestartPolicy, steps: int, seconds: float, processes: Processes) -> None:
        self.times: dict[str, list[float]] = {load: [] for load in LOADS}
        self.recoveries: list[Recovery] = []
        self._generator = np.random.default_rng(0)
        end, rounds = time.perf_counter() + seconds, 0
        while time.perf_counter() < end or min(map(len, self.times.values())) < LEAST:
            with contextlib.closing(FACES[face]([cartpole] * NUM_ENVS, restart=policy, hooks=[self._note])) as envs:
                envs.reset(seed=0)
                walk(envs, steps, self._generator)
                for again in range(1 if policy.snapshots else AGAIN):
                    for worker in range(len(envs.statistics())):
                        if not again or time.perf_counter() < end:
                            load = LOADS[(rounds + worker) % len(LOADS)]
                            with computing(processes if load == "busy" else ()):
                                self.times[load].append(self._kill(envs, worker))
            rounds += 1

    def _kill(self, envs: Any, worker: int) -> float:
        walk(envs, 5, self._generator)
        begin = time.perf_counter()
        os.kill(envs.statistics()[worker].pid, signal.SIGKILL)
        walk(envs, 1, self._generator)
        return time.perf_counter() - begin

    def _note(self, event: Event) -> None:
        if isinstance(event, Recovery):
            self.recoveries.append(event)


def print_histories(histories: Sequence[int], seconds: float, busy: int) -> None:
    """Print a table."""
    print(f"The same of {NUM_ENVS} envs after so many steps, the longest history against the shortest, kills and exact")
    print(f"{'':56}" + "".join(f"{steps:17,}" for steps in histories))
    with busy_processes(busy) as processes:
        for face in FACES:
            for snapshots in (True, False):
                policy = RestartPolicy(snapshots=snapshots)
                cells = [Kills(face, policy, steps, seconds, processes) for steps in histories]
                for load in LOADS:
                    every = [cell.times[load] for cell in cells]
                    ratio = statistics.median(every[-1]) / statistics.median(every[0])
                    name = f"{face}, {'as it comes' if snapshots else 'by the journal alone'}"
                    beside = f"{busy} busy" if load == "busy" else load
                    print(f"  {name:44} {beside:8} " + "".join(f"{told(times):>17}" for times in every), end="")
                    print(f" {ratio:7.2f} ×", flush=True)
                exact = [[one.outcome for one in cell.recoveries].count("exact") for cell in cells]
                counts = [f"{one} of {len(cell.recoveries)}" for one, cell in zip(exact, cells, strict=True)]
                print(f"  {'':44} {'exact':8} " + "".join(f"{count:>17}" for count in counts))


# --- a fresh start --------------------------------------------------------------------------------


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
    """Print all three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="of one env, with each policy")
    parser.add_argument("--histories", type=int, nargs="*", default=[500, 5_000, 50_000], help="steps; none: no table")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each history, but each has some kills")
    parser.add_argument("--busy", type=int, default=4, help="processes beside")
    parser.add_argument("--num-envs", type=int, default=32, help="that are started")
    arguments = parser.parse_args()
    logging.getLogger("multienv").setLevel(logging.ERROR)  # each recovery is worth a warning elsewhere
    print(f"SIGKILL to the next step's return over {arguments.kills} kills of a CartPole-v1: median / p99, ms")
    policies = {
        "as it comes": RestartPolicy(),
        "by the journal alone": RestartPolicy(snapshots=False),
        "with a snapshot every 64 steps": ForkingPolicy(snapshot_every=64),
    }
    # Reports are written as they come, and not among those of real losses.
    with tempfile.TemporaryDirectory() as os.environ["MULTIENV_REPORTS"]:
        for name, policy in policies.items():
            print(f"  {name:32} {told(recovery_times(arguments.kills, policy))}", flush=True)
        if arguments.histories:
            print_histories(arguments.histories, arguments.seconds, arguments.busy)
        for report in being_written():
            report.join()
    ours, theirs = start_times(arguments.num_envs)
    print(f"{arguments.num_envs} envs ready: {ours:.2f} s, gymnasium {theirs:.2f} s, {ours / theirs:.2f} × its time")


if __name__ == "__main__":
    main()
