"""Banks, journal entries, digests, and the segment that holds them: what one side writes the other finds, and no more."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from multienv.wire.banks import (
    ENDED,
    FAILED,
    HEAD,
    IRREGULAR,
    MESSAGE,
    RAISED,
    SKIPPED,
    STEP,
    STEPPED,
    VALUE,
    Bank,
    BankLayout,
    digester,
    entry_of,
    is_plain,
    split_entries,
)
from multienv.wire.codecs import layout_of_envs
from multienv.wire.segment import CONTROL_SIZE, REPLY_PAYLOAD, REQUEST, Segment

LAYOUTS = st.builds(
    BankLayout, st.integers(1, 9), st.integers(0, 40), st.lists(st.integers(0, 700), max_size=4).map(tuple)
)


def bank_of(layout: BankLayout, fill: int = 0) -> Bank:
    return Bank(layout, memoryview(bytearray([fill]) * layout.size), 0)


# --- layouts ----------------------------------------------------------------------------------


# --- entries ----------------------------------------------------------------------------------

HEADS = st.tuples(
    st.sampled_from([STEP, MESSAGE]),
    st.sampled_from([0, 1, 2, 8, SKIPPED, SKIPPED + 1]),
    st.sampled_from([STEPPED, VALUE, FAILED]),
    st.integers(0, ENDED | RAISED | IRREGULAR),
    st.integers(0, 5),
    st.integers(0, 2**32 - 1),
)


@st.composite
def answered(draw: st.DrawFn) -> tuple[BankLayout, tuple[int, ...], bytes, bytes, bytes]:
    """A layout, a head without irregular part, what is written behind it, request payload and irregular part."""
    layout = draw(LAYOUTS)
    head = draw(HEADS)
    body = draw(st.binary(min_size=layout.end - HEAD.size, max_size=layout.end - HEAD.size))
    return layout, head, body, draw(st.binary(max_size=30)), draw(st.binary(max_size=30))


def entry_in(layout: BankLayout, head: tuple[int, ...], body: bytes, payload: bytes, irregular: bytes) -> bytes:
    bank = bank_of(layout)
    bank.record[:] = HEAD.pack(*head, len(irregular)) + body
    return entry_of(bank, payload, irregular, exact=True)


@given(st.lists(answered(), min_size=1, max_size=6))
def test_entries_come_apart_as_they_were_put_together(requests):
    layout = requests[0][0]
    bodies = [(head, (body * layout.end)[: layout.end - HEAD.size].ljust(layout.end - HEAD.size, b"x"), payload, irregular)
              for _, head, body, payload, irregular in requests]  # fmt: skip
    packed = [entry_in(layout, *parts) for parts in bodies]
    entries = list(split_entries(b"".join(packed), layout.end))
    assert [entry.packed() for entry in entries] == packed
    for entry, (head, _, payload, irregular) in zip(entries, bodies, strict=True):
        assert entry.number == head[5]
        assert entry.is_step == (head[0] == STEP)
        plain = is_plain(entry.record)
        assert plain == (
            head[0] == STEP and bool(head[1] & ~SKIPPED) and head[2] == STEPPED and not head[3] & IRREGULAR
        )
        assert (entry.request_payload, entry.irregular) == ((b"", b"") if plain else (payload, irregular))


def parts_used(layout: BankLayout, head: tuple[int, ...]) -> list[slice]:
    """What of a record the request and the reply use, by their head alone."""
    kind, tag, reply, flags, *_ = head
    parts = [slice(0, HEAD.size)]
    if kind == MESSAGE and reply != STEPPED:  # it has no rows
        return parts
    if tag & ~SKIPPED:
        parts.append(slice(layout.actions, layout.actions + layout.action_bytes))
    if tag & SKIPPED:
        parts.append(slice(layout.skipped, layout.skipped + layout.slots))
    if reply == STEPPED:
        parts.append(slice(layout.rewards, layout.failed + layout.slots))
        if not flags & IRREGULAR:
            parts.append(slice(layout.shown, layout.end))
    return parts


EVERYTHING = (STEP, SKIPPED + 1, STEPPED, 0)


@given(answered(), st.binary(min_size=1, max_size=9))
def test_equal_requests_with_equal_outcomes_are_equal_bytes_whatever_the_bank_held_before(request_, before):
    layout, head, body, payload, irregular = request_
    plain = is_plain(HEAD.pack(*head, 0))
    written = HEAD.pack(*head, len(irregular)) + body
    found = []
    for content in (bytes(layout.end), (before * layout.end)[: layout.end]):
        bank = bank_of(layout)
        for part in parts_used(layout, EVERYTHING):  # not what lies between: nobody writes there
            bank.record[part] = (written if plain else content)[part]  # a plain step writes all that is compared
        for part in parts_used(layout, head):
            bank.record[part] = written[part]
        found.append(entry_of(bank, payload, irregular, exact=True))
    assert found[0] == found[1]
    (entry,) = split_entries(found[0], layout.end)
    for part in parts_used(layout, head):
        assert entry.record[part] == written[part], "something that was used is not in the entry"


# --- the segment ------------------------------------------------------------------------------


@pytest.fixture
def sides() -> Iterator[tuple[Segment, Segment]]:
    """Trainer and worker, mapping one file."""
    trainer = Segment.create()
    worker = Segment(os.dup(trainer.descriptor))
    yield trainer, worker
    trainer.close()
    worker.close()


@pytest.mark.parametrize("order", list(itertools.permutations(["trainer", "worker", "write"])), ids=str)
def test_banks_are_laid_out_by_both_sides_in_any_order(sides, order):
    trainer, worker = sides
    layout = layout_of_envs(False, spaces.Box(-1, 1, (400,)), spaces.Discrete(3), 5)
    trainer.banks[1].view[0] = worker.words[REQUEST] = 77
    for what in order:
        if what == "write":
            worker.write_reply_payload(1, b"written while the layout changes")
        else:
            {"trainer": trainer, "worker": worker}[what].lay_out(layout)
    for side in (0, 1):
        worker.banks[side].leaf(0, (400,), np.float32)[:] = side + 1
        worker.banks[side].rewards[:] = -side
    for side in (0, 1):
        assert (trainer.banks[side].leaf(0, (400,), np.float32) == side + 1).all()
        assert (trainer.banks[side].rewards == -side).all()
    assert trainer.read_reply_payload(1) == b"written while the layout changes"
    assert trainer.words[REQUEST] == 77
    assert os.fstat(trainer.descriptor).st_size >= CONTROL_SIZE + 2 * layout.size


def test_laying_out_cuts_nothing_off_that_the_other_side_writes_meanwhile(sides, monkeypatch):
    trainer, worker = sides
    before = os.fstat(trainer.descriptor)
    worker.lay_out(BankLayout(9, 0, (8000,)))
    worker.write_reply_payload(1, b"payload")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", lambda descriptor: before)  # it looked before the other side wrote
        trainer.lay_out(BankLayout(9, 0, (8000,)))
    assert trainer.read_reply_payload(1) == b"payload"


@pytest.mark.parametrize("size", [0, 1, 2**20 + 1, 2**24])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "in-process"])
def test_mail_of_any_size_arrives_and_may_be_read_twice(sides, shared, size):
    trainer, worker = sides if shared else (Segment(-1),) * 2
    request, reply = os.urandom(min(size, 4096)) * (size // 4096 or 1), b"r" * size
    request = request[:size].ljust(size, b"q")
    trainer.write_request_payload(6, request)
    worker.write_reply_payload(6, reply)
    trainer.write_request_payload(7, b"the next request")
    worker.write_reply_payload(-3, b"odd, and the supervisor's own")
    assert worker.read_request_payload(6) == worker.read_request_payload(6) == request
    assert trainer.read_reply_payload(6) == trainer.read_reply_payload(6) == reply
    assert worker.read_request_payload(7) == b"the next request"
    assert trainer.read_reply_payload(7) == b"odd, and the supervisor's own"
    assert trainer.words[REPLY_PAYLOAD] == size
    worker.write_reply_payload(6, b"")
    assert (trainer.read_reply_payload(6), trainer.words[REPLY_PAYLOAD]) == (b"", 0)


def test_mail_that_is_not_all_there_is_an_error_and_no_short_answer(sides):
    trainer, worker = sides
    worker.words[REPLY_PAYLOAD] = 1000
    with pytest.raises(EOFError, match="1000 bytes"):
        trainer.read_reply_payload(2)


# --- digests ----------------------------------------------------------------------------------


def digests_of(*contents: np.ndarray) -> list[int]:
    """The digest of each content, laid into the last of three slots."""
    leaf = np.zeros((3, *contents[0].shape), contents[0].dtype)
    shown = np.zeros(3, np.uint64)
    digest = digester(shown, [leaf])
    results = []
    for content in contents:
        leaf[2] = content
        digest()
        results.append(int(shown[2]))
    assert (shown[:2] == 0).all(), "zeros have the digest zero: that of a blank row"
    return results


@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_digest_changes_with_any_bit_whatever_the_width(content, data):
    before = np.frombuffer(content, np.uint8)
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    after = before.copy()
    after[bit // 8] ^= 1 << bit % 8
    assert len(set(digests_of(before, after))) == 2


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=40, unique=True), st.data())
def test_a_digest_changes_when_two_words_swap(words, data):
    before = np.array(words, np.uint32)
    one, other = data.draw(st.permutations(range(len(before))))[:2]
    after = before.copy()
    after[[one, other]] = after[[other, one]]
    assert len(set(digests_of(before, after))) == 2


def test_a_digest_covers_each_leaf_and_tells_which_changed():
    leaves = [np.zeros((2, 3), np.float32), np.zeros((2, 0)), np.zeros((2, 5), np.uint8), np.zeros((2, 3), np.float32)]
    shown = np.zeros(2, np.uint64)
    digest = digester(shown, leaves)
    found = {0}
    for leaf in (leaves[0], leaves[2], leaves[3]):
        leaf[1, 0] = 1
        digest()
        leaf[1, 0] = 0
        assert shown[0] == 0, "the digest of one slot depends on another"
        found.add(int(shown[1]))
    assert len(found) == 4
