"""The leak checks of the kit: the tests are a guest on the machine, and count only what their own processes made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.leaks import LeakError, assert_nothing_left, own_name, snapshot_resources
from kit.process_table import MARK_VARIABLE

LEAVES_NAMES = """
import os, sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(*sys.argv[1:], create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
print(memory.name, flush=True)
os._exit(0)
"""


def left_by_program(*names: str, environment: dict[str, str]) -> Path:
    """Run a program that leaves a name in /dev/shm, which no process maps then."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_NAMES, *names], capture_output=True, text=True, check=True, env=environment
    )
    return Path("/dev/shm", done.stdout.strip())


def test_names_that_another_program_leaves_are_no_leak():
    before = snapshot_resources()
    foreign = {name: value for name, value in os.environ.items() if name != MARK_VARIABLE}
    names = ((), ("sem.mp-of_others",), ("multienv-of-others",))
    left = [left_by_program(*name, environment=foreign) for name in names]
    try:
        assert all(map(Path.exists, left))
        assert_nothing_left(before, timeout=0.0)
    finally:
        for path in left:
            path.unlink()


def test_a_name_that_a_descendant_leaves_is_a_leak():
    before = snapshot_resources()
    path = left_by_program(own_name(), environment=dict(os.environ))
    with pytest.raises(LeakError, match=f"1 left behind .*\n  shared memory {path}"):
        assert_nothing_left(before, timeout=0.0)
    path.unlink()
    assert_nothing_left(before)
