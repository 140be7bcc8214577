"""The guard has a warden go on that has been stopped, and does without one that does nothing."""

from __future__ import annotations

import gc
import threading

import pytest

from multienv.processes.guard import PATIENCE, Guard


class Worker:
    def __init__(self, deadline: float = 0.0) -> None:
        self.deadline = deadline
        self.roused = self.ended = 0

    def overdue(self) -> float:
        return self.deadline

    def rouse(self) -> None:
        self.roused += 1

    def end_overdue(self) -> None:
        self.ended += 1

    @property
    def seen_to(self) -> tuple[int, int]:
        return self.roused, self.ended


@pytest.fixture
def guard() -> Guard:
    return Guard(seconds=3600.0)


def test_nobody_overdue(guard: Guard) -> None:
    worker = Worker()
    guard.attend(1, worker)
    for _ in range(2 * PATIENCE):
        guard.look()
    assert worker.seen_to == (0, 0)


def test_one_that_stays_overdue_is_ended(guard: Guard) -> None:
    worker, other = Worker(7.0), Worker()
    guard.attend(1, worker)
    guard.attend(2, other)
    for _ in range(PATIENCE - 1):
        guard.look()
    assert worker.seen_to == (1, 0)
    guard.look()
    assert (worker.seen_to, other.seen_to) == ((1, 1), (0, 0))


def test_one_deadline_after_the_other_is_somebodys_work(guard: Guard) -> None:
    worker = Worker()
    guard.attend(1, worker)
    for number in range(1, 3 * PATIENCE):
        worker.deadline = float(number)
        guard.look()
    assert worker.ended == 0


def test_who_answers_late_begins_anew(guard: Guard) -> None:
    worker = Worker()
    guard.attend(1, worker)
    for _ in range(5):
        for deadline in [7.0] * (PATIENCE - 1) + [0.0]:
            worker.deadline = deadline
            guard.look()
    assert worker.ended == 0


def test_it_keeps_nobody_alive(guard: Guard) -> None:
    worker = Worker(7.0)
    guard.attend(1, worker)
    guard.attend(2, Worker(7.0))
    gc.collect()
    guard.look()
    assert list(guard._workers) == [1]
    guard.leave(1)
    assert not guard._workers


def test_its_thread_ends_with_the_last_and_comes_with_the_next() -> None:
    guard = Guard(seconds=0.001)
    for number in range(20):
        worker = Worker(7.0)
        guard.attend(number, worker)
        thread = guard._thread
        assert thread is not None
        until = threading.Event()
        while not worker.ended:
            until.wait(0.001)
        guard.leave(number)
        thread.join(30)
        assert not thread.is_alive()


def test_others_come_and_go_while_it_looks() -> None:
    """Also by a collection of garbage that comes in between."""
    guard = Guard(seconds=0.0001)
    late = Worker(7.0)
    guard.attend(0, late)
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for number in range(1, 2000):
            cycle = [Worker()]
            cycle.append(cycle)  # type: ignore[arg-type]
            guard.attend(number, cycle[0])
            guard.leave(number - 7)
    finally:
        gc.set_threshold(*before)
    ended, until = late.ended, threading.Event()
    guard.attend(0, late)
    while late.ended == ended:
        until.wait(0.001)


def test_a_forked_child_begins_with_nobody_and_waits_for_no_lock(guard: Guard) -> None:
    worker = Worker(7.0)
    guard.attend(1, worker)
    inside, go = threading.Event(), threading.Event()

    def hold() -> None:
        with guard._starting:
            inside.set()
            go.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait()
    guard.forget()
    guard.attend(2, worker)
    assert list(guard._workers) == [2]
    go.set()
    holder.join()
