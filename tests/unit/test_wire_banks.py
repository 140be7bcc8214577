"""The segment, its payload, and digests of rows: what one side writes the other finds, and no more."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multienv._engine.wire import digests
from multienv._engine.wire.banks import BankLayout
from multienv._engine.wire.digests import digester
from multienv._engine.wire.infos import InfoPacker
from multienv._engine.wire.segment import REPLY_PAYLOAD, Segment

# --- the segment ------------------------------------------------------------------------------


@pytest.fixture
def sides() -> Iterator[tuple[Segment, Segment]]:
    """Trainer and worker, mapping one file."""
    trainer = Segment.create()
    worker = Segment(os.dup(trainer.descriptor))
    yield trainer, worker
    trainer.unmap()
    worker.unmap()


def test_laying_out_cuts_nothing_off_that_the_other_side_writes_meanwhile(sides, monkeypatch):
    trainer, worker = sides
    before = os.fstat(trainer.descriptor)
    worker.lay_out(BankLayout(9, 0, (8000,)))
    worker.write_reply_payload(1, b"payload")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", lambda descriptor: before)  # it looked before the other side wrote
        trainer.lay_out(BankLayout(9, 0, (8000,)))
    assert trainer.read_reply_payload(1) == b"payload"


@pytest.mark.parametrize("size", [0, 1, 2**20 + 1])
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


def test_memory_that_is_shared_cannot_be_made_shorter(sides):
    trainer, worker = sides
    trainer.lay_out(BankLayout(2, 0, (8,)))
    with pytest.raises(PermissionError):
        os.ftruncate(worker.descriptor, 0)
    assert trainer.words[REPLY_PAYLOAD] == 0


def test_infos_that_are_pickled_already_are_not_gone_through_byte_by_byte():
    packer, infos = InfoPacker(2), [(slot, bytes(2**20)) for slot in range(2)]
    tracemalloc.start()
    try:
        assert packer.numbers(infos) == b""
        assert tracemalloc.get_traced_memory()[1] < 2**16
    finally:
        tracemalloc.stop()


# --- digests ----------------------------------------------------------------------------------


def digests_of(*contents: np.ndarray) -> list[int]:
    """The digest of each content, laid into the last of three slots; native code and its reference give the same."""
    leaf = np.zeros((3, *contents[0].shape), contents[0].dtype)
    shown = np.zeros(3, np.uint64)
    digest = digester(shown, [leaf])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(digests, "native", None)
        reference = digester(shown, [leaf])
    results = []
    for content in contents:
        leaf[2] = content
        digest()
        results.append(shown.tolist())
        reference()
        assert shown.tolist() == results[-1]
    assert len({one for first, second, _ in results for one in (first, second)}) == 1
    return [one for _, _, one in results]


@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_digest_changes_with_any_bit_whatever_the_width(content, data):
    before = np.frombuffer(content, np.uint8)
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    after = before.copy()
    after[bit // 8] ^= 1 << bit % 8
    assert len(set(digests_of(before, after))) == 2


@pytest.mark.parametrize("size", [1023, 1024, 1025, 84 * 84 * 4, 2**20 + 7])
def test_a_digest_changes_with_each_byte_of_a_large_array(size):
    places = sorted({0, 1, size // 2, size - 9, size - 1, *np.random.default_rng(size).integers(0, size, 20).tolist()})
    contents = [np.random.default_rng(0).integers(0, 256, size, np.uint8) for _ in range(len(places) + 1)]
    for content, place in zip(contents, places, strict=False):
        content[place] ^= 1
    assert len(set(digests_of(*contents))) == len(contents)


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
    digest()
    blank = int(shown[0])
    found = {blank}
    for leaf in (leaves[0], leaves[2], leaves[3]):
        leaf[1, 0] = 1
        digest()
        leaf[1, 0] = 0
        assert shown[0] == blank, "the digest of one slot depends on another"
        found.add(int(shown[1]))
    assert len(found) == 4
