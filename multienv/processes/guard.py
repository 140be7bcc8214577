"""Whether the warden is there to enforce deadlines: who guards it.

It may be stopped (SIGSTOP), and with it every deadline and the news of every death; it may have been killed, while the
workers that the trainer has forked live on. So while there are workers whose requests have deadlines, a thread of the
trainer looks once a second whether one of them has passed and nothing came of it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

# Seconds between two looks; and how many in a row have to find the same deadline passed. The first makes a warden that
# has only been stopped go on, the last ends it. In less than half of that it would have killed whom it can kill.
LOOK = 1.0
PATIENCE = 5


class Guarded(Protocol):
    """A worker, as far as the guard knows it."""

    def overdue(self) -> float:
        """The deadline that has passed without news of its end; 0 if there is none."""
        ...

    def end_overdue(self) -> None:
        """Kill it, without the warden."""
        ...


class Guard:
    """Looks after workers as long as there are any.

    Args:
        rouse: Has the warden go on if it has been stopped.
        dismiss: Kills the warden.
        look: Seconds between two looks.
    """

    def __init__(self, rouse: Callable[[], None], dismiss: Callable[[], None], look: float = LOOK) -> None:
        """Nobody is to be looked after."""
        self._rouse, self._dismiss, self._look = rouse, dismiss, look
        self._workers: dict[int, weakref.ref[Guarded]] = {}
        self._seen: dict[int, tuple[float, int]] = {}  # of each a deadline that has passed, and for how many looks
        self._starting = threading.RLock()  # a signal handler may start workers too
        self._thread: tuple[int, threading.Thread] | None = None  # and the process it is in

    def attend(self, number: int, worker: Guarded) -> None:
        """Look after this one too."""
        with self._starting:
            self._workers[number] = weakref.ref(worker, lambda _: self.leave(number))
            if self._thread is None or self._thread[0] != os.getpid() or not self._thread[1].is_alive():
                thread = threading.Thread(target=self._watch, name="multienv-guard", daemon=True)
                self._thread = os.getpid(), thread
                with contextlib.suppress(RuntimeError):  # the system has none to give
                    thread.start()

    def leave(self, number: int) -> None:
        """Not any more."""
        self._workers.pop(number, None)

    def _watch(self) -> None:
        while True:
            time.sleep(self._look)
            self.look()
            with self._starting:
                if not self._workers:
                    self._thread = None
                    return

    def look(self) -> None:
        """See to those who have been seen overdue too often."""
        seen, self._seen = self._seen, {}
        for number, reference in list(self._workers.items()):
            worker = reference()
            deadline = 0.0 if worker is None else worker.overdue()
            if worker is None or not deadline:
                continue
            before, looks = seen.get(number, (deadline, 0))
            looks = looks + 1 if before == deadline else 1
            self._seen[number] = deadline, looks
            if looks == 1:
                self._rouse()
            elif looks >= PATIENCE:
                self._dismiss()
                worker.end_overdue()
