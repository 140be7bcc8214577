"""What is due between two requests: a process to be replaced by plan, a journal to be trimmed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from multienv.config import RestartPolicy
from multienv.processes.channel import Channel
from multienv.recovery.journal import Journal
from multienv.recovery.policy import Recycling
from multienv.recovery.record import Record, memory_of
from multienv.wire.segment import OBSTACLE, OTHER_SECONDS, SNAPSHOT, SNAPSHOTS, STEP_SECONDS
from multienv.worker.snapshots import OBSTACLES


class Maintenance:
    """Looks at the limits of one worker.

    Args:
        policy: The limits.
        resets_itself: The worker begins the next episode by itself: it is counted when one has ended.

    Attributes:
        seconds: Time that the envs took for what the caller asked so far, about.
        is_due: Something is to be done before the next request.
        recycling_due: Why the process is to be replaced, or ``""``.
        spoilt: Slots whose envs are to be new ones.
        ends_first: The old process has to end before a new one is launched: its envs could not be built beside it.
    """

    __slots__ = ("__dict__", "__weakref__", "is_due", "recycling")  # those of the hot path have a place of their own

    def __init__(self, policy: RestartPolicy, *, resets_itself: bool = False) -> None:
        self._policy, self._resets_itself = policy, resets_itself
        self.recycling = Recycling(policy, time.monotonic)
        self.seconds = 0.0
        self.is_due = False
        self.recycling_due = ""
        self.spoilt: frozenset[int] = frozenset()
        self.ends_first = False
        self._forks = policy.snapshots and policy.replays and sys.platform == "linux"
        self._steps, self._others = 0, 0.0  # counted in ``seconds``: steps, and other time in the present process
        self._step = 0.0  # time of a step, at the last count

    def begin(self, record: Record, channel: Channel, replayed: int, *, is_over: bool) -> None:
        """Note that a new process has taken over, after so many requests of a replay; ``is_over``: no episode runs."""
        self.recycling.begin(record.steps, self._ended(record, is_over=is_over), replayed)
        self._others = channel.segment.times[OTHER_SECONDS]
        self.is_due, self.recycling_due, self.spoilt = False, "", frozenset()

    def _ended(self, record: Record, *, is_over: bool) -> int:
        """Return how many episodes have ended, about: of several envs it takes all episodes but one for ended."""
        return max(0, record.episodes - (self._resets_itself or not is_over))

    def spoil(self, slot: int) -> None:
        """Note that a slot is to get a new env before the next request."""
        self.spoilt, self.is_due = self.spoilt | {slot}, True

    def put_off(self, episodes: int, *, slots: int, is_built: bool = True) -> None:
        """Note that the process was not replaced.

        Args:
            episodes: Begun so far.
            slots: Number of envs.
            is_built: The envs could be built in another process; else the old one ends first the next time.
        """
        self.recycling_due, self.spoilt = "", frozenset()
        self.ends_first = self.ends_first or not is_built
        self.recycling.put_off(episodes, 2 * slots if is_built else 1)

    def stand(self, seconds: float, steps: int) -> None:
        """Go on from earlier counts."""
        self.seconds, self._steps = seconds, steps

    def leave(self, why: str) -> None:
        """Have the process replaced before the next request."""
        self.recycling_due, self.is_due = why, True

    def count(self, record: Record, channel: Channel) -> float:
        """Return the time that the envs took so far."""
        times = channel.segment.times
        steps, others, step = record.steps, times[OTHER_SECONDS], times[STEP_SECONDS] or 1e-5
        # The least of two: a step may have had to wait for its core, and the next look finds that forgotten.
        self.seconds += max(0, steps - self._steps) * min(step, self._step or step) + others - self._others
        self._steps, self._others, self._step = steps, others, step
        return self.seconds

    def look(self, journal: Journal, record: Record, channel: Channel, is_between: Callable[[], bool]) -> None:
        """Find out what is due; called after one step in 64, and when an episode ends or begins.

        ``is_between`` tells whether no episode runs.
        """
        policy, slots, words = self._policy, journal.slots, channel.segment.words
        seconds = self.count(record, channel)
        if journal.recording:
            limit, longest = policy.journal_limit * slots, policy.replay_limit * slots
            forks = self._forks and not words[OBSTACLE]
            journal.trim(limit, seconds, longest, words[SNAPSHOT], forks=forks)
        if self.recycling.wanted and not self.recycling_due:
            is_over = is_between()
            counts = record.steps, self._ended(record, is_over=is_over), slots
            self.recycling_due = self.recycling.due(*counts, lambda: memory_of(channel), is_over=is_over)
        is_ripe = bool(self.recycling_due) and not self.recycling.is_put_off(record.episodes)
        self.is_due = is_ripe or bool(self.spoilt)

    def snapshots(self, channel: Channel | None) -> tuple[int, str]:
        """Return how many forked snapshots the process has taken, and why it takes none now."""
        if channel is None:
            return 0, ""
        words = channel.segment.words
        return words[SNAPSHOTS], OBSTACLES[words[OBSTACLE]]
