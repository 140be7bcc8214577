"""Infos that hold nothing but numbers, in a few bytes each: pickling numpy's scalars takes longer than many a step.

What names the columns goes with the numbers, so that a reply can be read whatever was read before it: after a recovery,
by a checkpoint, in a report.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
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
_PLAIN = frozenset((float, int, bool))
_NUMBERS, _STRINGS = frozenset(_TYPES), frozenset((str,))
# What gymnasium merges in a way of its own.
_SPECIAL = ("final_obs", "final_info")
# Kinds of infos that are known at a time; one that makes up new keys again and again is better off pickled.
_MOST = 256


class Columns:
    """The keys of an info, and the types of its values, both in its order."""

    def __init__(self, keys: tuple[str, ...], types: tuple[type, ...]) -> None:
        """Lay them out."""
        self.keys, self.types = keys, types
        self.row = struct.Struct("<" + "".join([_FORMATS[kind] for kind in types]))

    def head(self, kind: int) -> bytes:
        """In front of the numbers: what they are."""
        names = pickle.dumps((self.keys, bytes([_CODES[kind] for kind in self.types])), protocol=5)
        return _HEAD.pack(kind, len(names)) + names

    @cached_property
    def head_of_one(self) -> bytes:
        """In front of one info."""
        return self.head(_ONE)

    @cached_property
    def head_of_all(self) -> bytes:
        """In front of those of a group."""
        return self.head(_ALL)

    @cached_property
    def _dtype(self) -> np.dtype[Any]:
        # By numbers, because numpy does not take every string for a name.
        return np.dtype([(str(place), _little(kind)) for place, kind in enumerate(self.types)])

    @cached_property
    def _merged(self) -> list[tuple[str, str, str, np.dtype[Any]]]:
        columns = enumerate(zip(self.keys, self.types, strict=True))
        return [(str(place), key, f"_{key}", np.dtype(kind)) for place, (key, kind) in columns]

    def info(self, values: Sequence[Any]) -> dict[str, Any]:
        """The info, each value of the type that it had."""
        return {
            key: value if kind in _PLAIN else kind(value)
            for key, kind, value in zip(self.keys, self.types, values, strict=True)
        }

    def merged(self, rows: bytes) -> dict[str, Any]:
        """The infos of a batch as gymnasium merges them: an array for each key, and a mask, which is true."""
        table = np.frombuffer(rows, self._dtype)
        every = np.ones(len(table), np.bool_)
        infos: dict[str, Any] = {}
        for place, key, mask, dtype in self._merged:
            infos[key] = table[place].astype(dtype)
            infos[mask] = every.copy()
        return infos


def _little(kind: type) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(kind).newbyteorder("<")
    return dtype


_known: dict[tuple[tuple[str, ...], tuple[type, ...]], Columns] = {}


def _columns(keys: tuple[str, ...], types: tuple[type, ...]) -> Columns | None:
    """Those of an info whose keys are strings and whose values are numbers, if it can be merged like others."""
    known = _known.get((keys, types))
    if known is None and len(_known) < _MOST:
        if not all(key and key[0] != "_" and key not in _SPECIAL for key in keys):
            return None
        known = _known[keys, types] = Columns(keys, types)
    return known


@lru_cache(maxsize=4 * _MOST)
def _named(names: bytes) -> Columns:
    keys, codes = pickle.loads(names)
    return Columns(keys, tuple(_TYPES[code] for code in codes))


# --- the worker's end -------------------------------------------------------------------------


def pack_numbers(info: Any) -> bytes:
    """An info that holds only numbers, some of them numpy's, or ``b""``: Python's own are pickled as fast."""
    if type(info) is not dict:
        return b""
    try:  # the types may be foreign, and have an equality of their own
        types = tuple(map(type, info.values()))
        if not _NUMBERS.issuperset(types) or _PLAIN.issuperset(types) or not _STRINGS.issuperset(map(type, info)):
            return b""
        columns = _columns(tuple(info), types)
        return b"" if columns is None else columns.head_of_one + columns.row.pack(*info.values())
    except Exception:  # also where a number is larger than 64 bits
        return b""


class Rows:
    """Takes the infos of one step of a group, as long as they are alike and hold only numbers.

    Attributes:
        count: How many have been taken: those of the first envs.
    """

    def __init__(self) -> None:
        """Hold nothing."""
        self.count = 0
        self._columns: Columns | None = None
        self._rows: list[bytes] = []

    def take(self, slot: int, info: Any) -> bool:
        """Whether it fits to what has been taken."""
        if slot != self.count or type(info) is not dict:
            return False
        try:  # as above
            types = tuple(map(type, info.values()))
            if not _STRINGS.issuperset(map(type, info)):
                return False
            columns = self._columns
            if columns is None or types != columns.types or tuple(info) != columns.keys:
                if slot or not _NUMBERS.issuperset(types):
                    return False
                columns = _columns(tuple(info), types)
                if columns is None or not columns.head_of_all:  # which raises where the keys are too long
                    return False
                self._columns = columns
            self._rows.append(columns.row.pack(*info.values()))
        except Exception:
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
        if not self._rows:
            return []
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
    if len(infos) < len(told) or any(one.columns is not infos[0].columns for one in infos):
        return None
    columns: Columns = infos[0].columns
    return columns.merged(b"".join([one.rows for one in infos]))
