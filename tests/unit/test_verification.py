"""What came of a replay is held against the journal: each difference is found in its slot, and nothing else is one."""

from __future__ import annotations

import copy
import dataclasses
import enum
import math
import pickle
import threading
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium.spaces import GraphInstance
from hypothesis import given
from wire_strategies import fingerprint, spaces_with_values

from multienv._engine.recovery.verification import differences, same
from multienv._engine.wire.banks import (
    ENDED,
    FAILED,
    HEAD,
    MESSAGE,
    PICKLED_ROWS,
    RESET,
    STEP,
    STEPPED,
    VALUE,
    Bank,
    BankLayout,
    entry_of,
)
from multienv._engine.wire.digests import MARK, evidence_of, pack_evidence

SLOTS = 3
INLINE = BankLayout(SLOTS, 8 * SLOTS, (4, 8))
DIGESTED = BankLayout(SLOTS, 8 * SLOTS, (4, 4096))
SAME_STEP = BankLayout(SLOTS, 8 * SLOTS, (4, 8), has_finals=True)
EXACT = BankLayout(1, 8, (8,))


def entry(layout: BankLayout, *, number: int = 1, kind: int = STEP, reply: int = STEPPED, tag: int = 1, flags: int = 0,
          reward_tag: int = 0, evidence: bytes = b"", **change: Any) -> bytes:  # fmt: skip
    """One entry; ``change``: where in the bank, which slot and what value."""
    bank = Bank(layout, memoryview(bytearray(layout.size)), 0)
    HEAD.pack_into(bank.view, 0, kind, tag, reply, flags, reward_tag, number, 0)
    for name, (slot, value) in change.items():
        if name.startswith("leaf"):
            bank.leaf(int(name[4:]), (layout.leaf_bytes[int(name[4:])],), np.uint8)[slot, -1] = value
        else:
            getattr(bank, name)[slot] = value
    return entry_of(bank, b"payload", evidence)


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
        (found,) = differences(b"".join(before), b"".join(after), layout, verbatim=False).items()
        assert found[0] == slot
        assert what in found[1]
        assert found[1].endswith("at request 3 of 4")
        assert differences(b"".join(after), b"".join(after), layout, verbatim=False) == {}


def test_each_slot_tells_its_own_first_difference():
    before = [entry(INLINE), entry(INLINE)]
    after = [entry(INLINE, rewards=(2, 1.0)), entry(INLINE, rewards=(2, 3.0), terminated=(0, True))]
    found = differences(b"".join(before), b"".join(after), INLINE, verbatim=False)
    assert found == {2: "the reward differs at request 1 of 2", 0: "the flags differ at request 2 of 2"}


@pytest.mark.parametrize("layout", [INLINE, DIGESTED], ids=["inline", "digested"])
def test_a_slot_is_not_compared_before_its_start_and_there_by_its_observation_alone(layout):
    """What it shows with SAME_STEP: reward and flags are of the step that ended the episode before."""
    plain, seen = b"".join([entry(layout)] * 4), "digests" if layout is DIGESTED else "leaf1"

    def found(place: int, starts: dict[int, int], **change: Any) -> list[int]:
        replayed = [entry(layout)] * 4
        replayed[place] = entry(layout, flags=ENDED if "terminated" in change else 0, **change)
        return list(differences(plain, b"".join(replayed), layout, verbatim=False, starts=starts))

    for name, value, _ in [*CHANGES, (seen, 7, "")]:
        change = {name: (1, value)}
        assert found(1, {1: 2}, **change) == [], "it waits"
        assert found(2, {1: 2}, **change) == ([1] if name == seen else []), "it starts"
        assert found(3, {1: 2}, **change) == [1], "it takes part"
        assert found(1, {0: 2, 2: 4}, **change) == [1], "others wait, or take no part at all"
        assert found(2, {0: 2}, **change) == [1], "another one starts"
    assert found(1, {1: 2}, reply=FAILED) == [0, 2]


def test_of_a_single_env_all_is_compared_from_its_start_on():
    before = [entry(EXACT, kind=MESSAGE, tag=0, reply=VALUE), entry(EXACT, kind=RESET), entry(EXACT)]
    for place, expected in enumerate([[], [0], [0]]):
        after = list(before)
        after[place] = entry(EXACT, rewards=(0, 1.0))
        assert list(differences(b"".join(before), b"".join(after), EXACT, verbatim=True, starts={0: 1})) == expected


@pytest.mark.parametrize("layout", [EXACT, INLINE], ids=["verbatim", "rows"])
def test_one_that_raises_and_one_that_returns_differ_but_what_was_raised_is_not_compared(layout):
    verbatim = layout is EXACT
    raised, returned = entry(layout, reply=FAILED), entry(layout)
    everyone = set(range(layout.slots))
    assert set(differences(raised, returned, layout, verbatim=verbatim)) == everyone
    assert set(differences(returned, raised, layout, verbatim=verbatim)) == everyone
    one, other = (entry(layout, kind=MESSAGE, tag=0, reply=VALUE, rewards=(0, value)) for value in (1.0, 2.0))
    assert differences(one, other, layout, verbatim=verbatim) == {}


