"""A time limit that a busy machine does not shorten."""

from __future__ import annotations

import time

PAUSE = 0.01


class Patience:
    """So many seconds, in which a condition is looked at again and again.

    What this process, which looks, waited for a core does not count: those that are looked at waited as long. On a
    machine with nothing else to do these are seconds of the clock.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._looked, self._worked = time.monotonic(), time.process_time()

    def lasts(self) -> bool:
        """Wait a moment; whether there is time for more than one last look."""
        time.sleep(PAUSE)
        now, worked = time.monotonic(), time.process_time()
        self._left -= min(now - self._looked, PAUSE + worked - self._worked)
        self._looked, self._worked = now, worked
        return self._left > 0
