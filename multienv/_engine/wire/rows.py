"""Rows in a bank: how observations of any space are written to their row and read back.

Observations of a nested space have an array for each leaf. A space whose values have no fixed size (Text, Graph,
Sequence, OneOf, custom) has none: its observations travel as a payload. A single env is a batch of one, of which each
value is kept *verbatim*: see :func:`verbatim_writer`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from multienv._engine.wire.banks import Array, Bank

WriteRow = Callable[[int, Any], None]  # row, observation

# Spaces whose values are arrays; and those whose values have a fixed size.
ARRAYS = (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)
SOLID = (*ARRAYS, spaces.Discrete)
# Channels that are copied one by one where they do not lie beside each other.
_FEW = 8
# What an observation that is no dict, or lacks a key, raises when it is asked for the key.
_NO_MEMBER = (LookupError, TypeError, ValueError)
_FIX = "Fix the env, or its observation_space."
# What a Discrete space's values are in practice; the exact type of a single env's travels as a tag.
_INTEGER_TYPES: tuple[type, ...] = (int, np.int64, np.int32, np.int16, np.int8, np.uint8, np.uint16, np.uint32)
_INTEGER_TAG = {kind: tag for tag, kind in enumerate(_INTEGER_TYPES)}
_TAGGED = np.dtype(np.int64)


def has_rows(space: spaces.Space[Any]) -> bool:
    """Tell whether observations of this space have arrays in a bank."""
    # The exact type: a subclass may return anything. Of a long double, some bytes say nothing: rows show all bytes.
    if type(space) is spaces.Dict:
        return all(map(has_rows, space.spaces.values()))
    if type(space) is spaces.Tuple:
        return all(map(has_rows, space.spaces))
    dtype = space.dtype
    return type(space) in SOLID and dtype is not None and not dtype.hasobject and dtype.char not in "gG"


def leaf_spaces(space: Any) -> list[Any]:
    """Return the spaces that are not nested, in their order."""
    if type(space) is spaces.Dict:
        return [leaf for member in space.spaces.values() for leaf in leaf_spaces(member)]
    if type(space) is spaces.Tuple:
        return [leaf for member in space.spaces for leaf in leaf_spaces(member)]
    return [space]


def leaf_forms(space: Any, *, verbatim: bool) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return shape and dtype of each leaf; verbatim, an integer has the tag of its type beside it."""
    return [
        ((2,), _TAGGED) if verbatim and type(leaf) is spaces.Discrete else (leaf.shape, leaf.dtype)
        for leaf in leaf_spaces(space)
    ]


def row_bytes(space: Any, *, verbatim: bool = False) -> tuple[int, ...]:
    """Return for each leaf the bytes of one row."""
    return tuple(math.prod(shape) * dtype.itemsize for shape, dtype in leaf_forms(space, verbatim=verbatim))


def leaf_arrays(space: Any, bank: Bank, *, verbatim: bool = False) -> list[Array]:
    """Return for each leaf its array in a bank."""
    return [bank.leaf(index, *form) for index, form in enumerate(leaf_forms(space, verbatim=verbatim))]


def nested(space: Any, leaves: Iterable[Any]) -> Any:
    """Return leaves, one for each leaf of the space, in the structure of the space."""
    rest = iter(leaves)  # of an iterator, itself
    if type(space) is spaces.Dict:
        return {key: nested(member, rest) for key, member in space.spaces.items()}
    if type(space) is spaces.Tuple:
        return tuple(nested(member, rest) for member in space.spaces)
    return next(rest)


def batch_of(space: Any, observations: list[Any]) -> Any:
    """Return the batch of observations of any space."""
    empty: Any = create_empty_array(space, len(observations))
    return concatenate(space, observations, empty)


def stacked(space: Any, values: Sequence[Any]) -> Any:
    """Stack the values of many steps, in the structure of the space; values that do not stack become a list.

    Args:
        space: Of each value, or of each row of it.
        values: One for each step.
    """
    if isinstance(space, spaces.Dict) and all(isinstance(value, dict) for value in values):
        return {key: stacked(member, [value[key] for value in values]) for key, member in space.spaces.items()}
    if isinstance(space, spaces.Tuple) and all(isinstance(value, tuple) for value in values):
        members = enumerate(space.spaces)
        return tuple(stacked(member, [value[index] for value in values]) for index, member in members)
    if isinstance(space, SOLID):
        arrays = [np.asarray(value) for value in values]
        if len({array.shape for array in arrays}) == 1:
            return np.stack(arrays)
    return list(values)


