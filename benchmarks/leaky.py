"""An env that leaks, and a policy for it; in a module of their own, so that workers import them by name."""

from __future__ import annotations

import ctypes
from typing import Any

import gymnasium
import numpy as np

LEAK = 256 * 2**10  # bytes a step
HOARD: list[bytearray] = []


def leak_in_c() -> None:
    """Take memory that Python knows nothing of."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    ctypes.memset(libc.malloc(ctypes.c_size_t(LEAK)), 1, LEAK)


def leak_in_a_global() -> None:
    """Take memory that lives as long as the module."""
    HOARD.append(bytearray(b"\1" * LEAK))


LEAKS = {"C": leak_in_c, "global": leak_in_a_global, "": lambda: None}


class LeakyWalk(gymnasium.Env[Any, Any]):
    """Walks at random in four dimensions, and leaks at each step.

    All episodes go on with one random generator: the next one shows whether it was put back to where it stood.

    Args:
        length: Steps of each episode.
        leak: A name of ``LEAKS``; ``""`` is none.
    """

    def __init__(self, length: int, leak: str = "") -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._length, self._leak = length, leak

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin somewhere else."""
        super().reset(seed=seed)
        self._place, self._taken = self.np_random.normal(size=4), 0
        return self._place.copy(), {}

    def step(self, action: Any) -> Any:
        """Draw a step; the reward tells of the place, also of the last one, which not every face returns."""
        LEAKS[self._leak]()
        self._place += self.np_random.normal(size=4) + (0.1 if action else -0.1)
        self._taken += 1
        ends, terminates = self._taken == self._length, bool(self._place[0] > 0)
        return self._place.copy(), float(self._place.sum()), ends and terminates, ends and not terminates, {}


def policy(observations: Any) -> Any:
    """Return the action for an observation, or those for a batch of them."""
    return (observations[..., 0] > 0).astype(np.int64)
