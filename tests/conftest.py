"""Shared by all layers: nothing may be left behind by any test."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import assert_nothing_left, monitor_itself, snapshot_resources

# Trainers that tests launch as programs of their own find the kit too.
HERE = str(Path(__file__).parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH", "")]))


@pytest.fixture(autouse=True)
def reports(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the crash reports of this test lie, and those of the trainers it starts: not in the user's own directory."""
    directory = tmp_path_factory.mktemp("reports")
    monkeypatch.setenv("MULTIENV_REPORTS", str(directory))
    return directory


# DESIGN, invariant 7: seconds from the last close() until nothing is left.
GONE_WITHIN = 2.0
_ended = [0.0]  # when the last test of the module did


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Children, descriptors and shared memory are back where they were; the monitor may stay for the next test."""
    if "unit" in request.path.parts:  # they are many, and short: together, see below
        yield
        _ended[0] = time.monotonic()
        return
    before = snapshot_resources()
    yield
    _ended[0] = time.monotonic()
    # An error that a test has caught and kept refers to itself through the frames of its traceback, and those keep the
    # memory of a closed env mapped until the next collection.
    gc.collect()
    assert_nothing_left(before, timeout=GONE_WITHIN, ignore=monitor_itself)


@pytest.fixture(autouse=True, scope="module")
def nothing_left_by_all() -> Iterator[None]:
    """After the last test of a module the monitor ends too, and leaves neither a zombie nor its socket."""
    before = snapshot_resources()
    yield
    assert_nothing_left(before, timeout=max(0.1, _ended[0] + GONE_WITHIN - time.monotonic()))


@pytest.fixture
def marker(tmp_path: Path) -> str:
    """The path of a marker that makes a fault strike once."""
    return str(tmp_path / "struck")
