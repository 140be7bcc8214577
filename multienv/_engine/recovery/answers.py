"""Make the caller's answer from a reply: read the bank and the payload, and write truncations over lost slots.

A single env is a batch of one, whose caller gets only slot 0. A truncation shows the observation that the caller saw
last, which the worker's position holds. A reply that is read again gives the same, because reading changes nothing that
the caller has seen: the supervisor commits the ``Reply`` together with the end of the request.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from multienv._engine.processes.channel import Channel
from multienv._engine.recovery.position import PickledRows, Position, ReplayPoints
from multienv._engine.recovery.state_machine import Kind, State
from multienv._engine.sometimes import sometimes
from multienv._engine.wire.banks import BEGUN, ENDED, FAILED, NOT_RESET, PICKLED_ROWS, entry_of
from multienv._engine.wire.codecs import Codec, RowsReply, Transition, payload_of
from multienv._engine.wire.infos import Extras, Illegible, unpack_extras
from multienv._engine.wire.messages import CALLS, Failure, Reset, call_user_code, is_recorded
from multienv._engine.wire.segment import Segment
from multienv.errors import ResultNotPicklableError

# Slot and failure → the error to raise.
ErrorOf = Callable[[int, Failure], Exception]
# Reason → what info["multienv"] says of a truncation.
TruncationInfo = Callable[[str], dict[str, Any]]
Skipped = Sequence[tuple[int, str]]
# Reason → the error of an env that was lost.
LostError = Callable[[str], Exception]


def unreadable(command: str, error: Exception) -> ResultNotPicklableError:
    """Build the error for something the env returned that cannot be unpickled in this process."""
    error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    built = ResultNotPicklableError(
        f"{command}(): what the env returned was pickled, but cannot be unpickled here: "
        f"{type(error).__name__}: {error}. The {command} itself is done."
    )
    built.remote_traceback = "".join(traceback.format_exception(error))
    # Without its frames, which would keep the segment mapped as long as the caller keeps the error.
    built.__cause__ = error.with_traceback(None)
    return built


@dataclass(slots=True)
class Reply:
    """Holds what a reply shows, until the supervisor commits it.

    Attributes:
        number: Of the request.
        evidence, pickled, rest: The payload, see ``ReplyPayload``.
        seen, pickled_rows: The new values of these attributes of ``Position``.
        ended: A step ended the episode of a single env.
        failed: The request raised as a whole.
        entry, call: What the journal gets, see :meth:`Journal.record`; ``b""``: nothing.
        answer: What the caller gets.
        truncated_errors: Slot and error of what ``on_error="truncate"`` made a truncation of.
    """

    number: int
    evidence: bytes
    pickled: bytes
    rest: bytes
    seen: int
    pickled_rows: PickledRows
    ended: bool = False
    failed: bool = False
    entry: bytes = b""
    call: bytes = b""
    answer: Any = None
    truncated_errors: dict[int, Exception] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """Return the number that the position has after it.

        A reply that shows no rows takes up two numbers. So the next request does not lie in the bank with the rows that
        the caller saw last: its process may die while it writes there.
        """
        return self.number if self.seen == self.number else self.number + 1


class Answers:
    """Makes the answers of one worker: rows of a batch, or what a single env returned to the bit.

    Args:
        codec: Of the envs.
        position: What the caller has seen.
        error_of: Builds the error of a failure.
        truncation_info: What ``info["multienv"]`` says of a truncation.
        on_spaces: Called with the spaces that a single env has set, pickled.

    Attributes:
        codec, truncation_info: As given.
        same_step: The worker begins the next episode in the step that ended one.
        truncates: What an env raises in a step is made a truncation of.
        points_in: Number of the last reply with states of random generators before resets; 0: there was none.
        points: Those resets, where a replay can begin.
    """

    __slots__ = ("__dict__", "__weakref__", "points_in")  # the hot path reads these, native code by offset

    def __init__(
        self,
        codec: Codec,
        position: Position,
        error_of: ErrorOf,
        truncation_info: TruncationInfo,
        on_spaces: Callable[[bytes], object],
    ) -> None:
        self.codec, self._position = codec, position
        self._error_of, self.truncation_info, self._on_spaces = error_of, truncation_info, on_spaces
        self.same_step, self.truncates = position.build.autoreset == "SAME_STEP", position.build.truncates_errors
        self.points_in = 0
        self.points: ReplayPoints = ()

    def for_position(self, position: Position) -> Answers:
        """Return what reads replies to a caller who has seen what this position says."""
        other = copy.copy(self)
        other._position = position
        return other

    def read_reply(
        self, channel: Channel, number: int, state: State, message: Any, payload: bytes, lost: LostError | None
    ) -> Reply:
        """Read the reply to the pending request. Raises ``Gone`` if it cannot be decoded.

        Args:
            channel: Of the process that has answered.
            number: Of the request.
            state: The worker's.
            message: The request, unless it is a step.
            payload: What it carries beside its bank.
            lost: Builds the error of a slot that a reset skips; ``None``: no process was lost.
        """
        segment, request = channel.segment, state.request
        assert request is not None
        bank, is_call = segment.banks[number & 1], request.kind is Kind.CALL
        at = self._position
        read = Reply(number, b"", b"", b"", at.seen, at.pickled_rows) if is_call else self.read_raw(segment, number)
        read.failed = bank.view[2] == FAILED
        if not is_call or is_recorded(message):  # before anything is laid over the rows
            read.entry = entry_of(bank, payload, b"" if read.failed else read.evidence)
            read.call = payload if isinstance(message, CALLS) else b""
        try:
            read.answer = call_user_code(partial(self._answer, segment, read, message, state, lost), Illegible)
        except Illegible as illegible:
            if read.failed or is_call:  # the reply itself is no pickle
                sometimes("a reply is unreadable")
                raise channel.kill(cause="broken", detail=str(illegible)) from illegible
            read.answer = unreadable(request.name, illegible)
        if state.skipped or request.left_alone:
            bank.skipped[:] = 0
        if read.failed and request.kind is Kind.STEP and self.truncates:
            read.truncated_errors[0] = read.answer
            read.answer = self.truncation(segment, ((0, str(read.answer)),))
        return read

    def _answer(self, segment: Segment, read: Reply, message: Any, state: State, lost: LostError | None) -> Any:
        """Return what the reply to a request shows."""
        request, skipped = state.request, state.skipped
        assert request is not None
        if request.kind is Kind.STEP:
            return self.step_answer(segment, read, skipped, request.left_alone)
        if request.kind is Kind.RESET:
            answer = self.reset_answer(segment, read, message, skipped)
            if isinstance(answer, RowsReply) and lost is not None:
                answer.errors |= {slot: lost(reason) for slot, reason in skipped}
            return answer
        rest = segment.read_reply_payload(read.number)
        if read.failed:
            return self._error_of(-1, pickle.loads(rest))
        slots = message.slots or range(self.codec.slots)
        values, errors = call_answer(rest, slots, request.name, self._error_of)
        if self.codec.verbatim:
            return errors[0] if 0 in errors else values[0]
        return values, errors

    def read_raw(self, segment: Segment, number: int) -> Reply:
        """Return the reply as bytes. Nothing is unpickled, so nothing can raise."""
        return Reply(number, *payload_of(segment, number), self._position.seen, self._position.pickled_rows)

    def step_answer(
        self, segment: Segment, read: Reply, skipped: Skipped, left_alone: Sequence[int] = ()
    ) -> RowsReply | Transition | Exception:
        """Return what a reply to a step shows: rows, those of skipped slots as honest truncations, or a transition.

        The rows of slots that were left alone, and their flags, are what the caller saw last. An exception is what a
        single env raised; or nothing was stepped, because actions cannot be unpickled there.
        """
        bank, verbatim = segment.banks[read.number & 1], self.codec.verbatim
        if bank.view[2] == FAILED:
            read.ended = verbatim
            return self._error_of(-1, pickle.loads(read.rest))
        read.ended = verbatim and bool(bank.view[3] & ENDED)
        reply, extras = self._read_rows(segment, read, "step")
        if verbatim:
            return self._transition(segment, read, extras)
        infos: dict[int, Any] = dict(extras.infos) if skipped else {}
        for slot, reason in skipped:
            if bank.skipped[slot] == BEGUN:
                infos[slot] = {**infos.get(slot, {}), "multienv": {"recovery": "reset"}}
                continue
            begun = infos.get(slot, {}) if self.same_step else {}
            infos[slot] = {**begun, **self._info_of_truncation(segment, slot, reason)}
            if not self.same_step or bank.skipped[slot] == NOT_RESET:
                self._show_again(segment, (slot,), reply)
            reply.rewards[slot], reply.terminated[slot], reply.truncated[slot] = 0.0, False, True
        if left_alone:
            self._show_again(segment, left_alone, reply)
            rows, before = list(left_alone), segment.banks[self._position.seen & 1]
            for name in ("terminated", "truncated", "failed"):
                getattr(bank, name)[rows] = getattr(before, name)[rows]
        self._write_failures(segment, read, reply, extras, infos)
        return reply

    def reset_answer(
        self, segment: Segment, read: Reply, message: Reset, skipped: Skipped
    ) -> RowsReply | tuple[Any, dict[str, Any]] | Exception:
        """Return what a reply to a reset shows; rows of slots that were not reset are what the caller saw last."""
        if segment.banks[read.number & 1].view[2] == FAILED:
            return self._error_of(-1, pickle.loads(read.rest))
        reply, extras = self._read_rows(segment, read, "reset")
        if self.codec.verbatim:
            observation, *_, info = self._transition(segment, read, extras)
            return observation, info
        missing = dict(skipped)
        left = [slot for slot in range(self.codec.slots) if slot in missing or not message.touches(slot)]
        self._show_again(segment, left, reply)
        self._write_failures(segment, read, reply, extras, {})
        return reply

    def truncation(self, segment: Segment | None, skipped: Skipped) -> RowsReply | Transition:
        """Return the honest end of these episodes without a process: what was seen last once more."""
        if self.codec.verbatim:
            last = None
            if segment is not None:
                with contextlib.suppress(Exception):  # what cannot be unpickled here was never seen
                    last = self._last_observation(segment, 0)
            return last, 0.0, False, True, {"multienv": self.truncation_info(skipped[0][1])}
        assert segment is not None
        reply = self.codec.rows(segment, self._position.seen)
        infos = [(slot, self._info_of_truncation(segment, slot, reason)) for slot, reason in skipped]
        slots = [slot for slot, _ in skipped]
        reply.rewards[slots], reply.terminated[slots], reply.truncated[slots] = 0.0, False, True
        return reply.with_extras(Extras(infos, {}, self._unpickled_rows(self._position.pickled_rows_now, {})))

    def _info_of_truncation(self, segment: Segment, slot: int, reason: str) -> dict[str, Any]:
        info = {"multienv": self.truncation_info(reason)}
        if not self.same_step:
            return info
        return {"final_obs": self._last_observation(segment, slot), "final_info": info, **info}

    def answer_with_pickled_infos(self, segment: Segment, number: int) -> RowsReply | Transition | None:
        """Return the answer to a plain step of which some infos are pickled; ``None`` if they cannot be read."""
        payload = segment.read_reply_payload(number)  # without a pickled part: the rows hold all
        try:
            extras, illegible = call_user_code(partial(self._extras, number, payload), Illegible)
        except Illegible:
            return None
        if self.codec.verbatim:
            return (*self.codec.transition(segment, number), info_of(extras))
        reply = self.codec.rows(segment, number).with_extras(extras)
        reply.errors = {slot: unreadable("step", error) for slot, error in illegible.items()}
        return reply

    def spaces_in(self, spaces: bytes) -> tuple[Any, Any]:
        """Return the spaces that a single env has set; those it was built with if there are none that can be read."""
        with contextlib.suppress(Illegible):
            if spaces:
                return call_user_code(partial(pickle.loads, spaces), Illegible)  # type: ignore[no-any-return]
        return self.codec.space, self.codec.action_space

    def shown(self, segment: Segment) -> Any:
        """Return what the caller saw last: an observation; the arrays of the rows; or a pickled row for each slot."""
        if self.codec.verbatim:
            return self._last_observation(segment, 0)
        if not self.codec.has_rows:
            return self._position.pickled_rows_now
        return [leaf.copy() for leaf in self.codec.rows(segment, self._position.seen).leaves]

    def _extras(self, number: int, rest: bytes) -> tuple[Extras, dict[int, Exception]]:
        """Unpack what a reply carries beside its rows; raise the error of a single env's info that is illegible."""
        if not rest:
            return Extras(), {}
        extras, illegible = unpack_extras(rest)
        if extras.generators:  # resets at which a replay can begin
            self.points_in, self.points = number, [(number, extras.generators)]
        if extras.spaces:
            self._on_spaces(extras.spaces)
        if self.codec.verbatim and illegible:
            raise illegible[0]
        return extras, illegible

    def _read_rows(self, segment: Segment, read: Reply, command: str) -> tuple[RowsReply, Extras]:
        number, pickled_rows = read.number, self._position.pickled_rows_now
        if segment.banks[number & 1].view[3] & PICKLED_ROWS:
            pairs = zip(pickled_rows, pickle.loads(read.pickled), strict=True)
            pickled_rows = [old if new is None else new for old, new in pairs]
        elif self.codec.verbatim:
            pickled_rows = [None]
        read.seen, read.pickled_rows = number, (number, pickled_rows)
        reply = self.codec.rows(segment, number)
        extras, illegible = self._extras(number, read.rest)
        reply.errors = {slot: self._error_of(slot, failure) for slot, failure in extras.failures.items()}
        reply.errors |= {slot: unreadable(command, error) for slot, error in illegible.items()}
        return reply, extras

    def _transition(self, segment: Segment, read: Reply, extras: Extras) -> Transition:
        """Return the transition of a single env. Raises what unpickling it raises."""
        _, (row,) = read.pickled_rows
        return (*self.codec.transition(segment, read.number, row), info_of(extras))

    def _write_failures(
        self, segment: Segment, read: Reply, reply: RowsReply, extras: Extras, infos: dict[int, Any]
    ) -> None:
        """Write the failures into the rows of their slots.

        ``infos`` are all infos, if truncations were laid over some of them; else ``{}``.
        """
        failures = [slot for slot in reply.errors if slot in extras.failures]  # others: only the info is unreadable
        if failures and not infos:
            infos = dict(extras.infos)
        for slot in failures:
            if self.truncates and reply.truncated[slot]:
                read.truncated_errors[slot] = reply.errors.pop(slot)
                what = extras.failures[slot]
                reason = f"The env raised {what.type_name}: {what.text}"
                final_info = {"multienv": self.truncation_info(reason)}
                infos[slot] = {**infos.get(slot, {}), **final_info}
                reply.rewards[slot] = 0.0
                if self.same_step:
                    infos[slot] |= {"final_obs": self._last_observation(segment, slot), "final_info": final_info}
                    continue
            self._show_again(segment, (slot,), reply)
        extras.observations = self._unpickled_rows(read.pickled_rows[1], reply.errors)
        if infos:
            extras.infos = sorted(infos.items())
        reply.extras = extras if extras.infos or extras.observations is not None else None

    def _show_again(self, segment: Segment, slots: Sequence[int], reply: RowsReply) -> None:
        """Copy the rows of slots that the caller saw last into the reply."""
        if slots and self._position.seen and reply.leaves:
            before = self.codec.rows(segment, self._position.seen)
            for leaf, old in zip(reply.leaves, before.leaves, strict=True):
                for slot in slots:
                    leaf[slot] = old[slot]

    def _last_observation(self, segment: Segment, slot: int) -> Any:
        seen, row = self._position.seen, self._position.pickled_rows_now[slot]
        if self.codec.verbatim:
            return self.codec.observation(segment, seen, row) if seen else None
        if self.codec.has_rows:
            return self.codec.row(segment, seen, slot) if seen else None
        return None if row is None else pickle.loads(row)

    def _unpickled_rows(self, pickled_rows: list[bytes | None], errors: dict[int, Exception]) -> Any:
        """Return the observations that have no rows; those that cannot be unpickled here become ``errors``."""
        if self.codec.has_rows:
            return None
        observations: list[Any] = []
        for slot, row in enumerate(pickled_rows):
            observations.append(None)
            if row is not None:
                try:
                    observations[-1] = call_user_code(partial(pickle.loads, row), Illegible)
                except Illegible as error:
                    errors.setdefault(slot, unreadable("step", error))
                    pickled_rows[slot] = self._position.pickled_rows_now[slot]  # the caller has not seen this one
        return observations


def call_answer(
    payload: bytes, slots: Iterable[int], command: str, error_of: ErrorOf
) -> tuple[list[Any], dict[int, Exception]]:
    """Return the values of a call, one for each slot asked (``None`` if it failed), and the errors by slot.

    Args:
        payload: The payload of the reply.
        slots: The slots asked.
        command: What the caller called.
        error_of: Builds the error of a slot's failure.
    """
    pickled, failures = pickle.loads(payload)
    values: list[Any] = []
    errors: dict[int, Exception] = {}
    for slot, data in zip(slots, pickled, strict=True):
        values.append(None)
        if slot in failures:
            errors[slot] = error_of(slot, failures[slot])
        elif data is not None:
            try:
                values[-1] = call_user_code(partial(pickle.loads, data), Illegible)
            except Illegible as error:
                errors[slot] = unreadable(command, error)
    return values, errors


def info_of(extras: Extras) -> dict[str, Any]:
    """Return the info of a single env; ``{}`` if it has none."""
    return next(iter(extras.infos), (0, {}))[1]
