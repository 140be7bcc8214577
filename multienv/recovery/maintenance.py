"""What is due between two requests: a process to be replaced by plan, a state to be kept, a journal to be trimmed."""

from __future__ import annotations

import time

from multienv.config import Deadlines, RestartPolicy
from multienv.processes.channel import Channel, Gone
from multienv.recovery.journal import Journal
from multienv.recovery.ladder import Ladder, RequestFailedError
from multienv.recovery.policy import Recycling, StatePacing
from multienv.recovery.record import Record, memory_of
from multienv.wire.messages import CaptureState
from multienv.wire.segment import OBSTACLE, SNAPSHOTS, STEP_SECONDS
from multienv.worker.snapshots import OBSTACLES

# No env may take longer to tell its state, in seconds; then its process counts as hung.
_CAPTURE_LIMIT = 30.0
# Before a step with a deadline a capture may take as long as that deadline, but always this many seconds.
_CAPTURE_LEAST = 1.0


class Maintenance:
    """Looks at the limits of one worker.

    Args:
        policy: The limits.

    Attributes:
        is_due: Something is to be done before the next request.
        recycling_due: Why the process is to be replaced, or ``""``.
        state_due: The envs are to be asked for their state.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.recycling = Recycling(policy, time.monotonic)
        self.pacing = StatePacing(policy)
        self.is_due = False
        self.recycling_due = ""
        self.state_due = False

    def begin(self, record: Record) -> None:
        """Note that a new process has taken over."""
        self.recycling.begin(record.steps, record.episodes)
        self.is_due, self.recycling_due, self.state_due = False, "", False

    def leave(self, why: str) -> None:
        """Have the process replaced before the next request."""
        self.recycling_due, self.is_due = why, True

    def look(self, journal: Journal, record: Record, channel: Channel) -> None:
        """Find out what is due; called after one step in 64, and when an episode ends or begins."""
        policy, steps = self._policy, record.steps
        seconds = channel.segment.times[STEP_SECONDS] or 1e-5
        capacity = policy.replay_limit / seconds
        journal.trim(policy.journal_limit, capacity, steps)
        if self.recycling.wanted and not self.recycling_due:
            self.recycling_due = self.recycling.due(steps, record.episodes, lambda: memory_of(channel))
        if self.pacing.may_ask(steps, hurry=True) and journal.wants_state(policy.journal_limit, capacity, steps):
            # Half of all that may be held has come since the last anchor: soon the older half is forgotten.
            hurry = journal.wants_state(policy.journal_limit * 2, capacity * 2, steps)
            taken, obstacle = self.snapshots(channel)
            self.state_due = self.pacing.may_ask(steps, hurry=hurry, beside=taken > 0 and not obstacle)
        self.is_due = self.state_due or (bool(self.recycling_due) and not self.recycling.put_off)

    def snapshots(self, channel: Channel | None) -> tuple[int, str]:
        """Return how many forked snapshots the process has taken, and why it takes none now."""
        if channel is None:
            return 0, ""
        words = channel.segment.words
        return words[SNAPSHOTS], OBSTACLES[words[OBSTACLE]]

    def keep_state(self, ladder: Ladder, channel: Channel, journal: Journal, steps: int, deadlines: Deadlines) -> None:
        """Ask the envs for their state and keep it as an anchor. The next request finds a process lost meanwhile."""
        self.state_due = False
        limits = [_CAPTURE_LIMIT, deadlines.call or _CAPTURE_LIMIT]
        if deadlines.step is not None:
            limits.append(max(deadlines.step, _CAPTURE_LEAST))
        try:
            until = time.monotonic() + min(limits)
            seconds, state = ladder.ask(channel, CaptureState(), until)
        except Gone as gone:
            self.pacing.refused(steps, f"its process was lost ({gone.cause}) while telling it", lost=True)
        except RequestFailedError as failed:
            self.pacing.refused(steps, failed.failure.text)
        else:
            if len(state) > self._policy.journal_limit / 4:
                why = f"it takes {len(state):,} bytes, a quarter of journal_limit or more"
                self.pacing.refused(steps, why)
                return
            journal.keep_state(state, steps)
            self.pacing.took(steps, seconds, channel.segment.times[STEP_SECONDS] or 1e-5)
