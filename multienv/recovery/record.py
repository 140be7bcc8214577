"""What happened to one env: counted, kept, told to hooks and to the log."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Literal

from multienv.backends.base import Gone
from multienv.errors import CallPendingError
from multienv.events import Event, Hook, Loss, Outcome, Recovery, Recycled, Statistics
from multienv.recovery.healer import Effort
from multienv.recovery.report import exit_text, replay_advice, what_happened
from multienv.reports import store
from multienv.reports.crash import Case, Told, compose
from multienv.reports.store import Job, new_path

logger = logging.getLogger("multienv")
_KEPT_TIMES = 1000
# Weight of a new sample in the mean latency.
_SMOOTHING = 0.05
# Losses before the last that a report mentions.
_BEFORE = 20


class Reports:
    """The crash reports of one env: opened by a loss, closed by what becomes of it.

    Attributes:
        wanted: Whether there are any.
        path: Of the one that is open, or ``""``.
        last: Of the one closed last, or ``""``.
    """

    def __init__(self, directory: Path | None, env_index: int | None) -> None:
        """None is open."""
        self.wanted = directory is not None
        self.path = self.last = ""
        self._directory, self._env_index = directory, env_index
        self._open: tuple[Case, Told] | None = None
        self._before: list[str] = []

    def open(self, loss: Loss, case: Case | None, traceback: str) -> None:
        """A loss; one before that nothing has become of yet is mentioned in its report."""
        if self._directory is None or case is None:
            return
        if self._open is not None:
            self._before = [*self._before, self._open[1].what][-_BEFORE:]
        when = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        self._open = case, Told(what_happened(loss), exit_text(loss.exit_code), when, traceback)
        self.path = str(new_path(self._directory, self._env_index))

    def close(self, recovery: Recovery) -> None:
        """Have it written: before anybody is told of an error or a truncation, else soon."""
        self.last, opened, before = self.path, self._open, self._before
        self.path, self._open, self._before = "", None, []
        if opened is None:
            return
        case, told = opened
        if store.writer.is_full(case.size):
            case = replace(case, history=lambda: None, size=0)
        job = Job(Path(self.last), partial(compose, case, told, recovery, before), case.size)
        store.writer.submit(job)
        if recovery.outcome in ("raised", "truncated"):
            store.writer.finish(job)


class _Telling(threading.local):
    """Whose hooks this thread is in."""

    records: tuple[Record, ...] = ()


_telling = _Telling()


def refuse_in_hook(supervisors: Iterable[Any], call: str) -> None:
    """Refuse what a hook of one of these asks of them: it would wait for the request that waits for the hook."""
    records = _telling.records
    if records and any(supervisor.record in records for supervisor in supervisors):
        raise CallPendingError(
            f"{call}: a hook calls it, in the middle of another call to the same env. Leave it to the training loop.",
            call,
        )


class Record:
    """Counters of one env, and the events behind them."""

    def __init__(self, env_index: int | None, hooks: tuple[Hook, ...], reports: Path | None = None) -> None:
        """Nothing has happened yet; reports are to lie in that directory, if anywhere."""
        self.env_index = env_index
        self.reports = Reports(reports, env_index)
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

    def loss(self, gone: Gone, command: str, step: int | None, seed: int | None, case: Case | None = None) -> Loss:
        """A worker was lost; the case is for the report."""
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
        self.reports.open(loss, case, gone.traceback)
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
            self.reports.path,
        )
        self.reports.close(recovery)
        self._last_recovery = recovery
        self._exact += outcome == "exact"
        self._truncated += outcome == "truncated"
        self._replayed += effort.replayed
        self._times.append(recovery.seconds)
        level = logging.INFO if outcome == "exact" else logging.WARNING
        advice = replay_advice(recovery.report)
        logger.log(level, "%s Outcome: %s. %s %s", what_happened(loss), outcome, reason, advice)
        self._tell(recovery)

    def recycling(self, why: str, outcome: Literal["exact", "fresh", "put off"], reason: str, effort: Effort) -> None:
        """A process was replaced by plan, or could not be."""
        seconds = time.monotonic() - effort.began
        event = Recycled(self.env_index, why, outcome, reason, effort.replayed, seconds)
        self._recycled += outcome != "put off"
        logger.info("env %s recycled %s: %s. %s", self.env_index, why, outcome, reason)
        self._tell(event)

    def report_of(self, reason: str) -> str:
        """The report of the loss that was made good, or not, with this reason; ``""`` if there is none."""
        last = self._last_recovery
        return last.report if last is not None and last.reason == reason else ""

    def _tell(self, event: Event) -> None:
        outer = _telling.records
        try:
            _telling.records = (*outer, self)
            for hook in self._hooks:
                try:
                    hook(event)
                except Exception:  # a hook must not break a recovery
                    logger.exception("A hook failed on %r", event)
        finally:
            _telling.records = outer

    def statistics(
        self,
        *,
        state: str,
        pid: int | None,
        steps: int,
        restarts: int,
        journal_bytes: int,
        snapshots: tuple[int, str],
        state_anchors: tuple[int, str],
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
            state_anchors=state_anchors[0],
            no_state_anchors=state_anchors[1],
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