def test_an_observation_that_ended_an_episode_in_a_step_that_began_the_next_one_is_compared():
    plain, other = entry(SAME_STEP, finals=(1, 7)), entry(SAME_STEP, finals=(1, 8))
    assert differences(plain, other, SAME_STEP, verbatim=False) == {
        1: "the final observation differs at request 1 of 1"
    }
    assert differences(plain, other, SAME_STEP, verbatim=False, starts={1: 0}) == {}, "it is of the episode before"
    unknown = entry(SAME_STEP, finals=(2, int.from_bytes(MARK, "little")))
    (found,) = differences(unknown, unknown, SAME_STEP, verbatim=False).items()
    assert found == (2, "the final observation cannot be compared at request 1 of 1")


def rows(*values: Any) -> bytes:
    """An entry whose rows fit no layout; None: that env raised."""
    told = [b"" if value is None else evidence_of(value) for value in values]
    return entry(INLINE, flags=PICKLED_ROWS, evidence=pack_evidence(told))


LARGE, OTHER = np.zeros(1000), np.ones(1000)


@pytest.mark.parametrize(
    ("before", "after", "differ"),
    [
        (({1, 9}, "b", "c"), ({9, 1}, "b", "c"), []),
        (("a", "b", "c"), ("a", "x", "c"), [1]),
        (("a", None, "c"), ("a", "b", None), [1, 2]),
        ((LARGE, LARGE, "c"), (LARGE, LARGE, "c"), []),
        ((LARGE, LARGE, "c"), (LARGE, OTHER, "c"), [1]),
        ((LARGE, "b", "c"), ("a", "b", "c"), [0]),
    ],
)
def test_pickled_rows_are_compared_slot_by_slot_from_their_start_on(before, after, differ):
    one, other = rows(*before), rows(*after)
    assert len(one) < 1000
    assert list(differences(one, other, INLINE, verbatim=False)) == differ
    for place, expected in enumerate([[], differ, differ]):
        replayed = [one] * 3
        replayed[place] = other
        starts = dict.fromkeys(range(SLOTS), 1)
        assert list(differences(one * 3, b"".join(replayed), INLINE, verbatim=False, starts=starts)) == expected


class Ticket:
    """Pickles to other bytes each time: no copy of it can be told from another."""

    count = 0

    def __reduce__(self) -> Any:
        Ticket.count += 1
        return Ticket, (), {"number": Ticket.count}


def test_what_cannot_be_compared_is_a_difference_though_all_bytes_are_equal():
    one = rows("a", {"deep": [Ticket()]}, "c")
    (found,) = differences(one, one, INLINE, verbatim=False).items()
    assert found == (1, "the observation holds a value of type Ticket, which cannot be compared at request 1 of 1")
    assert differences(one, one, INLINE, verbatim=False, starts={1: 1}) == {}, "it takes no part yet"


# --- values -----------------------------------------------------------------------------------


@given(spaces_with_values(), spaces_with_values())
def test_samples_are_the_same_as_their_copies_and_as_nothing_else(pair, other):
    value = pair[1]
    assert same(value, pickle.loads(pickle.dumps(value)))
    assert evidence_of(value) == evidence_of(pickle.loads(pickle.dumps(value)))
    if fingerprint(value) != fingerprint(other[1]):
        assert not same(value, other[1])
        assert evidence_of(value) != evidence_of(other[1])


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
    assert evidence_of(one) != evidence_of(other)
    assert not same({"x": [one]}, {"x": [other]})
    assert evidence_of({"x": [one]}) != evidence_of({"x": [other]})


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
    assert evidence_of(one) == evidence_of(other)


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
    assert evidence_of({"x": [Tensor([1, 2])]}) == evidence_of({"x": [Tensor([1, 2])]})
    assert same(Tensor([np.nan]), Tensor([np.nan]))
    for other in (Tensor([1, 3]), Tensor([1, 2, 3]), Tensor([1, 2], np.float64), Tensor([[1, 2]]), np.array([1, 2])):
        assert not same(Tensor([1, 2]), other)
        assert evidence_of(Tensor([1, 2])) != evidence_of(other)


class Named(dict[str, Any]):
    """A dict that holds more than its items."""


def named(goal: str) -> Named:
    made = Named(a=1)
    made.goal = goal  # type: ignore[attr-defined]
    return made


class Slotted(Named):
    """Holds something in a slot, whose name is mangled."""

    __slots__ = ("__goal",)

    def __init__(self, goal: str) -> None:
        super().__init__(a=1)
        if goal:
            self.__goal = goal


class Aimed:
    __slots__ = ("goal",)


@dataclasses.dataclass
class AimedSeen(Aimed):
    frame: int = 0

    def __init__(self, goal: int) -> None:
        self.goal = goal

    def __iter__(self) -> Any:
        return iter((self.frame,))


