"""What a plain step costs the trainer, counted and not timed: a change that makes a step dearer fails here.

The workers are simulated; of the trainer's code all but the channel is real. A call of the channel stands for system
calls: ``ring`` writes to a pipe, ``wait`` and ``wait_any`` sleep.
"""

from __future__ import annotations

import gc
import math
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest

import multienv
from multienv import MultiEnv, RestartPolicy, SubprocessVectorEnv, create_subprocess_envs
from multienv._engine.asking import fanout
from multienv._engine.native import native
from multienv._engine.wire.segment import REPLY, REQUEST, WORKER_SLEEPS
from multienv.envs.subprocess_env import supervisor_of
from simulation.simulation import SimulatedChannel, Simulation, is_in_process

PACKAGE = str(Path(multienv.__file__).parent)
OPTIONS: dict[str, Any] = {"restart": RestartPolicy(snapshots=False), "reports": ""}


class Cost(NamedTuple):
    """What one step costs.

    Attributes:
        calls: Of Python functions of the package, comprehensions aside.
        locks: Taken.
        looks: At the word of a worker that says which request it has answered.
        rings, waits: Calls of the channel, or of ``wait_any``.
        journal: Bytes copied into the journal.
        memory: KiB that are allocated at the same time at the most. The trainer copies each picture once, and so does the
            simulation, which keeps what was asked.
    """

    calls: int
    locks: int
    looks: int
    rings: int
    waits: int
    journal: int
    memory: int


# Face, what each worker does when it is asked ("slow": it answers only when it is waited for), number of workers.
COSTS = {
    ("vector_env", "awake", 2): Cost(calls=17, locks=4, looks=4, rings=0, waits=0, journal=112, memory=112),
    ("vector_env", "awake", 64): Cost(calls=141, locks=128, looks=128, rings=0, waits=0, journal=3584, memory=3558),
    ("vector_env", "asleep", 2): Cost(calls=17, locks=4, looks=2, rings=2, waits=0, journal=112, memory=112),
    ("vector_env", "asleep", 64): Cost(calls=141, locks=128, looks=64, rings=64, waits=0, journal=3584, memory=3558),
    ("vector_env", "slow", 2): Cost(calls=21, locks=4, looks=2, rings=0, waits=2, journal=112, memory=112),
    ("vector_env", "slow", 64): Cost(calls=269, locks=128, looks=64, rings=0, waits=64, journal=3584, memory=3558),
    ("multi_env", "awake", 2): Cost(calls=14, locks=4, looks=4, rings=0, waits=0, journal=112, memory=115),
    ("multi_env", "awake", 64): Cost(calls=138, locks=128, looks=128, rings=0, waits=0, journal=3584, memory=3558),
    ("multi_env", "asleep", 2): Cost(calls=14, locks=4, looks=2, rings=2, waits=0, journal=112, memory=115),
    ("multi_env", "asleep", 64): Cost(calls=138, locks=128, looks=64, rings=64, waits=0, journal=3584, memory=3558),
    ("multi_env", "slow", 2): Cost(calls=18, locks=4, looks=2, rings=0, waits=2, journal=112, memory=115),
    ("multi_env", "slow", 64): Cost(calls=266, locks=128, looks=64, rings=0, waits=64, journal=3584, memory=3558),
}


