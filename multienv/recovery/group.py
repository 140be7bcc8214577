"""Several envs in one process: when it is lost, only the one that was to blame is treated by policy.

All are brought back together, as a single env is; the evidence is compared env by env. The one that was being called
when the process died is known, and so is one whose replay shows something else than was seen: it alone is left out of
the request that is asked again, and its episode ends there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from multienv.backends.arena import Arena
from multienv.backends.base import Gone
from multienv.errors import MultienvError
from multienv.events import Loss
from multienv.recovery.group_blame import UNKNOWN, GroupBlame
from multienv.recovery.healer import BudgetSpent, BuildFailed, Effort, Unrecoverable
from multienv.recovery.keeper import entered
from multienv.recovery.mender import LOSSES
from multienv.recovery.phases import ASKED, DUE, LOST, RESUMED, RUNNING, STEPPING
from multienv.recovery.report import env_error, what_happened
from multienv.recovery.supervisor import SAMPLE, Transition
from multienv.wire.actions import leave_out, left_out
from multienv.wire.messages import (
    FAILED,
    KIND_OF_REQUEST_AT,
    REPLY,
    STEP,
    STEPPED,
    GroupOptions,
    Initialize,
    LeftOut,
    Message,
    Reset,
    Sparing,
    pack_message,
    seq_of,
)
from multienv.wire.numbers import Reader, holds_numbers

_pack, _unpack = REPLY.pack, REPLY.unpack_from


class GroupSupervisor(GroupBlame):
    """Keeps the envs of one process alive.

    A step returns ``(observations, rewards, False, False, extras)``: what counts lies in the arena, except for
    observations that have no arrays there. ``extras`` has what there is of ``infos``, a list of slot and info, and
    ``failures``, slot → error. A call returns the values of all, and failures likewise.

    Args:
        arena: Where the rows lie.
    """

    __slots__ = (
        "_encode_plainly",
        "_numbers",
        "_owed_to",
        "_resetting_all",
        "_retrying",
        "_seeds",
    )

    def __init__(self, launch: Any, initialize: Initialize, arena: Arena, **options: Any) -> None:
        """Start nothing yet."""
        super().__init__(launch, initialize, arena, **options)
        self._owed_to: dict[int, LeftOut] = {}  # whose episodes end with the next step, and why
        self._resetting_all = False
        self._retrying = False  # the reply is looked at once more: what raises again is meant
        self._seeds: list[int | None] = [None] * self._group.size
        self._numbers = Reader()

    @property
    def seeds(self) -> tuple[int | None, ...]:
        """Of the last reset with one, of each env."""
        return tuple(self._seeds)

    # --- losses -----------------------------------------------------------------------------------

    def _heal(self, gone: Gone) -> None:
        """Bring all back and ask again, without those that are to be left out."""
        self._refuse_if_closed()
        command = self._pending_command()
        loss, is_news = self._mourn(gone, command)
        effort = self._healer.begin()
        if self._blamed != self.seq:
            self._forget_blame()
            self._blamed = self.seq
        self._deaths += gone.executing
        self._losses += 1
        if gone.executing and is_news:
            if gone.cause != "error":  # whether what is raised is meant shows when it is raised again
                self._blame(gone, loss, self._slot_of(gone), command)
        elif self._losses == LOSSES // 2:  # what some env has done may be what it dies of afterwards
            self._deaths_of[UNKNOWN] += 1
        elif self._losses >= LOSSES:
            self._blame(gone, loss, UNKNOWN, command)
        self._keep()
        try:
            backend = self._brought_back(gone, effort)
        except BudgetSpent as spent:
            raise self._give_up(loss, effort, spent) from None
        except Unrecoverable as why:
            self._refuse_if_closed()
            self._put_back()  # what was seen last is to be told, not what was replayed
            self._go_on_without(loss, effort, f"{what_happened(loss)} It cannot be brought back: {why}.", command)
            return
        finally:
            self._put_back()
        self._refuse_if_closed(backend)
        self._doubts.note(self._strays, self.seq)
        for stray, difference in self._strays.items():
            self._end_episode(stray, f"{what_happened(loss)} {difference}", command)
        self._rewrite_pending()  # before there is anybody to ask it again after an interruption
        self._adopt(backend)
        ended = [one.reason for one in (*self._absent.values(), *self._owed_to.values())]
        reason = next(filter(None, ended), "") or next(map(str, self._raised.values()), "")
        self.record.recovery(loss, "truncated" if any(ended) else "raised" if reason else "exact", reason, effort)
        self._ask_again()

    def _note_loss(self, gone: Gone, command: str) -> Loss:
        slot = self._slot_of(gone) if gone.executing else UNKNOWN
        self.record.env_index = None if slot < 0 else self._group.first + slot
        if slot < 0:
            return self.record.loss(gone, command, None, None, self._case(command))
        unknown = command in ("initialize", "reset") or not self._journal.recording
        step = None if unknown else self._steps_of(slot)
        return self.record.loss(gone, command, step, self._seeds[slot], self._case(command))

    def _end_episode(self, slot: int, reason: str, command: str) -> None:
        """Now, if a step is pending; else with the next one."""
        if command == "step":
            self._absent.setdefault(slot, LeftOut(None, reason))
        elif not self._is_reset(slot):
            self._owe(slot, LeftOut(self._observation_of(slot), reason, self.record.reports.path))

    def _is_reset(self, slot: int) -> bool:
        message = self._message
        return self.phase == ASKED and isinstance(message, Reset) and self._is_masked(message.options, slot)

    def _owe(self, slot: int, end: LeftOut) -> None:
        self._owed_to.setdefault(slot, end)
        if self._encode != self._encode_owed:
            self._encode_plainly = self._encode
            self._encode = self._encode_owed

    def _encode_owed(self, seq: int, action: Any) -> bytes:
        """A step, and the end of those episodes that have been lost since the last one."""
        return leave_out(self._encode_plainly(seq, action), self._owed_to)

    def _rewrite_pending(self) -> None:
        """The pending request, without those who are left out."""
        if not self._absent and not self._deaths_of[UNKNOWN]:
            return
        message = self._message
        if self.phase in (STEPPING, RESUMED):
            frame, before = left_out(self._pending)
            told = {slot: self._told(slot) for slot in self._absent}
            # Whose episode has been lost before ends for that reason; but who is to be raised does not begin another.
            raised = {slot: told[slot] for slot in self._raised if slot in told}
            self._pending = leave_out(frame, told | before | raised)
        elif isinstance(message, Reset):
            left = tuple({*message.options.left_out, *self._absent})
            anew = {slot: one.lasting for slot, one in self._absent.items() if one.lasting is not None}
            options = replace(message.options, left_out=left, careful=True, anew=anew)
            self._message = replace(message, options=options)
            self._pending = pack_message(self.seq, self._message)
        elif message is not None:
            self._pending = pack_message(self.seq, Sparing(message, tuple(self._absent)))

    def _told(self, slot: int) -> LeftOut:
        """What the worker is to tell of an env that is left out."""
        return replace(self._absent[slot], observation=self._observation_of(slot), report=self.record.reports.path)

    def _go_on_without(self, loss: Loss, effort: Effort, reason: str, command: str) -> None:
        """None can be brought back: new episodes can be begun, those that run must be ended."""
        if self._on_loss(loss.cause) == "raise":
            self._drop_backend()
            self.phase = LOST
            self.record.recovery(loss, "raised", reason, effort)
            raise self._lost_error(loss, loss.cause, f"{reason} The next reset() starts a new process.")
        everyone = range(self._group.size)
        # First of all what is to be asked: an interruption does not make it forgotten.
        if command == "step":
            for slot in everyone:
                self._absent.setdefault(slot, LeftOut(None, reason))
        else:
            for slot in everyone:
                if self._last_reply() and not self._is_reset(slot):
                    self._owe(slot, LeftOut(self._observation_of(slot), reason, self.record.reports.path))
        self._rewrite_pending()
        self._begin_anew(effort)
        if command not in ("step", "reset"):
            self.phase = self._phase_before
            self.record.recovery(loss, "truncated", reason, effort)
            raise self._lost_error(loss, loss.cause, f"{reason} The next step() ends the episodes.")
        self.record.recovery(loss, "truncated" if command == "step" or self._owed_to else "fresh", reason, effort)
        self._ask_again()

    def _begin_anew(self, effort: Effort | None = None) -> None:
        super()._begin_anew(effort)
        self._doubts.clear()
        self._seeds = [None] * self._group.size

    def _build_failed(self, failed: BuildFailed) -> MultienvError:
        if failed.failure.slot >= 0:
            self.record.env_index = self._group.first + failed.failure.slot
        return super()._build_failed(failed)

    def _recycle(self, *, resetting: bool) -> None:
        """As for one env, if all can be had again as they are."""
        self._keep()
        self._strict = True
        try:
            super()._recycle(resetting=resetting and self._resetting_all)
        finally:
            self._strict = False
            self._put_back()

    # --- requests and answers ---------------------------------------------------------------------

    def send(self, command: str, message: Message) -> None:
        """See :class:`Supervisor`."""
        self._resetting_all = isinstance(message, Reset) and message.options.mask is None
        super().send(command, message)

    def _complete_reset(self, message: Reset) -> Reset:
        """Ask for an anchor where one is due."""
        self._trim()
        anchor = message.options.mask is None and self._journal.wants_anchor(self._steps)
        return replace(message, anchor=anchor)

    @staticmethod
    def _is_masked(options: GroupOptions, slot: int) -> bool:
        return options.mask is None or options.mask[slot]

    @entered
    def resume(self) -> Any:
        """As for one env; of a call too, and nothing is left undone of what a reply brings with it."""
        self.interrupted = 0
        last, is_step = self._last_reply(), self._pending[KIND_OF_REQUEST_AT] == STEP
        if self.phase in (STEPPING, RESUMED, ASKED) or not last or seq_of(last) != self.seq:
            self.phase = STEPPING if is_step else ASKED
            if is_step:
                return self._resume_step()
            self._settle()
            return self.receive(self._command)
        transition = self._transition(last)
        if is_step:
            return self._settled_step(transition)
        assert isinstance(self._message, Reset)
        return self._settled_reset(transition[0], transition[4], self._message)

    def receive(self, command: str, timeout: float | None = None, *, defer: bool = False) -> Any:
        """See :class:`Supervisor`."""
        answer = super().receive(command, timeout, defer=defer)
        if command == "reset":
            return answer
        pickled, failures = answer
        values, illegible = self._values(pickled, command)
        return values, {**self._errors({**failures, **illegible}, command), **self._raised_now()}

    def _finish_reset(self, reply: bytes, message: Reset) -> tuple[Any, dict[str, Any]]:
        return self._settled_reset(*super()._finish_reset(reply, message), message)

    def _settled_reset(self, observations: Any, extras: dict[str, Any], message: Reset) -> tuple[Any, dict[str, Any]]:
        self._seed = None
        for slot, seed in enumerate(message.seed):
            if self._is_masked(message.options, slot):
                self._owed_to.pop(slot, None)
            if self._is_masked(message.options, slot) and slot not in message.options.left_out:
                self._seeds[slot] = self._seeds[slot] if seed is None else seed
        asked = [self._is_masked(message.options, slot) for slot in range(self._group.size)]
        if observations is not None:  # the caller has those of the others
            observations = [one if wanted else None for one, wanted in zip(observations, asked, strict=True)]
        observations, extras = self._read_loose(observations, extras, "reset")
        extras = self._without_illegible(extras)
        self._settle_owed()
        if observations is None:
            for slot, end in self._owed_to.items():  # also where the process knows nothing of them any more
                if end.observation is not None and not asked[slot]:
                    self._write(slot, end.observation)
        return observations, self._with_errors(extras, "reset")

    def _finish_step(self, reply: bytes) -> Transition:
        _, seq, info_length, kind, flags, _, _ = _unpack(reply)
        start = self._plain_size
        if (
            kind == STEPPED
            and 0 < info_length == len(reply) - start
            and not flags
            and holds_numbers(reply[start])
            and seq & SAMPLE
            and not self._owed_to
            and self._blamed != seq
        ):
            # A step like most, of envs that tell numbers in each: none has failed, and there is nothing to settle.
            self._log_request(self._pending)
            self._log_reply(_pack(start, seq, 0, STEPPED, 0, 0, 0.0) + reply[REPLY.size : start])
            self._last = reply
            self._steps += 1
            self.phase = DUE if self._recycling.wanted and self._is_due() else RUNNING
            return None, 0.0, False, False, self._numbers.read(reply, start)
        reply = self._legible(reply)
        if self._policy.on_error == "replay" and not self._retrying and self._error_in(reply):
            self._retrying = True
            try:
                return self._receive_step_slowly(reply)
            finally:
                self._retrying = False
        if _unpack(reply)[3] == FAILED:  # nothing has been stepped
            self._log(reply)
            self.phase = RUNNING
            raise self._env_error(reply, "step")
        return self._settled_step(super()._finish_step(reply))

    def _settled_step(self, transition: Transition) -> Transition:
        observations, rewards, terminated, truncated, extras = transition
        observations, extras = self._read_loose(observations, extras, "step")
        self._owed_to.clear()
        extras = self._without_illegible(extras, truncating=self._group.truncates_errors)
        self._settle_owed()
        return observations, rewards, terminated, truncated, self._with_errors(extras, "step")

    def _without_illegible(self, extras: dict[str, Any], *, truncating: bool = False) -> dict[str, Any]:
        """Whose info cannot be read has failed; its episode ends with the next step, if it has not in this one."""
        if "illegible" not in extras:
            return extras
        places, infos, failures = self._places, list(extras["infos"]), dict(extras["failures"])
        for slot in extras["illegible"] if places is not None else ():
            assert places is not None
            place, row, reason = places[self.seq & 1], self._group.first + slot, failures[slot].text
            if place.terminations[row] or place.truncations[row]:
                continue
            self._owe(slot, LeftOut(self._observation_of(slot), reason))
            if truncating:
                del failures[slot]
                infos.append((slot, {"multienv": {"reason": reason}}))
        return {**extras, "infos": infos, "failures": failures}

    def _settle_owed(self) -> None:
        if not self._owed_to and self._encode == self._encode_owed:
            self._encode = self._encode_plainly

    def _errors(self, failures: Any, command: str) -> dict[int, Any]:
        """What the envs have raised, as what is to be raised here."""
        first, seeds = self._group.first, self._seeds

        def step_of(slot: int) -> int | None:
            if command == "reset" or not self._journal.recording:
                return None
            return max(0, self._steps_of(slot) - (command == "step"))  # that has been logged

        return {
            slot: env_error(failure, index=first + slot, command=command, step=step_of(slot), seed=seeds[slot])
            for slot, failure in dict(failures).items()
        }

    def _raised_now(self) -> dict[int, MultienvError]:
        return self._raised if self._blamed == self.seq else {}

    def _with_errors(self, extras: dict[str, Any], command: str) -> dict[str, Any]:
        errors, raised = self._errors(extras.get("failures", ()), command), self._raised_now()
        ended = {*errors, *raised}.difference(extras.get("illegible", ()))
        self._failed_at |= dict.fromkeys(ended, self.seq)
        if errors or raised or "failures" in extras:
            extras = {**extras, "failures": {**errors, **raised}}
        return extras
