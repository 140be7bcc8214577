"""What came of a replay is held against the journal: each difference is found in its slot, and nothing else is one."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import GraphInstance
from hypothesis import given
from wire_strategies import fingerprint, spaces_with_values

from multienv.recovery.verification import alike, differences, same
from multienv.wire.banks import (
    BEGIN,
    ENDED,
    FAILED,
    HEAD,
    IRREGULAR,
    MESSAGE,
    STEP,
    STEPPED,
    VALUE,
    Bank,
    BankLayout,
    entry_of,
)

SLOTS = 3
INLINE = BankLayout(SLOTS, 8 * SLOTS, (4, 8))
DIGESTED = BankLayout(SLOTS, 8 * SLOTS, (4, 4096))
EXACT = BankLayout(1, 8, (8,))


def entry(layout: BankLayout, *, number: int = 1, kind: int = STEP, reply: int = STEPPED, tag: int = 1, flags: int = 0,
          reward_tag: int = 0, irregular: bytes = b"", **change: Any) -> bytes:  # fmt: skip
    """One entry; ``change``: where in the bank, which slot and what value."""
    bank = Bank(layout, memoryview(bytearray(layout.size)), 0)
    HEAD.pack_into(bank.view, 0, kind, tag, reply, flags, reward_tag, number, len(irregular))
    for name, (slot, value) in change.items():
        if name.startswith("leaf"):
            bank.leaf(int(name[4:]), (layout.leaf_bytes[int(name[4:])],), np.uint8)[slot, -1] = value
        else:
            getattr(bank, name)[slot] = value
    return entry_of(bank, b"payload", irregular, exact=layout is EXACT)


CHANGES = [
    ("rewards", 1.0, "the reward"),
    ("rewards", math.nan, "the reward"),
    ("rewards", -0.0, "the reward"),
    ("terminated", True, "the flags"),
    ("truncated", True, "the flags"),
    ("failed", True, "raised"),
]


@pytest.mark.parametrize("layout", [INLINE, DIGESTED], ids=["inline", "digested"])
@pytest.mark.parametrize("slot", range(SLOTS))
def test_a_difference_is_found_in_its_slot_and_place_and_named(layout, slot):
    observations = [("digests", 7)] if layout is DIGESTED else [("leaf0", 1), ("leaf1", 1)]
    for name, value, what in [*CHANGES, *((name, value, "the observation") for name, value in observations)]:
        before = [entry(layout, number=number) for number in range(4)]
        after = [*before[:2], entry(layout, number=2, **{name: (slot, value)}), before[3]]
        (found,) = differences(b"".join(before), b"".join(after), layout, exact=False).items()
        assert found[0] == slot
        assert what in found[1]
        assert found[1].endswith("at request 3 of 4")
        assert differences(b"".join(after), b"".join(after), layout, exact=False) == {}


def test_each_slot_tells_its_own_first_difference():
    before = [entry(INLINE), entry(INLINE)]
    after = [entry(INLINE, rewards=(2, 1.0)), entry(INLINE, rewards=(2, 3.0), terminated=(0, True))]
    found = differences(b"".join(before), b"".join(after), INLINE, exact=False)
    assert found == {2: "the reward differs at request 1 of 2", 0: "the flags differ at request 2 of 2"}


@pytest.mark.parametrize("layout", [INLINE, DIGESTED], ids=["inline", "digested"])
def test_a_slot_is_not_compared_before_its_start_and_there_by_its_observation_alone(layout):
    """What it shows with SAME_STEP: reward and flags are of the step that ended the episode before."""
    plain, seen = b"".join([entry(layout)] * 4), "digests" if layout is DIGESTED else "leaf1"

    def found(place: int, starts: dict[int, int], **change: Any) -> list[int]:
        replayed = [entry(layout)] * 4
        replayed[place] = entry(layout, flags=ENDED if "terminated" in change else 0, **change)
        return list(differences(plain, b"".join(replayed), layout, exact=False, starts=starts))

    for name, value, _ in [*CHANGES, (seen, 7, "")]:
        change = {name: (1, value)}
        assert found(1, {1: 2}, **change) == [], "it waits"
        assert found(2, {1: 2}, **change) == ([1] if name == seen else []), "it starts"
        assert found(3, {1: 2}, **change) == [1], "it takes part"
        assert found(1, {0: 2, 2: 4}, **change) == [1], "others wait, or take no part at all"
        assert found(2, {0: 2}, **change) == [1], "another one starts"
    assert found(1, {1: 2}, reply=FAILED) == [0, 2]


def test_of_a_single_env_all_is_compared_from_its_start_on():
    before = [entry(EXACT, kind=MESSAGE, tag=0, reply=VALUE), entry(EXACT, kind=BEGIN), entry(EXACT)]
    for place, expected in enumerate([[], [0], [0]]):
        after = list(before)
        after[place] = entry(EXACT, rewards=(0, 1.0))
        assert list(differences(b"".join(before), b"".join(after), EXACT, exact=True, starts={0: 1})) == expected


def test_irregular_rows_of_a_slot_that_waits_are_not_compared_and_those_of_its_start_are():
    def rows(*values: Any) -> bytes:
        told = [None if value is None else pickle.dumps(value) for value in values]
        return entry(INLINE, flags=IRREGULAR, irregular=pickle.dumps(told))

    before = rows("a", "b", "c") * 3
    for place, expected in enumerate([[], [1], [1]]):
        after = [rows("a", "b", "c")] * 3
        after[place] = rows("a", None, "c")
        assert list(differences(before, b"".join(after), INLINE, exact=False, starts={1: 1})) == expected


@pytest.mark.parametrize("layout", [EXACT, INLINE], ids=["exact", "rows"])
def test_one_that_raises_and_one_that_returns_differ_but_what_was_raised_is_not_compared(layout):
    exact = layout is EXACT
    raised, returned = entry(layout, reply=FAILED), entry(layout)
    everyone = set(range(layout.slots))
    assert set(differences(raised, returned, layout, exact=exact)) == everyone
    assert set(differences(returned, raised, layout, exact=exact)) == everyone
    one, other = (entry(layout, kind=MESSAGE, tag=0, reply=VALUE, rewards=(0, value)) for value in (1.0, 2.0))
    assert differences(one, other, layout, exact=exact) == {}


def test_irregular_rows_are_compared_slot_by_slot():
    def rows(*values: Any) -> bytes:
        told = [None if value is None else pickle.dumps(value) for value in values]
        return entry(INLINE, flags=IRREGULAR, irregular=pickle.dumps(told))

    assert differences(rows({1, 9}, "b", "c"), rows({9, 1}, "b", "c"), INLINE, exact=False) == {}
    assert list(differences(rows("a", "b", "c"), rows("a", "x", "c"), INLINE, exact=False)) == [1]
    assert list(differences(rows("a", None, "c"), rows("a", "b", None), INLINE, exact=False)) == [1, 2]


def test_rows_too_large_to_be_kept_are_compared_by_digests_slot_by_slot():
    def rows(*values: Any) -> bytes:
        return entry(INLINE, flags=IRREGULAR, irregular=pickle.dumps([pickle.dumps(value) for value in values]))

    large, other = np.zeros(1000), np.ones(1000)
    assert len(rows(large, large, "c")) < 1000
    assert differences(rows(large, large, "c"), rows(large, large, "c"), INLINE, exact=False) == {}
    assert list(differences(rows(large, large, "c"), rows(large, other, "c"), INLINE, exact=False)) == [1]
    assert list(differences(rows(large, "b", "c"), rows("a", "b", "c"), INLINE, exact=False)) == [0]


# --- values -----------------------------------------------------------------------------------


@given(spaces_with_values(), spaces_with_values())
def test_samples_are_the_same_as_their_copies_and_as_nothing_else(pair, other):
    value = pair[1]
    assert same(value, pickle.loads(pickle.dumps(value)))
    if fingerprint(value) != fingerprint(other[1]):
        assert not same(value, other[1])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0), (1, True), (0.0, -0.0), (np.float32(0), np.float32(-0.0)), (np.int64(1), np.int32(1)), ((1,), [1]),
        (np.zeros(2), np.zeros(3)), (np.zeros(2), np.zeros((2, 1))), (np.zeros(2), np.zeros(2, np.float32)),
        (np.array([0.0]), np.array([-0.0])), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({"a": 1}, {"a": 2}), ([1], [1, 2]),
        ("a", "b"), (None, 0), ({1}, {2}), (np.array([None]), np.array([1], object)),
    ],
    ids=repr,
)  # fmt: skip
def test_values_that_differ_in_type_order_or_any_bit_are_not_the_same(one, other):
    assert not same(one, other)
    assert not alike(pickle.dumps(one), pickle.dumps(other))
    assert not same({"x": [one]}, {"x": [other]})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (math.nan, math.nan),
        (np.array([np.nan]), np.array([np.nan])),
        (np.asfortranarray(np.eye(3)), np.eye(3)),
        ({3, 1, 2}, {1, 2, 3}),
        (np.array([None, {1, 9}]), np.array([None, {9, 1}])),
        (GraphInstance(np.ones((2, 1)), None, None), GraphInstance(np.ones((2, 1)), None, None)),
    ],
    ids=repr,
)
def test_values_that_are_equal_to_the_bit_are_the_same(one, other):
    assert same(one, other)
    assert alike(pickle.dumps(one), pickle.dumps(other))


class Tensor:
    """As torch's: its pickle has an address in it, and comparing it gives one answer for each element."""

    def __init__(self, values: Any, dtype: Any = np.float32, readable: bool = True) -> None:
        self.values = np.array(values, dtype)
        self.shape, self.dtype, self.readable = self.values.shape, self.values.dtype, readable

    def __reduce__(self) -> Any:
        return Tensor, (self.values, self.dtype, self.readable), {"address": id(self)}

    def __eq__(self, other: object) -> Any:
        return self.values == other.values  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if not self.readable:
            raise TypeError("it is on another device")
        return self.values

    def __dlpack__(self) -> None:
        raise NotImplementedError


def test_tensors_go_by_their_values():
    assert same({"x": [Tensor([1, 2])]}, {"x": [Tensor([1, 2])]})
    assert same(Tensor([np.nan]), Tensor([np.nan]))
    for other in (Tensor([1, 3]), Tensor([1, 2, 3]), Tensor([1, 2], np.float64), Tensor([[1, 2]]), np.array([1, 2])):
        assert not same(Tensor([1, 2]), other)


def test_what_cannot_be_compared_here_is_not_alike_and_no_error():
    tensors = [Tensor([1, 2], readable=False) for _ in range(2)]
    one, other = map(pickle.dumps, tensors)
    assert one != other
    assert not alike(one, other)
    assert alike(one, one)
    assert not alike(b"no pickle", b"nor this")
