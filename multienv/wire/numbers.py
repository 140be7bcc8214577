"""Infos that hold nothing but numbers, in a few bytes each: pickling numpy's scalars takes longer than many a step.

What names the columns goes with the numbers, so that a reply can be read whatever was read before it: after a recovery,
by a checkpoint, in a report.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

# First byte of an info that is not pickled: of one env, or of all envs of a group. Pickles begin with 0x80.
_ONE, _ALL = 1, 2
_HEAD = struct.Struct("<BH")  # that byte; bytes of what names the columns
# Exact types, in the order of their codes, and how their values are laid out.
_FORMATS: dict[type, str] = {
    float: "d",
    int: "q",
    bool: "?",
    np.float64: "d",
    np.float32: "f",
    np.int64: "q",
    np.int32: "i",
    np.uint8: "B",
}
_TYPES = list(_FORMATS)
_CODES = {kind: code for code, kind in enumerate(_TYPES)}
# What gymnasium merges in a way of its own.
_SPECIAL = ("final_obs", "final_info")


class Columns:
    """The keys of an info, and the types of its values.

    Attributes:
        keys, types: In the order of the info.
        head: What they are written as.
        row: Packs the values of one info.
    """

    def __init__(self, keys: tuple[str, ...], types: tuple[type, ...]) -> None:
        """Lay them out."""
        self.keys, self.types = keys, types
        self.row = struct.Struct("<" + "".join([_FORMATS[kind] for kind in types]))
        names = pickle.dumps((keys, bytes([_CODES[kind] for kind in types])), protocol=5)
        self._heads = [_HEAD.pack(kind, len(names)) + names for kind in (_ONE, _ALL)]
        # One that the values need not be asked of: they are what they were.
        self._as_it_is = [kind in (float, int, bool) for kind in types]
        fields = [(key, np.dtype(kind).newbyteorder("<")) for key, kind in zip(keys, types, strict=True)]
        self._dtype = np.dtype(fields)
        self._merged = [(key, f"_{key}", np.dtype(kind)) for key, kind in zip(keys, types, strict=True)]

    @property
    def head(self) -> bytes:
        """In front of the numbers of one info."""
        return self._heads[0]

    @property
    def head_of_all(self) -> bytes:
        """In front of those of a group."""
        return self._heads[1]

    def info(self, values: Sequence[Any]) -> dict[str, Any]:
        """The info, each value of the type that it had."""
        return {
            key: value if plain else kind(value)
            for key, kind, plain, value in zip(self.keys, self.types, self._as_it_is, values, strict=True)
        }

    def merged(self, rows: bytes) -> dict[str, Any]:
        """The infos of a batch as gymnasium merges them: an array for each key, and a mask, which is true."""
        table = np.frombuffer(rows, self._dtype)
        every = np.ones(len(table), np.bool_)
        infos: dict[str, Any] = {}
        for key, mask, kind in self._merged:
            infos[key] = table[key].astype(kind)
            infos[mask] = every.copy()
        return infos


@lru_cache(maxsize=256)
def _columns(keys: tuple[str, ...], types: tuple[type, ...]) -> Columns | None:
    """``None`` if something else is among the types, or keys that are not merged like others."""
    if not all(map(_FORMATS.__contains__, types)):
        return None
    if not all(type(key) is str and key and not key.startswith("_") and key not in _SPECIAL for key in keys):
        return None
    return Columns(keys, types)


@lru_cache(maxsize=256)
def _named(names: bytes) -> Columns:
    keys, codes = pickle.loads(names)
    return Columns(keys, tuple(_TYPES[code] for code in codes))


# --- the worker's end -------------------------------------------------------------------------


def pack_numbers(info: Any) -> bytes:
    """An info that holds only numbers, or ``b""``."""
    if type(info) is not dict:
        return b""
    try:
        columns = _columns(tuple(info), tuple(map(type, info.values())))
        return b"" if columns is None else columns.head + columns.row.pack(*info.values())
    except (struct.error, TypeError):  # larger than 64 bits; a key that cannot be hashed, in a dict all the same
        return b""


class Rows:
    """Takes the infos of one step of a group, as long as they are alike and hold only numbers.

    Args:
        size: How many envs the group has.

    Attributes:
        count: How many have been taken: those of the first envs.
    """

    def __init__(self, size: int) -> None:
        """Hold nothing."""
        self.count = 0
        self._size = size
        self._columns: Columns | None = None
        self._keys: tuple[Any, ...] = ()
        self._types: tuple[type, ...] = ()
        self._rows: list[bytes] = []

    def take(self, slot: int, info: Any) -> bool:
        """Whether it fits to what has been taken."""
        if slot != self.count or type(info) is not dict:
            return False
        keys, types = tuple(info), tuple(map(type, info.values()))
        try:
            if keys != self._keys or types != self._types:
                if slot:
                    return False
                self._columns = _columns(keys, types)
                self._keys, self._types = keys, types
            if self._columns is None:
                return False
            self._rows.append(self._columns.row.pack(*info.values()))
        except (struct.error, TypeError):
            return False
        self.count = slot + 1
        return True

    def clear(self) -> None:
        """A step begins."""
        self.count = 0
        self._rows.clear()

    def packed(self) -> bytes:
        """Those that have been taken, one behind the other; ``b""`` if there are none."""
        if not self._rows:
            return b""
        assert self._columns is not None
        return self._columns.head_of_all + b"".join(self._rows)

    def infos(self) -> list[tuple[int, dict[str, Any]]]:
        """Slot and info of those that have been taken; from now on there are none."""
        assert self._columns is not None
        unpack, info = self._columns.row.unpack, self._columns.info
        infos = [(slot, info(unpack(row))) for slot, row in enumerate(self._rows)]
        self.clear()
        return infos


# --- the trainer's end ------------------------------------------------------------------------


class NumberInfos:
    """Pairs of slot and info of all envs of a group, to be gone through; unpacked only then.

    Attributes:
        columns: What they have in common.
        rows: Their numbers.
    """

    __slots__ = ("columns", "rows")

    def __init__(self, columns: Columns, rows: bytes) -> None:
        """Unpack nothing."""
        self.columns, self.rows = columns, rows

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Slot and info, env by env."""
        for slot, values in enumerate(self.columns.row.iter_unpack(self.rows)):
            yield slot, self.columns.info(values)


def holds_numbers(first: int) -> bool:
    """Whether an info that begins with this byte is not pickled."""
    return first in (_ONE, _ALL)


def unpack_numbers(data: bytes) -> Any:
    """An info; or, of a group, ``{"infos": NumberInfos}``."""
    kind, length = _HEAD.unpack_from(data)
    start = _HEAD.size + length
    columns = _named(data[_HEAD.size : start])
    if kind == _ONE:
        return columns.info(columns.row.unpack_from(data, start))
    return {"infos": NumberInfos(columns, data[start:])}


def merged(told: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The infos of all groups merged, if there is nothing else to tell, and they are alike and hold only numbers."""
    if not any(told):
        return {}
    infos = [one["infos"] for one in told if len(one) == 1 and type(one.get("infos")) is NumberInfos]
    columns = infos[0].columns if infos else None
    if len(infos) < len(told) or any(one.columns is not columns for one in infos):
        return None
    return columns.merged(b"".join([one.rows for one in infos]))  # type: ignore[no-any-return,union-attr]
