"""What drove an env since its anchor, and what the caller saw of it.

Two byte strings: the request frames as they were sent, end to end, and the evidence of their replies (see
``wire.messages.evidence_of``) likewise. Appending is all the hot path does; one string, not a list of many,
because new memory for each step is what a journal costs.

A replay begins at the construction of the env as long as the journal reaches back that far: that is exact
for every deterministic env, also for one whose state outlives an episode. When the journal outgrows its
limit the oldest episodes are forgotten; a replay then begins at a reset, with the random generators put
back as they were before it, and only its verification can tell whether the env remembers more than that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import setitem

from multienv.wire.messages import KIND_AT, STEPPED, Reset, pack_message, seq_of, split_frames

# A reset is made an anchor when this many steps have passed since the last one: capturing the generators'
# state takes as long as ten steps of CartPole.
ANCHOR_EVERY = 2048

# The cheapest callable there is that does nothing with a bytes object.
_ignore: Callable[[bytes], object] = id


@dataclass(frozen=True, slots=True)
class Anchor:
    """A reset that a replay can begin with, and where it lies."""

    request: int
    reply: int
    steps: int
    reset: Reset
    generators: bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """A replay: these frames, and the evidence they must reproduce."""

    frames: tuple[bytes, ...]
    evidence: tuple[bytes, ...]
    from_construction: bool


class Journal:
    """Bounded in bytes and, through :meth:`trim`, in the time its replay takes.

    Attributes:
        log_request: Appends a request frame.
        log_reply: Appends the evidence of its reply.
        complete: It reaches back to the construction of the env.
        usable: It can bring the env back at all.
    """

    def __init__(self, *, recording: bool) -> None:
        """Begin with an env that has just been built."""
        self.recording = recording
        self._roomy = True  # far from the limit, as of the last trim
        self._requests, self._replies = bytearray(), bytearray()
        self._last_forgotten = b""
        # Always these two objects' methods: the hot path holds them.
        self.log_request: Callable[[bytes], object] = self._requests.extend if recording else _ignore
        # Without a journal the last reply alone is kept: a truncation shows its observation.
        self.log_reply: Callable[[bytes | memoryview], object] = (
            self._replies.extend if recording else partial(setitem, self._replies, slice(None))
        )
        self.clear()

    def clear(self, steps: int = 0) -> None:
        """Begin anew: the env has just been built."""
        self._forget_all()
        self._last_forgotten = b""
        self.complete = self.usable = self.recording
        self._anchors: list[Anchor] = []
        self._steps_before = steps

    def _forget_all(self) -> None:
        self._last_forgotten = self.last_observed()
        self._requests.clear()
        self._replies.clear()

    def last_observed(self) -> bytes:
        """Evidence of the last reply that carried an observation, or ``b""``."""
        observed = (reply for reply in reversed(split_frames(self._replies)) if reply[KIND_AT] == STEPPED)
        return next(observed, self._last_forgotten)

    def __len__(self) -> int:
        """Bytes held."""
        return len(self._requests) + len(self._replies)

    def forget_unanswered(self, pending: bytes) -> None:
        """Leave the request ``pending`` out, wherever between sending and logging its caller was interrupted."""
        if not self.recording:
            return
        requests, replies = split_frames(self._requests), split_frames(self._replies)
        keep = min(len(requests), len(replies))
        if keep and seq_of(requests[keep - 1]) == seq_of(pending):
            keep -= 1
        del self._requests[sum(map(len, requests[:keep])) :]
        del self._replies[sum(map(len, replies[:keep])) :]

    def wants_anchor(self, steps: int) -> bool:
        """Whether the coming reset should tell the state of the random generators."""
        if not self.recording:
            return False
        if not self._anchors or not self.usable:
            return True
        return steps - self._anchors[-1].steps >= ANCHOR_EVERY or not self._roomy

    def anchor(self, frame: bytes, evidence: bytes, reset: Reset, generators: bytes, steps: int) -> None:
        """What has just been logged was this reset, and the generators stood so before it."""
        if not self.usable:  # what came before has been forgotten: begin again here
            del self._requests[: -len(frame)]
            del self._replies[: -len(evidence)]
            self._anchors.clear()
            self._steps_before = steps
            self.usable = True
        request, reply = len(self._requests) - len(frame), len(self._replies) - len(evidence)
        self._anchors.append(Anchor(request, reply, steps, reset, generators))

    def plans(self) -> list[Plan]:
        """The replays to try, the most trustworthy first."""
        if not self.usable:
            return []
        if self.complete:
            return [Plan(tuple(split_frames(self._requests)), tuple(split_frames(self._replies)), True)]
        return [self._from(self._anchors[0])] if self._anchors else []

    def _from(self, anchor: Anchor) -> Plan:
        frames = split_frames(self._requests[anchor.request :])
        first = pack_message(seq_of(frames[0]), replace(anchor.reset, generators=anchor.generators, anchor=True))
        return Plan((first, *frames[1:]), tuple(split_frames(self._replies[anchor.reply :])), False)

    def _bytes_since(self, anchor: Anchor) -> int:
        return len(self) - anchor.request - anchor.reply

    def trim(self, limit: int, step_limit: float, steps: int) -> None:
        """Forget the oldest episodes when more than ``limit`` bytes or ``step_limit`` steps are held.

        Half of it is kept, so that this is rare. An episode that does not fit alone makes the journal
        unusable until the next reset.
        """
        # Few steps with large requests: anchors every so many steps would lie too far apart.
        self._roomy = not self._anchors or self._bytes_since(self._anchors[-1]) <= limit / 8
        if not self.recording or (len(self) <= limit and steps - self._steps_before <= step_limit):
            return
        self.complete = False

        def fits(anchor: Anchor, share: float) -> bool:
            return steps - anchor.steps <= step_limit * share and self._bytes_since(anchor) <= limit * share

        # The oldest anchor in the half to keep; failing that the last one, if what follows it fits the whole.
        start = next((one for one in self._anchors if fits(one, 0.5)), None)
        if start is None and self._anchors and fits(self._anchors[-1], 1.0):
            start = self._anchors[-1]
        if start is None:
            self._forget_all()
            self._anchors.clear()
            self.usable = False
            return
        del self._requests[: start.request]
        del self._replies[: start.reply]
        self._anchors = [
            replace(one, request=one.request - start.request, reply=one.reply - start.reply)
            for one in self._anchors[self._anchors.index(start) :]
        ]
        self._steps_before = start.steps