class PictureEnv(gymnasium.Env[Any, Any]):
    """Shows the same picture of 28 KB for ever: one copy too many shows in the memory of a step."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)
    picture = np.zeros((84, 84, 4), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.picture, {}

    def step(self, action: Any) -> Any:
        return self.picture, 0.0, False, False, {}


class CountingLock:
    def __init__(self, lock: Any, counts: Counter[str]) -> None:
        self.lock, self.counts = lock, counts

    def acquire(self, **options: Any) -> bool:
        self.counts["locks"] += 1
        return bool(self.lock.acquire(**options))

    def release(self) -> None:
        self.lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lock, name)


class CountingWords:
    """The control words as the hot path sees them. A worker that is awake answers after the first look."""

    def __init__(self, words: Any, counts: Counter[str], channel: SimulatedChannel) -> None:
        self.words, self.counts, self.channel = words, counts, channel

    def __getitem__(self, index: int) -> Any:
        value = self.words[index]
        if index == REPLY:
            self.counts["looks"] += 1
            if self.channel.spins:
                self.channel.execute(self.words[REQUEST])
        return value

    def __setitem__(self, index: int, value: Any) -> None:
        self.words[index] = value


class Counted:
    """Counts what a step of these envs costs.

    Args:
        supervisors: Of the workers.
        step: Takes a step of all.
    """

    def __init__(self, supervisors: list[Any], step: Callable[[], object]) -> None:
        self.supervisors, self.step = supervisors, step
        self.counts: Counter[str] = Counter()
        fanout.wait_any = self.counting("waits", fanout.wait_any)  # until Simulation.running() ends
        for supervisor in supervisors:
            supervisor.lock = CountingLock(supervisor.lock, self.counts)
            buffers = supervisor.buffers
            if native is None:  # it takes none but real words
                buffers.words = CountingWords(buffers.words, self.counts, supervisor.channel)
            buffers.ring = self.counting("rings", buffers.ring)
            supervisor.channel.wait = self.counting("waits", supervisor.channel.wait)

    def counting(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.counts[what] += 1
            return call(*arguments)

        return counted

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<" and not is_in_process():
            self.counts["calls"] += 1

    def cost(self) -> Cost:
        """Return what one step costs, which must be the same for each of several."""
        memory = []
        for _ in range(6):
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            self.step()
            memory.append(tracemalloc.get_traced_memory()[1] - before)
            tracemalloc.stop()
        costs = set()
        for _ in range(3):
            journal = sum(len(one.position.journal) for one in self.supervisors)
            self.counts.clear()
            sys.setprofile(self.profile)
            try:
                self.step()
            finally:
                sys.setprofile(None)
            journal = sum(len(one.position.journal) for one in self.supervisors) - journal
            counts = self.counts
            costs.add(
                Cost(
                    counts["calls"],
                    counts["locks"],
                    counts["looks"],
                    counts["rings"],
                    counts["waits"],
                    journal,
                    math.ceil(min(memory) / 1024),
                )
            )
        (cost,) = costs
        return cost


def make_vector_env(workers: int) -> tuple[Any, list[Any], Callable[[], object]]:
    envs = SubprocessVectorEnv([PictureEnv] * workers, envs_per_worker=1, **OPTIONS)
    actions = np.zeros(workers, np.int64)
    return envs, envs._workers, lambda: envs.step(actions)


def make_multi_env(workers: int) -> tuple[Any, list[Any], Callable[[], object]]:
    envs = create_subprocess_envs([PictureEnv] * workers, **OPTIONS)
    actions = [np.int64(0)] * workers
    several = MultiEnv(envs)
    return several, [supervisor_of(env) for env in envs], lambda: several.step(actions)


@pytest.mark.parametrize(("face", "worker", "workers"), [key for key in COSTS if native is None or key[1] != "awake"])
def test_cost_of_a_plain_step(face: str, worker: str, workers: int) -> None:
    told, cost = cost_of(face, worker, workers), COSTS[face, worker, workers]
    if native is not None:
        # For each worker two functions are native code, and two for all.
        fewer = 2 + 2 * workers
        cost = cost._replace(looks=0, calls=cost.calls - fewer)
    assert told._replace(memory=0) == cost._replace(memory=0), "if it is dearer, why? if it is cheaper, note it here"
    assert told.memory <= 1.02 * cost.memory


def cost_of(face: str, worker: str, workers: int) -> Cost:
    make = make_vector_env if face == "vector_env" else make_multi_env
    simulation = Simulation(eager=worker != "slow")
    with simulation.running():
        envs, supervisors, step = make(workers)
        gc.collect()
        gc.disable()  # finalizers of what others have left would be counted
        try:
            envs.reset(seed=1)
            for one in supervisors:
                one.segment.words[WORKER_SLEEPS] = worker == "asleep"
            for _ in range(8):
                step()
            told = Counted(supervisors, step).cost()
        finally:
            gc.enable()
            envs.close()
    return told
