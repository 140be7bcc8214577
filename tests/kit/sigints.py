"""Real SIGINTs at random moments, one after the other, and what goes on through all of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

_PRESS = """
import os, random, sys, time
pid, times, longest, seed = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
dice = random.Random(seed)
for _ in range(times):
    time.sleep(dice.uniform(0.0, longest))
    os.kill(pid, 2)
    if not sys.stdin.read(1):
        break
"""


class Presses:
    """Has a process send SIGINT to this one at random moments, the next one when the last was raised.

    Args:
        times: How many.
        longest: Seconds between one and the next.
        seed: Of the moments.
    """

    def __init__(self, times: int, longest: float, seed: str) -> None:
        arguments = [str(os.getpid()), str(times), str(longest), seed]
        self.times, self.raised, self._told = times, 0, 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PRESS, *arguments], stdin=subprocess.PIPE, start_new_session=True, text=True
        )

    def repeat(self, call: Callable[[int], Any], *, at_least: int = 0) -> list[Any]:
        """Call ``call(number)`` with 0, 1, 2, … while SIGINTs come; return what each call returned.

        A call that was interrupted is made again. Fails unless each SIGINT has raised KeyboardInterrupt once.
        """
        returned: list[Any] = []
        number, result, quiet_until = 0, None, 0.0
        while True:
            try:
                while result is not None or self._told < self.times or number < at_least:
                    self._tell()
                    if result is None:
                        result = (call(number),)
                    if len(returned) == number:  # else an interrupt came after the next line
                        returned.append(result[0])
                    number, result = number + 1, None
                quiet_until = quiet_until or time.monotonic() + 0.1
                while time.monotonic() < quiet_until:
                    time.sleep(0.01)
                break
            except KeyboardInterrupt:
                self.raised += 1
        assert self._process.wait() == 0
        assert self.raised == self.times
        return returned

    def _tell(self) -> None:
        """Tell the process that its signal was raised."""
        if self._told < self.raised:
            self._told += 1
            assert self._process.stdin is not None
            self._process.stdin.write("x")
            self._process.stdin.flush()
