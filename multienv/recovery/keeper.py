"""What one env consists of on the trainer's side: its process, its journal, what was seen, what is pending."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from multienv.backends.base import Backend
from multienv.config import Deadlines, RestartPolicy
from multienv.errors import (
    CallPendingError,
    ClosedError,
    NothingPendingError,
    NotInitializedError,
    ResetNeededError,
    ResultNotPicklableError,
    UsageError,
)
from multienv.events import Hook, Loss, Statistics
from multienv.recovery.anchoring import Anchoring
from multienv.recovery.healer import Healer, Launcher
from multienv.recovery.journal import ANCHOR_EVERY, Journal
from multienv.recovery.phases import (
    CLOSED,
    ENDED,
    IDLE,
    LOST,
    NEW,
    PENDING,
    RESUMED,
    STARTING,
    STATES,
    STEPPING,
    WHOLE,
)
from multienv.recovery.record import Record
from multienv.recovery.recycling import Recycling
from multienv.recovery.report import decoded
from multienv.recovery.verification import alike
from multienv.wire.actions import EncodeStep, action_encoder
from multienv.wire.memory import Block
from multienv.wire.messages import (
    IRREGULAR,
    REPLY,
    SEQ_MASK,
    Close,
    Description,
    Initialize,
    Message,
    pack_message,
    seq_of,
)
from multienv.wire.observations import Placement, array_views, body_of, irregular_parts, reader

_unpack = REPLY.unpack_from
_Call = TypeVar("_Call", bound=Callable[..., Any])


# All there are, for a forked child of the trainer's: they are not the child's to step.
_kept: weakref.WeakSet[Keeper] = weakref.WeakSet()


def _disown() -> None:
    for keeper in _kept:
        if keeper.phase != CLOSED:
            keeper.phase = ENDED  # whatever is called now looks whose it is


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)


def entered(call: _Call) -> _Call:
    """While it runs close() does not pull the pipes away under it."""

    @wraps(call)
    def wrapper(self: Keeper, *args: Any, **kwargs: Any) -> Any:
        before, self.inside = self.inside, True
        try:
            return call(self, *args, **kwargs)
        finally:
            self.inside = before

    return wrapper  # type: ignore[return-value]


class Keeper:
    """Holds everything one env consists of here: its process, its journal, what was seen last, what is pending.

    Args:
        launch: Gives a backend whose process has been launched.
        initialize: The request that builds the env.
        policy: What to do about losses.
        deadlines: When a process counts as hung.
        env_index: The env's index in its batch, for messages.
        hooks: Called with each ``Loss`` and ``Recovery``.
        recording: Whether to keep a journal; ``None``: if the policy has any loss made good.
        reports: The directory for crash reports; ``None`` for none.
    """

    # Slots, because an object with so many attributes would lose CPython's fast path to them.
    __slots__ = """
        __weakref__ core _anchoring _asked_state _backend _block _branching _buffer _looks _closing _command _deadlines
        _deaths _decode _encode _ending _healer _inline_limit _journal _last _log_reply _log_request _losses
        _lost_observation _message _mourned _owed _owner _pending _phase_before _placement _plain_reply _plain_size
        _policy _recycling _sampled_at _seed _step_deadline _steps _steps_before _transmit _views begun closed due
        inside interrupted phase record seq snapshots
    """.split()  # noqa: SIM905 - one name a line would take a page

    def __init__(
        self,
        launch: Launcher,
        initialize: Initialize,
        *,
        policy: RestartPolicy,
        deadlines: Deadlines,
        env_index: int | None = None,
        hooks: tuple[Hook, ...] = (),
        recording: bool | None = None,
        reports: Path | None = None,
    ) -> None:
        """Start nothing yet."""
        replaying = policy.replays if recording is None else recording
        self.seq = 0
        self.phase = NEW
        self.begun = 0  # how often the caller has had another episode: resets, and returns to an earlier state
        self.interrupted = 0
        self.inside = False  # some thread is in a call that uses the pipes
        self.record = Record(env_index, hooks, reports)
        self.snapshots: weakref.WeakSet[Any] = weakref.WeakSet()  # to come back to
        self._policy, self._deadlines = policy, deadlines
        self._owner = os.getpid()
        _kept.add(self)
        self._closing = threading.Event()
        self._ending = threading.Lock()  # who kills looks at descriptors that the waiting call lets go of
        self.closed = False  # the phase may be set once more by a call that close() interrupts
        self._healer = Healer(launch, initialize, policy, deadlines, wait=self._closing.wait)
        self._inline_limit = initialize.inline_limit
        self._recycling = Recycling(policy)
        self._anchoring = Anchoring(policy)
        self._asked_state: tuple[weakref.ref[Any], bytes] | None = None  # whom, and how: not known to be answered
        self._branching = 0  # the token of a snapshot that has been asked for, until somebody holds it
        self.due = ""  # why the process is to be replaced before the next request
        anchors = 1 if self._recycling.wanted else ANCHOR_EVERY
        # A report is to be replayed whatever the policy does, unless there is to be no journal at all.
        kept = replaying or (reports is not None and policy.journal_limit > 0)
        self._journal = Journal(recording=kept, replaying=replaying, anchor_every=anchors)
        self._log_request, self._log_reply = self._journal.log_request, self._journal.log_reply
        self._transmit: Callable[[bytes], None] = _no_sender
        self.core: int | None = None
        self._looks = False
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
        self._deaths = self._losses = 0  # processes that died executing the pending request; and all lost meanwhile
        self._mourned: tuple[weakref.ref[Any], Loss] | None = None  # whose loss is noted, and how
        self._owed = ""  # why the next step must be a truncation
        self._seed: int | None = None
        self._steps = 0
        self._steps_before = 0
        self._sampled_at = 0.0
        self._lost_observation: Any = None

    # --- its process ------------------------------------------------------------------------------

    @entered
    def start(self) -> None:
        """Launch the process and ask it to build the env; neither is waited for."""
        if self.closed:
            self.refuse("start")
        if self.phase == NEW:
            again = self._backend is not None  # launched by a call that was interrupted
            if not again:
                self._backend = self._healer.launch()
            self._healer.request_build(self._backend, again=again)
            self.phase = STARTING
            self._refuse_if_closed(command="start")

    def _adopt(self, backend: Backend) -> None:
        """From now on this backend is the env's."""
        description = self._healer.description
        assert description is not None
        if self._encode is _no_encoder:
            self._lay_out(description)
            self._encode = action_encoder(description.action_space)  # last: an interruption leaves all to do again
        space, placement = description.observation_space, self._placement
        block = backend.observations(placement.block_size) if placement.block_size else None
        decode, views = reader(space, placement, block), array_views(space, placement, block, backend.buffer)
        transmit, buffer, size = backend.send, backend.buffer, self._size_of_plain_replies()
        plain_reply = memoryview(buffer)[:size]
        old, unused = self._backend, (self._block, self._decode, self._views, self._plain_reply, self._transmit)
        # At one stroke, and nothing is destroyed in it: no interruption leaves the one's buffer with the other's pipe.
        self._backend = backend
        self._block, self._decode, self._views = block, decode, views
        self._buffer, self._plain_size, self._plain_reply = buffer, size, plain_reply
        self._transmit = transmit
        del unused
        self._healer.hand_over()
        self._recycling.begin(self._steps, self.record.episodes)
        self.due = ""
        backend.prefer(self.core, looks=self._looks)
        if old is not None and old is not backend:
            old.release()

    def _lay_out(self, description: Description) -> None:
        """Decide how observations travel."""
        self._placement = Placement.of(description.observation_space, self._inline_limit)

    def _size_of_plain_replies(self) -> int:
        return self._placement.plain_size

    def prefer(self, core: int | None, *, looks: bool) -> None:
        """Have the worker, and each that replaces it, run on this core while steps are short; or tell it is alone."""
        self.core, self._looks = core, looks
        if self._backend is not None:
            self._backend.prefer(core, looks=looks)

    def _drop_backend(self) -> None:
        old = self._backend
        # At one stroke, whatever interrupts then: nothing is sent by descriptors that may soon be somebody else's.
        self._backend, self._transmit = None, _no_sender
        if self.phase in IDLE:
            self.phase = LOST
        if old is not None:
            old.kill()
            old.release()

    # --- what was seen last -------------------------------------------------------------------------

    def _last_reply(self) -> bytes:
        """The last reply that carried an observation, whole if it had more to it than its evidence."""
        evidence = self._journal.last_observed()
        return self._last if self._last and evidence and seq_of(self._last) == seq_of(evidence) else evidence

    def _keep_last_observation(self) -> None:
        """For a truncation: the memory it arrived in may be gone by then."""
        last = self._last_reply()
        with contextlib.suppress(ResultNotPicklableError):  # then what was seen before it
            self._lost_observation = self._observation_in(last, "step") if last else None

    def _observation_in(self, reply: bytes, command: str) -> Any:
        _, seq, _, _, flags, _, _ = _unpack(reply)
        return decoded(irregular_parts, reply, command)[0] if flags & IRREGULAR else self._decode(reply, seq)

    def _looks_the_same(self, backend: Backend, last: bytes) -> bool:
        """The last observation the caller saw, whole, against that of the replay."""
        seen = self._last_reply()
        if not seen:
            return True
        _, seq, _, _, flags, _, _ = _unpack(seen)
        if flags & IRREGULAR:
            return not last or alike(body_of(seen), body_of(last))
        if self._block is None:
            return True  # inline: it was compared with the rest of the evidence
        return self._memory_of(seq, self._block) == self._memory_of(seq, backend.observations(self._block.size))

    @staticmethod
    def _memory_of(seq: int, block: Block) -> memoryview:
        """Where the observation of this reply lies."""
        size = block.size // 2
        place = (seq & 1) * size
        return block.view[place : place + size]

    # --- wrong calls --------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether a request could be sent now, to the process there is."""
        return self.phase in IDLE and self._backend is not None and not self.is_foreign

    @property
    def is_foreign(self) -> bool:
        """It belongs to another process, from which this one was forked."""
        return os.getpid() != self._owner

    def _pending_command(self) -> str:
        return "step" if self.phase in (STEPPING, RESUMED) else self._command

    def refuse(self, command: str) -> NoReturn:
        """Raise what is wrong with calling ``command`` now, and say what to call instead."""
        phase = self.phase
        if self.is_foreign:
            raise UsageError(f"{command}(): this env belongs to process {self._owner}; make one in each process.")
        if self.closed:
            raise ClosedError(f"{command}(): this env has been closed. Make a new one.")
        if phase in (NEW, STARTING):
            raise NotInitializedError(f"{command}(): the env is not built yet. Call initialize() first.")
        if phase in PENDING:
            pending = self._pending_command()
            if self.interrupted == WHOLE:
                raise CallPendingError(
                    f"{command}(): {pending}() was interrupted. Call {pending}() again for its outcome, or reset().",
                    pending,
                )
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

    def close(self, patience: float | None = None) -> None:
        """End the process, by asking and then by force; again does nothing. Never raises.

        It is asked for ``Deadlines.close`` seconds, or for ``patience`` if that is less.
        """
        is_foreign = self.is_foreign
        if self.closed:
            if not self.inside:  # a call that the first close() broke off has come to its end since
                self._release_backend()
            return
        if is_foreign:  # a forked child of the trainer's lets go of its copies, no more
            self.abandon()
            return
        # At one stroke: who closes it too, in another thread or a signal handler, finds no backend to end.
        self.closed, self.phase = True, CLOSED
        backend, inside = self._backend, self.inside
        if not inside:
            self._backend = None
        try:
            self._closing.set()
            self._healer.stop()
            if backend is None:
                return
            if inside:
                self._break_off(backend)
                return
            self._let_go()
            backend.send(pack_message((self.seq + 1) & SEQ_MASK, Close()))
            limit = self._deadlines.close
            backend.finish(limit if patience is None else min(limit, max(0.0, patience)))
        except BaseException:  # a signal handler raised: without asking any more
            if backend is not None and not inside:
                backend.kill()
                backend.release()
            raise
        finally:
            self._free_snapshots()

    def _free_snapshots(self) -> None:
        """Once the process has ended: nobody has heard yet of one that it is just taking."""
        for snapshot in list(self.snapshots):
            snapshot.free()
        self._free_forsaken()

    def _free_forsaken(self) -> None:
        """That which has been asked for by a snapshot() that was interrupted."""
        if self._branching:
            self._healer.free(self._branching)
            self._branching = 0

    def _break_off(self, backend: Backend) -> None:
        """End a call that this thread is in, below a signal handler, or that another one is in."""
        self.seq = (self.seq + 1) & SEQ_MASK  # so that it sees that its number is no longer current
        with self._ending:
            backend.kill()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_locals.get("self") is self and frame.f_code.co_name != "close":
                return  # the call lets go of the pipes itself
            frame = frame.f_back
        until = time.monotonic() + self._deadlines.close
        while True:
            # Said again before each look: a step on its way has its own idea of the phase. Who comes in after a look
            # that has found nobody inside is refused.
            self.phase = CLOSED
            if not self.inside:
                self._release_backend()
                return
            if time.monotonic() > until:
                return
            time.sleep(0.001)  # asked, because to tell would cost each step a lock

    def _refuse_if_closed(self, backend: Backend | None = None, command: str = "") -> None:
        """The env was closed meanwhile, by another thread or a signal handler: let go of it here."""
        if self.closed:
            with self._ending:
                if backend is not None:
                    backend.kill()
                    backend.release()
                self._drop_backend()
                self._let_go()
            self.refuse(command or self._pending_command())

    def _let_go(self) -> None:
        """Of what would keep the backend alive and its shared memory mapped."""
        self._views = self._block = None
        self._decode, self._transmit = _no_decoder, _no_sender

    def abandon(self) -> None:
        """Let go without waiting: the process ends by itself."""
        self.closed, self.phase = True, CLOSED
        self._release_backend()

    def _release_backend(self) -> None:
        backend, self._backend = self._backend, None
        self._let_go()
        if backend is not None:
            backend.release()

    def statistics(self) -> Statistics:
        """Counters and state at this moment."""
        backend: Backend | None = self._backend
        pid = None if backend is None else backend.pid
        return self.record.statistics(
            state=STATES[CLOSED if self.closed else self.phase],
            pid=pid,
            steps=self._steps,
            restarts=self._healer.restarts,
            journal_bytes=len(self._journal),
            snapshots=backend.snapshots() if backend is not None else (0, ""),
            state_anchors=(self._anchoring.taken, self._anchoring.obstacle),
        )


def _no_sender(frame: bytes) -> None:
    raise NotInitializedError("The env is not built yet. Call initialize() first.")


def _no_encoder(seq: int, action: Any) -> bytes:
    raise NotInitializedError("The env is not built yet. Call initialize() first.")


def _no_decoder(reply: bytes, seq: int) -> Any:
    raise NotInitializedError("The env is not built yet. Call initialize() first.")
