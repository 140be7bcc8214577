"""When a worker is restarted, replaced by plan, and asked for its state. Pure arithmetic: clock and dice are given."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from multienv.config import RestartPolicy
from multienv.events import Rung


@dataclass(slots=True)
class Effort:
    """Counts what a recovery took so far.

    Attributes:
        began: When the loss was noticed, seconds of the clock.
        until: When it is given up; ``None``: never.
        planned: No process was lost: nothing is charged to the budget.
    """

    began: float
    until: float | None
    planned: bool = False
    attempts: int = 0
    replayed: int = 0
    rung: Rung = ""
    deaths: Counter[tuple[int, bool]] = field(default_factory=Counter)


class RestartBudget:
    """Restarts of one worker within a window, with exponential back-off while they make no progress.

    The first restart after progress is immediate; each further one waits twice as long as the last, between half
    and the whole of that.

    Args:
        policy: The limits.
        dice: Gives numbers in [0, 1).
    """

    def __init__(self, policy: RestartPolicy, dice: Callable[[], float] = random.random) -> None:
        self._policy = policy
        self._dice = dice
        self._restarts: deque[float] = deque()
        self._in_a_row = 0
        self._progress = -1

    def admit(self, now: float, progress: int) -> float | None:
        """Return the seconds to wait before a restart that begins ``now``; ``None``: no restart is left.

        Args:
            now: The clock, seconds.
            progress: Any count that grows when the worker answers its caller.
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


class Recycling:
    """Tells when a process is due to be replaced, because simulators leak.

    Args:
        policy: The limits.
        clock: Tells seconds.

    Attributes:
        wanted: The policy has such limits at all.
        put_off: A replacement has failed, and is tried again at the next reset.
    """

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        limits = (policy.recycle_after_steps, policy.recycle_after_episodes, policy.recycle_after, policy.max_rss)
        self.wanted = any(limit is not None for limit in limits)
        self.begin(0, 0)

    def begin(self, steps: int, episodes: int) -> None:
        """Note that a new process has taken over at these counts."""
        self._steps, self._episodes, self._began = steps, episodes, self._clock()
        self.put_off = False

    def due(self, steps: int, episodes: int, rss: Callable[[], int | None]) -> str:
        """Return why the process should be replaced, or ``""``. ``rss`` is asked last: it costs a system call."""
        policy = self._policy
        if policy.recycle_after_steps is not None and steps - self._steps >= policy.recycle_after_steps:
            return f"after {steps - self._steps} steps"
        if policy.recycle_after_episodes is not None and episodes - self._episodes >= policy.recycle_after_episodes:
            return f"after {episodes - self._episodes} episodes"
        if policy.recycle_after is not None and self._clock() - self._began >= policy.recycle_after:
            return f"after {self._clock() - self._began:.0f} s"
        if policy.max_rss is not None:
            size = rss()
            if size is not None and size > policy.max_rss:
                return f"at {size / 2**20:.0f} MiB"
        return ""


# Time spent stepping for each second spent on telling a state: 1 % is what it may cost. Where the journal is about to
# forget all that there is to replay, 10 %; or any share, if telling takes no more than this, in seconds.
_PACE = 100
_HURRY = 10
_CHEAP = 0.1
# Where there is a forked snapshot to come back to, only what takes no longer than this is done in a hurry, in seconds.
_CHEAP_BESIDE = 5e-3
# Steps until a failed try is repeated, and their growth with each failure; after one that ended the process, more.
_PATIENCE = 1024
_GROWTH = 4
_AFTER_LOSS = 64


class StatePacing:
    """Tells when the state of the envs may be asked for, in steps.

    Args:
        policy: Says whether states are wanted at all.

    Attributes:
        wanted: Crashes and timeouts are both replayed, and the policy allows states.
        taken: States that were kept.
        obstacle: Why the last one asked for was not kept, or ``""``.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self.wanted = policy.state_anchors and policy.on_crash == policy.on_timeout == "replay"
        self.taken = 0
        self.obstacle = ""
        self._next_at = self._hurry_at = 0
        self._patience = _PATIENCE
        self._seconds = float("inf")

    def may_ask(self, steps: int, *, hurry: bool, beside: bool = False) -> bool:
        """Tell whether a state may be asked for after so many steps; ``beside``: there is a forked snapshot."""
        if beside and self._seconds > _CHEAP_BESIDE:
            hurry = False
        return self.wanted and steps >= (self._hurry_at if hurry else self._next_at)

    def took(self, steps: int, seconds: float, step_seconds: float) -> None:
        """Note that a state was kept and took the processor so many seconds."""
        self.taken += 1
        self.obstacle = ""
        self._patience = _PATIENCE
        self._seconds = min(self._seconds, seconds)
        self._next_at = steps + int(_PACE * self._seconds / step_seconds)
        self._hurry_at = steps + (0 if self._seconds <= _CHEAP else int(_HURRY * self._seconds / step_seconds))

    def move(self, steps: int) -> None:
        """Shift the counts of steps at which a state is due by ``steps``, which were restored and not taken."""
        self._next_at, self._hurry_at = self._next_at + steps, self._hurry_at + steps

    def refused(self, steps: int, why: str, *, lost: bool = False) -> None:
        """Note that a state could not be had, and why; ``lost``: asking for it ended the process."""
        self.obstacle = why
        self._patience *= _AFTER_LOSS if lost else _GROWTH
        self._next_at = self._hurry_at = steps + self._patience
