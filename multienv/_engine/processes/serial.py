"""A channel to a host in the trainer itself: for debugging, and to hold the process channel against."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from multienv._engine.interrupts import runs_user_code
from multienv._engine.processes.channel import Channel, Fate, Gone
from multienv._engine.wire.segment import PID, REPLY, REQUEST, Segment
from multienv._engine.worker.replies import exit_code
from multienv.events import LossCause


class SerialChannel(Channel):
    """Executes a request when its reply is waited for, in the same thread.

    Args:
        make_host: Makes the host, which serves a segment.
    """

    spins = 0  # the reply is there after wait() and not before

    def __init__(self, make_host: Callable[[Segment], Any]) -> None:
        self.segment = Segment(-1)
        self.segment.words[PID] = os.getpid()
        self._host = make_host(self.segment)
        self._begun = 0
        self._gone: Gone | None = None

    def ring(self, number: int) -> None:
        """Note the request."""
        self.segment.words[REQUEST] = number

    @runs_user_code
    def wait(self, number: int, until: float | None) -> bool:
        """Execute the request unless its reply is there; return true. Raises Gone if the host is lost."""
        if self.segment.words[REPLY] == number:
            return True
        if self._begun == number:  # an env that was interrupted in the middle cannot be asked twice
            self.kill(cause="broken", detail="the answer to an interrupted call is lost")
        if self._gone is not None:
            raise replace(self._gone)
        self._begun = number
        try:
            self._host.handle(number)
        except SystemExit as error:  # in a worker this would end the process
            self._gone = Gone("died", Fate(exit_code(error)), self.pid, number)
            raise replace(self._gone) from error
        self.segment.words[REPLY] = number
        return True

    def descriptors(self) -> tuple[int, ...]:
        """Return no descriptors: :meth:`answered` is always true, so that there is nothing to poll."""
        return ()

    def answered(self, number: int) -> bool:
        """Return true: :meth:`wait` executes the request."""
        return True

    def attend(self) -> bool:
        """Tell whether the host has been lost."""
        return self._gone is not None

    def kill(self, *, cause: LossCause = "died", stack: bool = False, detail: str = "") -> Gone:
        """Mark the host as lost; there is no process to kill."""
        self._gone = self._gone or Gone(cause, pid=self.pid, number=self._begun, detail=detail)
        return replace(self._gone)

    def close(self, timeout: float, *, keep_memory: bool = False) -> bool:
        """Close the envs, however long that takes."""
        self.release()
        return False

    def release(self, *, keep_memory: bool = False) -> None:
        """Close the envs."""
        self._host.close_envs()
