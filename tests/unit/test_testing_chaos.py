"""The killer strikes what it is shown, when it is told, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
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

    def pid(self) -> int:
        return self.current.pid

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
    killer = Killer(victims.pid)
    pid = victims.pid()
    strike = killer.strike(manner)
    assert victims.await_death() == -getattr(signal, manner)
    assert (strike.pid, strike.manner, strike.delivered) == (pid, manner, True)
    assert strike.elapsed >= 0
    assert killer.strikes == (strike,)


def test_a_stopped_process_stays_stopped(victims):
    Killer(victims.pid, manners=("SIGSTOP",)).strike()
    _, status = os.waitpid(victims.pid(), os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert is_alive(victims.pid())


def test_random_strikes_go_on_until_the_context_ends(victims):
    with Killer(victims.pid, interval=(0.0, 0.01), seed=3) as killer:
        for _ in range(5):
            victims.await_death()
    assert killer.delivered >= 5
    count = len(killer.strikes)
    assert victims.codes == [-signal.SIGKILL] * 5
    assert count == len(killer.strikes)


def test_scripted_strikes_come_as_often_as_scripted(victims):
    with Killer(victims.pid, moments=[0.1, 0.0]) as killer:
        victims.await_death()
        killer._thread.join()
    assert len(killer.strikes) == 2
    assert killer.strikes[0].elapsed <= killer.strikes[1].elapsed


def test_a_killer_may_be_content_with_so_many_kills(victims):
    with Killer(victims.pid, interval=(0.0, 0.0), kills=2) as killer:
        victims.await_death()
        killer._thread.join()  # the second one may have met the first victim, while that was dying
    assert killer.delivered == 2


def test_the_choices_are_a_function_of_the_seed():
    def choices(seed: int) -> list[tuple[int | None, str]]:
        killer = Killer(lambda: [2**22 + number for number in range(9)], manners=("SIGKILL", "SIGTERM"), seed=seed)
        return [(strike.pid, strike.manner) for strike in (killer.strike() for _ in range(20))]

    assert choices(1) == choices(1)
    assert choices(1) != choices(2)


def test_only_living_descendants_are_struck():
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    for pids in (None, [], os.getpid(), os.getppid(), 1, gone.pid):
        killer = Killer(lambda pids=pids: pids)
        assert not killer.strike().delivered
        assert killer.delivered == 0


def test_a_zombie_is_not_struck(victims):
    killer = Killer(victims.pid)
    assert killer.strike().delivered
    while is_alive(victims.pid()):
        pass
    assert not killer.strike().delivered


def test_grandchildren_are_struck():
    with subprocess.Popen(["/bin/sh", "-c", "sleep 60 & echo $!; wait $!; exit $?"], stdout=subprocess.PIPE) as shell:
        grandchild = int(shell.stdout.readline())
        assert Killer(lambda: grandchild).strike().delivered
        assert shell.wait() == 128 + signal.SIGKILL


def test_what_the_callable_raises_comes_out_at_the_end():
    asked = threading.Event()

    def refuse() -> int:
        asked.set()
        raise LookupError("no pid today")

    with pytest.raises(LookupError, match="today"), Killer(refuse, moments=[0.0]):
        asked.wait()
    with pytest.raises(ZeroDivisionError), Killer(refuse, moments=[0.0]):
        raise ZeroDivisionError


def test_a_killer_is_started_once(victims):
    with Killer(victims.pid, interval=(60, 60)) as killer, pytest.raises(ValueError, match="started already"):
        killer.start()


@pytest.mark.parametrize("wrong", [{"manners": ()}, {"manners": ("SIGFPE",)}, {"interval": (2, 1)}])
def test_a_killer_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        Killer(lambda: None, **wrong)


def test_without_pidfd_the_pid_has_to_do(victims, monkeypatch):
    if sys.platform == "linux":

        def refuse(pid: int) -> int:
            raise OSError("no pidfd in this sandbox")

        monkeypatch.setattr(os, "pidfd_open", refuse)
    assert Killer(victims.pid).strike().delivered
    assert victims.await_death() == -signal.SIGKILL
