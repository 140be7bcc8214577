"""The killer strikes what it is shown, when it is told, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from kit import is_alive, no_leaks
from multienv.testing import Killer


@pytest.fixture(autouse=True)
def _nothing_left():
    with no_leaks(threads=True):
        yield


class Victims:
    """A process at a time, started anew as soon as the one before has died."""

    def __init__(self) -> None:
        self.current = self._start()
        self.codes: list[int] = []

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["/bin/sleep", "60"])

    def pids(self) -> list[int]:
        return [self.current.pid]

    def await_death(self) -> int:
        self.codes.append(self.current.wait())
        self.current = self._start()
        return self.codes[-1]

    def end(self) -> None:
        self.current.kill()
        self.current.wait()


@pytest.fixture
def victims(_nothing_left) -> Iterator[Victims]:
    victims = Victims()
    yield victims
    victims.end()


@pytest.mark.parametrize("manner", ["SIGKILL", "SIGSEGV", "SIGTERM"])
def test_a_strike_has_the_manner_asked_for(victims, manner):
    killer = Killer(victims.pids, manners=(manner,))
    assert killer.strike()
    assert victims.await_death() == -getattr(signal, manner)
    assert killer.strikes == {manner: 1}


def test_a_stopped_process_stays_stopped(victims):
    Killer(victims.pids, manners=("SIGSTOP",)).strike()
    (pid,) = victims.pids()
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert is_alive(pid)


def test_random_strikes_go_on_until_the_context_ends(victims):
    with Killer(victims.pids, interval=(0.0, 0.01), seed=3) as killer:
        for _ in range(5):
            victims.await_death()
    assert killer.delivered >= 5
    assert victims.codes == [-signal.SIGKILL] * 5


def test_a_killer_may_be_content_with_so_many_kills(victims):
    with Killer(victims.pids, interval=(0.0, 0.0), kills=2) as killer:
        victims.await_death()
        while killer.delivered < 2:  # the second one may have met the first victim, while that was dying
            time.sleep(0.001)
    assert killer.delivered == 2


def test_the_choices_are_a_function_of_the_seed(monkeypatch):
    struck: list[tuple[int, str]] = []
    monkeypatch.setattr("multienv.testing.killer.send", lambda pid, manner: not struck.append((pid, manner)))

    def choices(seed: int) -> list[tuple[int, str]]:
        killer = Killer(lambda: list(range(9)), manners=("SIGKILL", "SIGTERM"), seed=seed)
        struck.clear()
        for _ in range(20):
            killer.strike()
        return list(struck)

    assert choices(1) == choices(1)
    assert choices(1) != choices(2)


def test_only_living_descendants_are_struck():
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    for pids in ([], [os.getpid()], [os.getppid()], [1], [gone.pid]):
        killer = Killer(lambda pids=pids: pids)
        assert not killer.strike()
        assert killer.delivered == 0


def test_a_zombie_is_not_struck(victims):
    killer = Killer(victims.pids)
    assert killer.strike()
    while is_alive(*victims.pids()):
        pass
    assert not killer.strike()


def test_what_the_callable_raises_comes_out_at_the_end():
    asked = threading.Event()

    def refuse() -> list[int]:
        asked.set()
        raise LookupError("no pid today")

    with pytest.raises(LookupError, match="today"), Killer(refuse, interval=(0.0, 0.0)):
        asked.wait()
    with pytest.raises(ZeroDivisionError), Killer(refuse, interval=(0.0, 0.0)):
        raise ZeroDivisionError


@pytest.mark.parametrize("wrong", [{"manners": ()}, {"manners": ("SIGFPE",)}, {"interval": (2, 1)}])
def test_a_killer_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        Killer(list, **wrong)
