"""The answer to the pending request: from whichever process comes to give it, and after an interrupted call too."""

from __future__ import annotations

import contextlib

from multienv.backends.base import Gone
from multienv.errors import MultienvError
from multienv.recovery.phases import HALF, PENDING, RESUMED, STEPPING, WHOLE, EpisodeLost, RecoveryDue
from multienv.recovery.report import env_error
from multienv.recovery.restorer import Restorer
from multienv.wire.messages import FAILED, REPLY, STEPPED, VALUE, Failure, Reset, evidence_of, seq_of, unpack_value

_unpack = REPLY.unpack_from


class Awaiter(Restorer):
    """Awaits what has been asked: replies, losses in between, and calls that were interrupted."""

    __slots__ = ()

    # --- the reply ----------------------------------------------------------------------------------

    def interests(self) -> list[tuple[int, int]]:
        """Descriptors and events that come before the answer; none if there is no need to wait for them."""
        return self._backend.interests() if self.phase in PENDING and self._backend is not None else []

    def answered(self) -> bool:
        """Whether the answer, or the end of the process, is there to be received."""
        return self.phase not in PENDING or self._backend is None or self._backend.poll(0.0)

    def _await(self, start: bytes, *, defer: bool = False) -> bytes:
        """The reply to the pending request, from whichever process comes to answer it."""
        self._deaths = self._losses = 0
        if self._owed and self._pending_command() == "step":
            raise EpisodeLost(self._owed)  # an interruption kept the caller from hearing of it
        while True:
            try:
                if self._backend is None:  # an interruption came in the middle of a recovery
                    raise Gone("died", executing=False)
                reply: bytes = self._backend.complete(start, self.seq)
                self._check_kind(reply)
            except Gone as gone:
                if defer and not self.closed:
                    raise RecoveryDue from None
                self._heal(gone)
            else:
                if self._policy.on_error != "replay" or self._pending_command() != "step":
                    return reply
                error = self._error_in(reply)
                if error is None or self._deaths + 1 >= self._policy.poison_after:
                    return reply  # if it raises every time the env means it
                fate = self._backend.kill()
                self._heal(Gone("error", fate, pid=self._backend.pid, detail=error.text, traceback=error.traceback))
            start = b""

    def _error_in(self, reply: bytes) -> Failure | None:
        """What the env has raised in a step."""
        return unpack_value(reply) if _unpack(reply)[3] == FAILED else None

    def _check_kind(self, reply: bytes) -> None:
        """A reply of another kind than the request asks for belongs to somebody else's request."""
        observes = self.phase in (STEPPING, RESUMED) or isinstance(self._message, Reset)
        if _unpack(reply)[3] not in ((STEPPED, FAILED) if observes else (VALUE, FAILED)):
            fate = self._backend.kill()
            raise Gone("broken", fate, pid=self._backend.pid, detail="a reply of the wrong kind")

    def _env_error(self, reply: bytes, command: str) -> MultienvError:
        step = None if command == "reset" else self._steps - self._steps_before
        return env_error(unpack_value(reply), index=self.record.env_index, command=command, step=step, seed=self._seed)

    def _log(self, reply: bytes) -> None:
        if not self._journal.recording and _unpack(reply)[3] != STEPPED:
            return  # the last observation alone is kept
        self._log_request(self._pending)
        self._log_reply(evidence_of(reply))

    # --- a call that was interrupted ----------------------------------------------------------------

    def note_interruption(self, error: object, extent: int = WHOLE) -> None:
        """An exception came through a call. If it is not ours and the request is unanswered, that is settled later."""
        if not isinstance(error, MultienvError):
            self.interrupted = extent if self.phase in PENDING else 0

    def rest(self) -> None:
        """Nobody waits for what has been asked, and it may not even have been sent: no deadline until it is settled."""
        backend = self._backend
        if backend is not None and not self.closed and (self.phase in PENDING or self._asked_state is not None):
            with contextlib.suppress(ValueError):  # closed by another thread just now
                backend.arm(None)

    def note_interrupted_step(self, error: object, before: int | None) -> None:
        """The same for a step whose outcome may have been logged, and was not delivered all the same.

        ``before`` is the number of the last request before the step; ``None`` if the step was pending already.
        """
        if isinstance(error, MultienvError) or self.closed:
            return
        self.rest()
        extent = HALF if before is None else WHOLE
        self.note_interruption(error, extent)
        if not self.interrupted and self._pending and self.seq != before and seq_of(self._pending) == self.seq:
            self.interrupted, self.phase = extent, RESUMED

    def is_resumable(self, error: object) -> bool:
        """Whether what came through a call, out of descriptors for instance, has left the request pending."""
        return not isinstance(error, MultienvError) and self.phase in PENDING and not self.closed

    def has_asked_since(self, mark: int) -> bool:
        """Whether a request has been made ready since ``seq`` was ``mark``; it may have been sent and answered."""
        if self.phase in PENDING:
            return True
        return self.seq != mark and bool(self._pending) and seq_of(self._pending) == self.seq

    def _settle(self) -> None:
        """Ctrl-C may have landed between any two lines of a request: put it where it surely is pending."""
        self._journal.forget_unanswered(self._pending)
        if self._backend is not None:
            self._arm_pending()
            self._backend.ask_again(self._pending)
