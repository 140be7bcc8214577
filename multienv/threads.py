"""Work for other threads, asked for by one that a signal handler may interrupt between any two lines.

``Executor.submit`` and ``Future.result`` wait on conditions that are written in Python: an exception that Ctrl-C
raises inside them can leave a lock held for ever, and a result taken but not handed over. Here the asking thread
touches nothing but locks written in C, and what a task gave stays with the task.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from multienv.errors import MultienvError


class Pool(ThreadPoolExecutor):
    """Starts all its threads at once, and so never has to count which are idle.

    When the interpreter exits, and where the system has none to give, there are fewer, or none.
    """

    def __init__(self, threads: int, name: str) -> None:
        """Start the threads."""
        super().__init__(threads, thread_name_prefix=name)
        self._idle_semaphore = _NobodyIdle()  # type: ignore[assignment]
        with contextlib.suppress(RuntimeError):
            for _ in range(threads):
                self.submit(bool)


class _NobodyIdle:
    """In place of the executor's semaphore, whose lock is one of those that can be left held."""

    @staticmethod
    def acquire(timeout: float | None = None) -> bool:
        return False

    @staticmethod
    def release() -> None:
        pass


class Task:
    """A call that another thread makes, once.

    Attributes:
        result: What it returned.
        error: What it raised.
    """

    __slots__ = ("_begun", "_call", "_done", "_finished", "error", "result")

    def __init__(self, call: Callable[[], Any]) -> None:
        """Nobody makes it yet."""
        self._call = call
        self._begun, self._finished = threading.Lock(), threading.Lock()
        self._finished.acquire()
        self._done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def start(self, pool: Pool) -> None:
        """Have a thread make the call, or make it here if there are no more to be had; again does nothing."""
        if not self._begun.locked():
            try:
                pool.submit(self.run)
            except RuntimeError:
                self.run()

    def run(self) -> None:
        """Make the call here, if nobody has begun it."""
        if self._begun.acquire(blocking=False):
            try:
                self.result = self._call()
            except BaseException as error:
                self.error = error
            self._done = True
            self._finished.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end, without raising what it raised; whether it has come within ``timeout`` seconds."""
        # An interruption may leave the lock held; by then it is done, and nobody asks for the lock any more.
        if not self._done and self._finished.acquire(timeout=-1 if timeout is None else timeout):
            self._finished.release()
        return self._done

    def drop(self) -> None:
        """Wait for its end if it has begun; otherwise it never will."""
        if not self._begun.acquire(blocking=False):
            self.wait()


def close_at_once(calls: Iterable[Callable[[], Any]], *, here: bool) -> None:
    """Make these calls, so that several that take their time take no longer than one; or ``here``, in this thread."""
    tasks = [Task(call) for call in calls]
    if here:
        for task in tasks:
            task.run()
        interruptions = [task.error for task in tasks if task.error and not isinstance(task.error, MultienvError)]
        if interruptions:  # by a signal handler's exception
            raise interruptions[0]
        return
    with Pool(max(1, len(tasks)), "multienv-close") as pool:
        _make(pool, tasks)


def side_by_side(pool: Pool, calls: Iterable[Callable[[], Any]]) -> list[Task]:
    """Make these calls, each in a thread, and wait for all of them."""
    tasks = [Task(call) for call in calls]
    _make(pool, tasks)
    return tasks


def _make(pool: Pool, tasks: list[Task]) -> None:
    for task in tasks:
        task.start(pool)
    for task in tasks:
        task.wait()
