"""Envs for the tests of the managers, in a module of their own: workers import them by name."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kit import CounterEnv


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


class SeenResetEnv(CounterEnv):
    """Tells in each info which seed and options its reset was given, and by which process."""

    seen: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.seen = seed, options
        return super().reset(seed=seed, options=options)

    def _info(self) -> dict[str, Any]:
        return {"reset": self.seen, "pid": os.getpid()}


class FailingResetEnv(SeenResetEnv):
    """From its second reset on it raises, as often as the file says; a line is taken off each time."""

    def __init__(self, *, errors: str, **counter: Any) -> None:
        super().__init__(**counter)
        self.errors = Path(errors)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        lines = self.errors.read_text().splitlines() if self.errors.exists() else []
        if (lines and self.seen is not None) or lines[:1] == ["first"]:
            self.errors.write_text("\n".join(lines[1:]))
            raise ConnectionError(lines[0])
        return super().reset(seed=seed, options=options)


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


def counters(number: int, **options: Any) -> list[Any]:
    return [partial(CounterEnv, **options)] * number
