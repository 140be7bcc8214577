"""What trainer and warden say to each other survives the wire."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from multienv.processes.protocol import LAUNCH, ORDER, SPAWN, UNKNOWN_FATE, Fate
from multienv.wire.messages import (
    GONE,
    GONE_FRAME,
    REPLY,
    Call,
    pack_message,
    pack_value,
    seq_of,
    split_frames,
    unpack_message,
    unpack_value,
)

TEXTS = st.text(max_size=50) | st.sampled_from(["\ufffd", "line\nline", 'quote"', "\x00", "\ud800"])


@given(st.none() | st.integers(-64, 255), st.booleans(), TEXTS, TEXTS)
def test_a_fate_survives_as_one_line(code, overdue, stack, stderr):
    fate = Fate(code, overdue, stack, stderr)
    line = fate.encode()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert Fate.decode(line) == fate


def test_nothing_is_known_of_an_unknown_fate():
    assert Fate(code=None, overdue=False, stack="", stderr="") == UNKNOWN_FATE


@given(st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1), st.floats(0, allow_infinity=False))
def test_an_order_survives(number, pid, shortest):
    assert ORDER.unpack(ORDER.pack(LAUNCH, SPAWN, number, pid, shortest)) == (LAUNCH, SPAWN, number, pid, shortest)


@given(st.lists(st.binary(max_size=40), max_size=6), st.data())
def test_frames_end_to_end_are_taken_apart_again_and_a_cut_one_is_left_out(payloads, data):
    frames = [pack_message(seq, Call("f", (payload,), {})) for seq, payload in enumerate(payloads)]
    joined = b"".join(frames)
    assert split_frames(joined) == frames
    cut = data.draw(st.integers(0, len(joined)))
    whole = split_frames(joined[:cut])
    assert whole == frames[: len(whole)]
    assert sum(map(len, frames[: len(whole) + 1])) > cut or len(whole) == len(frames)


@given(st.integers(0, 2**32 - 1))
def test_messages_and_values_keep_their_number(seq):
    message = Call("poke", (1,), {"amount": 2.0})
    assert seq_of(pack_message(seq, message)) == seq_of(pack_value(seq, [1])) == seq
    assert unpack_message(pack_message(seq, message)) == message
    assert unpack_value(pack_value(seq, [1])) == [1]


def test_values_that_cannot_be_pickled_by_reference_travel_by_value():
    class Local:
        number = 5

    assert unpack_value(pack_value(1, Local)).number == 5
    assert unpack_value(pack_value(1, lambda: 6))() == 6


def test_the_end_of_a_worker_is_a_frame_of_its_own_kind():
    length, seq, _, kind, *_ = REPLY.unpack(GONE_FRAME)
    assert (length, seq, kind) == (len(GONE_FRAME), 0, GONE)
