"""For tests of the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def imports_are_undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command leaves directories on the import path, and modules of files imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("odd_envs", "slow_env", "slow_package"):
        sys.modules.pop(name, None)
