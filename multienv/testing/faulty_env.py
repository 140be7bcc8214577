"""An env that fails at the step and in the way that you choose."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from pathlib import Path
from typing import Any, Literal, get_args

import gymnasium
import numpy as np
from numpy.typing import NDArray

Fault = Literal["raise", "exit", "kill", "segfault", "hang", "leak"]

# Steps and episodes that float32 counts exactly.
_MOST = float(2**24)


class FaultyEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Counts its steps and episodes, and fails for real when you say; otherwise it is deterministic under its seed.

    The observation is the step in the episode, the number of the episode, a draw of ``np_random`` and the last action
    (-1 after a reset). So it shows a lost, repeated or misplaced step. The reward is the draw.

    ::

        env = SubprocessEnv(partial(FaultyEnv, fault="kill", at=7, once=tmp_path / "struck"))

    Args:
        fault: How the env fails: ``"raise"`` raises a RuntimeError, ``"exit"`` exits with code 3, ``"kill"`` sends
            SIGKILL to itself, ``"segfault"`` causes a real segmentation fault, ``"hang"`` hangs for ever, ``"leak"``
            leaks ``leaked`` bytes in this and each later step; ``None``: it does not fail.
        at: The step of each episode at which the env fails, counted from 1; it fails before the step changes anything.
        once: Path of a file. The env fails only if the file does not exist, and creates it. So the step succeeds in a
            recovery; without ``once`` it fails in every process.
        horizon: Number of steps of an episode; the last step terminates it.
        leaked: Number of bytes to leak in each step.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium declares it so

    def __init__(
        self,
        fault: Fault | None = None,
        at: int = 1,
        *,
        once: str | os.PathLike[str] | None = None,
        horizon: int = 10,
        leaked: int = 2**20,
    ) -> None:
        if fault is not None and fault not in get_args(Fault):
            raise ValueError(f"fault is {fault!r}; choose one of {', '.join(map(repr, get_args(Fault)))}, or None")
        self.observation_space = gymnasium.spaces.Box(-_MOST, _MOST, (4,))
        self.action_space = gymnasium.spaces.Discrete(4)
        self.fault, self.at, self.once, self.horizon, self.leaked = fault, at, once, horizon, leaked
        self.episode, self.steps = -1, 0
        self._hoard: list[bytes] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode; a seed sets the number of the episode back to 0."""
        super().reset(seed=seed)
        self.episode = 0 if seed is not None else self.episode + 1
        self.steps = 0
        return self._observe(self.np_random.random(), -1), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Count a step, or fail."""
        if self.fault == "leak" and self.steps + 1 >= self.at:
            self._hoard.append(b"\x01" * self.leaked)  # not zeros, which would not be resident
        elif self.fault is not None and self.steps + 1 == self.at and self._may_strike():
            fail(self.fault)
        self.steps += 1
        draw = self.np_random.random()
        return self._observe(draw, int(action)), float(draw), self.steps >= self.horizon, False, {}

    def _observe(self, draw: float, action: int) -> NDArray[np.float32]:
        return np.array([self.steps, self.episode, draw, action], np.float32)

    def _may_strike(self) -> bool:
        if self.once is None:
            return True
        try:
            Path(self.once).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def fail(fault: Fault) -> None:
    """Fail in this way, here and now, in this process."""
    if fault == "raise":
        raise RuntimeError("FaultyEnv was told to raise")
    if fault == "exit":
        os._exit(3)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "segfault":
        ctypes.string_at(0)
    while True:  # a process that has sent itself SIGKILL gets here for a moment
        threading.Event().wait(3600)
