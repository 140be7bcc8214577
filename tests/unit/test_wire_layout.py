"""Values of a space in memory: written and read back to the bit, or refused; never converted."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from wire_strategies import LAID_OUT_SPACES, PICKLED, fingerprint, spaces_with_values

from multienv.wire.layout import layout_of

BOX = spaces.Box(-1.0, 1.0, (2, 3), dtype=np.float32)


class OddArray(np.ndarray):
    """A subclass: may carry anything besides its numbers."""


def there_and_back(space: spaces.Space[Any], value: Any, *, offset: int = 0, fill: int = 0) -> Any:
    layout = layout_of(space)
    assert layout is not None
    assert layout.fits(value)
    buffer = bytearray([fill]) * (offset + layout.size + 16)
    layout.write(value, buffer, offset)
    untouched = buffer[:offset] + buffer[offset + layout.size :]
    assert untouched == bytes([fill]) * len(untouched), "it wrote beyond its place"
    read = layout.read(buffer, offset)
    buffer[:] = bytes(len(buffer))  # what was read must be a value of its own
    return read


@given(spaces_with_values(LAID_OUT_SPACES), st.sampled_from([0, 8, 64]), st.sampled_from([0, 0xFF]))
def test_a_value_comes_back_to_the_bit(pair, offset, fill):
    space, value = pair
    expected = fingerprint(value)
    assert fingerprint(there_and_back(space, value, offset=offset, fill=fill)) == expected
    assert fingerprint(value) == expected, "writing changed the value"


@given(spaces_with_values(LAID_OUT_SPACES), st.integers(0, 2**31 - 1))
def test_a_value_writes_all_bytes_that_are_read(pair, seed):
    space, value = pair
    layout = layout_of(space)
    space.seed(seed)
    fresh, used = bytearray(layout.size), bytearray(layout.size)
    layout.write(space.sample(), used, 0)
    layout.write(value, fresh, 0)
    layout.write(value, used, 0)
    assert used == fresh
    assert fingerprint(layout.read(used, 0)) == fingerprint(layout.read(fresh, 0))


@given(PICKLED)
def test_a_space_without_a_fixed_size_has_no_layout_nor_have_those_that_hold_one(space):
    assert layout_of(space) is None
    assert layout_of(spaces.Tuple((BOX, space))) is None
    assert layout_of(spaces.Dict({"a": BOX, "b": space})) is None


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((2, 3), np.float64),
        np.zeros((2, 3), ">f4"),
        np.zeros((3, 2), np.float32),
        np.zeros((1, 2, 3), np.float32),
        np.zeros((2, 3), np.float32).view(OddArray),
        np.ma.masked_array(np.zeros((2, 3), np.float32)),
        np.zeros((2, 3), object),
        [[0.0] * 3] * 2,
        0.0,
        None,
        {"a": 1},
    ],
    ids=["float64", "big endian", "transposed", "one more axis", "subclass", "masked", "object", "list", "float", "None", "dict"],
)  # fmt: skip
def test_what_is_not_exactly_the_boxes_array_does_not_fit(value):
    assert not layout_of(BOX).fits(value)


@pytest.mark.parametrize("value", [True, 1.0, np.float32(1), np.uint64(1), np.bool_(True), np.array(1), 2**63, -(2**63) - 1, None, "1"])  # fmt: skip
def test_what_is_no_integer_of_64_bits_does_not_fit_a_discrete(value):
    assert not layout_of(spaces.Discrete(5)).fits(value)


DICT = spaces.Dict({"a": spaces.Discrete(3), "b": BOX})
ARRAY = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    "value",
    [
        {"b": ARRAY, "a": 1},
        OrderedDict(a=1, b=ARRAY),
        {"a": 1},
        {"a": 1, "b": ARRAY, "c": 0},
        {"a": 1, "b": ARRAY.astype(np.float64)},
        {"a": 1, "b": None},
        (1, ARRAY),
    ],
    ids=["order", "OrderedDict", "missing", "extra", "dtype", "None", "tuple"],
)
def test_what_is_not_exactly_the_dict_does_not_fit(value):
    assert not layout_of(DICT).fits(value)


@pytest.mark.parametrize("value", [[1, ARRAY], (1,), (1, ARRAY, 0), (ARRAY, 1), {0: 1, 1: ARRAY}, None])
def test_what_is_not_exactly_the_tuple_does_not_fit(value):
    assert not layout_of(spaces.Tuple((spaces.Discrete(3), BOX))).fits(value)


@pytest.mark.parametrize("value", [("x", ARRAY), ((1,), ARRAY), ((), None), ({}, ARRAY)])
def test_what_is_not_exactly_the_empty_tuple_inside_does_not_fit(value):
    layout = layout_of(spaces.Tuple((spaces.Tuple(()), BOX)))
    assert layout.fits(((), ARRAY))
    assert not layout.fits(value)


def test_fortran_order_and_strides_fit_and_keep_their_numbers():
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    for value in (np.asfortranarray(numbers), np.repeat(numbers, 2, axis=1)[:, ::2], numbers[::-1][::-1]):
        assert (there_and_back(BOX, value) == numbers).all()


def test_nan_payloads_and_negative_zeros_survive():
    numbers = np.array([0x7FC00001, 0x80000000, 0xFFFFFFFF, 0x7F800000, 0, 1], np.uint32).view(np.float32).reshape(2, 3)
    assert there_and_back(BOX, numbers).tobytes() == numbers.tobytes()
