"""When a worker is restarted, and replaced by plan. Pure arithmetic: clock and dice are given."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from multienv._engine.recovery.state_machine import POISON_AFTER
from multienv.config import RestartPolicy
from multienv.events import RecoveryMethod

# Seconds in which restarts are counted, see RestartPolicy.max_restarts.
WINDOW = 3600.0
# Seconds of the longest wait before a restart, however often it has failed.
LONGEST_BACKOFF = 10.0
# The mean time between losses is that of so many, the last ones.
_REMEMBERED = 8
# Seconds of the shortest mean: many workers may be killed in one moment.
_LEAST_MEAN = 1e-3
# If requests that ended a process went through when they were repeated, one may end so many more before it is poison.
_MORE_TRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ForkingPolicy(RestartPolicy):
    """Has snapshots taken every so many steps, whatever they cost: for the doctor, tests and benchmarks."""

    snapshot_every: int = 1


@dataclass(slots=True)
class RecoveryProgress:
    """Holds what one recovery, or one replacement by plan, has taken so far, and its deadline.

    Attributes:
        began: When the loss was noticed, seconds of the clock.
        log_at: When the log next says that it is still running, seconds of the clock.
        until: When it is given up; ``None``: never.
        planned: A replacement by plan: no process was lost, and nothing is charged to the budget.
        is_optional: The old process still runs, and goes on if this fails: a replay is tried once, and not for long.
        begins_at: When it may begin, seconds of the clock; ``None``: it is not charged yet.
        attempts: Processes that were started or woken for it.
        replayed: Requests that were replayed in them.
        method: What recovered the envs.
        is_exact: The recovery counts as exact; else as replayed.
        changed: Says that the code has changed since the lost process imported it; ``""``: not as far as is known.
        doing: What it waits for, in words.
        setback: Why the snapshot did not recover the envs; ``""``: it did, or was not tried.
        since: When the first process was lost with the same request, seconds of the clock.
        tries: How many processes a request may end, the pending one or one that is repeated, before it is given up.
    """

    began: float
    log_at: float
    until: float | None
    planned: bool = False
    is_optional: bool = False
    begins_at: float | None = None
    attempts: int = 0
    replayed: int = 0
    method: RecoveryMethod = ""
    is_exact: bool = True
    changed: str = ""
    doing: str = ""
    setback: str = ""
    since: float = 0.0
    tries: int = POISON_AFTER


class Losses:
    """Counts the losses of all workers of a call: tells how often they come, and whether by chance.

    Attributes:
        seconds: Time that all envs took, all together.
        count: Of the losses so far.
    """

    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0
        self._times = deque([0.0], maxlen=_REMEMBERED + 1)
        self._chances: Counter[Hashable] = Counter()  # by kind: requests that went through at last, less their repeats

    @property
    def mean(self) -> float:
        """Return the mean time of the envs between two losses; 0.0: there was none.

        It grows while none comes. Kills from outside count too: where they are rare, it soon is long.
        """
        return max(_LEAST_MEAN, (self.seconds - self._times[0]) / (len(self._times) - 1)) if self.count else 0.0

    def begin(self, progress: RecoveryProgress, before: RecoveryProgress | None, kind: Hashable, limit: float) -> None:
        """Note a loss, and how often its request may be tried.

        A request that always ends its process (poison) is given up soon. If most of those that ended one went through
        when they were repeated, it is chance: then there are more tries, but none begins later than after ``limit``.

        Args:
            progress: Of the recovery from the loss.
            before: Of the recovery from the loss before, if that came with the same request.
            kind: Of the loss.
            limit: Seconds, see :class:`~multienv.Deadlines`.
        """
        self.count += 1
        self._times.append(self.seconds)
        progress.since = progress.began
        if before is None:
            progress.tries = POISON_AFTER + min(max(0, self._chances[kind]), _MORE_TRIES)
            self._chances[kind] += 1
            return
        self._chances[kind] -= 1
        progress.since = before.since
        progress.tries = before.tries if progress.began - before.since < limit else POISON_AFTER


class RestartBudget:
    """Restarts of one worker within an hour, with exponential back-off while they make no progress.

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
        self._answered = -1

    def admit(self, now: float, answered: int) -> float | None:
        """Return the seconds to wait before a restart that begins ``now``; ``None``: no restart is left.

        Args:
            now: The clock, seconds.
            answered: Any count that grows when the worker answers its caller.
        """
        while self._restarts and self._restarts[0] <= now - WINDOW:
            self._restarts.popleft()
        if len(self._restarts) >= self._policy.max_restarts:
            return None
        self._restarts.append(now)
        if answered != self._answered:
            self._answered, self._in_a_row = answered, 0
        delay = self._delay(self._in_a_row)
        self._in_a_row += 1
        return delay

    def _delay(self, in_a_row: int) -> float:
        if in_a_row == 0 or not self._policy.backoff:
            return 0.0
        full = min(LONGEST_BACKOFF, self._policy.backoff * 2.0 ** min(in_a_row - 1, 60))
        return full * (0.5 + self._dice() / 2)


class Recycling:
    """Tells when a process is due to be replaced, because simulators leak.

    Args:
        policy: The limits.

    Attributes:
        wanted: The policy has such limits at all.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.wanted = policy.recycles
        self.begin(0, 0)

    def begin(self, steps: int, episodes: int, replayed: int = 0) -> None:
        """Note that a new process takes over: after so many steps, ended episodes, and requests of a replay."""
        self._steps, self._episodes, self._replayed = steps, episodes, replayed
        self._again_at = self._waited = 0

    def put_off(self, episodes: int, least: int) -> None:
        """Note that a replacement has failed: it is tried at a reset of all envs, else after some more episodes.

        Args:
            episodes: Begun so far.
            least: How many more the first time; then twice as many each time.
        """
        self._waited = 2 * self._waited or least
        self._again_at = episodes + self._waited

    def is_put_off(self, episodes: int) -> bool:
        """Tell whether a replacement has failed not long ago."""
        return episodes < self._again_at

    def due(self, steps: int, episodes: int, slots: int, rss: Callable[[], int | None], *, is_over: bool) -> str:
        """Return why the process should be replaced, or ``""``.

        Args:
            steps: Taken so far.
            episodes: Ended so far.
            slots: Number of envs.
            rss: Tells the resident memory, in bytes. It is asked last: it costs a system call.
            is_over: No episode runs.
        """
        policy = self._policy
        if policy.recycle_after_steps is not None and steps - self._steps >= policy.recycle_after_steps:
            return f"after {steps - self._steps} steps"
        most = policy.recycle_after_episodes
        if most is not None and episodes - self._episodes >= most and is_over:
            return f"after {episodes - self._episodes} episodes"
        # A replay of all that the process has done would leak as much once more. A replay goes back two episodes; where
        # it alone takes that much, the process would be replaced all the time.
        gains = is_over or (episodes - self._episodes >= 2 * slots and steps - self._steps >= self._replayed)
        if policy.max_rss is not None and gains:
            size = rss()
            if size is not None and size > policy.max_rss:
                return f"at {size / 2**20:.0f} MiB"
        return ""
