"""The guard has a warden go on that has been stopped, and does without one that does nothing."""

from __future__ import annotations

import gc
import threading

import pytest

from multienv.processes.guard import PATIENCE, Guard


class Worker:
    def __init__(self, deadline: float = 0.0) -> None:
        self.deadline = deadline
        self.ended = 0

    def overdue(self) -> float:
        return self.deadline

    def end_overdue(self) -> None:
        self.ended += 1


class Warden:
    def __init__(self) -> None:
        self.roused = self.dismissed = 0

    def rouse(self) -> None:
        self.roused += 1

    def dismiss(self) -> None:
        self.dismissed += 1


@pytest.fixture
def warden() -> Warden:
    return Warden()


@pytest.fixture
def guard(warden: Warden) -> Guard:
    return Guard(warden.rouse, warden.dismiss, look=3600.0)


def test_nobody_overdue(guard: Guard, warden: Warden) -> None:
    worker = Worker()
    guard.attend(1, worker)
    for _ in range(2 * PATIENCE):
        guard.look()
    assert (warden.roused, warden.dismissed, worker.ended) == (0, 0, 0)


def test_one_that_stays_overdue_is_ended(guard: Guard, warden: Warden) -> None:
    worker, other = Worker(7.0), Worker()
    guard.attend(1, worker)
    guard.attend(2, other)
    for _ in range(PATIENCE - 1):
        guard.look()
    assert (warden.roused, warden.dismissed, worker.ended) == (1, 0, 0)
    guard.look()
    assert (warden.dismissed, worker.ended, other.ended) == (1, 1, 0)


def test_one_deadline_after_the_other_is_somebodys_work(guard: Guard, warden: Warden) -> None:
    worker = Worker()
    guard.attend(1, worker)
    for number in range(1, 3 * PATIENCE):
        worker.deadline = float(number)
        guard.look()
    assert (warden.dismissed, worker.ended) == (0, 0)


def test_who_answers_late_begins_anew(guard: Guard, warden: Warden) -> None:
    worker = Worker()
    guard.attend(1, worker)
    for _ in range(5):
        for deadline in [7.0] * (PATIENCE - 1) + [0.0]:
            worker.deadline = deadline
            guard.look()
    assert (warden.dismissed, worker.ended) == (0, 0)


def test_it_keeps_nobody_alive(guard: Guard) -> None:
    worker = Worker(7.0)
    guard.attend(1, worker)
    guard.attend(2, Worker(7.0))
    guard.look()
    gc.collect()
    assert list(guard._workers) == [1]
    guard.leave(1)
    assert not guard._workers


def test_its_thread_ends_with_the_last_and_comes_with_the_next(warden: Warden) -> None:
    guard = Guard(warden.rouse, warden.dismiss, look=0.001)
    for number in range(20):
        worker = Worker(7.0)
        guard.attend(number, worker)
        assert guard._thread is not None
        _, thread = guard._thread
        until = threading.Event()
        while not worker.ended:
            until.wait(0.001)
        guard.leave(number)
        thread.join(30)
        assert not thread.is_alive()
