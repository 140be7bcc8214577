"""Counts and reports what happens to one worker: to hooks, to the log, in crash reports and in errors."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from multienv._engine.interrupts import runs_user_code
from multienv._engine.processes.channel import Channel, Gone
from multienv._engine.recovery import state_machine
from multienv._engine.recovery.journal import replays_of
from multienv._engine.recovery.position import Position
from multienv._engine.recovery.way_back import RecoveryProgress
from multienv._engine.reports.crash import Case, CrashReports
from multienv._engine.reports.texts import env_error, lost_error, named, outcome_text, what_happened
from multienv._engine.threads import beside
from multienv._engine.wire.banks import BankLayout
from multienv._engine.wire.codecs import Codec
from multienv._engine.wire.messages import Description, Failure
from multienv._engine.wire.segment import OBSTACLE, SNAPSHOT_SECONDS, SNAPSHOTS, STEP_SECONDS
from multienv._engine.wire.shared_pickle import SharedPickle
from multienv._engine.worker.census import OBSTACLES
from multienv.errors import UsageError, WorkerLostError
from multienv.events import Event, Hook, Loss, Outcome, Recovery, Recycled, RecyclingOutcome, Statistics

logger = logging.getLogger("multienv")
_KEPT_TIMES = 1000
# How many events of a worker are kept for crash reports.
_PATH = 50
# Seconds that the end of a worker waits for the log to take its warnings.
_LOG_WITHIN = 0.5
# Seconds between two lines of the log about losses of one kind.
PERIOD = 60.0


@dataclass(slots=True)
class _Kind:
    """Counts the losses of one kind since the last line about them.

    Attributes:
        outcome: Of all of them.
        logged_at: When the last line was written, seconds of the clock.
        count: Losses since then.
        last: The text about the newest one.
    """

    outcome: str
    logged_at: float
    count: int = 0
    last: str = ""

    def next_line(self, now: float) -> str:
        """Return a line about the losses since the last one, and begin to count anew."""
        count, seconds = self.count, now - self.logged_at
        self.count, self.logged_at = 0, now
        if count == 1:
            return self.last
        return f"{count} such losses in the last {seconds:.0f} s, all {self.outcome}. The last: {self.last}"


class Repeats:
    """Decides when a loss is logged: the first of each kind at once, then at most one line a minute and kind."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[Hashable, str], _Kind] = {}

    def line(self, cause: Hashable, outcome: str, text: str, now: float) -> str:
        """Return the line to log after a loss; ``""``: the loss is only counted.

        Args:
            cause: With ``outcome``, the kind of the loss.
            outcome: What became of it.
            text: The line about this loss alone.
            now: The clock, seconds.
        """
        kind = self._kinds.setdefault((cause, outcome), _Kind(outcome, now - PERIOD))
        kind.count, kind.last = kind.count + 1, text
        return kind.next_line(now) if now - kind.logged_at >= PERIOD else ""

    def rest(self, now: float) -> list[str]:
        """Return a line for each kind of which losses have only been counted since its last line."""
        return [kind.next_line(now) for kind in self._kinds.values() if kind.count]


