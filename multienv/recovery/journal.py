"""What drove an env since its anchor, and what the caller saw of it.

One byte string: each request frame as it was sent, and behind it the evidence of its reply (see
``wire.messages.evidence_of``). Appending is all the hot path does; one string, not a list of many, because
new memory is what a journal costs, and so is each place in memory that a step has to touch.

A replay begins at the construction of the env as long as the journal reaches back that far: that is exact
for every deterministic env, also for one whose state outlives an episode. When the journal outgrows its
limit the oldest part is forgotten; a replay then begins at an anchor. That is a reset, with the random
generators put back as they were before it; or the state of the env as it was between two requests, put into a
new one. Only its verification can tell whether the env remembers more than that. So no replay begins at a
state unless enough has been seen since to hold against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import setitem

from multienv.recovery.proof import has_proof
from multienv.wire.messages import (
    KIND_AT,
    KIND_OF_REQUEST_AT,
    LASTING,
    MESSAGE,
    REPLY,
    STEP,
    STEPPED,
    TAG_AT,
    VALUE,
    Reset,
    RestoreState,
    pack_message,
    seq_of,
    split_frames,
    unpack_message,
)

# A reset is made an anchor when this many steps have passed since the last one: capturing the generators'
# state takes as long as ten steps of CartPole.
ANCHOR_EVERY = 2048

# Kind, tag and padding in the header of such a request; elsewhere it is found by accident, and that does not matter.
_LASTING_MARK = bytes((MESSAGE, LASTING, 0, 0))
# Bytes in which to look for a reply before all are taken apart.
_GLANCE = 65536

# Steps that must have been seen since a state for a replay to begin there.
PROOF = 64
# A state is wanted whenever this part of what may be held has come since the last one.
_PART = 4
# ALE has something about it that no state tells: now and then one does not hold, and the next does.
_STATES_TRIED = 2
_RESTORED = REPLY.pack(REPLY.size, 0, 0, VALUE, 0, 0, 0.0)

# The cheapest callable there is that does nothing with a bytes object.
_ignore: Callable[[bytes], object] = id


@dataclass(frozen=True, slots=True)
class Anchor:
    """Where a replay can begin: at a reset, with these generators; or else with this state of the env."""

    place: int
    steps: int
    generators: bytes = b""
    state: bytes = b""


@dataclass(frozen=True, slots=True)
class Plan:
    """A replay: these frames, and the evidence they must reproduce."""

    frames: tuple[bytes, ...]
    evidence: tuple[bytes, ...]
    from_construction: bool
    from_state: bool = False


class Journal:
    """Bounded in bytes and, through :meth:`trim`, in the time its replay takes.

    Attributes:
        log_request: Appends a request frame.
        log_reply: Appends the evidence of its reply.
        complete: It reaches back to the construction of the env.
        usable: It can bring the env back at all.
    """

    def __init__(self, *, recording: bool, replaying: bool = True, anchor_every: int = ANCHOR_EVERY) -> None:
        """Begin with an env that has just been built; without ``replaying`` what is recorded is for reports alone."""
        self.recording = recording
        self.replaying = replaying and recording
        self._anchor_every = anchor_every
        self._roomy = True  # far from the limit, as of the last trim
        self._entries = bytearray()
        self._known = 0  # a frame begins there, one of the last
        self._last_forgotten = b""
        self._remembers = False  # more than a reset and the generators
        # Always this one object's methods: the hot path holds them.
        append: Callable[[bytes | memoryview], object] = self._entries.extend
        self.log_request: Callable[[bytes], object] = append if recording else _ignore
        # Without a journal the last reply alone is kept: a truncation shows its observation.
        self.log_reply = append if recording else partial(setitem, self._entries, slice(None))
        self.clear()

    def clear(self, steps: int = 0) -> None:
        """Begin anew: the env has just been built."""
        self._forget_all()
        self._last_forgotten = b""
        self._overgrown = False
        self._lasting = b""  # what was forgotten of calls and attributes set, with its evidence
        self.complete = self.usable = self.recording
        self._anchors: list[Anchor] = []
        self._steps_before = steps

    def begin_anew(self, frames: list[bytes], evidence: list[bytes], steps: int) -> None:
        """A new life of the env: it has just been built, and has answered these requests so, or none of them."""
        life = self.twin()
        life.clear(steps)
        for frame, answer in zip(frames, evidence, strict=False):
            life.log_request(frame)
            life.log_reply(answer)
        self.become(life)

    def _forget_all(self) -> None:
        self._last_forgotten = self.last_observed()
        self._entries.clear()
        self._known = 0

    def last_observed(self) -> bytes:
        """Evidence of the last reply that carried an observation, or ``b""``."""
        for start in (self._known, 0):  # the last frames tell, nearly always
            frames = split_frames(self._entries[start:])
            replies = frames[1::2] if self.recording else frames
            for reply in reversed(replies):
                if reply[KIND_AT] == STEPPED:
                    return reply
        return self._last_forgotten

    def _observes_from(self, place: int) -> bool:
        """Whether some reply from there on carries an observation: nearly always the first, but not behind a state."""
        frames = split_frames(self._entries[place : place + _GLANCE])
        return any(reply[KIND_AT] == STEPPED for reply in frames[1::2])

    def __len__(self) -> int:
        """Bytes held."""
        return len(self._entries) + self._state_bytes(0)

    def oldest(self) -> int:
        """The number of the first request held; 0 if there is none."""
        return seq_of(bytes(self._entries[:8]))

    def forget_unanswered(self, pending: bytes) -> None:
        """Leave the request ``pending`` out, wherever between sending and logging its caller was interrupted."""
        if not self.recording:
            return
        frames = split_frames(self._entries[self._known :])
        keep = len(frames) // 2 * 2
        if keep and seq_of(frames[keep - 2]) == seq_of(pending):
            keep -= 2
        del self._entries[self._known + sum(map(len, frames[:keep])) :]

    def wants_anchor(self, steps: int) -> bool:
        """Whether the coming reset should tell the state of the random generators."""
        if not self.recording:
            return False
        resets = self._resets()
        if not resets or not self.usable:
            return True
        return steps - resets[-1].steps >= self._anchor_every or not self._roomy

    def anchor(self, frame: bytes, evidence: bytes, generators: bytes, steps: int) -> None:
        """What has just been logged was this reset, and the generators stood so before it."""
        if not self.usable:  # what came before has been forgotten: begin again here
            place = len(self._entries) - len(frame) - len(evidence)
            self._lasting += _lasting_in(self._entries[:place])
            del self._entries[:place]
            self._anchors.clear()
            self._steps_before = steps
            self.usable = True
        self._known = len(self._entries) - len(frame) - len(evidence)
        self._anchors.append(Anchor(self._known, steps, generators))

    def wants_state(self, limit: int, step_limit: float, steps: int) -> bool:
        """Whether the env's state should be asked for: its last one, or its construction, is getting far."""
        if not self.replaying or not limit:
            return False
        states = self._states()
        place, before = (states[-1].place, states[-1].steps) if states else (0, self._steps_before)
        far = len(self._entries) - place > limit / _PART or steps - before > step_limit / _PART
        return far or not self.usable

    def keep_state(self, state: bytes, steps: int) -> None:
        """The env stands so after all that has been logged."""
        if not self.usable:  # what came since a snapshot is still of use
            self._anchors.clear()
            self.usable = True
        place = len(self._entries)
        if self._anchors and self._anchors[-1].place == place and self._anchors[-1].state:
            self._anchors.pop()  # an interruption has it told twice
        self._anchors.append(Anchor(place, steps, state=state))

    def plans(self, *, short: bool = False) -> list[Plan]:
        """The replays to try, the most trustworthy first: that which begins earliest, for it is held against the most.

        With ``short`` one is tried before that does not grow with the env's life. It begins at the reset before the
        last one that is an anchor, so that a whole episode is held against the evidence: that of an env which
        remembers more than its generators differs. In a long episode it is the state before the last one.
        """
        return self._plans(short=short) if self.replaying else []

    def _plans(self, *, short: bool = False) -> list[Plan]:
        if not self.usable:
            return []
        resets, states = self._resets(), self._states()
        plans = []
        if short:
            plans += next((self._from(anchors[-2]) for anchors in (resets, states) if len(anchors) > 1), [])
        if self.complete and not self._overgrown:
            frames = split_frames(self._entries)
            plans.append(Plan(tuple(frames[::2]), tuple(frames[1::2]), True))
            # An env that is not made twice alike may be so from a state on. A reset leaves what it was made of.
            resets = []
        anchors = sorted((*resets[:1], *states[:_STATES_TRIED]), key=lambda one: one.place)
        if self._remembers:  # a reset would be in vain
            anchors.sort(key=lambda one: not one.state)
        found = [plan for anchor in anchors for plan in self._from(anchor)]
        return [*plans, *(plan for plan in found if plan not in plans)]

    def learn(self, refuted: list[Plan], held: Plan | None) -> None:
        """From a recovery: that the env remembers more than its generators, and its state tells that."""
        if held is not None and held.from_state and any(not plan.from_state for plan in refuted):
            self._remembers, self.complete = True, False

    def _resets(self) -> list[Anchor]:
        return [anchor for anchor in self._anchors if not anchor.state]

    def _states(self) -> list[Anchor]:
        return [anchor for anchor in self._anchors if anchor.state]

    def newest_first(self) -> Iterator[tuple[bytes, bytes]]:
        """The requests held, with their evidence."""
        bounds = ((self._known, len(self._entries)), (0, self._known)) if self.recording else ()
        for start, stop in bounds:
            frames = split_frames(self._entries[start:stop])
            yield from zip(reversed(frames[::2]), reversed(frames[1::2]), strict=False)

    def since(self, seq: int) -> Plan | None:
        """What came after the step of this number; ``None`` if it is not held any more."""
        mark = seq.to_bytes(4, "little") + bytes([STEP])
        place = self._entries.rfind(mark)
        while place >= 4:
            frames = split_frames(self._entries[place - 4 :])
            requests, replies = frames[::2], frames[1::2]
            # Or it is in the middle of a frame that looks like it.
            if sum(map(len, frames)) == len(self._entries) - place + 4 and list(map(seq_of, requests)) == list(
                map(seq_of, replies)
            ):
                return Plan(tuple(requests[1:]), tuple(replies[1:]), False)
            place = self._entries.rfind(mark, 0, place + len(mark) - 1)  # they may overlap
        return None

    def history(self) -> tuple[bytes, bool] | None:
        """The most trustworthy replay as it lies here, requests and evidence in turns; is it from construction?"""
        if self.complete:
            return bytes(self._entries), True
        for plan in self._plans():
            return b"".join(chain.from_iterable(zip(plan.frames, plan.evidence, strict=True))), False
        return None

    def _from(self, anchor: Anchor) -> list[Plan]:
        frames = split_frames(self._entries[anchor.place :])
        before = []
        if not self._overgrown:
            before = split_frames(self._lasting + _lasting_in(self._entries[: anchor.place]))
        if anchor.state:
            if sum(frame[KIND_OF_REQUEST_AT] == STEP for frame in frames[::2]) < PROOF:
                return []
            first = pack_message(0, RestoreState(anchor.state))
            requests, replies = (first, *frames[::2]), (_RESTORED, *frames[1::2])
            with_lasting = Plan((*before[::2], *requests), (*before[1::2], *replies), False, True)
            # What was called is in the state too, as far as it changed the env alone; and there it came at its time.
            return [with_lasting, Plan(requests, replies, False, True)] if before else [with_lasting]
        if self._overgrown or not has_proof(frames[2::2]):
            return []
        reset = unpack_message(frames[0])
        assert isinstance(reset, Reset)
        first = pack_message(seq_of(frames[0]), replace(reset, generators=anchor.generators, anchor=True))
        return [Plan((*before[::2], first, *frames[2::2]), (*before[1::2], *frames[1::2]), False)]

    def lasting(self) -> list[bytes]:
        """What changed the env for longer than an episode: calls, and attributes set."""
        return split_frames(self._lasting + _lasting_in(self._entries))[::2] if self.replaying else []

    def copy(self) -> Journal:
        """What is held now."""
        twin = self.twin()
        twin.become(self)
        return twin

    def twin(self) -> Journal:
        """One that holds nothing."""
        return Journal(recording=self.recording, replaying=self.replaying, anchor_every=self._anchor_every)

    def become(self, other: Journal) -> None:
        """Hold what the other one does."""
        anchors = list(other._anchors)
        # From here on at one stroke: no interruption comes in between.
        self._entries[:], self._anchors = other._entries, anchors
        self._known, self._lasting, self._last_forgotten = other._known, other._lasting, other._last_forgotten
        self._roomy, self._overgrown, self._steps_before = other._roomy, other._overgrown, other._steps_before
        self.complete, self.usable = other.complete, other.usable

    def load(self, plan: Plan, steps: int) -> None:
        """Hold what another journal held: after this plan, ``steps`` steps of the env's life are done."""
        before = steps - sum(frame[KIND_OF_REQUEST_AT] == STEP for frame in plan.frames)
        self.clear(before)
        self.complete = anchored = plan.from_construction
        for frame, evidence in zip(plan.frames, plan.evidence, strict=True):
            if not anchored and (frame[TAG_AT] != LASTING or frame[KIND_OF_REQUEST_AT] != MESSAGE):
                anchored = True
                message = unpack_message(frame)
                if isinstance(message, RestoreState):
                    self._anchors = [Anchor(len(self._entries), before, state=message.state)]
                    continue
                assert isinstance(message, Reset)
                assert message.generators is not None
                self._anchors = [Anchor(len(self._entries), before, message.generators)]
            self._entries += frame + evidence

    def _state_bytes(self, place: int) -> int:
        return sum(len(anchor.state) for anchor in self._anchors if anchor.place >= place)

    def _bytes_since(self, anchor: Anchor) -> int:
        return len(self._entries) - anchor.place + self._state_bytes(anchor.place)

    def trim(self, limit: int, step_limit: float, steps: int) -> None:
        """Forget the oldest part when more than ``limit`` bytes or ``step_limit`` steps are held.

        Half of it is kept, from an anchor on, so that this is rare. Where no anchor lies in what fits, the journal is
        unusable until the next one, but for what came since a snapshot. To be called before a request is logged, so
        that :meth:`forget_unanswered` finds it behind the place noted here.
        """
        if self.recording:
            self._known = len(self._entries)
        # Few steps with large requests: anchors every so many steps would lie too far apart.
        resets = self._resets()
        last = resets[-1] if resets else None
        self._roomy = last is None or (self._bytes_since(last) <= limit / 8 and steps - last.steps <= step_limit / 8)
        if not self.recording or (len(self) <= limit and steps - self._steps_before <= step_limit):
            return
        self.complete = False
        if len(self._lasting) > limit:  # a call with every step: what they did to the env cannot be kept
            self._overgrown = True

        def fits(anchor: Anchor, share: float) -> bool:
            return steps - anchor.steps <= step_limit * share and self._bytes_since(anchor) <= limit * share

        # The oldest anchor in the half to keep; failing that the last one, if what follows it fits the whole.
        start = next((one for one in self._anchors if fits(one, 0.5)), None)
        if start is None and self._anchors and fits(self._anchors[-1], 1.0):
            start = self._anchors[-1]
        # A reset does not lead to where every env stands: a state that a replay may begin at is kept with it.
        proven = [one for one in self._states() if steps - one.steps >= PROOF and fits(one, 1.0)]
        if proven and (start is None or proven[-1].place < start.place):
            start = proven[-1]
        if start is None:
            self._keep_tail(limit // 2, step_limit / 2, steps)
            return
        lasting = self._lasting + _lasting_in(self._entries[: start.place])
        kept = self._anchors[self._anchors.index(start) :]
        kept = [replace(one, place=one.place - start.place) for one in kept]
        known = self._known - start.place
        if not self._observes_from(start.place):
            self._last_forgotten = self.last_observed()
        # At one stroke: no interruption comes in between.
        self._lasting, self._entries[: start.place], self._anchors = lasting, b"", kept
        self._steps_before, self._known = start.steps, known

    def _keep_tail(self, limit: int, step_limit: float, steps: int) -> None:
        """No replay can begin any more; but what came since a snapshot, which may well be younger, is still of use."""
        frames, size, kept = split_frames(self._entries), 0, 0
        for request, reply in zip(frames[-2::-2], frames[::-2], strict=True):
            is_step = request[KIND_OF_REQUEST_AT] == STEP
            if size + len(request) + len(reply) > limit or kept + is_step > step_limit:
                break
            size, kept = size + len(request) + len(reply), kept + is_step
        observed = (reply for reply in frames[::-2] if reply[KIND_AT] == STEPPED)
        last, cut = next(observed, self._last_forgotten), len(self._entries) - size
        lasting = self._lasting + _lasting_in(self._entries[:cut])
        # At one stroke, as below.
        self._lasting, self._entries[:cut], self._anchors = lasting, b"", []
        self._last_forgotten, self._known, self._steps_before, self.usable = last, size, steps - kept, False


def _has_lasting(entries: bytes | bytearray) -> bool:
    """Whether there may be any among them."""
    place = entries.find(_LASTING_MARK)
    while place >= 0:
        start = max(0, place - KIND_OF_REQUEST_AT)
        reply = start + int.from_bytes(entries[start : start + 4], "little")
        if entries[start + 4 : start + 8] == entries[reply + 4 : reply + 8]:  # the number of both
            return True
        place = entries.find(_LASTING_MARK, place + 1)
    return False


def _lasting_in(entries: bytes | bytearray) -> bytes:
    """The calls and attributes set among these requests, with their evidence."""
    if not _has_lasting(entries):  # a glance: to take megabytes apart takes as long as hundreds of steps
        return b""
    frames = split_frames(entries)
    pairs = zip(frames[::2], frames[1::2], strict=False)
    return b"".join(
        frame + evidence
        for frame, evidence in pairs
        if frame[KIND_OF_REQUEST_AT] == MESSAGE and frame[TAG_AT] == LASTING
    )
