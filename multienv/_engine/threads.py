"""Run blocking calls in other threads, for a thread that a signal handler may interrupt between any two lines.

``Executor.submit`` and ``Future.result`` wait on conditions that are written in Python: an exception that Ctrl-C raises
inside them can leave a lock held for ever, and a result taken but not handed over. Here the asking thread touches
nothing but locks written in C, and what a task returned stays with the task.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, starmap
from typing import Any

from multienv._engine.interrupts import finalizer, interruptible
from multienv.errors import MultienvError

if sys.version_info >= (3, 14) and sys.implementation.name == "cpython":

    class Lock(_thread.RLock):
        """A reentrant lock that ``with`` does not leave held if a signal handler raises.

        Since 3.14 CPython runs signal handlers after the call of ``__enter__``, before ``with`` knows that it must call
        ``__exit__``: of 288,000 handlers that raised in a loop around ``with RLock()``, 166,000 left the lock held.
        After a call of something written in Python it runs none there.
        """

        def __enter__(self) -> bool:
            held = self._recursion_count()
            try:
                return self.acquire()
            except BaseException:
                while self._recursion_count() > held:
                    self.release()
                raise

else:
    Lock = threading.RLock


def idents_of_threads() -> set[int]:
    """Return the identifiers of all threads, including those that the module ``threading`` has not started."""
    if sys.version_info >= (3, 11, 9):  # before, it may deadlock: https://github.com/python/cpython/issues/106883
        return set(sys._current_frames())  # noqa: TID251 - not before
    return {thread.ident or 0 for thread in threading.enumerate()}


class Pool(ThreadPoolExecutor):
    """A ThreadPoolExecutor that starts all its threads at once, and so never has to count which are idle.

    While the interpreter exits, and where the system has no threads left, there are fewer, or none. Its threads end
    once nothing refers to it any more, which takes no lock: a signal handler may drop the last reference.
    """

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(threads, thread_name_prefix=name)
        self._idle_semaphore = _NobodyIdle()  # type: ignore[assignment]
        with contextlib.suppress(RuntimeError):
            for _ in range(threads):
                self.submit(bool)


class _NobodyIdle:
    """Replaces the executor's semaphore, whose lock is one of those that an interruption can leave held."""

    @staticmethod
    def acquire(timeout: float | None = None) -> bool:
        return False

    @staticmethod
    def release() -> None:
        pass


class Bell:
    """Wakes a thread that sleeps in ``poll()``; may be rung by any thread, and by a signal handler.

    Its descriptors are closed with the last reference to it: none is closed while its number may be in use.
    """

    def __init__(self) -> None:
        self._pipes: list[tuple[int, int]] = []
        self._pipes.extend(starmap(os.pipe, [()]))  # one call into C: an interruption does not lose what it opens
        for descriptor in self._pipes[0]:
            os.set_blocking(descriptor, False)

    @property
    def descriptor(self) -> int:
        """Return the descriptor that is readable from :meth:`ring` until :meth:`silence`."""
        return self._pipes[0][0]

    def ring(self) -> None:
        """Wake the thread that polls the descriptor."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full
            os.write(self._pipes[0][1], b"\0")

    def silence(self) -> None:
        """Make the descriptor unreadable again."""
        with contextlib.suppress(BlockingIOError):  # it was not rung
            os.read(self._pipes[0][0], 4096)

    @finalizer
    def __del__(self) -> None:
        # One call into C, as above. There may be none: an interruption may have come before.
        deque(map(os.close, chain.from_iterable(self.__dict__.get("_pipes", ()))), 0)


class Task:
    """A call that another thread makes, once.

    Args:
        call: The call.
        then: Called when it has ended.

    Attributes:
        result: What it returned.
        error: What it raised.
    """

    __slots__ = ("_begun", "_call", "_done", "_finished", "_then", "error", "result")

    def __init__(self, call: Callable[[], Any], then: Callable[[], object] | None = None) -> None:
        self._call, self._then = call, then
        self._begun, self._finished = threading.Lock(), threading.Lock()
        self._finished.acquire()
        self._done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def start(self, pool: Pool) -> None:
        """Make the call in a thread of the pool, or here if there is none; a second start does nothing."""
        if not self._begun.locked():
            try:
                pool.submit(self.run)
            except RuntimeError:
                self.run()

    def start_alone(self) -> None:
        """Make the call in a thread of its own, or here if there is none.

        The thread is started by ``_thread``: ``threading`` and executors hold locks of theirs meanwhile, and a signal
        handler that needs one of those which the interrupted code holds would wait for ever.
        """
        try:
            start_plain_thread(self.run)
        except RuntimeError:  # there are no more threads to be had, or the interpreter exits
            self.run()

    def run(self) -> None:
        """Make the call here, unless it has been begun."""
        if self._begun.acquire(blocking=False):
            try:
                self.result = self._call()
            except BaseException as error:
                self.error = error
            self._done = True
            self._finished.release()
            if self._then is not None:
                self._then()
                self._then = None  # an error refers to this task, through its traceback: no circle is to hold a Bell

    def notify(self, then: Callable[[], object]) -> None:
        """Note what is called at the end of the call; if that has come already, it may not be."""
        self._then = then

    @interruptible
    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds until the call has ended; return whether it has. Never raises its error."""
        # An interruption may leave the lock held; by then the call has ended, and the lock is not asked for any more.
        if not self._done and self._finished.acquire(timeout=-1 if timeout is None else timeout):
            self._finished.release()
        return self._done


def side_by_side(pool: Pool, calls: Iterable[Callable[[], Any]]) -> list[Task]:
    """Make these calls, each in a thread of the pool, and wait for all of them."""
    tasks = [Task(call) for call in calls]
    for task in tasks:
        task.start(pool)
    for task in tasks:
        task.wait()
    return tasks


def beside(call: Callable[[], Any], patience: float) -> None:
    """Make a call in a thread of its own, and wait up to ``patience`` seconds for its end; errors are dropped.

    For what takes a lock that the caller must not wait for: a signal handler that calls close() may have interrupted
    code that holds it, such as that of a log handler.
    """
    task = Task(call)
    task.start_alone()
    task.wait(patience)


def start_plain_thread(call: Callable[[], object]) -> None:
    """Make a call in a thread that ``threading`` does not know of: to start it takes no lock. Raises RuntimeError.

    To log there makes ``threading`` note a thread by itself, which it would keep for ever (until Python 3.13).
    """

    def run() -> None:
        try:
            call()
        finally:
            threading._active.pop(threading.get_ident(), None)  # type: ignore[attr-defined]

    _thread.start_new_thread(run, ())


def close_at_once(calls: Iterable[Callable[[], Any]]) -> None:
    """Make these calls, so that several slow ones take no longer than one; in a signal handler, too."""
    first, *others = [Task(call) for call in calls] or [Task(bool)]
    for task in others:
        task.start_alone()
    first.run()
    for task in others:
        task.wait()
    interruptions = [
        task.error for task in (first, *others) if task.error and not isinstance(task.error, MultienvError)
    ]
    if interruptions:  # a signal handler's exception, or that of an env of the caller's own
        raise interruptions[0]
