"""How an observation lies in memory.

A layout is compiled once per space into three closures: ``fits`` (may this value be laid out without
changing it?), ``write`` and ``read``. A value that does not fit to the bit, in dtype, shape or type, is
never converted: it travels pickled, so that the trainer sees what it would have seen in-process.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

Fits = Callable[[Any], bool]
Write = Callable[[Any, Any, int], None]  # value, buffer, offset of the block
Read = Callable[[Any, int], Any]  # buffer, offset of the block

_ALIGNMENT = 8
_INTEGER = struct.Struct("<qB")
_LENGTH = struct.Struct("<I")
# What a Discrete space's values are in practice; their exact type travels as a tag.
_INTEGER_TYPES: tuple[type, ...] = (int, np.int64, np.int32, np.int16, np.int8, np.uint8, np.uint16, np.uint32)
_INTEGER_TAG = {kind: tag for tag, kind in enumerate(_INTEGER_TYPES)}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the values of a space lie, and how they get there and back."""

    size: int
    fits: Fits
    write: Write
    read: Read
    solid: bool = True  # every value writes every byte, so nothing of the last one can show through


def layout_of(space: spaces.Space[Any]) -> Layout | None:
    """The layout of ``space``, or ``None`` for one without a fixed size (Graph, Sequence, custom)."""
    return _compile(space, 0)


def _compile(space: spaces.Space[Any], start: int) -> Layout | None:
    """``start`` is the offset within the block; ``size`` of the result is the end, aligned."""
    # The exact type: a subclass may return anything.
    compiler = _COMPILERS.get(type(space))
    return None if compiler is None else compiler(space, start)


def _align(end: int) -> int:
    return math.ceil(end / _ALIGNMENT) * _ALIGNMENT


def _array(space: spaces.Space[Any], start: int) -> Layout | None:
    dtype, shape = space.dtype, space.shape
    if dtype is None or shape is None or dtype.hasobject:
        return None
    ndarray = np.ndarray

    def fits(value: Any) -> bool:
        return type(value) is ndarray and value.dtype == dtype and value.shape == shape

    def write(value: Any, buffer: Any, block: int) -> None:
        ndarray(shape, dtype, buffer, block + start)[...] = value

    def read(buffer: Any, block: int) -> Any:
        return ndarray(shape, dtype, buffer, block + start).copy()

    return Layout(_align(start + dtype.itemsize * math.prod(shape)), fits, write, read)


def _discrete(space: spaces.Space[Any], start: int) -> Layout:
    def fits(value: Any) -> bool:
        return type(value) in _INTEGER_TAG and -(2**63) <= value < 2**63

    def write(value: Any, buffer: Any, block: int) -> None:
        _INTEGER.pack_into(buffer, block + start, int(value), _INTEGER_TAG[type(value)])

    def read(buffer: Any, block: int) -> Any:
        value, tag = _INTEGER.unpack_from(buffer, block + start)
        return value if tag == 0 else _INTEGER_TYPES[tag](value)

    return Layout(_align(start + _INTEGER.size), fits, write, read)


def _text(space: spaces.Text, start: int) -> Layout:
    capacity = 4 * space.max_length

    def fits(value: Any) -> bool:
        if type(value) is not str or len(value) > space.max_length:
            return False
        try:
            value.encode()
        except UnicodeEncodeError:  # a lone surrogate
            return False
        return True

    def write(value: Any, buffer: Any, block: int) -> None:
        data = value.encode()
        at = block + start + _LENGTH.size
        _LENGTH.pack_into(buffer, block + start, len(data))
        buffer[at : at + len(data)] = data

    def read(buffer: Any, block: int) -> Any:
        (length,) = _LENGTH.unpack_from(buffer, block + start)
        at = block + start + _LENGTH.size
        return str(memoryview(buffer)[at : at + length], "utf-8")

    return Layout(_align(start + _LENGTH.size + capacity), fits, write, read, solid=False)


def _tuple(space: Any, start: int) -> Layout | None:
    members = _members(space.spaces, start)
    if members is None:
        return None
    size = members[-1].size if members else start

    def fits(value: Any) -> bool:
        return (
            type(value) is tuple
            and len(value) == len(members)
            and all(member.fits(item) for member, item in zip(members, value, strict=True))
        )

    def write(value: Any, buffer: Any, block: int) -> None:
        for member, item in zip(members, value, strict=True):
            member.write(item, buffer, block)

    def read(buffer: Any, block: int) -> Any:
        return tuple([member.read(buffer, block) for member in members])

    return Layout(size, fits, write, read, solid=all(member.solid for member in members))


def _dict(space: spaces.Dict, start: int) -> Layout | None:
    keys = tuple(space.spaces)
    members = _members(tuple(space.spaces.values()), start)
    if members is None:
        return None
    pairs = tuple(zip(keys, members, strict=True))
    size = members[-1].size if members else start

    def fits(value: Any) -> bool:
        # The order of the keys is part of what the caller sees.
        return type(value) is dict and tuple(value) == keys and all(member.fits(value[key]) for key, member in pairs)

    def write(value: Any, buffer: Any, block: int) -> None:
        for key, member in pairs:
            member.write(value[key], buffer, block)

    def read(buffer: Any, block: int) -> Any:
        return {key: member.read(buffer, block) for key, member in pairs}

    return Layout(size, fits, write, read, solid=all(member.solid for member in members))


def _one_of(space: Any, start: int) -> Layout | None:
    """A choice, and every member in a place of its own after it."""
    index = _discrete(spaces.Discrete(len(space.spaces)), start)
    members = _members(space.spaces, index.size)
    if members is None:
        return None

    def fits(value: Any) -> bool:
        return (
            type(value) is tuple
            and len(value) == 2
            and index.fits(value[0])
            and 0 <= value[0] < len(members)
            and members[value[0]].fits(value[1])
        )

    def write(value: Any, buffer: Any, block: int) -> None:
        index.write(value[0], buffer, block)
        members[value[0]].write(value[1], buffer, block)

    def read(buffer: Any, block: int) -> Any:
        choice = index.read(buffer, block)
        return choice, members[choice].read(buffer, block)

    return Layout(members[-1].size, fits, write, read, solid=False)


def _members(of: tuple[spaces.Space[Any], ...], start: int) -> list[Layout] | None:
    members = []
    for space in of:
        layout = _compile(space, start)
        if layout is None:
            return None
        members.append(layout)
        start = layout.size
    return members


_COMPILERS: Mapping[type, Callable[[Any, int], Layout | None]] = {
    spaces.Box: _array,
    spaces.MultiBinary: _array,
    spaces.MultiDiscrete: _array,
    spaces.Discrete: _discrete,
    spaces.Text: _text,
    spaces.Tuple: _tuple,
    spaces.Dict: _dict,
    spaces.OneOf: _one_of,
}
