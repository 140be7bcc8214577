"""What drove an env since its anchor: kept in order, within bounds, and right after any interruption."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from multienv.recovery import journal
from multienv.recovery.journal import ANCHOR_EVERY, Journal
from multienv.recovery.proof import PROOF_OF_RESET
from multienv.wire.actions import action_encoder
from multienv.wire.messages import (
    KIND_OF_REQUEST_AT,
    MESSAGE,
    REPLY,
    STEPPED,
    VALUE,
    Call,
    Message,
    Reset,
    pack_message,
    pack_value,
    seq_of,
    split_frames,
    unpack_message,
)

ENCODE = action_encoder(spaces.Discrete(9))
UNLIMITED = 10**12


class Caller:
    """Makes requests, and logs them with their evidence, as the supervisor does."""

    def __init__(self, *, recording: bool = True) -> None:
        self.journal = Journal(recording=recording)
        self.seq = self.steps = 0
        self.requests: list[bytes] = []
        self.replies: list[bytes] = []

    def next_step(self, action: int = 0) -> tuple[bytes, bytes]:
        self.seq += 1
        return ENCODE(self.seq, action), self._observed()

    def next_message(self, message: Message) -> tuple[bytes, bytes]:
        self.seq += 1
        reply = self._observed() if isinstance(message, Reset) else pack_value(self.seq, None, VALUE)
        return pack_message(self.seq, message), reply

    def _observed(self) -> bytes:
        return REPLY.pack(REPLY.size + 8, self.seq, 0, STEPPED, 0, 0, float(self.seq)) + self.seq.to_bytes(8, "little")

    def log(self, request: bytes, reply: bytes) -> None:
        self.journal.log_request(request)
        self.journal.log_reply(reply)
        self.requests.append(request)
        self.replies.append(reply)

    def step(self, action: int = 0) -> None:
        self.log(*self.next_step(action))
        self.steps += 1

    def call(self, argument: Any = None) -> None:
        self.log(*self.next_message(Call("poke", (argument,), {})))

    def reset(self, seed: int | None = None, options: Any = None) -> bool:
        """Whether it became an anchor."""
        message = Reset(seed, options, anchor=self.journal.wants_anchor(self.steps))
        request, reply = self.next_message(message)
        self.log(request, reply)
        if message.anchor:
            self.journal.anchor(request, reply, b"state %d" % self.seq, self.steps)
        return message.anchor

    def trim(self, limit: int = UNLIMITED, step_limit: float = UNLIMITED) -> None:
        self.journal.trim(limit, step_limit, self.steps)


@pytest.fixture
def caller() -> Caller:
    return Caller()


def test_a_complete_journal_replays_everything_from_construction(caller):
    caller.reset(seed=1)
    caller.step(3)
    caller.call("x")
    caller.step(4)
    caller.reset()
    (plan,) = caller.journal.plans()
    assert plan.from_construction
    assert plan.frames == tuple(caller.requests)
    assert plan.evidence == tuple(caller.replies)
    assert len(caller.journal) == sum(map(len, caller.requests + caller.replies))


def test_an_empty_journal_replays_nothing(caller):
    (plan,) = caller.journal.plans()
    assert plan.frames == plan.evidence == ()


def test_without_recording_only_the_last_reply_is_kept():
    caller = Caller(recording=False)
    assert not caller.reset(seed=1)
    for _ in range(5):
        caller.step()
    assert caller.journal.plans() == []
    assert caller.journal.last_observed() == caller.replies[-1]
    assert len(caller.journal) == len(caller.replies[-1])
    caller.trim(limit=1)
    caller.journal.forget_unanswered(caller.requests[-1])
    assert caller.journal.last_observed() == caller.replies[-1]


def test_the_last_observed_reply_is_not_a_calls(caller):
    assert caller.journal.last_observed() == b""
    caller.reset(seed=1)
    caller.step()
    observed = caller.replies[-1]
    caller.call()
    assert caller.journal.last_observed() == observed


def test_clear_begins_anew(caller):
    caller.reset(seed=1)
    caller.step()
    caller.journal.clear(caller.steps)
    assert len(caller.journal) == 0
    assert caller.journal.last_observed() == b""
    assert caller.journal.complete
    assert caller.journal.usable
    assert caller.reset(seed=2), "the first reset of a life is an anchor"
    assert len(caller.journal.plans()[0].frames) == 1


# --- anchors -----------------------------------------------------------------------------------


def test_resets_become_anchors_now_and_then(caller):
    assert caller.reset(seed=1)
    assert not caller.reset()
    for _ in range(ANCHOR_EVERY - 1):
        caller.step()
    assert not caller.reset()
    caller.step()
    assert caller.reset()
    assert not caller.reset()


def test_a_trimmed_journal_begins_with_a_reset_that_puts_the_generators_back(caller):
    for _ in range(4):
        caller.reset(options={"episode": caller.steps})
        for action in range(ANCHOR_EVERY):
            caller.step(action % 9)
    caller.trim(step_limit=3 * ANCHOR_EVERY)
    (plan,) = caller.journal.plans()
    assert not plan.from_construction
    assert not caller.journal.complete
    assert len(plan.frames) == len(plan.evidence) < len(caller.requests)
    first, place = unpack_message(plan.frames[0]), len(caller.requests) - len(plan.frames)
    original = unpack_message(caller.requests[place])
    assert isinstance(first, Reset)
    assert (first.seed, first.options) == (original.seed, original.options)
    assert first.generators == b"state %d" % seq_of(caller.requests[place])
    assert seq_of(plan.frames[0]) == seq_of(caller.requests[place])
    assert plan.frames[1:] == tuple(caller.requests[place + 1 :])
    assert plan.evidence == tuple(caller.replies[place:])


def test_about_half_of_it_is_kept(caller):
    for _ in range(8):
        caller.reset()
        for _ in range(ANCHOR_EVERY):
            caller.step()
    caller.trim(step_limit=8 * ANCHOR_EVERY - 1)
    assert len(caller.journal.plans()[0].frames) == pytest.approx(4 * ANCHOR_EVERY, rel=0.3)


def test_within_the_limits_nothing_is_forgotten(caller):
    caller.reset(seed=1)
    caller.step()
    caller.trim(limit=len(caller.journal), step_limit=1)
    assert caller.journal.complete
    assert len(caller.journal.plans()[0].frames) == 2


def test_an_episode_that_does_not_fit_alone_makes_it_unusable_until_the_next_reset(caller):
    caller.reset(seed=1)
    for _ in range(50):
        caller.step()
    seen = caller.replies[-1]
    caller.trim(step_limit=20)
    assert caller.journal.plans() == []
    assert not caller.journal.usable
    assert caller.journal.last_observed() == seen, "a truncation still shows it"
    caller.step()
    assert caller.journal.plans() == [], "the middle of an episode cannot be replayed"
    assert caller.reset()
    caller.step()
    assert caller.journal.plans() == [], "one step tells nothing of what the env remembers"
    caller.reset()
    (plan,) = caller.journal.plans()
    assert not plan.from_construction
    assert len(plan.frames) == len(plan.evidence) == 3
    assert isinstance(unpack_message(plan.frames[0]), Reset)


def test_a_long_part_of_an_episode_is_proof_too(caller):
    caller.reset(seed=1)
    for _ in range(50):
        caller.step()
    caller.trim(step_limit=20)
    caller.reset()
    for _ in range(PROOF_OF_RESET - 1):
        caller.step()
    assert caller.journal.plans() == []
    caller.step()
    assert len(caller.journal.plans()) == 1


def test_what_came_since_a_snapshot_outlives_a_trim_without_an_anchor(caller):
    caller.log(*caller.next_message(Reset(3, None, False)))
    for _ in range(200):
        caller.log(*caller.next_step())
        caller.steps += 1
    snapshot = caller.seq - 20
    caller.journal.trim(len(caller.journal) // 2, UNLIMITED, caller.steps)
    assert not caller.journal.usable
    assert caller.journal.plans() == []
    plan = caller.journal.since(snapshot)
    assert plan is not None
    assert list(plan.frames) == caller.requests[-20:]
    assert list(plan.evidence) == caller.replies[-20:]
    assert caller.journal.since(snapshot - 150) is None
    kept = len(caller.journal)
    caller.journal.trim(2 * kept, UNLIMITED, caller.steps)  # once in a while, not each time
    assert len(caller.journal) == kept
    caller.journal.trim(UNLIMITED, 10, caller.steps)
    assert len(caller.journal.since(caller.seq - 4).frames) == 4
    assert caller.journal.since(caller.seq - 6) is None


def test_nothing_may_be_kept_with_a_limit_of_zero(caller):
    caller.reset(seed=1)
    caller.step()
    caller.trim(limit=0)
    assert len(caller.journal) == 0
    assert caller.journal.plans() == []


def test_many_large_resets_without_a_step_stay_within_the_limit(caller):
    limit = 100_000
    for _ in range(300):
        caller.trim(limit=limit)
        caller.reset(seed=1, options={"map": bytes(1000)})
    caller.trim(limit=limit)
    assert len(caller.journal) <= limit


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 3 * ANCHOR_EVERY)),
        st.tuples(st.just("call"), st.integers(0, 5000)),
        st.tuples(st.just("reset"), st.integers(0, 5000)),
        st.tuples(st.just("trim"), st.integers(0, 400_000)),
    ),
    max_size=12,
)


@given(OPERATIONS)
def test_after_a_trim_the_limit_holds_and_what_is_left_is_the_end_of_what_was(operations):
    caller = Caller()
    caller.reset(seed=0)
    for what, amount in operations:
        if what == "step":
            for _ in range(amount):
                caller.step()
        elif what == "call":
            caller.call(bytes(amount))
        elif what == "reset":
            caller.reset(options=bytes(amount))
        else:
            caller.trim(limit=amount)
            assert len(caller.journal) <= amount
        for plan in caller.journal.plans():
            # First the calls of what was forgotten, then everything since the reset it begins with.
            calls = 0
            if not plan.from_construction:
                calls = next(i for i, frame in enumerate(plan.frames) if isinstance(unpack_message(frame), Reset))
            kept = len(plan.frames) - calls
            start = len(caller.replies) - kept
            assert plan.evidence[calls:] == tuple(caller.replies[start:])
            assert plan.frames[calls + 1 :] == tuple(caller.requests[start + 1 :])[: kept - 1]
            called = [frame for frame in caller.requests[:start] if frame[KIND_OF_REQUEST_AT] == MESSAGE]
            assert [*plan.frames[:calls]] == [one for one in called if isinstance(unpack_message(one), Call)]
        assert caller.journal.last_observed() == next(
            reply for reply in reversed(caller.replies) if reply[12] == STEPPED
        )


# --- interruptions -----------------------------------------------------------------------------


@pytest.mark.parametrize("logged", ["nothing", "request", "request and reply"])
@pytest.mark.parametrize("kind", ["step", "call", "reset"])
@pytest.mark.parametrize("before", [0, 1, 5])
@pytest.mark.parametrize("trimmed", [False, True])
def test_an_interrupted_request_is_left_out_wherever_the_interruption_fell(logged, kind, before, trimmed):
    caller = Caller()
    caller.reset(seed=1)
    for _ in range(before):
        caller.step()
    if trimmed:
        caller.trim()
    messages = {"call": Call("poke", (), {}), "reset": Reset(None, None, anchor=False)}
    request, reply = caller.next_step() if kind == "step" else caller.next_message(messages[kind])
    expected = caller.journal.plans()
    if logged != "nothing":
        caller.journal.log_request(request)
    if logged == "request and reply":
        caller.journal.log_reply(reply)
    for _ in range(2):  # Ctrl-C may come again
        caller.journal.forget_unanswered(request)
        assert caller.journal.plans() == expected
        assert caller.journal.last_observed() == caller.replies[-1]
    caller.log(request, reply)
    assert len(caller.journal.plans()[0].frames) == before + 2


def test_an_interrupted_first_request_is_left_out(caller):
    request, reply = caller.next_message(Reset(1, None, anchor=False))
    caller.log(request, reply)
    caller.journal.forget_unanswered(request)
    assert len(caller.journal) == 0


def test_what_was_interrupted_is_sought_among_the_last_requests_alone(caller, monkeypatch):
    """With a million steps in the journal Ctrl-C must not take a minute."""
    split: list[int] = []
    monkeypatch.setattr(journal, "split_frames", lambda joined: split.append(len(joined)) or split_frames(joined))
    caller.reset(seed=1)
    for _ in range(3):
        for _ in range(1000):
            caller.step()
        caller.trim()
        request, reply = caller.next_step()
        caller.log(request, reply)
        caller.journal.forget_unanswered(request)
        caller.step()
    assert split == [len(request) + len(reply)] * 3


@pytest.mark.parametrize("kind", [int, np.int64])
def test_what_came_since_is_found_also_where_a_step_looks_like_the_number(kind: type) -> None:
    """Kind, tag and action of a step, one behind the other, read as another step's number and kind."""
    tag, seq = (1, 0x0102) if kind is int else (2, 0x0202)
    caller = Caller()
    assert caller.next_step(kind(2))[0][8:13] == bytes([2, tag, 0, 0, 2]) == seq.to_bytes(4, "little") + b"\2"
    caller.seq = seq - 20
    for _ in range(24):
        caller.log(*caller.next_step(kind(2)))
    plan = caller.journal.since(seq)
    assert plan is not None
    assert (list(map(seq_of, plan.frames)), plan.evidence) == (
        [seq + n for n in (1, 2, 3, 4)],
        tuple(caller.replies[-4:]),
    )


def test_bytes_that_are_no_frames_are_read_to_an_end() -> None:
    frame = ENCODE(1, 0)
    assert split_frames(frame + bytes(40)) == [frame]
