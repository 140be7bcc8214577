"""Limits of the engine, set so small that a test meets in a second what takes hours in life.

The tests of promises name a limit, and know nothing else of the engine.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from multienv._engine import interrupts
from multienv._engine.processes import endings, watch
from multienv._engine.recovery import journal, pending, recoverer, supervisor, way_back
from multienv.envs import async_env

HOMES: dict[str, ModuleType] = {
    **dict.fromkeys(["LEAST", "LONGER", "SILENCE", "STEPS"], pending),
    **dict.fromkeys(["LARGE_SHARE", "SHARE"], supervisor),
    **dict.fromkeys(["AFFORDABLE", "MOST_CALLS"], journal),
    "BUSY_PATIENCE": endings,
    "PATIENCE": interrupts,
    "POISON_AFTER": way_back,
    **dict.fromkeys(["REPLAY_GRACE", "_SILENCE", "_SLOWER"], recoverer),
    "SPINS": watch,
    "_LOOK": async_env,
}


def limit(name: str) -> Any:
    """Return a limit."""
    return getattr(HOMES[name], name)


def set_limit(patch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """Set a limit until the test is over."""
    patch.setattr(HOMES[name], name, value)
