"""Several envs in one process: when it is lost, only the one that was to blame is treated by policy.

All are brought back together, as a single env is; the evidence is compared env by env. The one that was being called
when the process died is known, and so is one whose replay shows something else than was seen: it alone is left out of
the request that is asked again, and its episode ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from multienv.backends.arena import Arena
from multienv.backends.base import Backend, Gone
from multienv.errors import MultienvError
from multienv.events import Loss
from multienv.recovery.healer import BudgetSpent, BuildFailed, Effort, Unrecoverable
from multienv.recovery.phases import LOST, RESUMED, RUNNING, STEPPING
from multienv.recovery.report import env_error, what_happened
from multienv.recovery.supervisor import Supervisor, Transition
from multienv.recovery.verification import first_difference, same
from multienv.wire.actions import leave_out, left_out
from multienv.wire.batch import BatchLayout, Place, row_of
from multienv.wire.evidence import GroupEvidence
from multienv.wire.messages import (
    FAILED,
    IRREGULAR,
    REPLY,
    STEPPED,
    Description,
    Failure,
    GroupOptions,
    Initialize,
    LeftOut,
    Message,
    Reset,
    pack_message,
    seq_of,
)
from multienv.wire.observations import Placement, info_of, irregular_parts

_unpack = REPLY.unpack_from
Rows = list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]


class GroupSupervisor(Supervisor):
    """Keeps the envs of one process alive.

    A step returns ``(observations, rewards, False, False, extras)``: what counts lies in the arena, except for
    observations that have no arrays there. ``extras`` has what there is of ``infos``, a list of slot and info, and
    ``failures``, slot → error.

    Args:
        arena: Where the rows lie.
    """

    __slots__ = (
        "_absent",
        "_arena",
        "_deaths_of",
        "_encode_plainly",
        "_evidence",
        "_group",
        "_kept",
        "_owed_to",
        "_places",
        "_raised",
        "_resetting_all",
        "_retrying",
        "_seeds",
        "_size",
        "_strays",
        "_strict",
    )

    def __init__(self, launch: Any, initialize: Initialize, arena: Arena, **options: Any) -> None:
        """Start nothing yet."""
        group, policy = initialize.group, options["policy"]
        assert group is not None
        # Whatever becomes of the one that is to blame, the others are to go on.
        recording = policy.replays or (group.size > 1 and policy.journal_limit > 0)
        super().__init__(launch, initialize, recording=recording, **options)
        self._group, self._arena = group, arena
        self._places: tuple[Place, Place] | None = None
        self._evidence: GroupEvidence | None = None
        self._healer.compare = self._compare
        self._absent: dict[int, LeftOut] = {}  # who does not take part in the pending request
        self._raised: dict[int, MultienvError] = {}  # what is raised of them
        self._owed_to: dict[int, LeftOut] = {}  # whose episodes end with the next step, and why
        self._deaths_of: dict[int, int] = {}  # processes that the pending request of an env has killed
        self._strays: set[int] = set()  # whose replay shows something else than was seen
        self._strict = False  # none may
        self._kept: Rows = []  # the rows as they were before a replay wrote them
        self._size = -1
        self._resetting_all = False
        self._retrying = False  # the reply is looked at once more: what raises again is meant
        self._seeds: list[int | None] = [None] * self._group.size

    @property
    def size(self) -> int:
        """How many envs there are."""
        return self._group.size

    def _lay_out(self, description: Description) -> None:
        group = self._group
        layout = BatchLayout.of(description.members[0][0] if group.space is None else group.space, group.num_envs)
        self._places = self._arena.places(layout)
        self._evidence = GroupEvidence(layout, group.size)
        self._placement = Placement(None, inline=True)
        self._size = -1 if layout.tree is None else REPLY.size + self._evidence.length

    def _size_of_plain_replies(self) -> int:
        return self._size

    # --- rows -----------------------------------------------------------------------------------

    def _rows(self) -> list[np.ndarray[Any, Any]]:
        """The group's rows as the caller saw them last."""
        seen = self._last_reply()
        if not seen or self._places is None:
            return []
        first, place = self._group.first, self._places[seq_of(seen) & 1]
        return [array[first : first + self._group.size] for array in place.arrays]

    def _keep(self) -> Rows:
        """Those rows, and what they hold: a replay writes them anew."""
        return [(rows, rows.copy()) for rows in self._rows()]

    @staticmethod
    def _put_back(kept: Rows) -> None:
        for rows, before in kept:
            rows[...] = before

    def _observation_of(self, slot: int) -> Any:
        """What the caller saw of this env last."""
        seen = self._last_reply()
        if not seen or self._places is None:
            return None
        if _unpack(seen)[4] & IRREGULAR:
            return irregular_parts(seen)[0][slot] if len(seen) > REPLY.size else None
        return row_of(self._places[seq_of(seen) & 1].observations, self._group.first + slot)

    # --- is it the same? --------------------------------------------------------------------------

    def _compare(self, recorded: Sequence[bytes], replayed: Sequence[bytes]) -> str:
        """As :func:`first_difference`, if it is that of all; else those that differ are noted."""
        self._strays = set()
        for before, after in zip(recorded, replayed, strict=True):
            self._strays |= self._differing(before, after)
        return first_difference(recorded, replayed) or "the rows differ" if self._hopeless() else ""

    def _hopeless(self) -> bool:
        return len(self._strays) >= (1 if self._strict else self._group.size)

    def _differing(self, before: bytes, after: bytes) -> set[int]:
        assert self._evidence is not None
        kinds = before[12], after[12]
        if kinds[0] != kinds[1]:
            return set(range(self._group.size))
        if kinds[0] != STEPPED:
            return set()
        if not _unpack(before)[4] & _unpack(after)[4] & IRREGULAR or len(before) == REPLY.size:
            return self._evidence.differing(before, after)
        parts = zip(irregular_parts(before), irregular_parts(after), strict=True)
        return {slot for one, other in parts for slot in range(self._group.size) if not same(one[slot], other[slot])}

    def _looks_the_same(self, backend: Backend, last: bytes) -> bool:
        """The last observations the caller saw, whole, against those of the replay."""
        for rows, before in self._kept:
            for slot in range(self._group.size):
                if rows[slot].tobytes() != before[slot].tobytes():
                    self._strays.add(slot)
        return not self._hopeless()

    # --- losses -----------------------------------------------------------------------------------

    def _heal(self, gone: Gone) -> None:
        """Bring all back and ask again, without those that are to be left out."""
        self._refuse_if_closed()
        command, slot = self._pending_command(), gone.slot if gone.executing else -1
        if slot >= 0:
            self.record.env_index = self._group.first + slot
        loss = self._note_loss(gone, command)
        effort = self._healer.begin()
        if not self._deaths:
            self._absent, self._raised, self._deaths_of = {}, {}, {}
        self._deaths += gone.executing
        self._blame(gone, loss, slot, command)
        self._kept, self._strays = self._keep(), set()
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
        finally:
            kept, self._kept = self._kept, []
            self._put_back(kept)
        self._refuse_if_closed(backend)
        self._adopt(backend)
        for stray in self._strays:
            why = f"{what_happened(loss)} Its replay does not match what was seen."
            self._end_episode(stray, why, command)
        if command not in ("step", "reset") and self._deaths >= self._policy.poison_after:
            self._refuse_poison(loss, effort, command)
        ended = bool(self._absent or self._owed_to)
        self.record.recovery(loss, "truncated" if ended else "exact", "" if not ended else self._why(), effort)
        self._ask_again()

    def _blame(self, gone: Gone, loss: Loss, slot: int, command: str) -> None:
        """Decide whether the env that was being called takes part when the request is asked again."""
        if slot < 0 or command not in ("step", "reset"):
            return
        deaths = self._deaths_of[slot] = self._deaths_of.get(slot, 0) + 1
        on_loss, what = self._on_loss(gone.cause), "reset" if gone.resetting else "step"
        poison = deaths >= self._policy.poison_after
        killed = f"The same {what} killed {deaths} processes; it was not tried again."
        if on_loss == "raise":
            self._absent[slot] = LeftOut(None, "")
            self._raised[slot] = self._lost_error(loss, loss.cause, "Its episode is lost; the others go on.")
        elif gone.resetting and poison:
            self._absent[slot] = LeftOut(None, "")
            self._raised[slot] = self._lost_error(loss, "poison", killed)
        elif not gone.resetting and (poison or on_loss == "truncate"):
            self._absent[slot] = LeftOut(None, f"{what_happened(loss)} {killed if poison else ''}".rstrip())

    def _end_episode(self, slot: int, reason: str, command: str) -> None:
        """Now, if a step is pending; else with the next one."""
        if command == "step":
            self._absent.setdefault(slot, LeftOut(None, reason))
        elif not self._is_reset(slot):
            self._owe(slot, LeftOut(self._observation_of(slot), reason, self.record.reports.path))

    def _is_reset(self, slot: int) -> bool:
        message = self._message
        if not isinstance(message, Reset):
            return False
        mask = message.options.mask
        return mask is None or bool(mask[slot])

    def _owe(self, slot: int, end: LeftOut) -> None:
        self._owed_to[slot] = end
        if self._encode != self._encode_owed:
            self._encode_plainly = self._encode
            self._encode = self._encode_owed

    def _encode_owed(self, seq: int, action: Any) -> bytes:
        """A step, and the end of those episodes that have been lost since the last one."""
        return leave_out(self._encode_plainly(seq, action), self._owed_to)

    def _why(self) -> str:
        return next((one.reason for one in (*self._absent.values(), *self._owed_to.values()) if one.reason), "")

    def _ask_again(self) -> None:
        """The pending request, without those who are left out."""
        if self._absent:
            if self.phase in (STEPPING, RESUMED):
                frame, before = left_out(self._pending)
                absent = before | {
                    slot: replace(one, observation=self._observation_of(slot), report=self.record.reports.last)
                    for slot, one in self._absent.items()
                }
                self._pending = leave_out(frame, absent)
            elif isinstance(self._message, Reset):
                left = self._message.options.left_out
                options = replace(self._message.options, left_out=tuple({*left, *self._absent}))
                self._message = replace(self._message, options=options)
                self._pending = pack_message(self.seq, self._message)
        super()._ask_again()

    def _go_on_without(self, loss: Loss, effort: Effort, reason: str, command: str) -> None:
        """None can be brought back: new episodes can be begun, those that run must be ended."""
        if self._on_loss(loss.cause) == "raise":
            self._drop_backend()
            self.phase = LOST
            self.record.recovery(loss, "raised", reason, effort)
            raise self._lost_error(loss, loss.cause, f"{reason} The next reset() starts a new process.")
        running = self._last_reply() != b""
        observations = [self._observation_of(slot) for slot in range(self._group.size)]
        report = self.record.reports.path
        self._begin_anew(effort)
        everyone = range(self._group.size)
        if command == "step":
            absent = {slot: LeftOut(observations[slot], reason, report) for slot in everyone}
            absent |= {slot: replace(self._absent[slot], observation=observations[slot]) for slot in self._raised}
            self._pending = leave_out(left_out(self._pending)[0], absent)
            self._absent = {}
            self.record.recovery(loss, "truncated", reason, effort)
            super()._ask_again()
            return
        for slot in everyone:
            if running and not self._is_reset(slot):
                self._owe(slot, LeftOut(observations[slot], reason, report))
        if command != "reset":
            self.phase = self._phase_before
            self.record.recovery(loss, "truncated", reason, effort)
            raise self._lost_error(loss, loss.cause, f"{reason} The next step() ends the episodes.")
        assert isinstance(self._message, Reset)
        self._message = self._complete_reset(self._message)
        self._pending = pack_message(self.seq, self._message)
        self.record.recovery(loss, "fresh", reason, effort)
        self._ask_again()

    def _build_failed(self, failed: BuildFailed) -> MultienvError:
        if failed.failure.slot >= 0:
            self.record.env_index = self._group.first + failed.failure.slot
        return super()._build_failed(failed)

    def _recycle(self, *, resetting: bool) -> None:
        """As for one env, if all can be had again as they are."""
        self._kept, self._strict = self._keep(), True
        try:
            super()._recycle(resetting=resetting and self._resetting_all)
        finally:
            kept, self._kept, self._strict = self._kept, [], False
            self._put_back(kept)

    # --- requests and answers ---------------------------------------------------------------------

    def send(self, command: str, message: Message) -> None:
        """See :class:`Supervisor`."""
        self._resetting_all = isinstance(message, Reset) and message.options.mask is None
        super().send(command, message)

    def _complete_reset(self, message: Reset) -> Reset:
        """Draw and record a seed for each env to which none was ever given; ask for an anchor where one is due."""
        options, seeds = message.options, list(message.seed)
        for slot, seed in enumerate(seeds):
            if seed is None and self._is_masked(options, slot) and (not self._seeded or self._seeds[slot] is None):
                seeds[slot] = self._draw_seed()
        self._trim()
        anchor = options.mask is None and self._journal.wants_anchor(self._steps)
        return Reset(tuple(seeds), options, anchor)

    @staticmethod
    def _is_masked(options: GroupOptions, slot: int) -> bool:
        return options.mask is None or options.mask[slot]

    def _finish_reset(self, reply: bytes, message: Reset) -> tuple[Any, dict[str, Any]]:
        observations, extras = super()._finish_reset(reply, message)
        self._seed = None
        for slot, seed in enumerate(message.seed):
            if self._is_masked(message.options, slot):
                self._owed_to.pop(slot, None)
                self._seeds[slot] = self._seeds[slot] if seed is None else seed
        self._settle_owed()
        return observations, self._with_errors(extras, "reset")

    def _finish_step(self, reply: bytes) -> Transition:
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
        observations, rewards, terminated, truncated, extras = super()._finish_step(reply)
        self._owed_to.clear()
        self._settle_owed()
        return observations, rewards, terminated, truncated, self._with_errors(extras, "step")

    def _settle_owed(self) -> None:
        if not self._owed_to and self._encode == self._encode_owed:
            self._encode = self._encode_plainly

    def _with_errors(self, extras: dict[str, Any], command: str) -> dict[str, Any]:
        """What the envs have raised, as what is to be raised here."""
        failures: dict[int, Any] = dict(extras.get("failures", ()))
        if failures:
            errors: dict[int, Any] = {
                slot: env_error(
                    failure, index=self._group.first + slot, command=command, step=None, seed=self._seeds[slot]
                )
                for slot, failure in failures.items()
            }
            if self._group.truncates_errors and command == "step":
                reasons = [
                    (slot, {"multienv": {"reason": str(e), "recovery": "truncated"}}) for slot, e in errors.items()
                ]
                extras = {**extras, "infos": [*extras.get("infos", ()), *reasons]}
                errors = {}
            extras = {**extras, "failures": errors}
        if self._raised:
            extras = {**extras, "failures": {**extras.get("failures", {}), **self._raised}}
        self._absent, self._raised, self._deaths_of = {}, {}, {}
        return extras

    def _error_in(self, reply: bytes) -> Failure | None:
        if _unpack(reply)[3] != STEPPED or not _unpack(reply)[2]:
            return super()._error_in(reply)
        failures = info_of(reply)[0].get("failures", {})
        return next(iter(failures.values()), None)
