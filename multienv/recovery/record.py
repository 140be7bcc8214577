"""What happened to one env: counted, kept, told to hooks and to the log."""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path
from typing import Literal

from multienv.backends.base import Gone
from multienv.events import Event, Hook, Loss, Outcome, Recovery, Recycled, Statistics
from multienv.recovery.healer import Effort
from multienv.recovery.report import what_happened

logger = logging.getLogger("multienv")
_KEPT_TIMES = 1000
# Weight of a new sample in the mean latency.
_SMOOTHING = 0.05


class Record:
    """Counters of one env, and the events behind them."""

    def __init__(self, env_index: int | None, hooks: tuple[Hook, ...]) -> None:
        """Nothing has happened yet."""
        self.env_index = env_index
        self.episodes = 0
        self.step_seconds: float | None = None
        self.last_loss: Loss | None = None
        self._last_recovery: Recovery | None = None
        self._hooks = hooks
        self._recycled = 0
        self._losses = self._exact = self._truncated = self._replayed = 0
        self._times: deque[float] = deque(maxlen=_KEPT_TIMES)

    def step_latency(self, seconds: float) -> None:
        """A sample of the time from a step's call to its answer."""
        before = self.step_seconds
        self.step_seconds = seconds if before is None else before + _SMOOTHING * (seconds - before)

    def loss(self, gone: Gone, command: str, step: int | None, seed: int | None) -> Loss:
        """A worker was lost."""
        fate = gone.fate
        detail = f"\n{gone.detail}" if gone.detail else ""
        loss = Loss(
            env_index=self.env_index,
            cause=gone.cause,
            command=command,
            step=step,
            seed=seed,
            pid=gone.pid,
            exit_code=fate.code,
            stack=fate.stack,
            stderr=fate.stderr + detail,
        )
        self._losses += 1
        self.last_loss = loss
        self._tell(loss)
        return loss

    def recovery(self, loss: Loss, outcome: Outcome, reason: str, effort: Effort) -> None:
        """What became of it."""
        recovery = Recovery(
            loss,
            outcome,
            reason,
            effort.replayed,
            effort.attempts,
            time.monotonic() - effort.began,
            effort.rung if outcome == "exact" else "",
        )
        self._last_recovery = recovery
        self._exact += outcome == "exact"
        self._truncated += outcome == "truncated"
        self._replayed += effort.replayed
        self._times.append(recovery.seconds)
        level = logging.INFO if outcome == "exact" else logging.WARNING
        logger.log(level, "%s Outcome: %s. %s", what_happened(loss), outcome, reason)
        self._tell(recovery)

    def recycling(self, why: str, outcome: Literal["exact", "fresh", "put off"], reason: str, effort: Effort) -> None:
        """A process was replaced by plan, or could not be."""
        seconds = time.monotonic() - effort.began
        event = Recycled(self.env_index, why, outcome, reason, effort.replayed, seconds)
        self._recycled += outcome != "put off"
        logger.info("env %s recycled %s: %s. %s", self.env_index, why, outcome, reason)
        self._tell(event)

    def _tell(self, event: Event) -> None:
        for hook in self._hooks:
            try:
                hook(event)
            except Exception:  # a hook must not break a recovery
                logger.exception("A hook failed on %r", event)

    def statistics(
        self, *, state: str, pid: int | None, steps: int, restarts: int, journal_bytes: int, snapshots: tuple[int, str]
    ) -> Statistics:
        """The record at this moment."""
        return Statistics(
            state=state,
            pid=pid,
            steps=steps,
            episodes=self.episodes,
            losses=self._losses,
            restarts=restarts,
            recycled=self._recycled,
            exact_recoveries=self._exact,
            truncated_recoveries=self._truncated,
            replayed_steps=self._replayed,
            recovery_seconds=tuple(self._times),
            step_seconds=self.step_seconds,
            journal_bytes=journal_bytes,
            snapshots=snapshots[0],
            no_snapshots=snapshots[1],
            rss=resident_bytes(pid),
            last_loss=self.last_loss,
            last_recovery=self._last_recovery,
        )


def resident_bytes(pid: int | None) -> int | None:
    """Resident memory of a process, ``None`` where it cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:  # not Linux, or it has just ended
        return None
    import resource

    return int(fields[1]) * resource.getpagesize()
