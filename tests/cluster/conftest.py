"""A Ray cluster, and what tests on it may leave behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from kit import assert_nothing_left, monitor_itself, snapshot_resources
from kit.process_table import family, mark_descendants

if TYPE_CHECKING:
    from kit.ray_cluster import RayCluster

# A raylet that is killed takes some seconds to take its helpers with it.
GONE_WITHIN = 10.0


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    """Two nodes of four CPUs. A test that loses a node adds one; the head stays."""
    from kit.ray_cluster import RayCluster

    with RayCluster(nodes=2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No actor and no worker is left on the cluster. Ray's own helpers, descriptors and memory come and go."""
    yield
    gc.collect()
    if "ray_cluster" in request.fixturenames:
        request.getfixturevalue("ray_cluster").assert_idle()


@pytest.fixture(autouse=True, scope="module")
def nothing_left_by_a_module() -> Iterator[None]:
    """With the cluster all is gone, but for descriptors that Ray keeps as long as this process lives."""
    before = snapshot_resources(threads=True)
    yield
    gc.collect()
    # Two agents of Ray's wait a minute for a head that was killed; their titles hide whose they were.
    for pid, process in family(mark_descendants()).items():
        if process.command.startswith("ray::") and "Agent" in process.command:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert_nothing_left(before, timeout=GONE_WITHIN, ignore=monitor_itself)
