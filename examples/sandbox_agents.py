"""Run 16 agents in one event loop. Each acts in a sandbox outside its process, and steps take 0.2 to 1 s.

    pip install -e . && python examples/sandbox_agents.py

A sandbox here is a guessing game in a small server. In your program it may be a container or browser. The sandbox
outlives the worker that uses it. So if that worker is lost, somebody must release the sandbox: the trainer does it, in
a hook. The example kills one worker. The outcome of its episode is unknown: the episode is masked, and never becomes a
reward.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gymnasium

from multienv import AsyncEnv, Recovery, RestartPolicy

NUMBERS, GUESSES = 32, 6


class Sandboxes:
    """Serves sandboxes by name. It stands for a service that runs containers or browsers."""

    def __init__(self, slowest: float) -> None:
        self.running: dict[str, int] = {}
        self.released: list[str] = []
        self._slowest = slowest

    def release(self, name: str) -> None:
        if self.running.pop(name, None) is not None:
            self.released.append(name)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while line := await reader.readline():
                command, name, number = json.loads(line)
                if command == "create":
                    self.running[name] = number  # replaces a sandbox that a lost worker left under this name
                answer = self.running[name] - number
                if command == "guess":
                    await asyncio.sleep(random.uniform(0.2, 1.0) * self._slowest)
                if command == "release":
                    self.release(name)
                writer.write(f"{answer}\n".encode())


class GuessEnv(gymnasium.Env):
    """Plays in the sandbox of ``reset(options={"sandbox": name})``. Observations: too low, right, too high."""

    observation_space = gymnasium.spaces.Discrete(3)
    action_space = gymnasium.spaces.Discrete(NUMBERS)

    def __init__(self, path: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(path)
        self._file = self._connection.makefile("rw")

    def _ask(self, command: str, number: int) -> int:
        self._file.write(json.dumps([command, self._name, number]) + "\n")
        self._file.flush()
        return int(self._file.readline())

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._name, self._guesses = options["sandbox"], 0
        self._ask("create", int(self.np_random.integers(NUMBERS)))
        return 0, {}

    def step(self, action):
        difference = self._ask("guess", int(action))
        self._guesses += 1
        found, last = difference == 0, self._guesses == GUESSES
        if found or last:
            self._ask("release", 0)
        return 1 + (difference < 0) - (difference > 0), float(found), found, last and not found, {}

    def close(self):
        self._file.close()
        self._connection.close()


@dataclass
class Outcome:
    """The result of an episode, for a learner. A lost episode has no reward, and its mask is 0."""

    sandbox: str
    reward: float | None
    mask: int


async def episode(env: AsyncEnv, sandbox: str, seed: int) -> Outcome:
    low, high, reward, ended = 0, NUMBERS - 1, 0.0, False
    await env.reset(seed=seed, options={"sandbox": sandbox})
    while not ended:
        guess = (low + high) // 2
        answer, reward, terminated, truncated, info = await env.step(guess, deadline=60.0)
        ended = terminated or truncated
        if "reason" in info.get("multienv", {}):  # the worker was lost: the episode says nothing about the agent
            return Outcome(sandbox, None, 0)
        low, high = (guess + 1, high) if answer == 0 else (low, guess - 1)
    return Outcome(sandbox, reward, 1)


async def main(agents: int, episodes: int, slowest: float) -> None:
    sandboxes, in_use = Sandboxes(slowest), {}

    def on_event(event) -> None:
        """Release a lost sandbox, in the event loop's thread. If a release takes long, make it a task of the loop."""
        if isinstance(event, Recovery) and event.outcome in ("truncated", "raised"):
            sandboxes.release(in_use[event.loss.env_index])

    async def agent(index: int, env: AsyncEnv) -> list[Outcome]:
        outcomes = []
        async with env:
            for number in range(episodes):
                in_use[index] = f"agent {index}, episode {number}"
                outcomes.append(await episode(env, in_use[index], seed=index * 1000 + number))
        return outcomes

    async def kill(env: AsyncEnv) -> None:
        while env.statistics().steps < 2:
            await asyncio.sleep(0.01)
        os.kill(env.statistics().pid, signal.SIGKILL)

    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "sandboxes")
        server = await asyncio.start_unix_server(sandboxes.serve, path)
        # A step has effects outside its process, so a replay must not repeat it.
        policy = RestartPolicy(on_crash="truncate", on_timeout="truncate")
        envs = [
            AsyncEnv(partial(GuessEnv, path), restart=policy, env_index=index, hooks=[on_event], reports="")
            for index in range(agents)
        ]
        began = time.monotonic()
        found, _ = await asyncio.gather(asyncio.gather(*map(agent, range(agents), envs)), kill(envs[-1]))
        seconds = time.monotonic() - began
        server.close()
    outcomes = [outcome for of_agent in found for outcome in of_agent]
    known = [outcome for outcome in outcomes if outcome.mask]
    steps = sum(env.statistics().steps for env in envs)
    print(f"{agents} agents took {steps} steps in {seconds:.1f} s, in one event loop.")
    print(f"Mean reward of {len(known)} episodes: {sum(one.reward for one in known) / len(known):.2f}.")
    for lost in (outcome for outcome in outcomes if not outcome.mask):
        print(f"Masked: {lost.sandbox}; its sandbox was released: {lost.sandbox in sandboxes.released}.")
    print(f"Sandboxes left: {len(sandboxes.running)}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=3, help="episodes per agent")
    parser.add_argument("--slowest", type=float, default=1.0, help="longest time of a step, in seconds")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.agents, arguments.episodes, arguments.slowest))