def row_of(space: Any, leaves: Iterable[Array], row: int) -> Any:
    """Return a copy of one row of the leaves, in the type its space has: of a Box it is always an array."""
    members = zip(leaf_spaces(space), leaves, strict=True)
    copies = [leaf[row] if type(one) is spaces.Discrete else leaf[row, ...].copy() for one, leaf in members]
    return nested(space, copies)


def row_writer(tree: Any, name: str = "An observation") -> WriteRow:
    """Return the function that writes one observation into its row of nested arrays.

    Args:
        tree: The arrays; ``None`` in place of one: nothing is written there, only the parts above it are looked at.
        name: Of the observation, or of the part of it, for messages.
    """
    if isinstance(tree, dict):
        by_key = {key: row_writer(member, f"{name}[{key!r}]") for key, member in tree.items()}

        def write_dict(row: int, value: Any) -> None:
            for key, write in by_key.items():
                try:
                    item = value[key]
                except _NO_MEMBER:
                    raise _other_members(name, value, by_key) from None
                write(row, item)
            if isinstance(value, dict) and len(value) != len(by_key):
                _warn_of_more(name, value, by_key)

        return write_dict
    if isinstance(tree, tuple):
        members = [row_writer(member, f"{name}[{index}]") for index, member in enumerate(tree)]

        def write_tuple(row: int, value: Any) -> None:
            for write, item in zip(members, _items(name, value, len(members)), strict=True):
                write(row, item)

        return write_tuple
    return (lambda row, value: None) if tree is None else _array_row_writer(tree, name)


def _other_members(name: str, value: Any, wanted: Collection[Any]) -> ValueError:
    """Return the error for an observation that is no dict with all these keys."""
    missing = [key for key in wanted if key not in value] if isinstance(value, Mapping) else []
    found = f"lacks {_named(missing)}" if missing else f"is of type {type(value).__name__}"
    return ValueError(f"{name} {found}; the env's observation space wants a dict with {_named(wanted)}. {_FIX}")


def _items(name: str, value: Any, wanted: int) -> Sequence[Any]:
    """Return the items of a tuple, or of anything like it. Raises ValueError unless there are as many as wanted."""
    found = tuple(value) if isinstance(value, Iterable) else None
    if found is None or len(found) != wanted:
        what = f"is of type {type(value).__name__}" if found is None else f"has length {len(found)}"
        raise ValueError(f"{name} {what}; the env's observation space wants a tuple of {wanted}. {_FIX}")
    return found


def _warn_of_more(name: str, value: Mapping[Any, Any], wanted: Collection[Any]) -> None:
    """Warn, once in each process, of members that the space does not have: they are dropped, as gymnasium does."""
    more = _named([key for key in value if key not in wanted])
    warnings.warn(f"{name} has {more}, which the env's observation space lacks: dropped. {_FIX}", stacklevel=2)


def _named(keys: Collection[Any]) -> str:
    return f"the key{'' if len(keys) == 1 else 's'} {', '.join(map(repr, keys))}"


def _array_row_writer(array: Array, name: str) -> WriteRow:
    dtype, shape, ndarray = array.dtype, array.shape[1:], np.ndarray

    def write(row: int, value: Any) -> None:
        if type(value) is not ndarray or value.shape != shape or (value.dtype is not dtype and value.dtype != dtype):
            value = _fitting(value, dtype, shape, name)
        copy_into(array[row, ...], value)

    return write


def copy_into(target: Array, value: Array) -> None:
    """Copy an array into one of the same shape."""
    if value.ndim > 2 and value.shape[-1] <= _FEW and value.strides[-2:] != target.strides[-2:]:
        # A stack of frames whose axis was moved to the end: numpy would copy it a few bytes at a time.
        for channel in range(value.shape[-1]):
            target[..., channel] = value[..., channel]
    else:
        target[...] = value


