"""What is given to other threads is done once, and neither lost nor waited for in vain."""

from __future__ import annotations

import signal
import threading
import weakref
from types import FrameType

import pytest

from kit.interruption import Interrupted, disarm
from multienv._engine.threads import Bell, Lock, Pool, Task, close_at_once, side_by_side
from multienv.errors import UsageError


def test_a_task_that_has_ended_does_not_keep_the_bell_that_it_rang() -> None:
    """Its error refers to it through a traceback: a bell in that circle would be open until the next collection."""
    bell = Bell()
    held = weakref.ref(bell)
    task = Task(lambda: 1 // 0, bell.ring)
    task.run()
    del bell
    assert isinstance(task.error, ZeroDivisionError)
    assert held() is None


def test_where_no_thread_can_be_started_a_task_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:  # as when the interpreter exits
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with Pool(2, "test") as pool:
            tasks = side_by_side(pool, [threading.current_thread, lambda: 1 // 0])
    assert tasks[0].result is threading.current_thread()
    assert isinstance(tasks[1].error, ZeroDivisionError)


def test_slow_closes_run_beside_each_other_and_what_is_no_error_of_ours_is_raised_when_all_are_done() -> None:
    meeting, done = threading.Barrier(3, timeout=30), list[int]()

    def close(number: int) -> None:
        meeting.wait()  # passes only if all three run at once
        done.append(number)
        if number == 1:
            raise UsageError("ours")
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        close_at_once([lambda number=number: close(number) for number in range(3)])  # type: ignore[misc]
    assert sorted(done) == [0, 1, 2]
    close_at_once([])


def test_a_signal_handler_that_raises_at_any_moment_leaves_no_lock_held() -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    lock, interrupted = Lock(), 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(3000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.00005)
                for _ in range(5000):
                    with lock:
                        pass
                disarm()
            except Interrupted:
                interrupted += 1
            assert not lock._is_owned()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 1000
