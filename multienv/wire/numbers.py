"""Infos that hold nothing but numbers, in a few bytes each: pickling numpy's scalars takes longer than many a step.

What names the columns goes with the numbers, so that a reply can be read whatever was read before it: after a recovery,
by a checkpoint, in a report.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

import numpy as np

# First byte of an info that is not pickled: of one env, or of all envs of a group. Pickles begin with 0x80.
_ONE, _ALL = 1, 2
_HEAD = struct.Struct("<BH")  # that byte; bytes of what names the columns
# Exact types, in the order of their codes, and how their values are laid out: each in eight bytes, to be aligned.
_FORMATS: dict[type, str] = {
    float: "d",
    int: "q",
    bool: "?7x",
    np.float64: "d",
    np.float32: "f4x",
    np.int64: "q",
    np.int32: "i4x",
    np.uint8: "B7x",
}
_LANE = 8
_TYPES = list(_FORMATS)
_CODES = {kind: code for code, kind in enumerate(_TYPES)}
_PLAIN = frozenset((float, int, bool))
NUMBERS, _STRINGS = frozenset(_TYPES), frozenset((str,))
# What gymnasium merges in a way of its own.
_SPECIAL = ("final_obs", "final_info")
# Kinds of infos that are known at a time; one that makes up new keys again and again is better off pickled.
_MOST = 256


class Columns:
    """The keys of an info, and the types of its values, both in its order."""

    def __init__(self, keys: tuple[str, ...], types: tuple[type, ...]) -> None:
        """Lay them out."""
        self.keys, self.types = keys, types
        self._formats = "".join([_FORMATS[kind] for kind in types])
        self.row = struct.Struct(f"={self._formats}")

    def rows(self, count: int) -> struct.Struct:
        """So many of them, one behind the other."""
        return struct.Struct(f"={self._formats * count}")

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

    def info(self, values: Sequence[Any]) -> dict[str, Any]:
        """The info, each value of the type that it had."""
        return {
            key: value if kind in _PLAIN else kind(value)
            for key, kind, value in zip(self.keys, self.types, values, strict=True)
        }


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
        if not NUMBERS.issuperset(types) or _PLAIN.issuperset(types) or not _STRINGS.issuperset(map(type, info)):
            return b""
        columns = _columns(tuple(info), types)
        return b"" if columns is None else columns.head_of_one + columns.row.pack(*info.values())
    except Exception:  # also where a number is larger than 64 bits
        return b""


class Alike:
    """Packs the infos of one step of a group, if all its envs tell numbers of the same names and types.

    In few calls for all of them: to look at each env's info by itself takes longer than to copy what it holds.

    Args:
        size: Number of envs.
    """

    def __init__(self, size: int) -> None:
        """Know of none."""
        self._size = size
        self._head = b""
        self._keys: list[str] = []  # those of the last infos, and their types, env after env
        self._types: list[type] = []
        self._pack = struct.Struct("").pack

    def packed(self, infos: Sequence[tuple[int, dict[Any, Any]]]) -> bytes:
        """Those of all envs, with their slots; ``b""`` if they are to be pickled."""
        if len(infos) != self._size:
            return b""
        try:  # as above
            dicts = [info for _, info in infos]
            keys = list(chain.from_iterable(dicts))
            values = list(chain.from_iterable(map(dict.values, dicts)))
            types = list(map(type, values))
            if not _STRINGS.issuperset(map(type, keys)):
                return b""
            if (keys != self._keys or types != self._types) and not self._learn(dicts[0], keys, types):
                return b""
            return self._head + self._pack(*values)
        except Exception:
            return b""

    def _learn(self, first: dict[str, Any], keys: list[str], types: list[type]) -> bool:
        """What the first env tells; false if that is no table, or the others tell something else."""
        own = types[: len(first)]
        # No key is twice in a dict: where they all come again in the same order, each dict has them once.
        if keys != [*first] * self._size or types != own * self._size or not NUMBERS.issuperset(own):
            return False
        columns = _columns(tuple(first), tuple(own))
        if columns is None:
            return False
        self._head, self._pack = columns.head_of_all, columns.rows(self._size).pack
        self._keys, self._types = keys, types
        return True


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


class Reader:
    """Reads the infos of a group, reply after reply: what is in front of the numbers is mostly the same."""

    __slots__ = ("_columns", "_head")

    def __init__(self) -> None:
        """Know of none."""
        self._head = b""
        self._columns: Columns | None = None

    def read(self, reply: bytes, start: int) -> dict[str, NumberInfos]:
        """What lies there, behind the rest of the reply, as :func:`unpack_numbers` tells it."""
        columns = self._columns
        if columns is None or not reply.startswith(self._head, start):
            told: dict[str, NumberInfos] = unpack_numbers(reply[start:])
            self._columns = None  # an interruption in here is not to leave it half done
            self._head = reply[start : len(reply) - len(told["infos"].rows)]
            self._columns = told["infos"].columns
            return told
        return {"infos": NumberInfos(columns, reply[start + len(self._head) :])}


def unpack_numbers(data: bytes) -> Any:
    """An info; or, of a group, ``{"infos": NumberInfos}``."""
    kind, length = _HEAD.unpack_from(data)
    start = _HEAD.size + length
    columns = _named(data[_HEAD.size : start])
    if kind == _ONE:
        return columns.info(columns.row.unpack_from(data, start))
    return {"infos": NumberInfos(columns, data[start:])}


class Merging:
    """Merges the infos of a batch as gymnasium merges them, if they are alike and hold only numbers.

    Always in the same memory: to lay it out again takes longer than to copy what it holds.

    Args:
        count: Number of envs.
    """

    def __init__(self, count: int) -> None:
        """Know of no infos."""
        self._every = np.ones(count, np.bool_)
        self._columns: Columns | None = None
        self._rows = memoryview(b"")
        self._lanes: list[tuple[str, str, np.ndarray[Any, Any]]] = []  # key, that of its mask, values

    def merged(self, told: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """An array for each key, and a mask, which is true; ``None`` if there is anything else among it."""
        if not any(told):
            return {}
        columns, parts = None, []
        for one in told:
            infos = one.get("infos")
            if type(infos) is not NumberInfos or len(one) > 1 or (columns is not None and columns is not infos.columns):
                return None
            columns = infos.columns
            parts.append(infos.rows)
        assert columns is not None
        if columns is not self._columns:
            self._lay_out(columns)
        self._rows[:] = b"".join(parts)
        every, infos = self._every, {}
        for key, mask, lane in self._lanes:
            infos[key], infos[mask] = lane.copy(), every.copy()
        return infos

    def _lay_out(self, columns: Columns) -> None:
        """What they have in common has changed."""
        self._columns = None  # an interruption in here is not to leave it half done
        count, size = len(self._every), columns.row.size
        rows = bytearray(count * size)
        self._lanes = [
            (key, f"_{key}", np.ndarray((count,), kind, rows, place * _LANE, (size,)))
            for place, (key, kind) in enumerate(zip(columns.keys, columns.types, strict=True))
        ]
        self._rows = memoryview(rows)
        self._columns = columns
