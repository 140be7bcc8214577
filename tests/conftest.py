"""Shared by all layers: nothing may be left behind by any test."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import CounterEnv, assert_nothing_left, monitor_itself, snapshot_resources
from multienv import SubprocessEnv
from multienv._engine.native import native

# Trainers that tests launch as programs of their own find the kit too.
HERE = str(Path(__file__).parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH", "")]))

# Where this is set, each of the hundreds of interpreters that tests launch compiles the package: two fifths of its time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell has SIGINT ignored in what it runs in the background, and so have many CI systems. Then Python sets no handler,
# neither here nor in the trainers that tests launch. Those get it as it is by default, because this is a handler.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Say which of the two runs: everything is tested with the native extension and without it."""
    return "native extension: " + ("not used" if native is None else native.__file__)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return two more than there are cores, because many tests wait; at most 8, because they launch processes, too."""
    return min(8, 2 + len(os.sched_getaffinity(0)))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which all tests are marked ``ci`` when none is to run: what it imports may not be installed."""
    if "not ci" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    return "\npytestmark = pytest.mark.ci\n" in collection_path.read_text() or None


@pytest.fixture(autouse=True)
def reports(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the crash reports of this test lie, and those of the trainers it starts: not in the user's own directory."""
    directory = tmp_path_factory.mktemp("reports")
    monkeypatch.setenv("MULTIENV_REPORTS", str(directory))
    return directory


# docs/guarantees.md, 7: seconds from the last close() until nothing is left.
GONE_WITHIN = 2.0


@pytest.fixture(autouse=True, scope="session")
def quick_collections() -> None:
    """Leave what the imports have made out of the collections after each test: they take a tenth of the time then."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Children, descriptors and shared memory are back where they were; the monitor may stay for the next test."""
    if "unit" in request.path.parts:  # they are many, and short: together, see below
        yield
        return
    before = snapshot_resources()
    yield
    # An error that a test has caught and kept refers to itself through the frames of its traceback, and those keep the
    # memory of a closed env mapped until the next collection. That the package needs none is invariant 7's to show.
    assert_nothing_left(before, timeout=GONE_WITHIN, ignore=monitor_itself, collects=True)


@pytest.fixture(autouse=True, scope="module")
def nothing_left_by_a_module() -> Iterator[None]:
    """The same for all tests of a module."""
    before = snapshot_resources()
    yield
    assert_nothing_left(before, timeout=GONE_WITHIN, ignore=monitor_itself, collects=True)


@pytest.fixture(autouse=True, scope="session")
def nothing_left_by_all() -> Iterator[None]:
    """After the last test the monitor ends too, and leaves neither a zombie nor its socket."""
    before = snapshot_resources()
    yield
    assert_nothing_left(before, timeout=GONE_WITHIN)


@pytest.fixture
def marker(tmp_path: Path) -> str:
    """The path of a marker that makes a fault strike once."""
    return str(tmp_path / "struck")


@pytest.fixture(scope="module")
def monitor_stays() -> Iterator[None]:
    """Keep a worker, and with it the monitor, which would end and be launched again between many tests of a module."""
    with SubprocessEnv(CounterEnv):
        yield
