"""Collect whole episodes from 16 envs of very different speed: wait for all envs, or only for those that are ready.

    pip install -e ".[examples]" && python examples/collect_episodes.py

With ``--kills 0.02``, a worker is killed before one step in fifty. The episodes stay whole.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import time
from functools import partial

import gymnasium
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from multienv import AsyncSubprocessEnvManager, SyncSubprocessEnvManager

ENVS = 16


class Delayed(gymnasium.Wrapper):
    """Makes each step slow, like a slow simulator."""

    def __init__(self, env: gymnasium.Env, seconds: float) -> None:
        super().__init__(env)
        self.seconds = seconds

    def step(self, action):
        time.sleep(self.seconds)
        return self.env.step(action)


def make(env_id: str, seconds: float) -> gymnasium.Env:
    return Delayed(gymnasium.make(env_id), seconds)


def collect(manager, episodes: int, kills: float, advance) -> tuple[list[list], int]:
    """Return that many whole episodes, each a list of timesteps, and the number of steps that the envs took."""
    running: dict[int, list] = {env_id: [] for env_id in range(manager.env_num)}
    whole, steps, dice = [], 0, random.Random(0)
    manager.action_space.seed(0)
    while len(whole) < episodes:
        ready = manager.ready_obs
        if dice.random() < kills:
            with contextlib.suppress(ProcessLookupError, TypeError):  # it is already dead
                os.kill(manager.statistics()[dice.randrange(manager.env_num)].pid, signal.SIGKILL)
        for env_id, timestep in manager.step({env_id: manager.action_space.sample() for env_id in ready}).items():
            steps += 1
            running[env_id].append(timestep)
            if timestep.done:
                if not timestep.info.get("abnormal"):  # truncated by a loss that was not recovered exactly
                    whole.append(running[env_id])
                    advance()
                running[env_id] = []
    return whole[:episodes], steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--slowest", type=float, default=0.02, help="seconds per step in the slowest env")
    parser.add_argument("--kills", type=float, default=0.0, help="probability of a kill before each step")
    arguments = parser.parse_args()
    # Each env is slower than the one before. A step of the last one takes forty times as long as one of the first.
    fns = [partial(make, arguments.env, arguments.slowest * 40 ** (index / (ENVS - 1) - 1)) for index in range(ENVS)]
    rates = {}
    columns = TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress:
        for name, kind, options in (
            ("waiting", SyncSubprocessEnvManager, {}),
            ("not waiting", AsyncSubprocessEnvManager, {"wait_num": 2, "step_wait_timeout": 0.0}),
        ):
            bar = progress.add_task(name, total=arguments.episodes)
            with kind(fns, **options) as manager:
                begin = time.perf_counter()
                _, steps = collect(manager, arguments.episodes, arguments.kills, lambda bar=bar: progress.advance(bar))
                rates[name] = steps / (time.perf_counter() - begin)
            progress.console.print(f"{name:>14}: {rates[name]:7,.0f} steps/s", highlight=False)
    print(f"The asynchronous manager is {rates['not waiting'] / rates['waiting']:.1f} times as fast.")
    print("The first episodes come from the fast envs. To get equally many from each env, use episode_num.")


if __name__ == "__main__":
    main()
