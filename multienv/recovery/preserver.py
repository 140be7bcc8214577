"""Asking an env for its state now and then, so that a long episode can be gone on with in a new process."""

from __future__ import annotations

import weakref
from typing import Any

from multienv.backends.base import Gone
from multienv.config import Deadlines
from multienv.recovery.awaiter import Awaiter
from multienv.wire.messages import (
    FAILED,
    KIND_OF_REQUEST_AT,
    REPLY,
    SEQ_MASK,
    STEP,
    CaptureState,
    pack_message,
    seq_of,
    unpack_value,
)

_unpack = REPLY.unpack_from
# Longer than this no env may take to tell its state, in seconds. Then it counts as hung, and that as no fault of its.
CAPTURE_DEADLINE = 30.0
# Nor must a step with a deadline wait much longer than that because it came first; but so much it may take.
_AT_LEAST = 1.0


def capture_deadline(deadlines: Deadlines) -> float:
    """How long an env may take to tell its state, in seconds."""
    step = CAPTURE_DEADLINE if deadlines.step is None else max(deadlines.step, _AT_LEAST)
    return min(CAPTURE_DEADLINE, step, deadlines.call or CAPTURE_DEADLINE)


class Preserver(Awaiter):
    """Keeps states of the env as anchors of its journal."""

    __slots__ = ()

    def _state_is_due(self) -> bool:
        """Whether the env should be asked for its state before the next step."""
        policy, journal, anchoring = self._policy, self._journal, self._anchoring
        if not anchoring.may_ask(self._steps, hurry=True):
            return False
        steps, step_limit = self._steps, policy.replay_limit / self.env_seconds()
        if not journal.wants_state(policy.journal_limit, step_limit, steps):
            return False
        # Half of all that may be held has come since the last one: soon the rest is forgotten.
        hurry = journal.wants_state(policy.journal_limit * 2, step_limit * 2, steps)
        taken, obstacle = self._backend.snapshots()
        return anchoring.may_ask(steps, hurry=hurry, beside=taken > 0 and not obstacle)

    def _preserve(self) -> None:
        """Ask for it, between two requests. When the process is lost meanwhile, the next request finds that.

        What was interrupted goes on when this is called again: until its outcome is noted the request stays put down,
        and the worker executes it once.
        """
        backend: Any = self._backend  # Backend | None
        if backend is None:
            self._asked_state = None
            return
        asked, deadline = self._asked_state, capture_deadline(self._deadlines)
        if asked is not None and asked[0]() is backend:
            frame = asked[1]
            self._backend.arm(deadline)
            self._backend.ask_again(frame)
        else:
            before = self._pending
            step = before if before and before[KIND_OF_REQUEST_AT] == STEP else b""
            # As for any request that shows no observation: steps go on to alternate between even and odd.
            seq = (self.seq + 2) & SEQ_MASK
            frame = pack_message(seq, CaptureState(step))
            self.seq, self._asked_state = seq, (weakref.ref(backend), frame)
            backend.arm(deadline)
            backend.send(frame)
        try:
            reply = backend.complete(b"", seq_of(frame))
        except Gone as gone:
            self._anchoring.refused(self._steps, f"its process was lost ({gone.cause}) while telling it", lost=True)
            self._asked_state = None
            return
        self._note_state(reply)
        self._asked_state = None

    def _note_state(self, reply: bytes) -> None:
        if _unpack(reply)[3] == FAILED:
            self._anchoring.refused(self._steps, unpack_value(reply).text)
            return
        seconds, state = unpack_value(reply)
        if len(state) > self._policy.journal_limit / 4:
            self._anchoring.refused(self._steps, f"it takes {len(state):,} bytes, a quarter of journal_limit or more")
            return
        self._journal.keep_state(state, self._steps)
        self._anchoring.took(self._steps, seconds * self._workers_waiting(), self.env_seconds())

    def _workers_waiting(self) -> float:
        """How many workers do nothing while one tells its env's state."""
        return 1.0
