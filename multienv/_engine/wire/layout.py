"""How the observation of a single env lies in memory: exactly as the env returned it.

A layout is compiled once per space into three closures: ``fits`` (may this value be laid out without changing it?),
``write`` and ``read``. A value that does not fit to the bit, in dtype, shape or type, is never converted: it travels
pickled, so that the trainer sees what it would have seen in-process.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from multienv._engine.wire.rows import copy_into, has_rows, leaf_spaces, nested

Fits = Callable[[Any], bool]
Write = Callable[[Any, Any, int], None]  # value, buffer, offset of the block
Read = Callable[[Any, int], Any]  # buffer, offset of the block

_ALIGNMENT = 8
_INTEGER = struct.Struct("<qB")
# What a Discrete space's values are in practice; their exact type travels as a tag.
_INTEGER_TYPES: tuple[type, ...] = (int, np.int64, np.int32, np.int16, np.int8, np.uint8, np.uint16, np.uint32)
_INTEGER_TAG = {kind: tag for tag, kind in enumerate(_INTEGER_TYPES)}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the values of a space lie, and how they get there and back. Each value writes all bytes that are read."""

    size: int
    fits: Fits
    write: Write
    read: Read


def layout_of(space: spaces.Space[Any]) -> Layout | None:
    """Return the layout of ``space``; ``None``: it has no fixed size (Text, Graph, Sequence, OneOf, custom)."""
    if not has_rows(space):
        return None
    size, members = 0, []
    for leaf in leaf_spaces(space):
        members.append(_discrete(size) if type(leaf) is spaces.Discrete else _array(leaf, size))
        size = members[-1].size
    if type(space) not in (spaces.Dict, spaces.Tuple):
        return members[0]

    def fits(value: Any) -> bool:
        try:
            leaves = _leaves_of(space, value)
        except TypeError:
            return False
        return all(member.fits(leaf) for member, leaf in zip(members, leaves, strict=True))

    def write(value: Any, buffer: Any, block: int) -> None:
        for member, leaf in zip(members, _leaves_of(space, value), strict=True):
            member.write(leaf, buffer, block)

    def read(buffer: Any, block: int) -> Any:
        return nested(space, [member.read(buffer, block) for member in members])

    return Layout(size, fits, write, read)


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


def _end(start: int, size: int) -> int:
    return math.ceil((start + size) / _ALIGNMENT) * _ALIGNMENT


def _array(space: Any, start: int) -> Layout:
    dtype, shape, ndarray = space.dtype, space.shape, np.ndarray

    def fits(value: Any) -> bool:
        return type(value) is ndarray and value.dtype == dtype and value.shape == shape

    def write(value: Any, buffer: Any, block: int) -> None:
        copy_into(ndarray(shape, dtype, buffer, block + start), value)

    def read(buffer: Any, block: int) -> Any:
        return ndarray(shape, dtype, buffer, block + start).copy()

    return Layout(_end(start, dtype.itemsize * math.prod(shape)), fits, write, read)


def _discrete(start: int) -> Layout:
    def fits(value: Any) -> bool:
        return type(value) in _INTEGER_TAG and -(2**63) <= value < 2**63

    def write(value: Any, buffer: Any, block: int) -> None:
        _INTEGER.pack_into(buffer, block + start, int(value), _INTEGER_TAG[type(value)])

    def read(buffer: Any, block: int) -> Any:
        value, tag = _INTEGER.unpack_from(buffer, block + start)
        return value if tag == 0 else _INTEGER_TYPES[tag](value)

    return Layout(_end(start, _INTEGER.size), fits, write, read)
