"""From when on an env of a group counts, and how much must have been seen of it since."""

from __future__ import annotations

import pytest

from multienv.recovery.doubts import Doubts
from multienv.recovery.journal import Plan
from multienv.recovery.proof import PROOF_OF_RESET
from multienv.wire.actions import leave_out
from multienv.wire.messages import (
    REPLY,
    SEQ_MASK,
    STEP,
    STEP_INTEGER,
    STEPPED,
    TERMINATED,
    VALUE,
    Call,
    GroupOptions,
    LeftOut,
    Reset,
    pack_message,
)

START = SEQ_MASK - 20  # the numbers begin anew on the way


class Story:
    """Requests of a group of two, and what they showed."""

    def __init__(self) -> None:
        self.seq = START
        self.frames: list[bytes] = []
        self.evidence: list[bytes] = []

    def add(self, frame: bytes, kind: int = STEPPED, flags: int = 0) -> int:
        self.frames.append(frame)
        self.evidence.append(REPLY.pack(REPLY.size, self.seq, 0, kind, flags, 0, 0.0))
        seq, self.seq = self.seq, (self.seq + 1) & SEQ_MASK
        return seq

    def reset(self, *slots: int) -> int:
        mask = tuple(slot in slots for slot in range(2)) if slots else None
        return self.add(pack_message(self.seq, Reset((1, 2), GroupOptions(mask, None), False)))

    def step(self, *, ended: bool = False, without: int | None = None) -> int:
        frame = STEP_INTEGER.pack(STEP_INTEGER.size, self.seq, STEP, 1, 0)
        if without is not None:
            frame = leave_out(frame, {without: LeftOut(None, "different")})
        return self.add(frame, flags=TERMINATED if ended else 0)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def plan(self, start: int = 0) -> Plan:
        return Plan(tuple(self.frames[start:]), tuple(self.evidence[start:]), False)


@pytest.fixture
def doubts() -> Doubts:
    """Of slot 1, whose episodes alone end here."""
    return Doubts(lambda reply, slot: slot == 1 and bool(reply[13] & TERMINATED))


@pytest.fixture
def story(doubts: Doubts) -> Story:
    """It has been truncated after ten steps."""
    told = Story()
    told.reset()
    told.steps(10)
    doubts.note([1], told.step(without=1))
    return told


def test_what_came_before_does_not_count_and_what_comes_since_does(doubts, story):
    assert doubts.counting({0, 1}, START) == {0}
    assert doubts.counting({0, 1}, (START + 10) & SEQ_MASK) == {0}
    assert doubts.counting({0, 1}, (START + 11) & SEQ_MASK) == {0, 1}
    assert doubts.counting({0, 1}, (START + 40) & SEQ_MASK) == {0, 1}


def test_a_whole_episode_since_is_enough(doubts, story):
    story.steps(20)
    assert doubts.unproven(story.plan()) == {1}
    story.step(ended=True)
    assert doubts.unproven(story.plan()) == set()


def test_so_many_steps_since_are_enough(doubts, story):
    story.steps(PROOF_OF_RESET - 1)
    assert doubts.unproven(story.plan()) == {1}
    story.step()
    assert doubts.unproven(story.plan()) == set()


def test_the_truncation_itself_is_no_end_of_an_episode(doubts, story):
    story.step(ended=True, without=1)
    assert doubts.unproven(story.plan()) == {1}


def test_a_reset_ends_an_episode_if_there_was_one(doubts, story):
    story.reset()
    assert doubts.unproven(story.plan()) == {1}
    story.steps(3)
    story.reset(0)
    assert doubts.unproven(story.plan()) == {1}
    story.reset(1)
    assert doubts.unproven(story.plan()) == set()


def test_what_begins_since_needs_no_more(doubts, story):
    """A snapshot, or a state, taken after the truncation; calls from before may precede it."""
    story.step()
    assert doubts.unproven(story.plan(11)) == set()
    assert doubts.unproven(story.plan(12)) == set()
    assert doubts.unproven(story.plan(10)) == {1}
    early = Story()
    early.add(pack_message(START, Call("poke", (), {})), VALUE)
    late = story.plan(12)
    plan = Plan((*early.frames, *late.frames), (*early.evidence, *late.evidence), False, True)
    assert doubts.unproven(plan) == set()


def test_a_replay_that_ends_before_it_counts_shows_nothing(doubts, story):
    assert doubts.unproven(Plan(story.plan().frames[:-1], story.plan().evidence[:-1], True)) == {1}


def test_doubts_end_where_the_journal_begins(doubts, story):
    doubts.forget((START + 10) & SEQ_MASK)
    assert doubts.unproven(story.plan()) == {1}
    doubts.forget((START + 11) & SEQ_MASK)
    assert doubts.unproven(story.plan()) == set()


def test_a_new_life_has_none(doubts, story):
    doubts.clear()
    assert doubts.unproven(story.plan()) == set()
    assert doubts.counting({0, 1}, START) == {0, 1}
