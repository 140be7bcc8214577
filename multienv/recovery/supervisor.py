"""The heart: one env behind one backend, its requests, its losses, its recoveries.

A request is sent by ``send_*`` and its answer collected by ``receive_*``. A loss shows while receiving;
it is healed there, and the answer comes from the new process, or it ends the episode, or it is raised.

The two halves of a step are the hot path; everything that is not a plain answer to a plain step leaves it
at the first branch.
"""

from __future__ import annotations

import contextlib
from time import perf_counter
from typing import Any

from multienv.errors import (
    MultienvError,
    ResultNotPicklableError,
    UsageError,
)
from multienv.recovery.keeper import entered
from multienv.recovery.phases import (
    ASKED,
    DUE,
    ENDED,
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
from multienv.recovery.preserver import Preserver
from multienv.recovery.report import decoded
from multienv.wire.messages import (
    FAILED,
    IRREGULAR,
    KIND_OF_REQUEST_AT,
    REPLY,
    SEQ_MASK,
    STEP,
    STEPPED,
    TERMINATED,
    TRUNCATED,
    Call,
    Message,
    Render,
    Reset,
    SetAttribute,
    Unpicklable,
    evidence_of,
    pack_message,
    seq_of,
    unpack_value,
)
from multienv.wire.observations import info_of, irregular_parts, reward_of

Transition = tuple[Any, Any, bool, bool, dict[str, Any]]

# One step in so many is timed, and the journal's size looked at.
SAMPLE = 63
_JOURNALED = (Reset, Call, SetAttribute, Render)
_unpack = REPLY.unpack_from


def resumed(transition: Transition) -> Transition:
    """The same, which says in its info that it is that of an interrupted step, beside what else it says there."""
    *seen, info = transition
    told = info.get("multienv", {}) if isinstance(info, dict) else None
    if not isinstance(told, dict):  # an env of the caller's own, in this process
        return transition
    return (*seen, {**info, "multienv": {**told, "resumed": True}})


class Supervisor(Preserver):
    """Keeps one env alive: what is asked of it, and what it answers."""

    __slots__ = ()

    # --- the hot path -----------------------------------------------------------------------------

    def send_step(self, action: Any) -> None:
        """Send a step; does not block, unless the process is due to be replaced first, or asked for the env's state."""
        self.inside = True
        try:
            if self.phase != RUNNING and self._cannot_step():
                return
            seq = (self.seq + 1) & SEQ_MASK
            encode, transmit = self._encode, self._transmit
            frame = encode(seq, action)
            self.seq, self._pending = seq, frame
            self.phase = STEPPING
            if self._step_deadline is not None:
                self._backend.arm(self._step_deadline)
            if not seq & SAMPLE:
                self._sampled_at = perf_counter()
            transmit(frame)
        finally:
            self.inside = False

    def receive_step(self, timeout: float | None = None, defer: bool = False) -> Transition:
        """Collect what the step returned; with ``defer`` a recovery is not done here: RecoveryDue is raised.

        By position, because CPython 3.11 is slow to call with keywords.
        """
        self.inside = True
        try:
            if self.phase != STEPPING or timeout is not None or self.interrupted:
                early = self._before_receiving_step(timeout)
                if early is not None:
                    return early
            # Through locals: CPython 3.11 has no fast path to call what a slot holds.
            fill, buffer, seq = self._backend.fill, self._buffer, self.seq
            received = fill()
            length, number, _, kind, flags, tag, reward = _unpack(buffer)
            # The number is compared with what it is now: close() in a signal handler has moved it.
            if received != length or number != self.seq or kind != STEPPED:
                return self._receive_step_slowly(bytes(buffer[:received]), defer=defer)
            if received != self._plain_size or flags or not seq & SAMPLE:
                return self._finish_step(bytes(buffer[:received]))
            log_request, log_reply, views = self._log_request, self._log_reply, self._views
            log_request(self._pending)
            log_reply(self._plain_reply)
            self._steps += 1
            self.phase = RUNNING
            if tag:
                reward = reward_of(tag, reward)
            observation = self._decode(buffer, seq) if views is None else views[seq & 1].copy()
            return observation, reward, False, False, {}
        finally:
            self.inside = False

    # --- a step that is not plain -------------------------------------------------------------------

    def _cannot_step(self) -> bool:
        """Raise what is wrong; or true when the step need not be sent: its answer is already owed."""
        if self.interrupted == WHOLE:
            if self.phase in (STEPPING, RESUMED):
                self.phase = RESUMED
                return True
            self._drain()
            if self.phase == RUNNING:
                return False
        if self.phase == DUE:
            if self.due:
                self._recycle(resetting=False)
            else:
                self._preserve()
            self.phase = RUNNING
            return False
        if self.phase != OWED:
            self.refuse("step")
        return True

    def _before_receiving_step(self, timeout: float | None) -> Transition | None:
        if self.phase == OWED:
            return self._truncation(self._owed)
        if self.phase not in (STEPPING, RESUMED):
            self.refuse("step_wait")
        if self.interrupted:
            self._settle()
            self.interrupted = 0
        self._wait(timeout, "step")
        if self.phase == STEPPING:
            return None
        self.phase = STEPPING
        try:
            return resumed(self._receive_step_slowly(b""))
        except BaseException as error:
            if not isinstance(error, MultienvError) and self.phase != OWED:
                self.phase, self.interrupted = RESUMED, WHOLE  # not delivered, once more
            raise

    def _receive_step_slowly(self, start: bytes, *, defer: bool = False) -> Transition:
        try:
            reply = self._await(start, defer=defer)
        except EpisodeLost as lost:
            return self._truncation(str(lost))
        return self._finish_step(reply)

    def _finish_step(self, reply: bytes) -> Transition:
        if _unpack(reply)[3] == FAILED:
            self._log(reply)
            self.phase = ENDED
            error = self._env_error(reply, "step")
            if self._policy.on_error == "truncate":
                self._keep_last_observation()
                return self._truncation(str(error))
            raise error
        sampled = not self.seq & SAMPLE
        if sampled:
            self._sample()
        self._log(reply)
        self._last = reply
        self._steps += 1
        due = (self._recycling.wanted and self._is_due()) or (sampled and self._state_is_due())
        ended = _unpack(reply)[4] & (TERMINATED | TRUNCATED)
        self.phase = ENDED if ended else DUE if due else RUNNING
        return self._transition(reply)

    def _transition(self, reply: bytes) -> Transition:
        _, seq, info_length, _, flags, tag, reward = _unpack(reply)
        terminated, truncated = bool(flags & TERMINATED), bool(flags & TRUNCATED)
        info = self._info_in(reply, "step")[0] if info_length else {}
        if flags & IRREGULAR:
            observation, reward, _, _ = decoded(irregular_parts, reply, "step")
            return observation, reward, terminated, truncated, info
        return self._decode(reply, seq), reward_of(tag, reward), terminated, truncated, info

    def _info_in(self, reply: bytes, command: str) -> tuple[dict[str, Any], bytes | None]:
        """The info, and the state of the generators where one was asked for."""
        return decoded(info_of, reply, command)  # type: ignore[no-any-return]

    def _truncation(self, reason: str) -> Transition:
        """The honest end of an episode that cannot go on."""
        self._owed = reason  # until the next reset
        self.phase = ENDED if self._backend is not None else LOST
        told = {"reason": reason, "recovery": "truncated"}
        report = self.record.report_of(reason)
        if report:
            told["report"] = report
        return self._lost_observation, 0.0, False, True, {"multienv": told}

    def _sample(self) -> None:
        self.record.step_latency(perf_counter() - self._sampled_at)
        if not self.seq & 1023:
            self._trim()

    # --- everything but steps -----------------------------------------------------------------------

    @entered
    def send(self, command: str, message: Message) -> None:
        """Send a request that is not a step.

        Blocks where there is no process to send it to any more, or a reset finds that due to be replaced.
        """
        if self.interrupted == WHOLE:
            self._drain(step=isinstance(message, Reset))
        if self.closed or self.phase in (NEW, STARTING, *PENDING) or self.is_foreign:
            self.refuse(command)
        if self._asked_state is not None:
            self._preserve()
        if self._backend is None:
            self._revive()
        observes = isinstance(message, Reset)
        if isinstance(message, Reset):
            if self._is_due_at_reset():
                self._recycle(resetting=True)
            message = self._complete_reset(message)
        # Steps and resets alternate between even and odd, which says where a large observation lies: that of the
        # last one stays whole until the next but one.
        seq = (self.seq + (1 if observes else 2)) & SEQ_MASK
        try:
            frame = pack_message(seq, message)
        except Unpicklable as unpicklable:
            error = unpicklable.__cause__
            raise UsageError(
                f"{command}(): its arguments cannot be sent to the env: {type(error).__name__}: {error}. "
                "Nothing was sent."
            ) from error
        self._phase_before, self._command, self._message = self.phase, command, message
        self.seq, self._pending = seq, frame
        self.phase = ASKED
        self._backend.arm(self._deadline(message))
        self._backend.send(frame)

    @entered
    def receive(self, command: str, timeout: float | None = None, *, defer: bool = False) -> Any:
        """Collect the answer: a value, or observation and info after a reset."""
        if self.phase != ASKED or command != self._command:
            self.refuse(f"{command}_wait")
        if self.interrupted:
            self.interrupted = 0
            self._settle()
        self._wait(timeout, command)
        reply = self._await(b"", defer=defer)
        message, failed = self._message, _unpack(reply)[3] == FAILED
        if isinstance(message, _JOURNALED):
            if not isinstance(message, Reset):
                self._trim()
            self._log(reply)
        if failed:
            self.phase = READY if isinstance(message, Reset) else self._phase_before
            raise self._env_error(reply, command)
        if isinstance(message, Reset):
            return self._finish_reset(reply, message)
        try:
            value = decoded(unpack_value, reply, command)
        except ResultNotPicklableError:
            self.phase = self._phase_before
            raise
        self.phase = self._phase_before
        return value

    def _finish_reset(self, reply: bytes, message: Reset) -> tuple[Any, dict[str, Any]]:
        try:
            info, generators = self._info_in(reply, "reset")
        except ResultNotPicklableError:
            self.phase = READY
            raise
        if generators is not None:
            self._journal.anchor(self._pending, evidence_of(reply), generators, self._steps)
        if message.seed is not None:
            self._seed = message.seed
        try:
            observation = self._observation_in(reply, "reset")
        except ResultNotPicklableError:
            self.phase = READY
            raise
        self._last = reply
        self._owed = ""
        self._steps_before = self._steps
        self.record.episodes += 1
        self.begun += 1
        self.phase = RUNNING
        return observation, info

    # --- after an interrupted call ------------------------------------------------------------------

    @entered
    def resume(self) -> Any:
        """What the last request returned, whether or not its answer has been collected before."""
        self.interrupted = 0
        if self.phase in (STEPPING, RESUMED):
            return self._resume_step()
        if self.phase == ASKED:
            self._settle()
            return self.receive(self._command)
        last = self._last_reply()
        if not last or seq_of(last) != seq_of(self._pending):
            return self._resume_step()  # made ready, and perhaps not even sent
        observation, reward, terminated, truncated, info = self._transition(last)
        if self._pending[KIND_OF_REQUEST_AT] == STEP:
            return observation, reward, terminated, truncated, info
        return observation, info

    def _resume_step(self) -> Transition:
        self._settle()
        self.interrupted = 0
        self.phase = STEPPING
        return self._receive_step_slowly(b"")

    def _drain(self, *, step: bool = False) -> None:
        """Collect and drop the answer to a request whose caller was interrupted; that to a step only if told so."""
        if self.phase == ASKED:
            self.interrupted = 0
            self._settle()
            with contextlib.suppress(MultienvError):  # nobody waits for it any more
                self.receive(self._command)
            self._free_forsaken()
        elif self.phase not in (STARTING, *PENDING):
            self.interrupted = 0
        elif step:
            with contextlib.suppress(MultienvError):
                self._resume_step()
