"""Whether the warden is there to enforce deadlines: who guards it.

It may be stopped (SIGSTOP), and with it every deadline and the news of every death; it may have been killed, while the
workers that the trainer has forked live on. So while there are workers whose requests have deadlines, a thread of the
trainer looks once a second whether one of them has passed and nothing came of it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import Protocol

# Seconds between two looks; and how many in a row have to find the same deadline passed. The first has a warden go on
# that has only been stopped, the last does without it: until then it would have killed whom it can kill.
LOOK = 1.0
PATIENCE = 3


class Guarded(Protocol):
    """A worker, as far as the guard knows it."""

    def overdue(self) -> float:
        """The deadline that has passed without news of its end; 0 if there is none."""
        ...

    def rouse(self) -> None:
        """Have its warden go on if that has been stopped."""
        ...

    def end_overdue(self) -> None:
        """End it without its warden."""
        ...


class Guard:
    """Looks after workers as long as there are any.

    Args:
        seconds: Between two looks.
    """

    def __init__(self, seconds: float = LOOK) -> None:
        """Nobody is to be looked after."""
        self._seconds = seconds
        self.forget()

    def forget(self) -> None:
        """In a forked child: these are another's workers, its thread is not here, and its lock may be held for ever."""
        self._workers: dict[int, weakref.ref[Guarded]] = {}
        self._seen: dict[int, tuple[float, int]] = {}  # of each a deadline that has passed, and for how many looks
        self._starting = threading.RLock()  # a signal handler may start workers too
        self._thread: threading.Thread | None = None

    def attend(self, number: int, worker: Guarded) -> None:
        """Look after this one too."""
        with self._starting:
            self._workers[number] = weakref.ref(worker)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, name="multienv-guard", daemon=True)
                with contextlib.suppress(RuntimeError):  # the system has none to give
                    self._thread.start()

    def leave(self, number: int) -> None:
        """Not any more."""
        self._workers.pop(number, None)

    def _watch(self) -> None:
        while True:
            time.sleep(self._seconds)  # there is no handle for it that a deadline passes and nobody does anything
            self.look()
            with self._starting:
                if not self._workers:
                    self._thread = None
                    return

    def look(self) -> None:
        """See to those who have been seen overdue too often."""
        seen, self._seen = self._seen, {}
        for number in list(self._workers):  # others come and go meanwhile
            reference = self._workers.get(number)
            worker = None if reference is None else reference()
            if worker is None:
                self.leave(number)
                continue
            deadline = worker.overdue()
            if not deadline:
                continue
            before, looks = seen.get(number, (deadline, 0))
            looks = looks + 1 if before == deadline else 1
            self._seen[number] = deadline, looks
            if looks == 1:
                worker.rouse()
            elif looks >= PATIENCE:
                worker.end_overdue()