def _fitting(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> Array:
    """Return what ``np.stack`` would make of it; raises for another shape or a type that loses more than precision."""
    array = np.asarray(value)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; the env's observation space wants {shape}. {_FIX}")
    same_kind = np.can_cast(array.dtype, dtype, "same_kind")
    if not same_kind and not (isinstance(value, int) and _holds(dtype, value)):
        raise TypeError(f"{name} has dtype {array.dtype}; the env's observation space wants {dtype}. {_FIX}")
    return array.astype(dtype, copy=False)


def _holds(dtype: np.dtype[Any], value: int) -> bool:
    return np.issubdtype(dtype, np.integer) and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max


class Cell:
    """Writes an observation that is assigned to it into a row, as a memoryview of a row does."""

    __slots__ = ("_row", "_write")

    def __init__(self, write: WriteRow, row: int) -> None:
        self._write, self._row = write, row

    def __setitem__(self, whole: slice, observation: Any) -> None:
        """Write the observation into the row."""
        self._write(self._row, observation)


def cells(tree: Any, slots: int) -> list[Any]:
    """Return for each row what an observation is assigned to.

    A memoryview takes what has its very format and shape, and refuses anything else, in half the time that it takes to
    ask; but it knows one dimension only. What it refuses may fit all the same: see :func:`row_writer`.
    """
    if isinstance(tree, np.ndarray) and tree.ndim == 2 and tree.dtype.isnative:
        return [row.data for row in tree]
    write = row_writer(tree)
    return [Cell(write, row) for row in range(slots)]


# --- a single env: to the bit ---------------------------------------------------------------------


def verbatim_writer(space: Any, leaves: Sequence[Array]) -> Callable[[Any], bool]:
    """Return the function that writes an observation into the only row, and tells whether it fits.

    A value that does not fit to the bit, in dtype, shape, type or order of keys, is never converted: it travels
    pickled, so that the trainer sees what it would have seen in-process.
    """
    members = [
        _integer_writer(leaf) if type(one) is spaces.Discrete else _exact_writer(leaf[0, ...])
        for one, leaf in zip(leaf_spaces(space), leaves, strict=True)
    ]

    def write(value: Any) -> bool:
        try:
            found = _leaves_of(space, value)
        except TypeError:
            return False
        return all(member(leaf) for member, leaf in zip(members, found, strict=True))

    return write if type(space) in (spaces.Dict, spaces.Tuple) else members[0]


def _leaves_of(space: Any, value: Any) -> list[Any]:
    """Return what a nested value holds, in the order of the space's leaves; TypeError: it is built another way."""
    if type(space) is spaces.Dict:
        # The order of the keys is part of what the caller sees.
        if type(value) is not dict or tuple(value) != tuple(space.spaces):
            raise TypeError
        return [leaf for key, member in space.spaces.items() for leaf in _leaves_of(member, value[key])]
    if type(space) is spaces.Tuple:
        if type(value) is not tuple or len(value) != len(space.spaces):
            raise TypeError
        return [leaf for member, item in zip(space.spaces, value, strict=True) for leaf in _leaves_of(member, item)]
    return [value]


def _exact_writer(target: Array) -> Callable[[Any], bool]:
    dtype, shape, ndarray = target.dtype, target.shape, np.ndarray

    def write(value: Any) -> bool:
        fits = type(value) is ndarray and value.dtype == dtype and value.shape == shape
        if fits:
            copy_into(target, value)
        return fits

    return write


def _integer_writer(leaf: Array) -> Callable[[Any], bool]:
    row = leaf[0].data

    def write(value: Any) -> bool:
        fits = type(value) in _INTEGER_TAG and -(2**63) <= value < 2**63
        if fits:
            row[0], row[1] = int(value), _INTEGER_TAG[type(value)]
        return fits

    return write


def integer_reader(leaf: Array) -> Callable[[], Any]:
    """Return the function that returns the integer in the only row, in the type that the env gave it."""
    row = leaf[0].data

    def read() -> Any:
        value, tag = row
        return _INTEGER_TYPES[tag](value) if tag else value

    return read
