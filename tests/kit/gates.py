"""Envs whose steps, resets and builds take as long as a test wants. Of no module that takes long to import."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from kit.counter import CounterEnv

GO, WAIT = 0, 3


class GateEnv(gymnasium.Env[Any, Any]):
    """Waits in each step with the action ``WAIT``, and in ``wait()``, until the gate is there; says that it does.

    The observation is the step in the episode, a draw, and the last action.
    """

    observation_space = gymnasium.spaces.Box(-1, np.inf, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, directory: Path, name: str = "") -> None:
        self.waits, self.gate = directory / f"waits{name}", directory / "gate"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(-1), {}

    def step(self, action: Any) -> Any:
        if action == WAIT:
            self.wait()
        self.steps += 1
        return self._observe(action), 1.0, False, False, {}

    def wait(self) -> str:
        self.waits.touch()
        while not self.gate.exists():
            time.sleep(0.02)
        return "waited"

    def poke(self) -> int:
        return self.steps

    def _observe(self, action: int) -> Any:
        return np.array([self.steps, self.np_random.random(), action])


def gated_from_the_second_time(directory: Path) -> GateEnv:
    """Build an env: the first time at once, later when the gate is there."""
    env = GateEnv(directory)
    if (directory / "built").exists():
        env.wait()
    (directory / "built").touch()
    return env


class GatedEnv(CounterEnv):
    """Waits at the gates it is given: in a step with action 3, and in resets of the numbers named, from 0 on.

    A gate is a FIFO: who waits goes on when the test opens it.
    """

    def __init__(self, *, step_gate: str = "", reset_gate: str = "", gated_reset: int = 1, **counter: Any) -> None:
        super().__init__(**counter)
        self.step_gate, self.reset_gate, self.gated_reset = step_gate, reset_gate, gated_reset
        self.resets = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self.reset_gate and self.resets == self.gated_reset:
            Path(self.reset_gate).read_bytes()
        self.resets += 1
        return super().reset(seed=seed, options=options)

    def step(self, action: np.int64) -> Any:
        if self.step_gate and action == 3:
            Path(self.step_gate).read_bytes()
        return super().step(action)


class GatedBuildEnv(CounterEnv):
    """Waits at the gate when it is built, but for the first time."""

    def __init__(self, *, gate: str, **counter: Any) -> None:
        super().__init__(**counter)
        built = Path(gate + ".built")
        if built.exists():
            Path(gate).read_bytes()
        built.touch()


def open_up(gate: Path) -> None:
    """Let through who waits, or the first who comes."""
    gate.write_bytes(b"")


@contextlib.contextmanager
def opened_meanwhile(gate: Path) -> Iterator[None]:
    """By another thread, while this one waits for who waits there."""
    thread = threading.Thread(target=open_up, args=(gate,))
    thread.start()
    yield
    thread.join()
