"""The journal against a plain list of entries: whatever is asked, repeated, interrupted, forgotten or copied."""

from __future__ import annotations

import contextlib
import dis
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from multienv.recovery import journal as journal_module
from multienv.recovery.journal import Journal, Plan
from multienv.wire.banks import HEAD, IRREGULAR, MESSAGE, STEP, STEPPED, VALUE, BankLayout, Entry
from multienv.wire.messages import Call, Render, Reset, SetAttribute

LAYOUT = BankLayout(2, 8, (8,))
STRIDE = LAYOUT.end
PROOF_OF_STATE, PROOF_OF_RESET = 3, 5
UNLIMITED = 10**12

RESET = Reset((1, 2), (None, None))
SOME_RESET = Reset((1, 2), (None, None), mask=(True, False))
MESSAGES = st.sampled_from([RESET, RESET, SOME_RESET, Call("poke"), SetAttribute("x", (1, 2)), Render(), None])
BODIES = st.integers(0, 255)
CUTS = st.none() | st.integers(0, 12)


@pytest.fixture(autouse=True, scope="module")
def little_proof():
    """A few steps are enough to go on from an anchor."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(journal_module, "PROOF_OF_STATE", PROOF_OF_STATE)
        patched.setattr(journal_module, "PROOF_OF_RESET", PROOF_OF_RESET)
        yield


class Cut(BaseException):
    """As Ctrl-C would raise it."""


def cut_at(call: Callable[[], Any], place: int) -> None:
    """Make a call; raise Cut where the interpreter looks for signals for the place-th time: behind calls and jumps."""
    left = place

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != journal_module.__file__:
            return None
        frame.f_trace_opcodes = True
        last = getattr(frame, "f_lasti", 0) - 2
        if event == "opcode" and last >= 0:
            # Caches lie between an instruction and the next: look for the one before.
            while last > 0 and dis.opname[frame.f_code.co_code[last]] == "CACHE":
                last -= 2
            if dis.opname[frame.f_code.co_code[last]].startswith(("CALL", "JUMP", "RESUME")):
                if left == 0:
                    raise Cut
                left -= 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


@dataclass
class Kept:
    """What the model knows of a request."""

    number: int
    entry: bytes
    is_step: bool = False
    is_plain: bool = False
    begins: bool = False
    lasts: bool = False


@dataclass
class At:
    """An anchor of the model: before the entry at this index."""

    index: int
    generators: bytes = b""
    state: bytes = b""


class Model(RuleBasedStateMachine):
    """Asks journal and list the same."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = Journal(recording=True)

    @initialize(number=st.integers(1, 2**33), lasting=st.sampled_from([b"", b"from before"]))
    def begin(self, number: int, lasting: bytes) -> None:
        self.journal.stride = STRIDE
        self.journal.begin(number, 0, lasting)
        self.number = self.start = number
        self.lasting_before = lasting
        self.kept: list[Kept] = []
        self.first = 0  # index of the first entry that is still held
        self.anchors: list[At] = []
        self.usable = True
        self.steps_at_start = 0

    def repeat(self, call: Callable[[], Any], cuts: list[int | None]) -> None:
        """Make a call again and again; only the last time is sure to come to its end."""
        for place in cuts:
            with contextlib.suppress(Cut):
                cut_at(call, UNLIMITED if place is None else place)
        call()

    def stretch(
        self, number: int, body: int, kind: int = STEP, tag: int = 1, reply: int = STEPPED, flags: int = 0
    ) -> bytes:
        return HEAD.pack(kind, tag, reply, flags, 0, number & 0xFFFF_FFFF, 0) + bytes([body]) * (STRIDE - HEAD.size)

    @rule(bodies=st.lists(BODIES, min_size=1, max_size=8), times=st.integers(1, 2))
    def steps(self, bodies: list[int], times: int) -> None:
        """As the supervisor writes them."""
        journal = self.journal
        for body in bodies:
            number = self.number + 1
            stretch = self.stretch(number, body)
            for _ in range(times):
                journal.entries[journal.base + number * journal.stride :] = stretch
            self.kept.append(Kept(number, stretch, is_step=True, is_plain=True))
            self.number = number

    @rule(
        message=MESSAGES,
        body=BODIES,
        mail=st.binary(max_size=9),
        evidence=st.binary(max_size=9),
        cuts=st.lists(CUTS, max_size=3),
        anchor=st.booleans(),
    )
    def add(self, message: Any, body: int, mail: bytes, evidence: bytes, cuts: list[int | None], anchor: bool) -> None:
        """A step with mail, if there is no message; a reset, that may be an anchor; a call."""
        is_call = message is not None and not isinstance(message, Reset)
        number = self.number + (2 if is_call else 1)
        if message is None:
            stretch = self.stretch(number, body, tag=0, flags=IRREGULAR)
        else:
            stretch = self.stretch(number, body, MESSAGE, 0, VALUE if is_call else STEPPED)
        entry = Entry(stretch, mail, evidence).packed()
        self.repeat(lambda: self.journal.add(number, entry, message), cuts)
        lasts = isinstance(message, Call | SetAttribute)
        self.kept.append(Kept(number, entry, message is None, begins=message is RESET, lasts=lasts))
        self.number = number
        if anchor and message is RESET:
            generators = b"generators %d" % number
            self.journal.anchor(generators, self.steps_before(len(self.kept)))
            self.usable = True  # what lies before it is held all the same: it may have come since a snapshot
            self.anchors.append(At(len(self.kept) - 1, generators))

    @rule(cuts=st.lists(CUTS, max_size=3), several=st.integers(1, 2))
    def skip(self, cuts: list[int | None], several: int) -> None:
        """Requests that are not kept."""
        for _ in range(several):
            self.number += 2
            self.repeat(lambda: self.journal.skip(self.number), cuts)

    @rule(message=MESSAGES, cuts=st.lists(CUTS, max_size=3), steps=st.booleans())
    def lose_what_was_not_committed(self, message: Any, cuts: list[int | None], steps: bool) -> None:
        """A request is journalled, but the process is lost before that is committed."""
        number = self.number + (1 if steps else 2)
        stretch = self.stretch(number, 9) if steps else self.stretch(number, 9, MESSAGE)
        entry = stretch if steps else Entry(stretch, b"mail").packed()
        self.journal.log(number, entry, None if steps else message)
        self.repeat(lambda: self.journal.cut(self.number), cuts)

    @rule()
    def keep_state(self) -> None:
        state = b"state %d" % len(self.kept)
        self.journal.keep_state(state, self.steps_before(len(self.kept)))
        if not self.usable:
            self.anchors, self.usable = [], True
        self.anchors = [one for one in self.anchors if one.state != state]
        self.anchors.append(At(len(self.kept), state=state))

    @rule(limit=st.integers(0, 20), step_limit=st.integers(0, 30), cut=CUTS)
    def trim(self, limit: int, step_limit: int, cut: int | None) -> None:
        limit *= STRIDE
        steps = self.steps_before(len(self.kept))
        if self.size_from(self.first) > limit or steps - self.steps_at_start > step_limit:
            room = int(min(limit / 2 // STRIDE, step_limit / 2)) * STRIDE
            while self.size_from(self.first) > room:
                self.first += 1
            self.anchors = [one for one in self.anchors if one.index >= self.first]
            self.usable = bool(self.anchors)
            self.steps_at_start = steps - (len(self.kept) - self.first)  # a reset counts as a step here
        # An interrupted one has forgotten what it was to forget, or nothing.
        self.repeat(lambda: self.journal.trim(limit, step_limit, steps), [] if cut is None else [cut])

    @rule()
    def begin_anew(self) -> None:
        """In a new life of the envs, where calls were repeated."""
        lasting = self.journal.all_lasting()
        assert lasting == self.lasting_up_to(len(self.kept))
        self.begin(self.number, lasting)

    @rule(how=st.sampled_from(["copy", "dump"]))
    def go_on_with_a_copy(self, how: str) -> None:
        old = self.journal
        if how == "copy":
            self.journal = old.copy()
        else:
            self.journal = Journal(recording=True)
            self.journal.load(pickle.loads(pickle.dumps(old.dump())))
        assert self.journal.dump() == old.dump()
        old.add(self.number + 1, self.stretch(self.number + 1, 1, MESSAGE) + bytes(8), RESET)
        old.anchor(b"other", 0)

    # --- what the list says ----------------------------------------------------------------------

    def steps_before(self, index: int) -> int:
        return sum(one.is_step for one in self.kept[:index])

    def steps_from(self, index: int) -> int:
        return sum(one.is_step for one in self.kept[index:])

    def size_from(self, index: int) -> int:
        return len(self.entries_from(index))

    def entries_from(self, index: int) -> bytes:
        return b"".join([one.entry for one in self.kept[index:]])

    def lasting_up_to(self, index: int) -> bytes:
        return self.lasting_before + b"".join([one.entry for one in self.kept[:index] if one.lasts])

    def plan_from(self, one: At) -> Plan | None:
        lasting = self.lasting_up_to(one.index)
        if one.state:
            proven = self.steps_from(one.index) >= PROOF_OF_STATE
            return self.plan(one.index, rung="state", state=one.state, lasting=lasting) if proven else None
        proven = self.steps_from(one.index) >= PROOF_OF_RESET or any(k.begins for k in self.kept[one.index + 1 :])
        return self.plan(one.index, generators=one.generators, lasting=lasting) if proven else None

    def plan(self, index: int, **options: Any) -> Plan:
        return Plan(self.entries_from(index), requests=len(self.kept) - index, **options)

    @invariant()
    def what_is_held_is_the_newest_part_of_the_list(self) -> None:
        assert bytes(self.journal.entries) == self.entries_from(self.first)
        assert self.journal.lasting == self.lasting_up_to(self.first)
        assert self.journal.all_lasting() == self.lasting_up_to(len(self.kept))
        assert [entry.packed() for entry in self.journal.iterate()] == [one.entry for one in self.kept[self.first :]]
        assert self.journal.complete == (self.first == 0 and self.usable) or not self.kept

    @invariant()
    def since_any_request_is_the_rest_of_the_list_or_not_known(self) -> None:
        numbers = [self.start, *(one.number for one in self.kept)]
        for index, number in enumerate(numbers):
            expected = self.plan(index, rung="snapshot") if index >= self.first else None
            assert self.journal.since(number) == expected, f"since {number}, the {index}-th"

    @invariant()
    def plans_begin_where_they_say(self) -> None:
        plans = self.journal.plans()
        if not self.usable:
            assert plans == self.journal.plans(short=True) == []
            return
        states = [one for one in self.anchors if one.state]
        resets = [one for one in self.anchors if not one.state]
        anchors = [*(resets[:1] if self.first else []), *states[:2]]
        expected = [plan for one in sorted(anchors, key=lambda one: one.index) if (plan := self.plan_from(one))]
        if self.first == 0 and self.journal.complete:
            generators = next((one.generators for one in resets if one.index == 0), b"")
            whole = self.plan(0, lasting=self.lasting_before, generators=generators)
            expected.insert(0, whole)
        assert plans == expected
        short = []  # the anchor before the last of either kind
        for kind in (resets, states):
            short += [plan for one in reversed(kind[:-1]) if (plan := self.plan_from(one))][:1]
        assert self.journal.plans(short=True) == short + [plan for plan in expected if plan not in short]


TestJournal = Model.TestCase
TestJournal.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)


# --- what a list does not show ------------------------------------------------------------------


def journal_with(steps: int, **options: Any) -> Journal:
    journal = Journal(recording=True, **options)
    journal.stride = STRIDE
    journal.begin(1)
    journal.add(2, Entry(HEAD.pack(MESSAGE, 0, STEPPED, 0, 0, 2, 0) + bytes(STRIDE - HEAD.size)).packed(), RESET)
    for number in range(3, 3 + steps):
        journal.entries[journal.base + number * STRIDE :] = HEAD.pack(STEP, 1, STEPPED, 0, 0, number, 0) + bytes(STRIDE - HEAD.size)  # fmt: skip
    return journal


def test_a_first_anchor_is_wanted_and_another_after_many_steps_or_when_half_of_the_limit_is_held():
    journal = journal_with(0, anchor_every=10)
    assert journal.wants_anchor(0, UNLIMITED)
    journal.anchor(b"generators", 0)
    assert [journal.wants_anchor(steps, UNLIMITED) for steps in (0, 9, 10)] == [False, False, True]
    assert journal.wants_anchor(0, len(journal.entries))


def test_a_state_is_wanted_when_a_quarter_of_the_limits_has_come_since_the_last():
    journal = journal_with(40)
    held = len(journal.entries)
    assert journal.wants_state(3 * held, UNLIMITED, 40)
    assert not journal.wants_state(5 * held, UNLIMITED, 40)
    assert journal.wants_state(UNLIMITED, 159, 40)
    assert not journal.wants_state(UNLIMITED, 161, 40)
    assert not journal.wants_state(0, 1, 40)
    journal.keep_state(b"state", 40)
    assert not journal.wants_state(3 * held, 159, 40)
    without = journal_with(40)
    without.trim(STRIDE, UNLIMITED, 40)
    assert without.wants_state(UNLIMITED, UNLIMITED, 40), "there is nowhere to begin"


def test_a_journal_that_does_not_record_holds_nothing_and_one_for_reports_replays_nothing():
    silent, for_reports = Journal(recording=False), journal_with(20, replaying=False)
    silent.add(2, b"entry", RESET)
    silent.anchor(b"generators", 0)
    silent.skip(4)
    assert (len(silent), silent.since(1), silent.plans(), silent.wants_anchor(0, 1)) == (0, None, [], False)
    assert (for_reports.plans(), for_reports.wants_anchor(0, 1), for_reports.wants_state(1, 1, 9)) == ([], False, False)
    assert len(for_reports.iterate()) == 21


def test_an_interruption_whose_traceback_lives_keeps_the_entries_from_nothing():
    """A view of them in a frame of the traceback would: a bytearray that is looked into cannot grow."""
    journal = journal_with(20)
    journal.keep_state(b"state", 0)
    for place in range(400):
        caught = None
        try:
            cut_at(journal.plans, place)
        except Cut as error:
            caught = error
        journal.entries += bytes(STRIDE)
        del journal.entries[-STRIDE:]
        if caught is None:
            break
    else:
        pytest.fail("it was never let through")
    assert place > 5
