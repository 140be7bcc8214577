"""The leak check sees each kind of leak, names it, forgives what is on its way out, and ignores what it is told to."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading

import pytest

from kit import (
    LeakError,
    Resources,
    assert_nothing_left,
    descendants,
    is_alive,
    no_leaks,
    snapshot_resources,
)

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def left(before: Resources) -> str:
    """The complaint about what is left now."""
    with pytest.raises(LeakError) as caught:
        assert_nothing_left(before, timeout=0.0)
    return str(caught.value)


def test_descriptors_are_named_with_what_they_lead_to():
    before = snapshot_resources()
    reading, writing = os.pipe()
    complaint = left(before)
    assert f"descriptor {reading} -> pipe:[" in complaint
    assert f"descriptor {writing} -> pipe:[" in complaint
    os.close(reading)
    os.close(writing)
    assert_nothing_left(before, timeout=0.0)


def test_children_grandchildren_and_zombies_are_named():
    before = snapshot_resources()
    with subprocess.Popen(
        ["/bin/sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True
    ) as shell:
        grandchild = int(shell.stdout.readline())
        complaint = left(before)
        assert f"process {shell.pid} (parent {os.getpid()}" in complaint
        assert f"process {grandchild} (parent {shell.pid}" in complaint
        assert set(descendants(os.getpid())) >= {shell.pid, grandchild}
        os.killpg(shell.pid, signal.SIGKILL)
        while is_alive(shell.pid):
            pass
        assert f"zombie {shell.pid} " in left(before)
    assert_nothing_left(before)


def test_an_orphan_in_a_session_of_its_own_is_found():
    before = snapshot_resources()
    code = f"import subprocess; print(subprocess.Popen({SLEEP!r}, start_new_session=True, stdout=2).pid)"
    output = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout
    orphan = int(output)
    assert f"process {orphan} (parent " in left(before)
    os.kill(orphan, signal.SIGKILL)
    assert_nothing_left(before)


def test_anonymous_memory_is_found_without_its_descriptor():
    before = snapshot_resources()
    descriptor = os.memfd_create("multienv-test")
    os.ftruncate(descriptor, 4096)
    memory = mmap.mmap(descriptor, 4096)
    assert "-> /memfd:multienv-test" in left(before)
    os.close(descriptor)
    assert "memory map /memfd:multienv-test" in left(before)
    memory.close()
    assert_nothing_left(before, timeout=0.0)


def test_what_is_on_its_way_out_is_waited_for():
    before = snapshot_resources()
    reading, writing = os.pipe()
    closer = threading.Timer(0.1, lambda: (os.close(reading), os.close(writing)))
    closer.start()
    assert_nothing_left(before, timeout=30.0)
    closer.join()


def test_no_leaks_fails_after_a_leak_and_notes_it_on_an_error():
    def leak() -> None:
        kept.extend(os.pipe())

    kept: list[int] = []
    with pytest.raises(LeakError, match="pipe"), no_leaks(timeout=0.0):
        leak()

    def leak_and_raise() -> None:
        leak()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught, no_leaks(timeout=0.0):
        leak_and_raise()
    if sys.version_info >= (3, 11):
        assert "pipe" in caught.value.__notes__[0]
    for descriptor in kept:
        os.close(descriptor)
    with no_leaks(threads=True) as before:
        assert isinstance(before, Resources)
