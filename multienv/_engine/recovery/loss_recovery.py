"""One loss of a worker's process: which env is to blame, how the envs are recovered, and what is reported of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from multienv._engine.processes.channel import Channel, Gone
from multienv._engine.recovery.pending import Pending
from multienv._engine.recovery.position import Position
from multienv._engine.recovery.recoverer import NotBuilt, Recoverer, Revived, Unrecoverable
from multienv._engine.recovery.reporter import Reporter
from multienv._engine.recovery.state_machine import (
    Episode,
    Instruction,
    Kind,
    Lost,
    NotRecovered,
    Process,
    Recovered,
    State,
)
from multienv._engine.recovery.way_back import RecoveryProgress, sources_after_loss
from multienv._engine.reports.texts import what_happened
from multienv._engine.sometimes import sometimes
from multienv._engine.wire.segment import ASKED_OUTSIDE
from multienv.config import RestartPolicy
from multienv.errors import MultienvError, RestartBudgetExceeded
from multienv.events import Outcome

# After so many losses for one request, all by kills from outside, the past of the process is suspected, not the killer.
_OUTSIDE_LOSSES = 3


def slot_to_blame(gone: Gone, state: State, number: int, slots: int) -> int:
    """Return the slot whose env a lost process was calling; -1: none, or not known; ``slots``: a policy was called.

    Args:
        gone: How it was lost.
        state: The worker's before.
        number: Of the pending request.
        slots: Number of envs.
    """
    request = state.request
    if state.process is Process.BUILDING:
        return gone.slot
    if request is not None and request.steps and gone.number >= number:  # each step of it has a number of its own
        return gone.slot if gone.slot >= 0 else slots
    if gone.number != number:
        return -1
    return 0 if slots == 1 else gone.slot


def usable_snapshot(gone: Gone, lost: Channel, number: int) -> int | None:
    """Return which snapshot of a lost process the envs may come from: number of the last request executed in it.

    Args:
        gone: How the process was lost.
        lost: The channel to it.
        number: Of the last request whose answer the caller has.
    """
    snapshot = gone.fate.snapshot
    if snapshot is not None and snapshot > number:  # of a request that was taken back
        sometimes("a snapshot is newer than the last answer")
        return None
    if snapshot is not None and snapshot < lost.segment.words[ASKED_OUTSIDE]:
        sometimes("an env has asked outside after its snapshot")
        return None
    return snapshot


class LossRecovery:
    """Recovers from one loss, and reports what comes of it: kept until the request is answered or the envs given up.

    Args:
        gone: How the process was lost. It is not kept: its traceback would keep the segment mapped.
        lost: The channel of the lost process.
        state: The worker's before.
        earlier: The progress of the recovery before, if that was for the same request.
        recoverer, reporter, pending, position: Of the worker.
        long_past: The process came from a recovery, and had repeated more of the past than that needs.

    Attributes:
        loss: What is reported of it.
        event: The same for the state machine.
        progress: How far the recovery has come, and what it has cost.
        long_past: The past may be the cause: this process was started for this very request. A short replay is tried
            first.
    """

    def __init__(
        self,
        gone: Gone,
        lost: Channel,
        state: State,
        earlier: RecoveryProgress | None,
        recoverer: Recoverer,
        reporter: Reporter,
        pending: Pending,
        position: Position,
        *,
        long_past: bool,
    ) -> None:
        number = position.number + 1  # of the pending request
        slot = slot_to_blame(gone, state, number, reporter.slots)
        kind = None if state.process is Process.BUILDING else (gone.cause, gone.fate.code)
        progress = recoverer.new_progress_after(kind, earlier)
        # One that is killed from outside need not have failed by its past; but memory that piles up also ends so.
        least = _OUTSIDE_LOSSES if gone.is_from_outside else max(1, progress.tries - 1)
        self.long_past = long_past and state.losses >= least
        entry = partial(pending.journal_entry, lost.segment, number, state.request)
        self.loss = reporter.report_loss(gone, state.command, slot, pending.limit, entry)
        self.progress, self._lost, self._snapshot_number = progress, lost, usable_snapshot(gone, lost, position.number)
        self._recoverer, self._reporter, self._position = recoverer, reporter, position
        is_past = self.long_past and gone.cause in ("died", "hung")
        self.event = Lost(gone.cause, slot, gone.is_from_outside, what_happened(self.loss), is_past, progress.tries)

    def recover(self) -> tuple[Revived, Recovered] | tuple[None, NotRecovered]:
        """Bring the envs back, with one charge to the budget and one deadline; return them, and what came of it.

        Raises:
            BudgetSpentError: The policy allows no further restart.
        """
        recoverer, position, journal = self._recoverer, self._position, self._position.journal
        recoverer.restart_deadline(self.progress)
        try:
            recoverer.charge_budget(self.progress, position.steps)
            sometimes("a process with all of its past is lost with the next request", self.long_past)
            snapshot, why = recoverer.newest_snapshot_of(self._lost, self._snapshot_number), journal.why_no_plan()
            sources = sources_after_loss(journal, snapshot, long_past=self.long_past)
            found = recoverer.bring_back(position.build, sources, self.progress, lost=self._lost, why_no_source=why)
        except Unrecoverable as why_not:
            reason = f"{self._truncation_reason(str(why_not))} {journal.memory.lost}".rstrip()
            return None, NotRecovered(reason, is_built=not isinstance(why_not, NotBuilt))
        return found, Recovered({slot: self._truncation_reason(what) for slot, what in found.mismatches.items()})

    def _truncation_reason(self, what: str) -> str:
        """Return the reason for a truncation: what happened, and why the envs cannot be recovered."""
        return self._with_snapshot_failure(f"{what_happened(self.loss)} It cannot be recovered: {what}.")

    def _with_snapshot_failure(self, reason: str) -> str:
        snapshot_failure = self.progress.snapshot_failure
        return f"{reason} Its snapshot did not bring it back: {snapshot_failure}." if snapshot_failure else reason

    def report(self, outcome: Outcome, reason: str = "") -> None:
        """Report the outcome, with the reason for it."""
        self._reporter.report_outcome(self.loss, outcome, reason, self.progress)

    def report_without_recovery(self, instruction: Instruction, state: State, beginning: Sequence[int]) -> None:
        """Report that the policy has no recovery. ``beginning``: slots of which the request was to begin an episode."""
        if instruction is Instruction.RAISE_LOST:
            self.report("raised")
            return
        is_reset = state.request is not None and state.request.kind is Kind.RESET
        is_reset |= len(state.skipped) == len(beginning) > 0
        self.report("reset" if is_reset else "truncated", state.what)

    def outcome(
        self,
        event: Recovered | NotRecovered,
        instruction: Instruction,
        before: State,
        after: State,
        beginning: Sequence[int],
    ) -> tuple[Outcome, str]:
        """Return the outcome to report, and the reason for it.

        Args:
            event: How the recovery ended.
            instruction: What follows from that.
            before: The state before the event.
            after: The state after it.
            beginning: Skipped slots that begin their next episode: nothing is truncated there.
        """
        if isinstance(event, NotRecovered):
            is_reset = before.request is not None and before.request.kind is Kind.RESET
            fresh = (is_reset or beginning) and not after.pending_truncations and len(after.skipped) == len(beginning)
            return "reset" if fresh else "truncated", event.reason
        if instruction is Instruction.RAISE_POISON:
            return "raised", f"The same {self.loss.command}() ended process after process."
        truncated = [reason for slot, reason in after.pending_truncations if slot in event.mismatches]
        reasons = [*dict(after.skipped).values(), *truncated, *event.mismatches.values()]
        if reasons:  # if the pending request resets all slots that differ, nothing is truncated
            return "truncated" if len(after.skipped) > len(beginning) or truncated else "reset", reasons[0]
        if self.progress.is_exact:
            return "exact", ""
        return "replayed", self._with_snapshot_failure(
            self.progress.changed or self._position.journal.memory.reservation
        )

    def error(self, instruction: Instruction, state: State, processes: int, policy: RestartPolicy) -> MultienvError:
        """Build the error for an instruction to raise; ``processes``: how many the request has ended."""
        loss, reporter = self.loss, self._reporter
        if instruction is Instruction.RAISE_BUDGET:
            text = f"Its RestartPolicy allows {policy.max_restarts} restarts in an hour; they are spent."
            return reporter.lost_error(loss, text, RestartBudgetExceeded)
        if instruction is Instruction.RAISE_POISON:
            sometimes("a reset or a call ends process after process")
            advice = f"The same {loss.command}() ended process after process, {processes} so far; it is given up. "
            if loss.command == "reset":
                advice += "The next reset() starts a new process: try another seed or other options, or fix the env."
            else:
                advice += "The episode goes on: fix the method that it calls, or do not call it."
            return reporter.lost_error(loss, advice)
        if loss.command == "initialize":
            sometimes("the first process is lost while its envs are built, and given up")
            return reporter.lost_error(loss, "Run env_fn() in-process to see why; initialize() tries again.")
        if state.episode is Episode.TRUNCATED:
            sometimes("a call finds the episode lost")
            reason = state.pending_truncations[0][1].removeprefix(what_happened(loss)).strip()
            return reporter.lost_error(loss, f"{reason} The next step() ends the episode.".strip())
        whose = "The episodes of all its envs are" if len(loss.envs) > 1 else "Its episode is"
        return reporter.lost_error(loss, f"{whose} lost; the next reset() starts a new process.")
