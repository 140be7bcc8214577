"""One loss of a worker's process: how the envs are brought back, and what is told of it."""

from __future__ import annotations

from multienv.config import RestartPolicy
from multienv.errors import MultienvError, RestartBudgetExceeded
from multienv.events import Loss, Outcome
from multienv.processes.channel import Channel, Fate
from multienv.recovery.policy import RecoveryProgress
from multienv.recovery.position import Position
from multienv.recovery.recoverer import RecoveredEnvs, Recoverer, Unrecoverable
from multienv.recovery.reporter import Reporter
from multienv.recovery.state_machine import Instruction, Kind, NotRecovered, Recovered, State
from multienv.reports.texts import what_happened
from multienv.sometimes import sometimes


class Healing:
    """Holds what is known of one loss, from when it is noticed until the request is answered, or the envs are given up.

    Args:
        lost: The channel of the lost process.
        fate: How that process ended, and which snapshot it left. Not the ``Gone``: its traceback would keep the segment
            mapped.
        progress: What it takes to bring the envs back.
        repeats: The process was itself brought back for this request, with more of the past than it had to have. That
            past may be the cause, so a short replay is tried first.

    Attributes:
        loss: As events tell of it; ``None`` until it is recorded.
        processes: How many the request has ended, once the envs are brought back.
    """

    def __init__(self, lost: Channel, fate: Fate, progress: RecoveryProgress, *, repeats: bool = False) -> None:
        self.lost, self.fate, self.progress = lost, fate, progress
        self._repeats = repeats
        self.loss: Loss | None = None
        self.processes = 0

    def recover(self, recoverer: Recoverer, position: Position) -> RecoveredEnvs:
        """Bring the envs back, with one charge to the budget and one deadline.

        From the snapshot, else by the journal; the second time by a short replay if possible. A simulator may fail
        because something has piled up in its process. A snapshot has the same pile, and a replay from the construction
        builds it again.

        Raises:
            BudgetSpentError: The policy allows no further restart.
            Unrecoverable: Nothing leads back.
        """
        progress, journal = self.progress, position.journal
        recoverer.arm(progress)
        recoverer.admit(progress, position.steps)
        found = self._shortly_replayed(recoverer, position) if self._repeats else None
        found = found or recoverer.wake(self.lost, journal.since, progress, self.fate)
        if found is None:
            self.let_go()  # first: there may be no descriptors for a lost process and its replacement at a time
        return found or recoverer.bring_back(position.build, journal.plans(), progress, journal.why_no_plan())

    def _shortly_replayed(self, recoverer: Recoverer, position: Position) -> RecoveredEnvs | None:
        sometimes("a process with all of its past is lost with the next request")
        try:
            found = recoverer.bring_back(position.build, position.journal.plans(near=True), self.progress)
        except Unrecoverable:
            sometimes("no short replay leads back")
            return None
        if not found.mismatches:
            return found
        sometimes("a short replay differs")
        found.channel.kill()
        found.channel.release()
        return None

    def let_go(self) -> None:
        """Release the lost process; its segment stays, with what the caller saw last."""
        self.lost.kill()
        self.lost.release(keep_memory=True)

    @property
    def what_happened(self) -> str:
        """Return a sentence that says how the process was lost."""
        assert self.loss is not None
        return what_happened(self.loss)

    def because(self, what: str) -> str:
        """Return the reason for a truncation: what happened, and why the envs cannot be brought back."""
        return f"{self.what_happened} It cannot be brought back: {what}."

    def outcome(
        self, event: Recovered | NotRecovered, instruction: Instruction, before: State, after: State, reservation: str
    ) -> tuple[Outcome, str]:
        """Return what is told of a recovery, and the reason for it.

        Args:
            event: How it ended.
            instruction: What follows from that.
            before: The state before the event.
            after: The state after it.
            reservation: What is said of a replay that is not exact.
        """
        if isinstance(event, NotRecovered):
            is_reset = before.request is not None and before.request.kind is Kind.RESET
            fresh = is_reset and not after.pending_truncations and not after.skipped
            return "reset" if fresh else "truncated", event.reason
        if instruction is Instruction.RAISE_POISON:
            assert self.loss is not None
            return "raised", f"The same {self.loss.command}() ended process after process."
        truncated = [reason for slot, reason in after.pending_truncations if slot in event.mismatches]
        reasons = [*dict(after.skipped).values(), *truncated, *event.mismatches.values()]
        if reasons:  # all that differs may be about to be reset
            return "truncated" if after.skipped or truncated else "reset", reasons[0]
        return ("exact", "") if self.progress.is_exact else ("replayed", reservation)

    def error(self, instruction: Instruction, state: State, reporter: Reporter, policy: RestartPolicy) -> MultienvError:
        """Build the error for an instruction to raise."""
        loss = self.loss
        assert loss is not None
        if instruction is Instruction.RAISE_BUDGET:
            text = f"Its RestartPolicy allows {policy.max_restarts} restarts in {policy.window:g} s; they are spent."
            return reporter.lost_error(loss, text, RestartBudgetExceeded)
        if instruction is Instruction.RAISE_POISON:
            sometimes("a reset or a call ends process after process")
            advice = f"The same {loss.command}() ended process after process, {self.processes} so far; it is given up. "
            if loss.command == "reset":
                advice += "The next reset() starts a new process: try another seed or other options, or mend the env."
            else:
                advice += "The episode goes on: mend what it calls in the env, or leave it out."
            return reporter.lost_error(loss, advice)
        if loss.command == "initialize":
            sometimes("the first process is lost while its envs are built, and given up")
            return reporter.lost_error(loss, "Run env_fn() in-process to see why; initialize() tries again.")
        if state.pending_truncations:
            sometimes("a call finds the episode lost")
            reason = state.pending_truncations[0][1].removeprefix(what_happened(loss)).strip()
            return reporter.lost_error(loss, f"{reason} The next step() ends the episode.".strip())
        whose = "The episodes of all its envs are" if len(loss.envs) > 1 else "Its episode is"
        return reporter.lost_error(loss, f"{whose} lost; the next reset() starts a new process.")
