"""The heart: one env behind one backend, its requests, its losses, its recoveries.

A request is sent by ``send_*`` and its answer collected by ``receive_*``. A loss shows while receiving;
it is healed there, and the answer comes from the new process, or it ends the episode, or it is raised.

The two halves of a step are the hot path; everything that is not a plain answer to a plain step leaves it
at the first branch.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Callable
from time import perf_counter
from types import FrameType
from typing import Any, NoReturn

from multienv.backends.base import Backend, Gone
from multienv.config import Deadlines, OnLoss, RestartPolicy, check_seconds
from multienv.errors import (
    CallPendingError,
    ClosedError,
    MultienvError,
    NothingPendingError,
    NotInitializedError,
    ResetNeededError,
    UsageError,
    WaitTimeout,
)
from multienv.events import Hook, Loss, Statistics
from multienv.recovery.healer import BudgetSpent, BuildFailed, Effort, Healer, Unrecoverable
from multienv.recovery.journal import Journal
from multienv.recovery.record import Record
from multienv.recovery.report import env_error, lost_error, what_happened
from multienv.recovery.verification import same
from multienv.wire.actions import EncodeStep, action_encoder
from multienv.wire.memory import Block
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
    VALUE,
    Call,
    Close,
    Description,
    Initialize,
    Message,
    Reset,
    SetAttribute,
    evidence_of,
    pack_message,
    seq_of,
    unpack_value,
)
from multienv.wire.observations import Placement, array_views, info_of, irregular_parts, reader, reward_of

Transition = tuple[Any, Any, bool, bool, dict[str, Any]]

# Phases. RUNNING: step() may be called. READY, ENDED: reset() must come first. STEPPING, ASKED: an answer is
# outstanding. RESUMED: that of a step whose caller was interrupted. OWED: the next step is a truncation.
NEW, STARTING, READY, RUNNING, ENDED, STEPPING, ASKED, RESUMED, OWED, LOST, CLOSED = range(11)
_STATES = ["new", "starting", "ready", "running", "ended", "running", "running", "running", "running", "lost", "closed"]
_PENDING = (STEPPING, ASKED, RESUMED)

# What is known of a call that an exception from outside came through. WHOLE: the caller lost interest, or calls
# again to have the answer. HALF: it stands between the halves of a call; what was sent is still to be collected.
WHOLE, HALF = 1, 2

# One step in so many is timed, and the journal's size looked at.
_SAMPLE = 63
_JOURNALED = (Reset, Call, SetAttribute)
_unpack = REPLY.unpack_from


class EpisodeLost(Exception):  # noqa: N818 - internal
    """The episode cannot go on; the caller gets a truncation that says why."""


class RecoveryDue(Exception):  # noqa: N818 - internal
    """The worker is lost; wait again, in a thread that may take its time, for the answer."""


class Supervisor:
    """Keeps one env alive.

    Args:
        launch: Gives a backend whose process has been launched.
        initialize: The request that builds the env.
        policy: What to do about losses.
        deadlines: When a process counts as hung.
        env_index: The env's index in its batch, for messages.
        hooks: Called with each ``Loss`` and ``Recovery``.
    """

    # Slots, because an object with so many attributes would lose CPython's fast path to them.
    __slots__ = """
        __weakref__ _backend _block _buffer _closing _core _command _deadlines _deaths _decode _encode _healer
        _inline_limit _journal _last _log_reply _log_request _lost_observation _message _owed _owner _pending
        _phase_before _placement _plain_reply _plain_size _policy _sampled_at _seed _seeded _step_deadline
        _steps _steps_before _transmit _views interrupted phase record seq
    """.split()  # noqa: SIM905 - one name a line would take a page

    def __init__(
        self,
        launch: Callable[[], Backend],
        initialize: Initialize,
        *,
        policy: RestartPolicy,
        deadlines: Deadlines,
        env_index: int | None = None,
        hooks: tuple[Hook, ...] = (),
    ) -> None:
        """Start nothing yet."""
        self.seq = 0
        self.phase = NEW
        self.interrupted = 0
        self.record = Record(env_index, hooks)
        self._policy, self._deadlines = policy, deadlines
        self._owner = os.getpid()
        self._closing = threading.Event()
        self._healer = Healer(launch, initialize, policy, deadlines, wait=self._closing.wait)
        self._inline_limit = initialize.inline_limit
        recording = "replay" in (policy.on_crash, policy.on_timeout, policy.on_error)
        self._journal = Journal(recording=recording)
        self._log_request, self._log_reply = self._journal.log_request, self._journal.log_reply
        self._transmit: Callable[[bytes], None] = _no_sender
        self._core: int | None = None
        self._backend: Any = None  # Backend | None; Any because the hot path does not ask
        self._encode: EncodeStep = _no_encoder
        self._decode: Callable[[Any, int], Any] = _no_decoder
        self._views: Any = None  # where observations arrive, for a Box
        self._buffer = bytearray()  # where replies are read into
        self._plain_reply = memoryview(b"")  # a reply without an info, in there
        self._plain_size = 0
        self._placement = Placement(None, inline=True)
        self._block: Block | None = None
        self._step_deadline = deadlines.step
        self._pending = b""
        self._command = ""  # what is pending, unless it is a step
        self._message: Message | None = None
        self._phase_before = NEW
        self._last = b""  # the last reply whose evidence is not all of it
        self._deaths = 0  # processes that died executing the pending request
        self._owed = ""  # why the next step must be a truncation
        self._seed: int | None = None
        self._seeded = False
        self._steps = 0
        self._steps_before = 0
        self._sampled_at = 0.0
        self._lost_observation: Any = None

    # --- start and build ------------------------------------------------------------------------

    def start(self) -> None:
        """Launch the process and ask it to build the env; neither is waited for."""
        if self.phase == CLOSED:
            self.refuse("start")
        if self.phase == NEW:
            self._backend = self._healer.launch()
            self._healer.request_build(self._backend)
            self.phase = STARTING

    def initialize(self, timeout: float | None = None) -> Description:
        """Wait until the env is built."""
        self.start()
        if self.phase == STARTING:
            self._wait(timeout, "initialize")
            try:
                again, self.interrupted = self.interrupted, WHOLE
                if again:
                    self._healer.request_build(self._backend, again=True)
                self._healer.collect_build(self._backend)
                self._adopt(self._backend)
                self.interrupted = 0
            except BuildFailed as failed:
                self.interrupted = 0
                error = self._build_failed(failed)
                raise error from error.__cause__
            except Gone as gone:
                self.interrupted = 0
                self._drop_backend()
                self._rebuild(gone)
            self.phase = READY
        assert self._healer.description is not None
        return self._healer.description

    def _rebuild(self, gone: Gone | None) -> None:
        """Launch and build until there is an env: the first time, or after one that was given up."""
        effort, deaths = self._healer.begin(), 0
        loss = self._note_loss(gone, "initialize") if gone else None
        while True:
            if gone is not None and loss is not None:
                deaths += 1
                if self._on_loss(gone.cause) != "replay" or deaths >= self._policy.poison_after:
                    self.record.recovery(loss, "raised", "", effort)
                    self.phase = LOST if self._healer.description else NEW
                    advice = "Run env_fn() in-process to see why; initialize() tries again."
                    raise lost_error(loss, loss.cause, advice)
            try:
                backend = self._healer.restart(effort, self._steps)
            except BuildFailed as failed:
                error = self._build_failed(failed)
                raise error from error.__cause__
            except Gone as again:
                gone, loss = again, self._note_loss(again, "initialize")
            except (BudgetSpent, Unrecoverable) as spent:
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

    def _adopt(self, backend: Backend) -> None:
        """From now on this backend is the env's."""
        description = self._healer.description
        assert description is not None
        if self._encode is _no_encoder:
            self._placement = Placement.of(description.observation_space, self._inline_limit)
            self._encode = action_encoder(description.action_space)  # last: an interruption leaves all to do again
        size = self._placement.block_size
        self._block = backend.observations(size) if size else None
        space, placement = description.observation_space, self._placement
        self._decode = reader(space, placement, self._block)
        self._views = array_views(space, placement, self._block, backend.buffer)
        self._buffer, self._plain_size = backend.buffer, placement.plain_size
        self._plain_reply = memoryview(self._buffer)[: self._plain_size]
        old, self._backend = self._backend, backend
        self._transmit = backend.send
        if self._core is not None:
            backend.prefer(self._core)
        if old is not None and old is not backend:
            old.release()

    def prefer(self, core: int) -> None:
        """Have the worker, and each that replaces it, run on this core while steps are short."""
        self._core = core
        if self._backend is not None:
            self._backend.prefer(core)

    def _drop_backend(self) -> None:
        old, self._backend = self._backend, None
        if old is not None:
            old.kill()
            old.release()

    # --- the hot path -----------------------------------------------------------------------------

    def send_step(self, action: Any) -> None:
        """Send a step; does not block."""
        if self.phase != RUNNING and self._cannot_step():
            return
        seq = self.seq = (self.seq + 1) & SEQ_MASK
        encode, transmit = self._encode, self._transmit
        self._pending = frame = encode(seq, action)
        self.phase = STEPPING
        if self._step_deadline is not None:
            self._backend.arm(self._step_deadline)
        if not seq & _SAMPLE:
            self._sampled_at = perf_counter()
        transmit(frame)

    def receive_step(self, timeout: float | None = None, defer: bool = False) -> Transition:
        """Collect what the step returned; with ``defer`` a recovery is not done here: RecoveryDue is raised.

        By position, because CPython 3.11 is slow to call with keywords.
        """
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
        if received != self._plain_size or flags:
            return self._finish_step(bytes(buffer[:received]))
        log_request, log_reply, views = self._log_request, self._log_reply, self._views
        log_request(self._pending)
        log_reply(self._plain_reply)
        self._steps += 1
        self.phase = RUNNING
        if not seq & _SAMPLE:
            self._sample()
        if tag:
            reward = reward_of(tag, reward)
        observation = self._decode(buffer, seq) if views is None else views[seq & 1].copy()
        return observation, reward, False, False, {}

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
        if self.phase != OWED:
            self.refuse("step")
        return True

    def _before_receiving_step(self, timeout: float | None) -> Transition | None:
        if self.phase == OWED:
            return self._truncation(self._owed)
        if self.phase == RESUMED:
            observation, reward, terminated, truncated, info = self._resume_step()
            return observation, reward, terminated, truncated, {**info, "multienv": {"resumed": True}}
        if self.phase != STEPPING:
            self.refuse("step_wait")
        if self.interrupted:
            return self._resume_step()
        self._wait(timeout, "step")
        return None

    def has_asked_since(self, mark: int) -> bool:
        """Whether a request has been made ready since ``seq`` was ``mark``; it may have been sent and answered."""
        if self.phase in _PENDING:
            return True
        return self.seq != mark and bool(self._pending) and seq_of(self._pending) == self.seq

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
        self._log(reply)
        self._last = reply
        self._steps += 1
        transition = self._transition(reply)
        self.phase = ENDED if transition[2] or transition[3] else RUNNING
        if not self.seq & _SAMPLE:
            self._sample()
        return transition

    def _transition(self, reply: bytes) -> Transition:
        _, seq, info_length, _, flags, tag, reward = _unpack(reply)
        terminated, truncated = bool(flags & TERMINATED), bool(flags & TRUNCATED)
        info = info_of(reply)[0] if info_length else {}
        if flags & IRREGULAR:
            observation, reward, _, _ = irregular_parts(reply)
            return observation, reward, terminated, truncated, info
        return self._decode(reply, seq), reward_of(tag, reward), terminated, truncated, info

    def _truncation(self, reason: str) -> Transition:
        """The honest end of an episode that cannot go on."""
        self.phase = ENDED if self._backend is not None else LOST
        self._owed = ""
        info = {"multienv": {"reason": reason, "recovery": "truncated"}}
        return self._lost_observation, 0.0, False, True, info

    def _sample(self) -> None:
        self.record.step_latency(perf_counter() - self._sampled_at)
        if not self.seq & 1023:
            self._trim()

    def _trim(self) -> None:
        seconds = self.record.step_seconds or 1e-5
        self._journal.trim(self._policy.journal_limit, self._policy.replay_limit / seconds, self._steps)

    # --- everything but steps -----------------------------------------------------------------------

    def send(self, command: str, message: Message) -> None:
        """Send a request that is not a step; does not block."""
        if self.interrupted == WHOLE:
            self._drain()
        if self.phase in (NEW, STARTING, CLOSED, *_PENDING) or os.getpid() != self._owner:
            self.refuse(command)
        if self.phase == LOST:
            self._revive()
        if isinstance(message, Reset):
            message = self._complete_reset(message)
        try:
            frame = pack_message((self.seq + 1) & SEQ_MASK, message)
        except Exception as error:  # pickling runs foreign code
            raise UsageError(
                f"{command}(): its arguments cannot be sent to the env: {type(error).__name__}: {error}. "
                "Nothing was sent."
            ) from error
        self._phase_before, self._command, self._message = self.phase, command, message
        self.seq = (self.seq + 1) & SEQ_MASK
        self._pending = frame
        self.phase = ASKED
        self._backend.arm(self._deadline(message))
        self._backend.send(frame)

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
            self._log(reply)
        if failed:
            self.phase = READY if isinstance(message, Reset) else self._phase_before
            raise self._env_error(reply, command)
        if isinstance(message, Reset):
            return self._finish_reset(reply, message)
        self.phase = self._phase_before
        if isinstance(message, _JOURNALED):
            self._trim()
        return unpack_value(reply)

    def _complete_reset(self, message: Reset) -> Reset:
        """Draw and record a seed where none was ever given; ask for an anchor where one is due."""
        seed = message.seed
        if seed is None and not self._seeded:
            seed = secrets.randbits(31)
        self._trim()
        return Reset(seed, message.options, self._journal.wants_anchor(self._steps))

    def _finish_reset(self, reply: bytes, message: Reset) -> tuple[Any, dict[str, Any]]:
        info, generators = info_of(reply)
        if generators is not None:
            self._journal.anchor(self._pending, evidence_of(reply), message, generators, self._steps)
        if message.seed is not None:
            self._seed, self._seeded = message.seed, True
        self._last = reply
        self._owed = ""
        self._steps_before = self._steps
        self.record.episodes += 1
        self.phase = RUNNING
        return self._observation_in(reply), info

    def _last_reply(self) -> bytes:
        """The last reply that carried an observation, whole if it had more to it than its evidence."""
        evidence = self._journal.last_observed()
        return self._last if self._last and evidence and seq_of(self._last) == seq_of(evidence) else evidence

    def _keep_last_observation(self) -> None:
        """For a truncation: the memory it arrived in may be gone by then."""
        last = self._last_reply()
        self._lost_observation = self._observation_in(last) if last else None

    def _observation_in(self, reply: bytes) -> Any:
        _, seq, _, _, flags, _, _ = _unpack(reply)
        return irregular_parts(reply)[0] if flags & IRREGULAR else self._decode(reply, seq)

    def _deadline(self, message: Message) -> float | None:
        return self._deadlines.reset if isinstance(message, Reset) else self._deadlines.call

    def _log(self, reply: bytes) -> None:
        self._log_request(self._pending)
        self._log_reply(evidence_of(reply))

    def _wait(self, timeout: float | None, command: str) -> None:
        check_seconds("timeout", timeout, zero=True)
        if timeout is not None and not self._backend.poll(timeout):
            raise WaitTimeout(
                f"{command}() has not answered within {timeout} s. It is still running: wait again, or close()."
            )

    def note_interruption(self, error: object, extent: int = WHOLE) -> None:
        """An exception came through a call. If it is not ours and the request is unanswered, that is settled later."""
        if not isinstance(error, MultienvError):
            self.interrupted = extent if self.phase in _PENDING else 0

    def note_interrupted_step(self, error: object, before: int | None) -> None:
        """The same for a step whose outcome may have been logged, and was not delivered all the same.

        ``before`` is the number of the last request before the step; ``None`` if the step was pending already.
        """
        if isinstance(error, MultienvError) or self.phase == CLOSED:
            return
        extent = HALF if before is None else WHOLE
        self.note_interruption(error, extent)
        if not self.interrupted and self._pending and self.seq != before and seq_of(self._pending) == self.seq:
            self.interrupted, self.phase = extent, RESUMED

    # --- after an interrupted call ------------------------------------------------------------------

    def _settle(self) -> None:
        """Ctrl-C may have landed between any two lines of a request: put it where it surely is pending."""
        self._journal.forget_unanswered(self._pending)
        self._backend.ask_again(self._pending)

    def _drain(self) -> None:
        """Collect and drop the answer to a request whose caller was interrupted."""
        self.interrupted = 0
        if self.phase == ASKED:
            self._settle()
            self.receive(self._command)

    # --- losses -------------------------------------------------------------------------------------

    def _await(self, start: bytes, *, defer: bool = False) -> bytes:
        """The reply to the pending request, from whichever process comes to answer it."""
        self._deaths = 0
        while True:
            try:
                reply: bytes = self._backend.complete(start, self.seq)
                self._check_kind(reply)
            except Gone as gone:
                if defer and self.phase != CLOSED:
                    raise RecoveryDue from None
                self._heal(gone)
            else:
                command = self._pending_command()
                if _unpack(reply)[3] != FAILED or self._policy.on_error != "replay" or command != "step":
                    return reply
                if self._deaths + 1 >= self._policy.poison_after:
                    return reply  # it raises every time: the env means it
                fate = self._backend.kill()
                self._heal(Gone("error", fate, pid=self._backend.pid, detail=unpack_value(reply).text))
            start = b""

    def _check_kind(self, reply: bytes) -> None:
        """A reply of another kind than the request asks for belongs to somebody else's request."""
        observes = self.phase in (STEPPING, RESUMED) or isinstance(self._message, Reset)
        if _unpack(reply)[3] not in ((STEPPED, FAILED) if observes else (VALUE, FAILED)):
            fate = self._backend.kill()
            raise Gone("broken", fate, pid=self._backend.pid, detail="a reply of the wrong kind")

    def _pending_command(self) -> str:
        return "step" if self.phase in (STEPPING, RESUMED) else self._command

    def _heal(self, gone: Gone) -> None:
        """Bring the env back and ask again; or raise: EpisodeLost, a WorkerLostError, ClosedError."""
        self._refuse_if_closed()
        command = self._pending_command()
        loss = self._note_loss(gone, command)
        effort = self._healer.begin()
        self._deaths += gone.executing
        self._keep_last_observation()
        on_loss = self._on_loss(gone.cause)
        if on_loss == "raise":
            self._drop_backend()
            self.phase = LOST
            self.record.recovery(loss, "raised", "", effort)
            raise lost_error(loss, loss.cause, "Its episode is lost; the next reset() starts a new process.")
        if on_loss == "truncate":
            self._go_on_without(loss, effort, what_happened(loss), command)
            return
        try:
            backend = self._healer.bring_back(self._journal.plans(), effort, self._steps, self._looks_the_same)
        except BudgetSpent as spent:
            raise self._give_up(loss, effort, spent) from None
        except Unrecoverable as reason:
            self._refuse_if_closed()
            self._go_on_without(loss, effort, f"{what_happened(loss)} It cannot be brought back: {reason}.", command)
            return
        self._refuse_if_closed(backend)
        self._adopt(backend)
        if self._deaths >= self._policy.poison_after:
            self._refuse_poison(loss, effort, command)
        self.record.recovery(loss, "exact", "", effort)
        self._ask_again()

    def _refuse_if_closed(self, backend: Backend | None = None) -> None:
        """The env was closed meanwhile, by another thread or a signal handler: let go of it here."""
        if self.phase == CLOSED:
            if backend is not None:
                backend.kill()
                backend.release()
            self._drop_backend()
            self._let_go()
            self.refuse(self._pending_command())

    def _ask_again(self) -> None:
        step = self.phase in (STEPPING, RESUMED)
        assert step or self._message is not None
        self._backend.arm(self._step_deadline if step else self._deadline(self._message))  # type: ignore[arg-type]
        self._backend.send(self._pending)

    def _looks_the_same(self, backend: Backend, last: bytes) -> bool:
        """The last observation the caller saw, whole, against that of the replay."""
        seen = self._last_reply()
        if not seen:
            return True
        _, seq, _, _, flags, _, _ = _unpack(seen)
        if flags & IRREGULAR:
            return not last or same(irregular_parts(seen), irregular_parts(last))
        if self._block is None:
            return True  # inline: it was compared with the rest of the evidence
        size = self._block.size // 2
        place = (seq & 1) * size
        new = backend.observations(self._block.size)
        return bool(self._block.view[place : place + size] == new.view[place : place + size])

    def _go_on_without(self, loss: Loss, effort: Effort, reason: str, command: str) -> None:
        """The env cannot be brought back. A new episode can be begun; a running one must be ended."""
        self._drop_backend()
        self._journal.clear(self._steps)
        self._seeded = False
        if command == "step":
            self.record.recovery(loss, "truncated", reason, effort)
            raise EpisodeLost(reason)
        if command != "reset" and self._phase_before in (RUNNING, OWED):
            self.record.recovery(loss, "truncated", reason, effort)
            self._owed, self.phase = reason, OWED
            raise lost_error(loss, loss.cause, f"{reason} The next step() ends the episode.")
        self._rebuild(None)
        if isinstance(self._message, Reset):
            self._message = self._complete_reset(Reset(self._message.seed, self._message.options, anchor=True))
            self._pending = pack_message(self.seq, self._message)
        self.record.recovery(loss, "fresh", reason, effort)
        self._ask_again()

    def _refuse_poison(self, loss: Loss, effort: Effort, command: str) -> NoReturn:
        """The env stands just before the request that kills it: end the episode there."""
        reason = f"{what_happened(loss)} The same {command} killed {self._deaths} processes; it was not tried again."
        if command == "step":
            self.record.recovery(loss, "truncated", reason, effort)
            raise EpisodeLost(reason)
        self.phase = READY if command == "reset" else self._phase_before
        self.record.recovery(loss, "raised", reason, effort)
        raise lost_error(
            loss, "poison", f"The same {command}() killed {self._deaths} processes; it is not tried again."
        )

    def _give_up(self, loss: Loss | None, effort: Effort, why: Exception) -> MultienvError:
        self._drop_backend()
        self.phase = LOST if self._healer.description else NEW
        if loss is None:
            loss = self.record.last_loss or Loss(self.record.env_index, "died", "", None, None, None)
        self.record.recovery(loss, "raised", str(why), effort)
        if isinstance(why, BudgetSpent):
            limit = f"{self._policy.max_restarts} restarts in {self._policy.window:g} s"
            return lost_error(loss, "budget", f"Its RestartPolicy allows {limit}; they are spent.")
        return lost_error(loss, loss.cause, f"It could not be started again: {why}.")

    def _revive(self) -> None:
        """A new process, and a new life for the env, after the last one was lost."""
        self._journal.clear(self._steps)
        self._seeded = False
        self._last = b""
        self._rebuild(None)
        self.phase = READY

    def _on_loss(self, cause: str) -> OnLoss:
        policy = self._policy
        return {"hung": policy.on_timeout, "error": policy.on_error}.get(cause, policy.on_crash)

    def _note_loss(self, gone: Gone, command: str) -> Loss:
        step = None if command in ("initialize", "reset") else self._steps - self._steps_before
        return self.record.loss(gone, command, step, self._seed)

    def _env_error(self, reply: bytes, command: str) -> MultienvError:
        step = None if command == "reset" else self._steps - self._steps_before
        return env_error(unpack_value(reply), index=self.record.env_index, command=command, step=step, seed=self._seed)

    # --- wrong calls --------------------------------------------------------------------------------

    def refuse(self, command: str) -> NoReturn:
        """Raise what is wrong with calling ``command`` now, and say what to call instead."""
        phase = self.phase
        if os.getpid() != self._owner:
            raise UsageError(f"{command}(): this env belongs to process {self._owner}; make one in each process.")
        if phase == CLOSED:
            raise ClosedError(f"{command}(): this env has been closed. Make a new one.")
        if phase in (NEW, STARTING):
            raise NotInitializedError(f"{command}(): the env is not built yet. Call initialize() first.")
        if phase in _PENDING:
            pending = self._pending_command()
            if command.endswith("_wait"):
                raise NothingPendingError(f"{command}(): what is pending is {pending}; call {pending}_wait().", command)
            raise CallPendingError(f"{command}(): {pending} is pending. Call {pending}_wait() first.", pending)
        if command.endswith("_wait"):
            raise NothingPendingError(f"{command}(): call {command.removesuffix('_wait')}_async() first.", command)
        if phase == LOST:
            raise ResetNeededError(f"{command}(): the env's process was lost. reset() starts a new one.")
        if phase == ENDED:
            raise ResetNeededError(f"{command}(): the episode has ended. Call reset() first.")
        raise ResetNeededError(f"{command}(): there is no episode yet. Call reset() first.")

    # --- the end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the process, by asking and then by force; again does nothing. Never raises."""
        if self.phase == CLOSED:
            return
        before, self.phase = self.phase, CLOSED
        self._closing.set()
        backend = self._backend
        if os.getpid() != self._owner:  # a forked child of the trainer's lets go of its copies, no more
            self.abandon()
            return
        self._healer.stop()
        if backend is None:
            return
        if before in _PENDING and _is_inside(self):
            # Called from a signal handler or another thread while a call waits for its answer: it will see
            # that its number is no longer current, and let go of the pipes itself.
            self.seq = (self.seq + 1) & SEQ_MASK
            backend.kill()
            return
        self._backend = None
        self._let_go()
        backend.send(pack_message((self.seq + 1) & SEQ_MASK, Close()))
        backend.finish(self._deadlines.close)

    def _let_go(self) -> None:
        """Of what would keep the backend alive and its shared memory mapped."""
        self._views = self._block = None
        self._decode, self._transmit = _no_decoder, _no_sender

    def abandon(self) -> None:
        """Let go without waiting: the process ends by itself."""
        backend, self._backend = self._backend, None
        self.phase = CLOSED
        self._let_go()
        if backend is not None:
            backend.release()

    def statistics(self) -> Statistics:
        """Counters and state at this moment."""
        pid = self._backend.pid if self._backend is not None else None
        return self.record.statistics(
            state=_STATES[self.phase],
            pid=pid,
            steps=self._steps,
            restarts=self._healer.restarts,
            journal_bytes=len(self._journal),
        )


def _is_inside(supervisor: Supervisor) -> bool:
    """Whether some thread is inside a call of this supervisor. Asked when closing: the hot path keeps no note."""
    waiting = {Supervisor.receive_step.__code__, Supervisor._await.__code__}
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_code in waiting and frame.f_locals.get("self") is supervisor:
                return True
            frame = frame.f_back
    return False


def _no_sender(frame: bytes) -> None:
    raise NotInitializedError("The env is not built yet. Call initialize() first.")


def _no_encoder(seq: int, action: Any) -> bytes:
    raise NotInitializedError("The env is not built yet. Call initialize() first.")


def _no_decoder(reply: bytes, seq: int) -> Any:
    raise NotInitializedError("The env is not built yet. Call initialize() first.")
