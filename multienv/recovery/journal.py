"""What drove an env since its anchor, and what the caller saw of it.

Two lists in step: the request frames as they were sent, and the evidence of their replies (see
``wire.messages.evidence_of``). Appending is all the hot path does.

A replay begins at the construction of the env as long as the journal reaches back that far: that is exact
for every deterministic env, also for one whose state outlives an episode. When the journal outgrows its
limit the oldest episodes are forgotten; a replay then begins at a reset, with the random generators put
back as they were before it, and only its verification can tell whether the env remembers more than that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from multienv.wire.messages import Reset, pack_message

# CPython's own cost of a bytes object and of the reference to it.
_OVERHEAD = 33 + 8
# A reset is made an anchor when this many requests have passed since the last one: capturing the
# generators' state takes as long as ten steps of CartPole.
ANCHOR_EVERY = 2048
# The journal's size is looked at when it has grown by so many requests.
_COUNT_EVERY = 1024


@dataclass(frozen=True, slots=True)
class Anchor:
    """A reset that a replay can begin with."""

    index: int
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
        requests: Frames, in the order they were answered.
        replies: Their evidence. One shorter only while Ctrl-C is being survived.
        complete: It reaches back to the construction of the env.
        usable: It can bring the env back at all.
    """

    requests: Any  # list[bytes]; a deque that keeps nothing when not recording
    replies: Any

    def __init__(self, *, recording: bool) -> None:
        """Begin with an env that has just been built."""
        self.recording = recording
        self.clear()

    def clear(self) -> None:
        """Begin anew: the env has just been built."""
        if self.recording:
            self.requests, self.replies = [], []
        else:
            self.requests, self.replies = deque(maxlen=0), deque(maxlen=0)
        self.complete = self.usable = self.recording
        self._anchors: list[Anchor] = []
        self._bytes = 0
        self._counted = 0

    def __len__(self) -> int:
        """Requests held."""
        return len(self.replies)

    def wants_anchor(self) -> bool:
        """Whether the coming reset should tell the state of the random generators."""
        if not self.recording:
            return False
        return not self._anchors or not self.usable or len(self.requests) - self._anchors[-1].index >= ANCHOR_EVERY

    def anchor(self, reset: Reset, generators: bytes) -> None:
        """The last request was this reset, and the generators stood so before it."""
        if not self.usable:  # what came before has been forgotten: begin again here
            del self.requests[:-1]
            del self.replies[:-1]
            self._anchors.clear()
            self._bytes = self._counted = 0
            self.usable = True
        self._anchors.append(Anchor(len(self.requests) - 1, reset, generators))

    def plans(self) -> list[Plan]:
        """The replays to try, the most trustworthy first."""
        if not self.usable:
            return []
        if self.complete:
            return [Plan(tuple(self.requests), tuple(self.replies), True)]
        return [self._from(self._anchors[0])] if self._anchors else []

    def _from(self, anchor: Anchor) -> Plan:
        seq = int.from_bytes(self.requests[anchor.index][4:8], "little")
        first = pack_message(seq, replace(anchor.reset, generators=anchor.generators, anchor=True))
        frames = (first, *self.requests[anchor.index + 1 :])
        return Plan(frames, tuple(self.replies[anchor.index :]), False)

    def trim(self, limit: int, request_limit: float) -> None:
        """Forget the oldest episodes when more than ``limit`` bytes or ``request_limit`` requests are held.

        Half of it is kept, so that this is rare. An episode that does not fit alone makes the journal
        unusable until the next reset.
        """
        if not self.recording or len(self.replies) - self._counted < _COUNT_EVERY:
            return
        self._count()
        if self._bytes <= limit and len(self.requests) <= request_limit:
            return
        share = max(self._bytes / limit if limit else 2.0, len(self.requests) / max(1.0, request_limit), 1.0)
        keep = len(self.requests) / share / 2
        start = next((one.index for one in self._anchors if len(self.requests) - one.index <= keep), None)
        if start is None and self._anchors and self._anchors[-1].index > 0:
            # No anchor in the half to keep: the last one will do if what follows it fits the whole.
            tail = len(self.requests) - self._anchors[-1].index
            if tail <= len(self.requests) / share:
                start = self._anchors[-1].index
        self.complete = False
        if start is None:
            self.requests.clear()
            self.replies.clear()
            self._anchors.clear()
            self._bytes = self._counted = 0
            self.usable = False
            return
        del self.requests[:start]
        del self.replies[:start]
        self._anchors = [replace(one, index=one.index - start) for one in self._anchors if one.index >= start]
        self._bytes = self._counted = 0
        self._count()

    def _count(self) -> None:
        start, end = self._counted, len(self.replies)
        self._bytes += sum(map(len, self.requests[start:end])) + sum(map(len, self.replies[start:end]))
        self._bytes += 2 * _OVERHEAD * (end - start)
        self._counted = end
