"""Envs for the tests of the managers, in a module of their own: workers import them by name."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from kit import CounterEnv


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


def counters(number: int, **options: Any) -> list[Any]:
    return [partial(CounterEnv, **options)] * number
