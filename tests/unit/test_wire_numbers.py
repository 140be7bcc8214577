"""Infos of numbers come back as they were, whatever the numbers; all else is left to pickle."""

from __future__ import annotations

import enum
import math
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

from multienv.testing import first_difference
from multienv.wire import numbers
from multienv.wire.numbers import Alike, Merging, NumberInfos, Reader, holds_numbers, pack_numbers, unpack_numbers

KINDS: list[st.SearchStrategy[Any]] = [
    st.floats(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats().map(np.float64),
    st.floats(width=32).map(np.float32),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.integers(-(2**31), 2**31 - 1).map(np.int32),
    st.integers(0, 255).map(np.uint8),
]
KEYS = st.text(min_size=1).filter(lambda key: not key.startswith("_") and key not in ("final_obs", "final_info"))


def alike(rows: int) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Infos with the same keys and types."""
    shapes = st.dictionaries(KEYS, st.sampled_from(KINDS), min_size=1, max_size=5)
    infos = shapes.flatmap(lambda shape: st.lists(st.fixed_dictionaries(shape), min_size=rows, max_size=rows))
    return infos.map(lambda many: [{key: one[key] for key in many[0]} for one in many])  # in one order


def same(one: Any, other: Any) -> bool:
    """Also of which type, in which order, and if they are no numbers."""
    return first_difference(one, other) is None and list(one) == list(other)


@given(alike(1))
def test_one_comes_back_as_it_was(infos):
    data = pack_numbers(infos[0])
    if not any(isinstance(value, np.generic) for value in infos[0].values()):
        assert data == b""  # Python's own are pickled as fast
        return
    assert holds_numbers(data[0])
    back = unpack_numbers(data)
    assert same(back, infos[0])
    assert [type(value) for value in back.values()] == [type(value) for value in infos[0].values()]


def packed(*infos: dict[Any, Any]) -> bytes:
    """As a worker packs those of all its envs."""
    return Alike(len(infos)).packed(list(enumerate(infos)))


@given(alike(3))
def test_those_of_a_group_come_back_as_they_were(infos):
    data = packed(*infos)
    assert holds_numbers(data[0])
    told = list(unpack_numbers(data)["infos"])
    assert [slot for slot, _ in told] == [0, 1, 2]
    for (_, one), info in zip(told, infos, strict=True):
        assert same(one, info)
        assert [type(value) for value in one.values()] == [type(value) for value in info.values()]


@given(alike(4))
def test_they_are_merged_as_gymnasium_merges_them(infos):
    ours = Merging(4).merged([unpack_numbers(packed(infos[0])), unpack_numbers(packed(*infos[1:]))])
    theirs: dict[str, Any] = {}
    envs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4)
    for index, info in enumerate(infos):
        theirs = envs._add_info(theirs, info, index)
    envs.close()
    assert ours is not None
    assert same(ours, theirs)
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype
        assert ours[key].flags.writeable


@pytest.mark.parametrize(
    "info",
    [
        {"text": "a"},
        {"array": np.zeros(2)},
        {"flag": np.bool_(True)},
        {"nested": {"a": 1}},
        {"large": 2**63},
        {"nothing": None},
        {"_hidden": 1},
        {"": 1},
        {"final_obs": 1},
        {1: 1},
        {(1,): 1.0},
        {"complex": 1j},
        [1.0],
        None,
        type("Info", (dict,), {})(a=1),
        {"a": type("Number", (float,), {})(1.0)},
    ],
)
def test_what_is_left_to_pickle(info):
    assert pack_numbers(info) == b""
    if type(info) is dict:
        assert packed(info) == b""
        assert packed({"a": 1.0}, info) == b""
        assert packed(info, {"a": 1.0}) == b""


@pytest.mark.parametrize(
    "infos",
    [
        [{"a": 1.0, "b": 2}, {"a": 1, "b": 2}],
        [{"a": 1.0, "b": 2}, {"b": 2, "a": 1.0}],
        [{"a": 1.0, "b": 2}, {"a": 1.0}],
        [{"a": 1.0}, {"a": 1.0, "b": 2}],
        [{"a": 1.0, "b": 2}, {"a": 1.0, "b": 2**64}],
        [{"a": 1}, {"b": 1, "a": 1}, {"b": 1}],
        [{"a": 1, "b": 1, "c": 1}, {"a": 1}, {"b": 1, "c": 1}],
    ],
)
def test_what_is_not_alike_is_left_to_pickle(infos):
    """Also after some that were, and it does not keep others from being packed."""
    rows, good = Alike(len(infos)), list(enumerate([{"a": 1.0, "b": 2}] * len(infos)))
    for _ in range(2):
        assert rows.packed(list(enumerate(infos))) == b""
        assert list(unpack_numbers(rows.packed(good))["infos"]) == good


def test_infos_of_some_envs_are_left_to_pickle():
    assert Alike(3).packed([(0, {"a": 1}), (2, {"a": 1})]) == b""


def test_infos_may_change_from_step_to_step():
    rows = Alike(2)
    for infos in ([{"a": 1.0}, {"a": math.inf}], [{"b": 1}, {"b": -2}], [{"a": True}, {"a": False}]) * 2:
        assert list(unpack_numbers(rows.packed(list(enumerate(infos))))["infos"]) == list(enumerate(infos))


class Letter(str, enum.Enum):
    A = "a"


class Odd:
    """A key that is hashed by identity, and compares as tensors do."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        return np.zeros(2)


@pytest.mark.parametrize("key", [Letter.A, type("Key", (str,), {})("a"), Odd()])
def test_keys_that_only_look_like_strings_are_left_to_pickle(key):
    """Also after the string itself."""
    rows, plain, odd = Alike(2), {"a": np.float64(1)}, {key: np.float64(1)}
    assert pack_numbers(plain)
    assert pack_numbers(odd) == b""
    assert rows.packed([(0, plain), (1, plain)])
    assert rows.packed([(0, plain), (1, odd)]) == b""
    assert rows.packed([(0, odd), (1, odd)]) == b""


def test_an_info_that_makes_up_keys_is_left_to_pickle_in_the_end(monkeypatch):
    monkeypatch.setattr(numbers, "_known", {})
    taken = [bool(pack_numbers({f"unit {number}": np.float64(1)})) for number in range(1000)]
    assert all(taken[:200])
    assert not any(taken[300:])
    assert pack_numbers({"unit 3": np.float64(1)})


def test_groups_that_differ_are_not_merged_here():
    def told(info: dict[str, Any]) -> dict[str, Any]:
        one: dict[str, Any] = unpack_numbers(packed(info))
        return one

    merged = Merging(2).merged
    assert merged([{}, {}]) == {}
    assert merged([told({"a": 1}), {}]) is None
    assert merged([told({"a": 1}), told({"a": 1.0})]) is None
    assert merged([told({"a": 1}), told({"b": 1})]) is None
    assert merged([told({"a": 1}), {**told({"a": 1}), "failures": {}}]) is None
    assert merged([told({"a": 1}), {"infos": [(0, {"a": 1})]}]) is None
    assert type(told({"a": 1})["infos"]) is NumberInfos


def test_infos_merged_before_stay_as_they_were():
    merging = Merging(2)
    first = merging.merged([unpack_numbers(packed({"a": 1}, {"a": 2}))])
    other = merging.merged([unpack_numbers(packed({"b": 0.5}, {"b": 1.5}))])
    again = merging.merged([unpack_numbers(packed({"a": 3}, {"a": 4}))])
    values = [{key: array.tolist() for key, array in (one or {}).items()} for one in (first, other, again)]
    every = [True, True]
    assert values == [{"a": [1, 2], "_a": every}, {"b": [0.5, 1.5], "_b": every}, {"a": [3, 4], "_a": every}]


def test_replies_are_read_whatever_was_read_before():
    reader = Reader()
    for infos in ([{"a": 1}, {"a": 2}], [{"a": 3}, {"a": 4}], [{"a": 0.5, "b": True}] * 2, [{"ab": 3}, {"ab": 4}]) * 2:
        told = reader.read(b"what comes first" + packed(*infos), len(b"what comes first"))
        assert list(told["infos"]) == list(enumerate(infos))
