"""When a process is due to be replaced by plan, because simulators leak. Pure arithmetic: the clock is given."""

from __future__ import annotations

import time
from collections.abc import Callable

from multienv.config import RestartPolicy


class Recycling:
    """Looks at one process after another.

    Attributes:
        wanted: The policy asks for it at all.
        put_off: It was tried in vain, and will be again at the next reset.
    """

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        """A process begins now."""
        self._policy = policy
        self._clock = clock
        limits = (policy.recycle_after_steps, policy.recycle_after_episodes, policy.recycle_after, policy.max_rss)
        self.wanted = any(limit is not None for limit in limits)
        self.begin(0, 0)

    def begin(self, steps: int, episodes: int) -> None:
        """A process has taken over, at these counts."""
        self._steps, self._episodes, self._began = steps, episodes, self._clock()
        self._first_size: int | None = None
        self.put_off = False

    def due(self, steps: int, episodes: int, rss: Callable[[], int | None]) -> str:
        """Why the process should be replaced, or ``""``. ``rss`` is asked last: it costs a system call."""
        policy = self._policy
        if policy.recycle_after_steps is not None and steps - self._steps >= policy.recycle_after_steps:
            return f"after {steps - self._steps} steps"
        if policy.recycle_after_episodes is not None and episodes - self._episodes >= policy.recycle_after_episodes:
            return f"after {episodes - self._episodes} episodes"
        if policy.recycle_after is not None and self._clock() - self._began >= policy.recycle_after:
            return f"after {self._clock() - self._began:.0f} s"
        if policy.max_rss is not None:
            size = rss()
            self._first_size = self._first_size or size
            # One that is too large as soon as it is new is not replaced again and again for that.
            if size is not None and size > max(policy.max_rss, 1.1 * (self._first_size or 0)):
                return f"at {size / 2**20:.0f} MiB"
        return ""
