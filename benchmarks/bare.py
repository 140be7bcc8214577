"""The least that a batch in processes takes: doorbells in shared memory, no recovery, no errors, infos dropped.

In each direction, a word in shared memory holds the number of the newest request or reply. The side that waits looks at
the word, and gives its core away at each look; after a while it sleeps on a pipe. docs/in_150_lines.md explains it line
by line. What the other contenders need more time for than this is what they do for it.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import select
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space

LOOKING = 200e-6  # seconds that a worker looks before it sleeps
LOOKS = 50  # of the trainer, before it sleeps
FIRST_SLEEP = 2e-3  # seconds; a wake-up may be lost, for there is no fence between "I sleep" and the last look
LINE = 8  # words in a cache line
# Where a worker's words begin, each in a line of its own: request, reply, "I sleep" of the worker and of the trainer.
REPLY, WORKER_SLEEPS, TRAINER_SLEEPS, WORDS = LINE, 2 * LINE, 3 * LINE, 4 * LINE

Arrays = list[np.ndarray[Any, Any]]
Shapes = list[tuple[tuple[int, ...], np.dtype[Any]]]


class BareDoorbells:
    """Steps envs; begins their next episodes by itself. Pins the trainer to its first core.

    Args:
        fns: Each builds one env; their observations are Boxes.
        one_each: A worker for each env; else one for each core.
    """

    def __init__(self, fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]], *, one_each: bool = False) -> None:
        """Start the workers."""
        env, count, flags = fns[0](), (len(fns),), np.dtype(np.bool_)
        actions: Any = batch_space(env.action_space, len(fns))
        observations: Any = env.observation_space
        cores = sorted(os.sched_getaffinity(0))
        workers = len(fns) if one_each else min(len(fns), len(cores))
        shapes: Shapes = [
            ((WORDS * workers,), np.dtype(np.int64)),
            (actions.shape, actions.dtype),
            ((*count, *observations.shape), observations.dtype),
            (count, np.dtype(np.float64)),
            (count, flags),
            (count, flags),
        ]
        context = multiprocessing.get_context("forkserver")
        memory = context.RawArray("b", sum(map(_size, shapes)))
        words, self._actions, *self._results = _arrays(memory, shapes)
        self._words, self._number, self._processes, self._pipes = words.data, 0, [], []
        self._cores = cores
        bounds = [len(fns) * place // workers for place in range(workers + 1)]
        for place, (first, stop) in enumerate(pairwise(bounds)):
            ours, theirs = context.Pipe()
            rows, core = slice(first, stop), cores[place % len(cores)]
            arguments = fns[rows], theirs, memory, shapes, rows, WORDS * place, core
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        # The workers on other cores begin at once, those on the trainer's own core when it waits: asked last, heard
        # first.
        self._order = sorted(range(workers), key=lambda place: place % len(cores) == 0)
        for pipe in self._pipes:
            pipe.recv_bytes()  # its envs are built

    def reset(self) -> None:
        """Do nothing: each worker has begun the first episodes."""

    def step(self, actions: Any) -> Arrays:
        """Return observations, rewards, terminations, truncations."""
        words, give_way = self._words, os.sched_yield
        self._actions[...] = actions
        self._number = number = self._number + 1
        for place in self._order:
            words[WORDS * place] = number
            if words[WORDS * place + WORKER_SLEEPS]:
                os.write(self._pipes[place].fileno(), b"s")
        for place in reversed(self._order):
            reply, looks = WORDS * place + REPLY, 0
            while words[reply] != number:
                give_way()
                looks += 1
                if looks > LOOKS:
                    _sleep(words, reply, number - 1, WORDS * place + TRAINER_SLEEPS, self._pipes[place].fileno())
        return [array.copy() for array in self._results]

    def pin(self, *, on: bool) -> None:
        """Pin the trainer to the first core, or let go of it."""
        os.sched_setaffinity(0, self._cores[:1] if on else self._cores)

    def close(self) -> None:
        """End the workers."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()


def _size(shape: tuple[tuple[int, ...], np.dtype[Any]]) -> int:
    return -(-math.prod(shape[0]) * shape[1].itemsize // 64) * 64  # a line of the cache


def _arrays(memory: Any, shapes: Shapes) -> Arrays:
    arrays, start = [], 0
    for shape, dtype in shapes:
        arrays.append(np.ndarray(shape, dtype, memory, start))
        start += _size((shape, dtype))
    return arrays


def _sleep(words: Any, place: int, last: int, asleep: int, file: int) -> None:
    """Sleep until the word at ``place`` is another than ``last``."""
    patience: float | None = FIRST_SLEEP
    words[asleep] = 1
    while words[place] == last:
        poller = select.poll()  # select() takes no descriptor above 1,023
        poller.register(file, select.POLLIN)
        if poller.poll(None if patience is None else 1000 * patience):
            os.read(file, 64)
        patience = None
    words[asleep] = 0


def _await(words: Any, request: int, last: int, file: int) -> None:
    """Wait for another request than the last."""
    until = time.perf_counter() + LOOKING
    while words[request] == last:
        if time.perf_counter() > until:
            _sleep(words, request, last, request + WORKER_SLEEPS, file)
            return
        os.sched_yield()


def _work(fns: Any, pipe: Any, memory: Any, shapes: Shapes, rows: slice, request: int, core: int) -> None:
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # interrupts nobody
    envs = [fn() for fn in fns]
    for seed, env in enumerate(envs, rows.start):
        env.reset(seed=seed)
    words = _arrays(memory, shapes)[0].data
    actions, observations, *others = [array[rows] for array in _arrays(memory, shapes)[1:]]
    rewards, terminations, truncations = [array.data for array in others]
    steps, cells, file = [env.step for env in envs], list(observations), pipe.fileno()
    if observations.ndim == 2:
        cells = [cell.data for cell in cells]
    reply, asleep, last = request + REPLY, request + TRAINER_SLEEPS, 0
    pipe.send_bytes(b"built")
    while True:
        if words[request] == last:
            _await(words, request, last, file)
        last = words[request]
        batch = actions.tolist() if actions.ndim == 1 else actions
        for slot, (step, action, cell) in enumerate(zip(steps, batch, cells, strict=True)):
            observation, rewards[slot], terminated, truncated, _ = step(action)
            terminations[slot], truncations[slot] = terminated, truncated
            if terminated or truncated:
                observation, _ = envs[slot].reset()
            cell[:] = observation
        words[reply] = last
        if words[asleep]:
            os.write(file, b".")


def main() -> None:
    """Step eight CartPoles for a second."""
    envs = BareDoorbells([partial(gymnasium.make, "CartPole-v1")] * 8)
    until, rounds = time.perf_counter() + 1.0, 0
    while time.perf_counter() < until:
        envs.step(np.full(8, rounds % 2))
        rounds += 1
    envs.close()
    print(f"{8 * rounds:,} steps")


if __name__ == "__main__":
    main()