class Told(tuple[Any, ...]):  # noqa: SLOT001 - as users write them
    """Says itself what it pickles to."""

    told = 0

    def __getnewargs__(self) -> Any:
        return ((self.told,),)


def told(value: int) -> Any:
    """Return the pickle's view of a tuple that shows the value nowhere else, as a digest."""
    Told.told = value
    return evidence_of(Told())


class Nonce(list[Any]):
    """Pickles to other bytes each time."""

    def __getstate__(self) -> Any:
        Ticket.count += 1
        return {"number": Ticket.count}


class Pair(NamedTuple):
    one: Any
    other: Any


class Mass(np.longdouble):
    """A number that holds more than its value."""


def padded(rest: int) -> Any:
    """Numbers between which there are bytes that say nothing."""
    kind = np.dtype([("a", "i1"), ("b", "f8")], align=True)
    array = np.full(3 * kind.itemsize, rest, np.uint8).view(kind)
    array["a"], array["b"] = 1, 2.0
    return array


@dataclasses.dataclass
class Seen:
    """An observation of a class of its own."""

    frame: Any
    words: str = ""


class Kind(enum.Enum):
    ONE = 1
    OTHER = 2


def masked(mask: list[bool]) -> Any:
    return np.ma.MaskedArray([1.0, 2.0], mask)


def test_values_of_any_other_kind_go_by_what_they_hold():
    itself: list[Any] = []
    itself.append(itself)
    pairs = [
        (Seen(np.zeros(2)), Seen(np.ones(2))),
        (Seen(None, "a"), Seen(None, "b")),
        (masked([False, True]), masked([True, False])),
        (np.array([(1, 2.0)], "i4,f8"), np.array([(1, 3.0)], "i4,f8")),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (b"ab", bytearray(b"ab")),
        (["ab", "c"], ["a", "bc"]),
        (1j, -1j),
        (10**5000, 10**5000 + 1),
        (Kind.ONE, Kind.OTHER),
        (named("x"), named("y")),
        (defaultdict(int, a=1), defaultdict(float, a=1)),
        (np.array([1, 2], np.longdouble), np.array([1, 3], np.longdouble)),
        (np.longdouble(1) / 3, np.float64(1) / 3),
        (Slotted("x"), Slotted("y")),
        (Slotted("x"), Slotted("")),
        (AimedSeen(1), AimedSeen(2)),
        (Pair({1, 9}, 0), Pair({1, 8}, 0)),
        (itself, [[]]),
        (np.zeros((600, 600), np.uint8), np.eye(600, dtype=np.uint8) * 0 + (np.arange(600) == 599)),
    ]
    for one, other in pairs:
        assert evidence_of(one) == evidence_of(copy.deepcopy(one))
        assert evidence_of(one) != evidence_of(other)
        assert not evidence_of(one).startswith(MARK)


def test_bytes_that_say_nothing_are_no_difference():
    assert evidence_of(padded(0)) == evidence_of(padded(255))
    one, other = (np.full(4 * 16, rest, np.uint8).view(np.longdouble) for rest in (0, 255))
    one[:], other[:] = 1.5, 1.5
    assert evidence_of(one) == evidence_of(other)
    assert evidence_of(one[0]) == evidence_of(other[0])
    assert evidence_of(one.view(np.clongdouble)) == evidence_of(other.view(np.clongdouble))
    assert evidence_of(one.astype(">g")) != evidence_of(one.astype(">g") * 2)
    kind = np.dtype([("a", "g"), ("b", "G", 2)])
    one, other = (np.full(kind.itemsize, rest, np.uint8).view(kind) for rest in (0, 255))
    one["a"], other["a"] = 1.5, 1.5
    one["b"], other["b"] = 1.5, 1.5
    assert evidence_of(one) == evidence_of(other)
    assert evidence_of(one[0]) == evidence_of(other[0])


def test_what_a_class_itself_says_of_its_pickle_is_compared():
    assert told(1) == told(1) != told(2)
    assert evidence_of(Nonce("ab")) == MARK + b"Nonce"


def test_what_the_standard_library_says_of_a_class_is_no_reason_to_pickle_its_values():
    tensors = lambda: [Pair(Tensor(1), 0), Seen(Tensor(1)), AimedSeen(Tensor(1)), OrderedDict(a=Tensor(1))]  # noqa: E731
    assert [*map(evidence_of, tensors())] == [*map(evidence_of, tensors())]
    assert evidence_of(OrderedDict(a={1, 9})) == evidence_of(OrderedDict(a={9, 1}))
    assert evidence_of(defaultdict(set, a={1, 9})) == evidence_of(defaultdict(set, a={9, 1}))


def test_what_does_not_pickle_to_the_same_bytes_twice_cannot_be_compared():
    for value, name in ((threading.Lock(), "lock"), (Ticket(), "Ticket")):
        assert evidence_of({"a": (value,)}) == evidence_of(value) == MARK + name.encode()
    tensor = Tensor([1], readable=False)  # goes by its pickle, which has its address in it
    assert evidence_of(tensor) == evidence_of(tensor) != evidence_of(Tensor([1], readable=False))