class Reporter:
    """Counts and reports what happens to one worker.

    Hooks are not called at once: their events are queued until the caller's call is done.

    Args:
        position: Of the worker.
        index: Env index of its first env, or ``None``.
        hooks: Called with each event.
        reports: Where crash reports are written; ``None``: nowhere.

    Attributes:
        slots: Number of envs.
        description, codec: Of the envs; ``None``: they were never built.
        seeds_asked: Seeds of the reset that was asked for last, answered or not.
        events: Hooks, each with an event that it has not been called with yet. Several fan-outs read it, so it is never
            replaced.
        transitions: The last events and the states that they led to, but for those of plain steps.
    """

    def __init__(self, position: Position, index: int | None, hooks: tuple[Hook, ...], reports: Path | None) -> None:
        self._position, self.index = position, index
        self.reports = CrashReports(reports, index)
        self.description: Description | None = None
        self.codec: Codec | None = None
        self.seeds_asked: Sequence[int | None] = ()
        self.last_loss: Loss | None = None
        self.last_recovery: Recovery | None = None
        self.events: deque[tuple[Callable[[Any], object], Any]] = deque()
        self.transitions: deque[tuple[state_machine.Event, state_machine.State]] = deque(maxlen=_PATH)
        self.slots = len(position.seeds)
        self._hooks = hooks
        self._repeats = Repeats()
        self._lost_in = 0  # number of the last request that was answered before the last loss
        self._untold: list[tuple[int, Recovery]] = []  # each with that number
        self._losses = self._replayed_requests = 0
        self._outcomes: Counter[Outcome] = Counter()  # of losses
        self._recyclings: Counter[str] = Counter()  # by outcome
        self._times: deque[float] = deque(maxlen=_KEPT_TIMES)

    # --- names and positions ----------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Return how messages name the env, or the envs."""
        return named(self.envs).capitalize()

    def env_in(self, slot: int) -> str:
        """Return how sentences name the env in a slot; of slot -1, all envs of the worker."""
        index = self.index_of(slot)
        return named(self.envs if index is None else (index,))

    @property
    def envs(self) -> tuple[int, ...]:
        """Return the indexes of the envs in their batch; ``()``: they have none."""
        return () if self.index is None else tuple(range(self.index, self.index + self.slots))

    def index_of(self, slot: int) -> int | None:
        """Return the index of a slot's env in its batch; of slot -1, that of a worker with one env."""
        if slot >= 0:
            return None if self.index is None else self.index + slot
        return self.index if self.slots == 1 else None

    def seed_of(self, slot: int, command: str) -> int | None:
        """Return the seed that a reset asks for, else the last seed of a slot; of slot -1, that of the only env."""
        known = slot < self.slots and (slot >= 0 or self.slots == 1)
        if not known:
            return None
        asked = self.seeds_asked[max(slot, 0)] if command == "reset" and self.seeds_asked else None
        return self._position.seeds[max(slot, 0)] if asked is None else asked

    def episode_steps(self, slot: int, command: str) -> int | None:
        """Return the steps of a slot's episode, if ``command`` is in one; of slot -1, that of a worker with one env."""
        known = (slot >= 0 or self.slots == 1) and command not in ("initialize", "reset", "rollout")
        position = self._position
        return max(0, position.steps - position.steps_before[max(slot, 0)]) if known else None

    def error_of(self, slot: int, failure: Failure, command: str) -> Exception:
        """Build the error for what a slot's env raised; slot -1: the failure says which, or it is not known."""
        slot = failure.slot if slot < 0 <= failure.slot else slot
        step = self.episode_steps(slot, command)
        return env_error(
            failure, index=self.index_of(slot), command=command, step=step, seed=self.seed_of(slot, command)
        )

    def truncation_info(self, reason: str) -> dict[str, Any]:
        """Return the value of info["multienv"] for a truncated episode."""
        info: dict[str, Any] = {"reason": reason, "recovery": "truncated"}
        last = self.last_recovery
        report = self.reports.path or (last.report if last is not None and last.reason == reason else "")
        return {**info, "report": report} if report else info

    def lost_error(self, loss: Loss, advice: str, kind: type[WorkerLostError] | None = None) -> WorkerLostError:
        """Build the error for a loss."""
        report = self.reports.path or self.reports.last
        return lost_error(loss, advice, report, kind)

    def build_error(self, reason: str, failure: Failure | None) -> Exception:
        """Return the error for envs that could not be built anew; ``failure``: what ``env_fn`` raised, if it did."""
        if failure is not None:
            return self.error_of(-1, failure, "initialize")
        if self.last_loss is None:
            return UsageError(f"It could not be started: {reason}.")
        return self.lost_error(self.last_loss, f"It could not be started again: {reason.rstrip('.')}.")

    # --- events -----------------------------------------------------------------------------------

    def _case(self, entry: Callable[[BankLayout], bytes], deadline: float | None) -> Case:
        """Return the data for a crash report."""
        journal, build, codec = self._position.journal, self._position.build, self.codec
        known = journal.recording and codec is not None
        packed = build.env_fns
        if isinstance(packed, SharedPickle):  # the worker may be closed before the report is written
            packed = packed.copy()
        return Case(
            replays=partial(replays_of, journal.dump() if known else None),
            size=len(journal) if known else 0,
            pending=b"" if codec is None else entry(codec.layout),
            build=replace(build, env_fns=packed, code=b""),
            description=self.description,
            deadline=deadline,
            layout=None if codec is None else codec.layout,
            path=tuple(state_machine.line_of(event, after) for event, after in tuple(self.transitions)),
        )

    def report_loss(
        self, gone: Gone, command: str, slot: int, limit: float | None, entry: Callable[[BankLayout], bytes]
    ) -> Loss:
        """Report the loss of a process, and return it; a warning follows with the outcome: :meth:`report_outcome`.

        Args:
            gone: How it was lost.
            command: What the caller had called.
            slot: The slot whose env the process was executing; -1, or none of the envs': none, or not known.
            limit: The deadline of the request, seconds.
            entry: Returns the entry of the request in which the process was lost, for a crash report.
        """
        fate, slot = gone.fate, slot if slot < self.slots else -1
        loss = Loss(
            env_index=self.index_of(slot),
            cause=gone.cause,
            command=command,
            step=self.episode_steps(slot, command),
            seed=self.seed_of(slot, command),
            pid=gone.pid,
            exit_code=fate.code,
            stack=fate.stack,
            stderr=fate.stderr + (f"\n{gone.detail}" if gone.detail and gone.cause != "died" else ""),
            deadline=limit if gone.cause == "hung" else None,
            detail=gone.detail,
            idle=self.codec is not None and gone.number == 0 and gone.cause != "broken" and fate.code is not None,
            envs=self.envs,
            seeds=tuple(self.seed_of(slot, command) for slot in range(self.slots)),
        )
        self._lost_in = self._position.number
        self.reports.open(loss, partial(self._case, entry, limit))
        logger.info("%s", what_happened(loss))
        self._losses += 1
        self.last_loss = loss
        self.events += self._for_hooks(loss)
        return loss

    def log_doing(self, doing: str, progress: RecoveryProgress) -> None:
        """Log what a recovery or a replacement by plan is doing if it takes long."""
        what = "being moved to a new process" if progress.planned else "being recovered"
        seconds = time.monotonic() - progress.began
        verb = "are" if len(self.envs) > 1 else "is"
        attempt = f", attempt {progress.attempts}" if progress.attempts > 1 else ""
        logger.warning("%s %s %s, %.0f s so far%s: %s.", self.name, verb, what, seconds, attempt, doing)

    def report_outcome(self, loss: Loss, outcome: Outcome, reason: str, progress: RecoveryProgress) -> None:
        """Report the outcome of a loss; when the call is done, a warning describes both, or counts it with its kind."""
        recovery = Recovery(
            loss,
            outcome,
            reason,
            progress.replayed,
            progress.attempts,
            time.monotonic() - progress.began,
            progress.method if outcome in ("exact", "replayed") else "",
            self.reports.path,
        )
        self.reports.close(recovery)
        self._times.append(recovery.seconds)
        self._untold.append((self._lost_in, recovery))
        self.last_recovery = recovery
        self._outcomes[outcome] += 1
        self._replayed_requests += progress.replayed
        self.events += [(self._log, None), *self._for_hooks(recovery)]

    def _log(self, event: None = None) -> None:
        """Log the losses of the call that is done: a line for each request, with what became of it in the end."""
        untold, self._untold = self._untold, []
        for _, same in groupby(untold, itemgetter(0)):
            recoveries = [recovery for _, recovery in same]
            last, text = recoveries[-1], outcome_text(recoveries[-1])
            if len(recoveries) > 1:
                text = f"{len(recoveries)} processes were lost in the same {last.loss.command}(). The last: {text}"
            cause = last.loss.env_index, last.loss.cause, last.loss.exit_code
            line = self._repeats.line(cause, last.outcome, text, time.monotonic())
            if line:
                logger.warning("%s", line)

    def report_truncated_errors(self, errors: Iterable[tuple[int, Exception]], pid: int | None) -> None:
        """Report the exceptions of envs, by slot, that ended their episodes, as ``on_error="truncate"`` says."""
        for slot, error in errors:
            index = self.index_of(slot)
            text = f"An exception of the env ended its episode (on_error='truncate'): {error}"
            line = self._repeats.line((index, type(error).__name__), "truncated", text, time.monotonic())
            if line:
                logger.warning("%s", line, exc_info=error if line == text else None)
            loss = self.last_loss = Loss(
                env_index=index,
                cause="error",
                command="step",
                step=self.episode_steps(slot, "step"),
                seed=self.seed_of(slot, "step"),
                pid=pid,
                stack=getattr(error, "remote_traceback", ""),
            )
            self._losses += 1
            self._outcomes["truncated"] += 1
            self.last_recovery = Recovery(loss, "truncated", str(error), 0, 0, 0.0)
            self.events += [*self._for_hooks(loss), *self._for_hooks(self.last_recovery)]

    def report_recycling(self, why: str, outcome: RecyclingOutcome, reason: str, progress: RecoveryProgress) -> None:
        """Report that a process was replaced by plan, or could not be."""
        seconds = time.monotonic() - progress.began
        self._recyclings[outcome] += 1
        self._replayed_requests += progress.replayed
        if outcome == "put off":
            logger.warning("%s: its process is not replaced, %s: %s", self.name, why, reason)
        else:
            logger.info("%s: its process is replaced, %s: %s, in %.3f s. %s", self.name, why, outcome, seconds, reason)
        self.events += self._for_hooks(Recycled(self.index, why, outcome, reason, progress.replayed, seconds))

    def log_rest(self) -> None:
        """Log a line for each kind of loss of which some are not in the log yet; waits only shortly for the log."""
        self._log()
        lines = self._repeats.rest(time.monotonic())
        if lines:
            beside(partial(_warn, lines), _LOG_WITHIN)

    def _for_hooks(self, event: Event) -> list[tuple[Hook, Event]]:
        return [(hook, event) for hook in self._hooks]

    def call_hooks(self) -> None:
        """Call the hooks with the events since the last call; log the exceptions that hooks raise."""
        call_hooks(self.events)

    def statistics(self, channel: Channel | None, state: str, restarts: int, *, is_there: bool) -> Statistics:
        """Return the counters at this moment.

        Args:
            channel: To the present process, or the last one.
            state: Of the worker, in a word.
            restarts: Processes started in place of lost ones.
            is_there: The process should be running.
        """
        alive = channel if is_there and channel is not None and not channel.has_ended() else None
        words, times = (None, None) if channel is None else (channel.segment.words, channel.segment.times)
        return Statistics(
            state=state,
            restarts=restarts,
            pid=None if alive is None else alive.pid,
            rss=None if alive is None else alive.memory(),
            step_seconds=times[STEP_SECONDS] or None if times else None,
            snapshots=words[SNAPSHOTS] if words else 0,
            no_snapshots=OBSTACLES[words[OBSTACLE]] if words else "",
            snapshot_seconds=times[SNAPSHOT_SECONDS] or None if times else None,
            steps=self._position.steps,
            episodes=self._position.episodes,
            losses=self._losses,
            recycled=self._recyclings.total() - self._recyclings["put off"],
            exact_recyclings=self._recyclings["exact"],
            replayed_recyclings=self._recyclings["replayed"],
            reset_recyclings=self._recyclings["reset"],
            exact_recoveries=self._outcomes["exact"],
            replayed_recoveries=self._outcomes["replayed"],
            truncated_recoveries=self._outcomes["truncated"],
            replayed_steps=self._replayed_requests,
            recovery_seconds=tuple(self._times),
            journal_bytes=len(self._position.journal),
            last_loss=self.last_loss,
            last_recovery=self.last_recovery,
        )


def _warn(lines: list[str]) -> None:
    for line in lines:
        logger.warning("%s", line)


@runs_user_code
def call_hooks(events: deque[tuple[Callable[[Any], object], Any]]) -> None:
    """Call hooks with events, the oldest first, and forget them; log the exceptions that hooks raise."""
    while events:
        hook, event = events.popleft()
        try:
            hook(event)
        except Exception:  # a hook must not break a recovery
            logger.exception("A hook failed on %r", event)
