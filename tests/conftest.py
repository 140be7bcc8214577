"""Shared by all layers: nothing may be left behind by any test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from multienv.processes import client
from multienv.testing import Ignored, assert_nothing_left, multiprocessing_helpers, snapshot_resources


def warden_itself() -> Ignored:
    """The warden lives as long as the trainer, by design; so does its socket."""
    warden = client._client
    if warden is None:
        return multiprocessing_helpers()
    own = Ignored(pids=frozenset([warden.process.pid]), descriptors=frozenset([warden._control.fileno()]))
    return own | multiprocessing_helpers()


@pytest.fixture(autouse=True)
def reports(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the crash reports of this test lie, and those of the trainers it starts: not in the user's own directory."""
    directory = tmp_path_factory.mktemp("reports")
    monkeypatch.setenv("MULTIENV_REPORTS", str(directory))
    return directory


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Children, descriptors and shared memory are back where they were."""
    if "unit" in request.path.parts:  # they are many, and short: together, see below
        yield
        return
    before = snapshot_resources()
    yield
    assert_nothing_left(before, timeout=5.0, ignore=warden_itself)


@pytest.fixture(autouse=True, scope="module")
def nothing_left_by_all() -> Iterator[None]:
    """The same for all tests of a module."""
    before = snapshot_resources()
    yield
    assert_nothing_left(before, timeout=5.0, ignore=warden_itself)


@pytest.fixture
def marker(tmp_path: Path) -> str:
    """The path of a marker that makes a fault strike once."""
    return str(tmp_path / "struck")
