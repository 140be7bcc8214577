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
from multienv.wire.numbers import NumberInfos, Rows, holds_numbers, merged, pack_numbers, unpack_numbers

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
    packed = pack_numbers(infos[0])
    if not any(isinstance(value, np.generic) for value in infos[0].values()):
        assert packed == b""  # Python's own are pickled as fast
        return
    assert holds_numbers(packed[0])
    back = unpack_numbers(packed)
    assert same(back, infos[0])
    assert [type(value) for value in back.values()] == [type(value) for value in infos[0].values()]


@given(alike(3))
def test_those_of_a_group_come_back_as_they_were(infos):
    rows = Rows()
    assert all(rows.take(slot, info) for slot, info in enumerate(infos))
    packed = rows.packed()
    assert holds_numbers(packed[0])
    told = unpack_numbers(packed)["infos"]
    for back in (list(told), rows.infos()):
        assert [slot for slot, _ in back] == [0, 1, 2]
        for (_, one), info in zip(back, infos, strict=True):
            assert same(one, info)
            assert [type(value) for value in one.values()] == [type(value) for value in info.values()]
    assert rows.packed() == b""


@given(alike(4))
def test_they_are_merged_as_gymnasium_merges_them(infos):
    groups = [Rows(), Rows()]
    groups[0].take(0, infos[0])
    for slot, info in enumerate(infos[1:]):
        groups[1].take(slot, info)
    ours = merged([unpack_numbers(rows.packed()) for rows in groups])
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
    rows = Rows()
    assert not rows.take(0, info)
    assert rows.packed() == b""


def test_what_is_not_alike_is_not_taken():
    rows = Rows()
    assert rows.take(0, {"a": 1.0, "b": 2})
    assert not rows.take(1, {"a": 1, "b": 2})
    assert not rows.take(1, {"b": 2, "a": 1.0})
    assert not rows.take(1, {"a": 1.0})
    assert not rows.take(2, {"a": 1.0, "b": 2})  # the one before had something else
    assert rows.take(1, {"a": math.inf, "b": -2})
    assert not rows.take(2, {"a": 1.0, "b": 2**64})
    assert rows.infos() == [(0, {"a": 1.0, "b": 2}), (1, {"a": math.inf, "b": -2})]
    assert rows.take(0, {"other": True})


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
    rows = Rows()
    assert pack_numbers({"a": np.float64(1)})
    assert rows.take(0, {"a": np.float64(1)})
    assert pack_numbers({key: np.float64(1)}) == b""
    assert not rows.take(1, {key: np.float64(1)})
    rows.clear()
    assert not rows.take(0, {key: np.float64(1)})


def test_an_info_that_makes_up_keys_is_left_to_pickle_in_the_end(monkeypatch):
    monkeypatch.setattr(numbers, "_known", {})
    packed = [bool(pack_numbers({f"unit {number}": np.float64(1)})) for number in range(1000)]
    assert all(packed[:200])
    assert not any(packed[300:])
    assert pack_numbers({"unit 3": np.float64(1)})


def test_what_has_been_taken_is_a_copy():
    rows, info = Rows(), {"a": 1}
    rows.take(0, info)
    info["a"] = 2
    rows.take(1, info)
    assert rows.infos() == [(0, {"a": 1}), (1, {"a": 2})]


def test_groups_that_differ_are_not_merged_here():
    def told(info: dict[str, Any]) -> dict[str, Any]:
        rows = Rows()
        rows.take(0, info)
        one: dict[str, Any] = unpack_numbers(rows.packed())
        return one

    assert merged([{}, {}]) == {}
    assert merged([told({"a": 1}), {}]) is None
    assert merged([told({"a": 1}), told({"a": 1.0})]) is None
    assert merged([told({"a": 1}), told({"b": 1})]) is None
    assert merged([told({"a": 1}), {**told({"a": 1}), "failures": {}}]) is None
    assert merged([told({"a": 1}), {"infos": [(0, {"a": 1})]}]) is None
    assert type(told({"a": 1})["infos"]) is NumberInfos
