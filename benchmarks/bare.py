"""The least that a batch in processes takes: nothing heals, infos are dropped, and what is amiss ends it.

A worker on each core, observations, rewards, flags and actions in shared memory, a byte each way. What the other
contenders are slower than this by is what they do for it.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space

Arrays = list[np.ndarray[Any, Any]]
Shapes = list[tuple[tuple[int, ...], np.dtype[Any]]]


class BarePipes:
    """Steps envs; begins their next episodes by itself.

    Args:
        fns: Each builds one env; their observations are Boxes.
    """

    def __init__(self, fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]]) -> None:
        """Start a worker for each core."""
        env = fns[0]()
        actions: Any = batch_space(env.action_space, len(fns))
        observations: Any = env.observation_space
        count, flags = (len(fns),), np.dtype(np.bool_)
        shapes: Shapes = [
            (actions.shape, actions.dtype),
            ((*count, *observations.shape), observations.dtype),
            (count, np.dtype(np.float64)),
            (count, flags),
            (count, flags),
        ]
        context = multiprocessing.get_context("forkserver")
        memory = context.RawArray("b", sum(map(_size, shapes)))
        self._actions, *self._results = _arrays(memory, shapes)
        self._workers, self._pipes = [], []
        cores = len(os.sched_getaffinity(0))
        bounds = [len(fns) * place // cores for place in range(cores + 1)]
        for first, stop in pairwise(bounds):
            ours, theirs = context.Pipe()
            rows = slice(first, stop)
            worker = context.Process(target=_work, args=(fns[rows], theirs, memory, shapes, rows), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)
        self.reset()

    def reset(self) -> None:
        """Wait until all have begun their first episodes, unless they have."""
        for pipe in self._pipes:
            os.write(pipe.fileno(), b"?")
        for pipe in self._pipes:
            os.read(pipe.fileno(), 1)

    def step(self, actions: Any) -> Arrays:
        """Observations, rewards, terminations, truncations."""
        self._actions[...] = actions
        for pipe in self._pipes:
            os.write(pipe.fileno(), b"s")
        for pipe in self._pipes:
            os.read(pipe.fileno(), 1)
        return [array.copy() for array in self._results]

    def close(self) -> None:
        """End the workers."""
        for pipe in self._pipes:
            pipe.close()
        for worker in self._workers:
            worker.join()


def _size(shape: tuple[tuple[int, ...], np.dtype[Any]]) -> int:
    return -(-math.prod(shape[0]) * shape[1].itemsize // 64) * 64  # a line of the cache


def _arrays(memory: Any, shapes: Shapes) -> Arrays:
    arrays, start = [], 0
    for shape, dtype in shapes:
        arrays.append(np.ndarray(shape, dtype, memory, start))
        start += _size((shape, dtype))
    return arrays


def _work(fns: Any, pipe: Any, memory: Any, shapes: Shapes, rows: slice) -> None:
    envs = [fn() for fn in fns]
    for seed, env in enumerate(envs, rows.start):
        env.reset(seed=seed)
    actions, observations, *others = [array[rows] for array in _arrays(memory, shapes)]
    rewards, terminations, truncations = [array.data for array in others]
    steps, cells, file = [env.step for env in envs], list(observations), pipe.fileno()
    if observations.ndim == 2:
        cells = [cell.data for cell in cells]
    while order := os.read(file, 1):
        if order == b"s":
            for slot, (step, action, cell) in enumerate(zip(steps, actions, cells, strict=True)):
                observation, rewards[slot], terminated, truncated, _ = step(action)
                terminations[slot], truncations[slot] = terminated, truncated
                if terminated or truncated:
                    observation, _ = envs[slot].reset()
                cell[:] = observation
        os.write(file, b".")
