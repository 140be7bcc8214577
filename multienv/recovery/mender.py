"""Building an env, and bringing it back after a loss."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import NoReturn

from multienv.backends.base import Backend, Gone
from multienv.config import OnLoss, check_seconds
from multienv.errors import (
    MultienvError,
    WaitTimeout,
    WorkerLostError,
)
from multienv.events import Loss
from multienv.recovery.healer import BudgetSpent, BuildFailed, Effort, Unrecoverable
from multienv.recovery.keeper import Keeper, entered
from multienv.recovery.phases import (
    DUE,
    LOST,
    NEW,
    OWED,
    PENDING,
    READY,
    RESUMED,
    RUNNING,
    STARTING,
    STEPPING,
    WHOLE,
    EpisodeLost,
)
from multienv.recovery.record import resident_bytes
from multienv.recovery.report import env_error, lost_error, what_happened
from multienv.reports.crash import Case
from multienv.wire.messages import (
    REPLY,
    Description,
    Message,
    Reset,
    pack_message,
    unpack_message,
)

_unpack = REPLY.unpack_from


# So many losses while one request is pending are laid to it, even if no process died executing it: an env that closes
# the descriptors of its process, for instance, is done when that dies of it.
LOSSES = 6


class Mender(Keeper):
    """Builds the env, and brings it back when its process is lost; or says why not."""

    __slots__ = ()

    # --- build ------------------------------------------------------------------------------------

    @entered
    def initialize(self, timeout: float | None = None) -> Description:
        """Wait until the env is built."""
        self.start()
        if self.phase == STARTING:
            try:
                if self._backend is None:  # an interruption came in the middle of a second attempt
                    raise Gone("died", executing=False)
                if self.interrupted:
                    self._healer.request_build(self._backend, again=True)
                self.interrupted = WHOLE
                self._wait(timeout, "initialize")
                self._healer.collect_build(self._backend)
                self._adopt(self._backend)
            except WaitTimeout:
                self.interrupted = 0  # nothing has been lost
                raise
            except BuildFailed as failed:
                self.interrupted = 0
                error = self._build_failed(failed)
                raise error from error.__cause__
            except Gone as gone:
                self._refuse_if_closed(command="initialize")
                self._drop_backend()
                self._rebuild(gone)
            self._refuse_if_closed(command="initialize")
            self.phase = READY
            self.interrupted = 0  # last: until then the reply may have been read for nobody
        assert self._healer.description is not None
        return self._healer.description

    def _rebuild(self, gone: Gone | None, effort: Effort | None = None) -> None:
        """Launch and build until there is an env: the first time, or after one that was given up."""
        effort, deaths = effort or self._healer.begin(), 0
        loss = self._note_loss(gone, "initialize") if gone else None
        while True:
            if gone is not None and loss is not None:
                deaths += 1
                if self._on_loss(gone.cause) != "replay" or deaths >= self._policy.poison_after:
                    self.record.recovery(loss, "raised", "", effort)
                    self.phase = LOST if self._healer.description else NEW
                    advice = "Run env_fn() in-process to see why; initialize() tries again."
                    raise self._lost_error(loss, loss.cause, advice)
            try:
                backend = self._healer.restart(effort, self._steps)
            except BuildFailed as failed:
                error = self._build_failed(failed)
                raise error from error.__cause__
            except Gone as again:
                gone, loss = again, self._note_loss(again, "initialize")
            except (BudgetSpent, Unrecoverable) as spent:
                self._refuse_if_closed(command="initialize")
                raise self._give_up(loss, effort, spent) from None
            else:
                self._adopt(backend)
                if loss is not None:
                    self.record.recovery(loss, "exact", "", effort)
                return

    def _build_failed(self, failed: BuildFailed) -> MultienvError:
        self._drop_backend()
        self.phase = LOST if self._healer.description else NEW
        return env_error(failed.failure, index=self.record.env_index, command="initialize", step=None, seed=None)

    def _wait(self, timeout: float | None, command: str) -> None:
        check_seconds("timeout", timeout, zero=True)
        if timeout is not None and self._backend is not None and not self._backend.poll(timeout):
            raise WaitTimeout(
                f"{command}() has not answered within {timeout} s. It is still running: wait again, or close()."
            )

    @entered
    def discard(self) -> None:
        """End the process, whatever state the env is in: the next reset begins in a new one."""
        if self.closed or self.phase in (NEW, STARTING, *PENDING):
            self.refuse("discard")
        with self._ending:
            self._drop_backend()
        self._refuse_if_closed(command="discard")
        self.phase = LOST

    # --- losses -------------------------------------------------------------------------------------

    def _heal(self, gone: Gone) -> None:
        """Bring the env back and ask again; or raise: EpisodeLost, a WorkerLostError, ClosedError."""
        self._refuse_if_closed()
        command = self._pending_command()
        loss, _ = self._mourn(gone, command)
        effort = self._healer.begin()
        self._deaths += gone.executing
        self._losses += 1
        if self._losses >= max(self._policy.poison_after, LOSSES):
            self._deaths = self._losses  # it has them die as soon as it is done, or may as well have
        self._keep_last_observation()
        on_loss = self._on_loss(gone.cause)
        if on_loss == "raise":
            self._drop_backend()
            self.phase = LOST
            self.record.recovery(loss, "raised", "", effort)
            raise self._lost_error(loss, loss.cause, "Its episode is lost; the next reset() starts a new process.")
        if on_loss == "truncate":
            self._go_on_without(loss, effort, what_happened(loss), command)
            return
        try:
            backend = self._wake(gone, effort) or self._healer.bring_back(
                self._journal.plans(), effort, self._steps, self._looks_the_same
            )
        except BudgetSpent as spent:
            raise self._give_up(loss, effort, spent) from None
        except Unrecoverable as reason:
            self._refuse_if_closed()
            self._go_on_without(loss, effort, f"{what_happened(loss)} It cannot be brought back: {reason}.", command)
            return
        self._refuse_if_closed(backend)
        self._adopt(backend)
        self._journal.learn(effort.refuted, effort.plan)
        if self._deaths >= self._policy.poison_after:
            self._refuse_poison(loss, effort, command)
        self.record.recovery(loss, "exact", "", effort)
        self._ask_again()

    def _wake(self, gone: Gone, effort: Effort) -> Backend | None:
        """The lost process's snapshot, if it has left one, brought to where that was lost."""
        standby = gone.fate.standby
        plan = None if standby is None or self._backend is None else self._journal.since(standby[1])
        if plan is None:
            return None
        return self._healer.wake(self._backend, plan, effort, self._steps, self._looks_the_same)

    def _ask_again(self) -> None:
        self._arm_pending()
        self._backend.send(self._pending)

    def _arm_pending(self) -> None:
        self._backend.arm(self._pending_deadline())

    def _pending_deadline(self) -> float | None:
        if self.phase in (STEPPING, RESUMED):
            return self._step_deadline
        assert self._message is not None
        return self._deadline(self._message)

    def _go_on_without(self, loss: Loss, effort: Effort, reason: str, command: str) -> None:
        """The env cannot be brought back. A new episode can be begun; a running one must be ended."""
        if command == "step":
            self._owed = reason  # first of all: an interruption does not make it forgotten
            self._drop_backend()
            self.record.recovery(loss, "truncated", reason, effort)
            raise EpisodeLost(reason)
        if command != "reset" and self._phase_before in (RUNNING, DUE, OWED):
            self._owed, self.phase = reason, OWED
            self._drop_backend()
            self.record.recovery(loss, "truncated", reason, effort)
            raise self._lost_error(loss, loss.cause, f"{reason} The next step() ends the episode.")
        self._begin_anew()
        if command == "reset":
            message = unpack_message(self._pending)
            assert isinstance(message, Reset)
            self._message = self._complete_reset(replace(message, anchor=True))
            self._pending = pack_message(self.seq, self._message)
        self.record.recovery(loss, "fresh", reason, effort)
        self._ask_again()

    def _refuse_poison(self, loss: Loss, effort: Effort, command: str) -> NoReturn:
        """The env stands just before the request that kills it: end the episode there."""
        reason = f"{what_happened(loss)} The same {command} killed {self._deaths} processes; it was not tried again."
        if command == "step":
            self._owed = reason
            self.record.recovery(loss, "truncated", reason, effort)
            raise EpisodeLost(reason)
        self.record.recovery(loss, "raised", reason, effort)
        advice = f"The same {command}() killed {self._deaths} processes; it is not tried again."
        if command == "reset":  # it may end every process in which the env is as it was
            self._drop_backend()
            self.phase = LOST
            advice += " The next reset() starts a new process."
        else:
            self.phase = self._phase_before
        raise self._lost_error(loss, "poison", advice)

    def _give_up(self, loss: Loss | None, effort: Effort, why: Exception) -> MultienvError:
        self._drop_backend()
        self.phase = LOST if self._healer.description else NEW
        if loss is None:
            loss = self.record.last_loss or Loss(self.record.env_index, "died", "", None, None, None)
        self.record.recovery(loss, "raised", str(why), effort)
        if isinstance(why, BudgetSpent):
            limit = f"{self._policy.max_restarts} restarts in {self._policy.window:g} s"
            return self._lost_error(loss, "budget", f"Its RestartPolicy allows {limit}; they are spent.")
        return self._lost_error(loss, loss.cause, f"It could not be started again: {why}.")

    def _revive(self, effort: Effort | None = None) -> None:
        """A new process after the last one was lost; a truncation that is owed stays so."""
        self._begin_anew(effort)
        self.phase = OWED if self.phase == OWED else READY

    def _begin_anew(self, effort: Effort | None = None) -> None:
        """A new life for the env: what was called and set before holds in it too."""
        anew, seeds = self._healer.anew(effort), self._healer.seeds
        self._drop_backend()
        frames, evidence = self._journal.lasting(), []
        try:
            self._healer.draw_seeds()
            self._rebuild(None, anew)
            try:
                evidence = self._healer.repeat(self._backend, frames)
            except Gone:  # one of them ends the process: go on without them
                self._drop_backend()
                self._rebuild(None, anew)
            self._journal.begin_anew(frames, evidence, self._steps)
        except BaseException:  # all of it is to be done again, with what was called and set
            self._drop_backend()
            self._healer.seeds = seeds
            raise
        self._last = b""
        if effort is not None:
            effort.attempts, effort.admitted = anew.attempts, anew.admitted

    def _on_loss(self, cause: str) -> OnLoss:
        policy = self._policy
        return {"hung": policy.on_timeout, "error": policy.on_error}.get(cause, policy.on_crash)

    def _mourn(self, gone: Gone, command: str) -> tuple[Loss, bool]:
        """The loss, and whether it is news: what broke a recovery off may have done so after it was noted."""
        mourned, backend = self._mourned, self._backend
        if mourned is not None and backend is not None and mourned[0]() is backend:
            return mourned[1], False
        loss = self._note_loss(gone, command)
        if backend is not None:
            self._mourned = weakref.ref(backend), loss
        return loss, True

    def _note_loss(self, gone: Gone, command: str) -> Loss:
        step = None if command in ("initialize", "reset") else self._steps - self._steps_before
        return self.record.loss(gone, command, step, self._seed, self._case(command))

    def _case(self, command: str) -> Case | None:
        """For the report: what is known now, and will not be any more when the env is brought back."""
        if not self.record.reports.wanted:
            return None
        built = command != "initialize"
        return Case(
            history=self._journal.copy().history,
            size=len(self._journal),
            pending=self._pending if built else b"",
            initialize=self._healer.initialize,
            description=self._healer.description,
            deadline=self._pending_deadline() if built else self._deadlines.start,
        )

    def _lost_error(self, loss: Loss, kind: str, advice: str) -> WorkerLostError:
        return lost_error(loss, kind, advice, self.record.reports.path or self.record.reports.last)

    # --- by plan ------------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        if not self.due:
            self.due = self._recycling.due(self._steps, self.record.episodes, lambda: resident_bytes(self._backend.pid))
        return bool(self.due) and not self._recycling.put_off

    def takes_long_to_reset(self) -> bool:
        """Whether a reset finds the process lost, or due to be replaced first."""
        return self.phase == LOST or self._is_due_at_reset()

    def _is_due_at_reset(self) -> bool:
        if self._backend is not None and self._recycling.wanted:
            self._is_due()
        return bool(self.due)

    def _recycle(self, *, resetting: bool) -> None:
        """Replace the process between two requests, if the env can be had again as it is."""
        why, effort = self.due, self._healer.begin(planned=True)
        try:
            # Not its whole life again: what leaked would leak once more.
            plans = self._journal.plans(short=True)
            backend = self._healer.bring_back(plans, effort, self._steps, self._looks_the_same)
        except Unrecoverable as reason:
            self._refuse_if_closed()
            if not resetting:  # due still, at the next reset
                self._recycling.put_off = True
                self.record.recycling(why, "put off", str(reason), effort)
                return
            self._revive(effort)
            self.record.recycling(why, "fresh", str(reason), effort)
            return
        self._refuse_if_closed(backend)
        self._adopt(backend)
        self.record.recycling(why, "exact", "", effort)

    # --- for a reset --------------------------------------------------------------------------------

    def _complete_reset(self, message: Reset) -> Reset:
        """Ask for an anchor where one is due."""
        self._trim()
        return replace(message, anchor=self._journal.wants_anchor(self._steps))

    def _trim(self) -> None:
        self._journal.trim(self._policy.journal_limit, self._policy.replay_limit / self.env_seconds(), self._steps)

    def env_seconds(self) -> float:
        """For a step: the env's own time, not that of the caller, who may think between asking and waiting."""
        return (self._backend and self._backend.step_seconds()) or 1e-5

    def _deadline(self, message: Message) -> float | None:
        return self._deadlines.reset if isinstance(message, Reset) else self._deadlines.call
