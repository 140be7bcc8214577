"""How often, and how soon, a lost worker is replaced. Pure arithmetic: the clock and the dice are given."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from multienv.config import RestartPolicy


class RestartBudget:
    """Restarts of one env within a window, with exponential backoff while they make no progress.

    The first restart after progress is immediate; each further one waits twice as long as the last,
    between half and the whole of that.
    """

    def __init__(self, policy: RestartPolicy, dice: Callable[[], float] = random.random) -> None:
        """``dice`` gives numbers in [0, 1)."""
        self._policy = policy
        self._dice = dice
        self._restarts: deque[float] = deque()
        self._in_a_row = 0
        self._progress = -1

    def admit(self, now: float, progress: int) -> float | None:
        """Seconds to wait before the restart that begins ``now``, or ``None`` when none is left.

        ``progress`` is any count that grows when the env does something for its caller.
        """
        while self._restarts and self._restarts[0] <= now - self._policy.window:
            self._restarts.popleft()
        if len(self._restarts) >= self._policy.max_restarts:
            return None
        self._restarts.append(now)
        if progress != self._progress:
            self._progress, self._in_a_row = progress, 0
        delay = self._delay(self._in_a_row)
        self._in_a_row += 1
        return delay

    def _delay(self, in_a_row: int) -> float:
        if in_a_row == 0 or not self._policy.backoff:
            return 0.0
        full = min(self._policy.max_backoff, self._policy.backoff * 2.0 ** min(in_a_row - 1, 60))
        return full * (0.5 + self._dice() / 2)
