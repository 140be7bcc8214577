"""Rows of a batch: written as ``np.stack`` would make them, whichever way they are written, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from hypothesis import given
from hypothesis import strategies as st
from wire_strategies import SCALARS, boxes, discretes, fingerprint

from kit import TokenSpace
from multienv.wire.banks import Bank
from multienv.wire.codecs import layout_of_envs
from multienv.wire.rows import cells, has_rows, leaf_arrays, leaf_spaces, nested, row_bytes, row_of, row_writer

LEAVES = st.one_of(
    boxes(),
    SCALARS,
    discretes(),
    st.integers(1, 9).map(spaces.MultiBinary),
    st.lists(st.integers(1, 9), min_size=1, max_size=4).map(spaces.MultiDiscrete),
)
SPACES = st.recursive(
    LEAVES,
    lambda children: (
        st.lists(children, min_size=1, max_size=3).map(lambda members: spaces.Tuple(tuple(members)))
        | st.dictionaries(st.text(min_size=1, max_size=3), children, min_size=1, max_size=3).map(spaces.Dict)
    ),
    max_leaves=5,
)


def tree_in_a_bank(space: Any, slots: int) -> Any:
    layout = layout_of_envs(False, space, spaces.Discrete(2), slots)
    return nested(space, leaf_arrays(space, Bank(layout, memoryview(bytearray(layout.size)), 0)))


@given(SPACES, st.integers(1, 4), st.integers(0, 2**31 - 1))
def test_rows_of_any_space_are_what_gymnasium_concatenates(space, slots, seed):
    assert has_rows(space)
    assert len(row_bytes(space)) == len(leaf_spaces(space))
    space.seed(seed)
    observations = [space.sample() for _ in range(slots)]
    expected = concatenate(space, observations, create_empty_array(space, slots))
    for through in ("writer", "cells"):
        tree = tree_in_a_bank(space, slots)
        write = row_writer(tree)
        for row, (cell, observation) in enumerate(zip(cells(tree, slots), observations, strict=True)):
            if through == "cells":
                try:
                    cell[:] = observation
                    continue
                except (TypeError, ValueError):
                    pass  # as the worker does: it may fit all the same
            write(row, observation)
        assert fingerprint(tree) == fingerprint(expected)
    assert tree in batch_space(space, slots)
    for row in range(slots):
        assert row_of(tree, row) in space


def test_a_subclass_of_a_known_space_has_no_rows():
    class OddBox(spaces.Box):
        """May return anything."""

    assert not has_rows(OddBox(-1.0, 1.0, (2,)))
    assert not has_rows(spaces.Dict({"a": spaces.Discrete(2), "b": TokenSpace()}))


FITTING: list[tuple[Any, Any, Any]] = [
    (np.float32, (2,), [0.5, 1.5]),
    (np.float32, (2,), np.float64([0.1, 1e300])),  # as np.stack into the batch would: to infinity
    (np.float32, (2,), np.array([1.0, 2.0], ">f4")),
    (np.float32, (2,), np.float32([1, 9, 2, 9])[::2]),
    (np.uint8, (), 255),
    (np.int64, (), True),
    (np.int64, (), np.int8(-3)),
    (np.float32, (), 1.5),
    (np.int64, (2,), np.int32([1, 2])),
    (np.uint8, (2, 2, 3), np.moveaxis(np.arange(12, dtype=np.uint8).reshape(3, 2, 2), 0, -1)),
    (np.uint8, (4, 4, 4), np.arange(64, dtype=np.uint8).reshape(4, 4, 4)[::-1, ::-1]),
    (np.float32, (2, 2), np.asfortranarray(np.eye(2, dtype=np.float32))),
]


@pytest.mark.parametrize(("dtype", "shape", "value"), FITTING)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_values_that_fit_are_converted_as_numpy_converts_them(dtype, shape, value):
    tree = np.zeros((2, *shape), dtype)
    row_writer(tree)(1, value)
    expected = np.stack([np.zeros(shape, dtype), np.asarray(value).astype(dtype)])
    assert fingerprint(tree) == fingerprint(expected)


@pytest.mark.parametrize(
    ("dtype", "shape", "value"),
    [
        (np.float32, (2,), np.zeros(3, np.float32)),
        (np.float32, (2,), np.zeros((1, 2), np.float32)),
        (np.float32, (2,), 1.0),
        (np.float32, (1,), 1.0),
        (np.float32, (2,), None),
        (np.float32, (2,), "ab"),
        (np.float32, (2,), [[1], [2, 3]]),
        (np.int64, (2,), np.float32([1, 2])),
        (np.uint8, (2,), np.int64([1, 2])),
        (np.uint8, (), 256),
        (np.uint8, (), -1),
        (np.uint8, (), 1.0),
        (np.float32, (2,), np.complex64([1, 2])),
        (np.float32, (2,), {"a": 1}),
    ],
    ids=repr,
)
def test_values_of_another_shape_or_kind_are_refused_and_write_nothing(dtype, shape, value):
    tree = np.zeros((2, *shape), dtype)
    with pytest.raises((TypeError, ValueError)):
        row_writer(tree)(1, value)
    for cell in cells(tree, 2):
        with pytest.raises((TypeError, ValueError)):
            cell[:] = value
    assert not tree.any()


def test_nested_values_of_another_structure_are_refused():
    space = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Tuple((spaces.Discrete(3), spaces.Discrete(3)))})
    write = row_writer(tree_in_a_bank(space, 2))
    for value in ({"a": 1}, {"a": 1, "b": (1,)}, {"a": 1, "b": (1, 2, 3)}, 5):
        with pytest.raises((KeyError, TypeError, ValueError)):
            write(0, value)
