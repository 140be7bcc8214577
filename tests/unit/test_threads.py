"""What is given to other threads is done once, and neither lost nor waited for in vain."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from multienv.threads import Pool, Task, side_by_side


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(2, "test") as pool:
        yield pool


def test_a_result(pool: Pool) -> None:
    task = Task(lambda: threading.current_thread().name)
    task.start(pool)
    task.wait()
    assert task.result.startswith("test")
    assert task.error is None


def test_an_error_is_kept(pool: Pool) -> None:
    def fail() -> None:
        raise SystemExit(3)

    tasks = side_by_side(pool, [fail, lambda: 5])
    assert [type(task.error) for task in tasks] == [SystemExit, type(None)]
    assert tasks[1].result == 5


def test_started_again_and_again_it_is_done_once(pool: Pool) -> None:
    calls: list[int] = []
    task = Task(lambda: calls.append(1))
    for _ in range(3):
        task.start(pool)
    for _ in range(3):
        task.wait()
        task.start(pool)
    side_by_side(pool, [bool] * 4)  # whatever is queued has been taken
    assert calls == [1]


def test_dropped_before_it_began_it_never_does(pool: Pool) -> None:
    begun, gate, calls = threading.Barrier(3), threading.Event(), list[int]()

    def block() -> bool:
        begun.wait()
        return gate.wait()

    blockers = [Task(block) for _ in range(2)]
    for blocker in blockers:
        blocker.start(pool)
    begun.wait()
    task = Task(lambda: calls.append(1))
    task.start(pool)
    task.drop()
    gate.set()
    for blocker in blockers:
        blocker.drop()  # has begun: waits
        assert blocker.result is True
    side_by_side(pool, [bool] * 4)
    assert calls == []


def test_all_threads_are_there_from_the_start() -> None:
    before = threading.active_count()
    with Pool(5, "test"):
        assert threading.active_count() == before + 5


def test_where_no_thread_can_be_started_it_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the interpreter exits."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with Pool(2, "test") as pool:
            tasks = side_by_side(pool, [threading.current_thread, lambda: 1 // 0])
    assert tasks[0].result is threading.current_thread()
    assert isinstance(tasks[1].error, ZeroDivisionError)
