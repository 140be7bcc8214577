"""The killer strikes what it is shown, when it is told, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import pytest

from kit import no_leaks
from multienv.testing import Killer


@pytest.fixture(autouse=True)
def _nothing_left():
    with no_leaks(threads=True):
        yield


@pytest.mark.parametrize("manner", ["SIGKILL", "SIGSEGV", "SIGTERM"])
def test_a_strike_has_the_manner_asked_for(manner):
    victim = subprocess.Popen(["/bin/sleep", "60"])
    killer = Killer(lambda: [victim.pid], manners=(manner,))
    assert killer.strike()
    assert victim.wait() == -getattr(signal, manner)
    assert killer.strikes == {manner: 1}


def test_random_strikes_go_on_until_the_context_ends():
    struck = 0
    victim = subprocess.Popen(["/bin/sleep", "60"])
    with Killer(lambda: [victim.pid], interval=(0.0, 0.01), seed=3) as killer:
        for _ in range(5):
            struck += victim.wait() == -signal.SIGKILL
            victim = subprocess.Popen(["/bin/sleep", "60"])
    victim.kill()
    victim.wait()
    assert struck == 5 <= killer.delivered


def test_only_living_descendants_are_struck():
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    for pids in ([], [os.getpid()], [os.getppid()], [1], [gone.pid]):
        killer = Killer(lambda pids=pids: pids)
        assert not killer.strike()
        assert killer.delivered == 0


def test_what_the_callable_raises_comes_out_at_the_end():
    asked = threading.Event()

    def refuse() -> list[int]:
        asked.set()
        raise LookupError("no pid today")

    with pytest.raises(LookupError, match="today"), Killer(refuse, interval=(0.0, 0.0)):
        asked.wait()
    with pytest.raises(ZeroDivisionError), Killer(refuse, interval=(0.0, 0.0)):
        raise ZeroDivisionError
