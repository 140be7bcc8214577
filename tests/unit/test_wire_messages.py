"""What a frame says is what was put into it."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from multienv.wire.messages import (
    KIND_OF_REQUEST_AT,
    MARK_SIZE,
    MESSAGE,
    REQUEST,
    RESET,
    Call,
    Reset,
    mark_frame,
    pack_message,
    split_frames,
    unpack_message,
)

SEEDS = st.none() | st.integers(0, 2**70)
OPTIONS = st.none() | st.dictionaries(st.text(max_size=3), st.integers(), max_size=3)


@given(seq=st.integers(0, 2**32 - 1), seed=SEEDS, options=OPTIONS, anchor=st.booleans())
def test_resets(seq: int, seed: int | None, options: dict[str, Any] | None, anchor: bool) -> None:
    message = Reset(seed, options, anchor)
    frame = pack_message(seq, message)
    length, number, kind, _ = REQUEST.unpack_from(frame)
    assert (length, number) == (len(frame), seq)
    assert kind == frame[KIND_OF_REQUEST_AT] == (RESET if options is None and (seed or 0) < 2**63 else MESSAGE)
    assert unpack_message(frame) == message


@given(st.lists(st.builds(Reset, SEEDS, OPTIONS, st.booleans()) | st.just(Call("render", (), {})), max_size=5))
def test_joined_frames_come_apart(messages: list[Any]) -> None:
    frames = [pack_message(seq, message) for seq, message in enumerate(messages)]
    assert split_frames(b"".join(frames)) == frames


def test_a_mark_is_no_request() -> None:
    frame = mark_frame(bytes(range(MARK_SIZE)), 7)
    length, seq, *_ = REQUEST.unpack_from(frame)
    assert (length, seq) == (0, 7)
    assert frame[REQUEST.size :] == bytes(range(MARK_SIZE))
