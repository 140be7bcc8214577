"""What a reply carries beside its rows: infos, failures, states of generators.

Infos that hold only numbers travel as numbers: to pickle and merge those of HalfCheetah takes as long as two of its
steps. Names and types of the columns travel with them, so each reply can be read by itself. Any other info is pickled,
each slot's by itself, while the slot is marked as being called. So an info that cannot be pickled, or that kills the
process, is blamed on its own env alone.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np

from multienv._engine.wire.messages import Failure, call_user_code

# First byte of infos that are numbers. Pickles begin with 0x80.
_NUMBERS = 1
_HEAD = struct.Struct("<BxHI")  # that byte; bytes of the names; slots
_CELL = 8
# Exact types, in the order of their codes, and how a value is laid out in 8 bytes.
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
_TYPES = list(_FORMATS)
_CODES = {kind: code for code, kind in enumerate(_TYPES)}
_BUILT_IN = frozenset((float, int, bool))
NUMBERS, _STRINGS = frozenset(_TYPES), frozenset((str,))
# What gymnasium merges in a way of its own.
_SPECIAL = ("final_obs", "final_info")

Infos = Sequence[tuple[int, Mapping[str, Any]]]  # slot and info


class Columns:
    """Holds the keys of an info, and the types of its values, both in its order."""

    def __init__(self, keys: tuple[str, ...], types: tuple[type, ...]) -> None:
        self.keys, self.types = keys, types
        self.formats = "".join([_FORMATS[kind] for kind in types])
        self.row = struct.Struct(f"={self.formats}")
        self._is_built_in = _BUILT_IN.issuperset(types)

    def described(self, head: bytes) -> tuple[tuple[str, ...], tuple[type, ...], bytes, bytes]:
        """Return what native code needs to know of infos that have ``head`` before their numbers."""
        return self.keys, self.types, "".join([_FORMATS[kind][0] for kind in self.types]).encode(), head

    def info(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return an info, each value of the type that it had."""
        if self._is_built_in:
            return dict(zip(self.keys, values, strict=True))
        return {
            key: value if kind in _BUILT_IN else kind(value)
            for key, kind, value in zip(self.keys, self.types, values, strict=True)
        }


NO_COLUMNS = Columns((), ())


class NumberInfos:
    """Holds the infos of all slots as numbers; iterating unpacks them.

    Attributes:
        columns: What the infos have in common; the same object for infos of the same keys and types.
        rows: The numbers.
    """

    __slots__ = ("columns", "rows")

    def __init__(self, columns: Columns, rows: bytes) -> None:
        self.columns, self.rows = columns, rows

    @classmethod
    def of(cls, payload: bytes) -> NumberInfos:
        """Return the infos in payload that begins with the code of numbers."""
        begin = _HEAD.size + _HEAD.unpack_from(payload)[1]
        return cls(_named(payload[_HEAD.size : begin]), payload[begin:])

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield slot and info."""
        for slot, values in enumerate(self.columns.row.iter_unpack(self.rows)):
            yield slot, self.columns.info(values)


@dataclass(slots=True)
class Extras:
    """Holds what a reply carries beside its rows.

    Attributes:
        infos: Slot and info of those that have one.
        failures: What the envs have raised, by slot.
        observations: By slot, pickled each by itself, where observations have no fixed layout; else ``None``.
        generators: State of the random generators of slots, before they were reset; now and then.
        spaces: Observation and action space that a single env has had since its reset, pickled; ``b""``: the same.
    """

    infos: NumberInfos | list[tuple[int, Any]] = field(default_factory=list)
    failures: dict[int, Failure] = field(default_factory=dict)
    observations: list[bytes] | None = None
    generators: Mapping[int, bytes] = field(default_factory=dict)
    spaces: bytes = b""


# --- the worker's end -------------------------------------------------------------------------


class InfoPacker:
    """Packs the infos of one reply.

    Args:
        slots: Number of envs.

    Attributes:
        columns: Names, types and struct formats of the last infos, and the bytes that precede the numbers; ``None``:
            there were none.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.columns: tuple[tuple[str, ...], tuple[type, ...], bytes, bytes] | None = None
        self._keys: list[str] = []  # those of the last infos and their types, slot after slot
        self._types: list[type] = []
        self._pack = struct.Struct("").pack

    def numbers(self, infos: Sequence[tuple[int, Any]]) -> bytes:
        """Pack infos as numbers; ``b""`` unless all slots have numbers of the same names and types."""
        if len(infos) != self._slots or any(type(info) is bytes for _, info in infos):  # pickled already
            return b""
        try:  # keys, values and types may be the user's
            dicts = [info for _, info in infos]
            keys = list(chain.from_iterable(dicts))
            values = list(chain.from_iterable([info.values() for info in dicts]))
            types = list(map(type, values))
            if not _STRINGS.issuperset(map(type, keys)):
                return b""
            if (keys != self._keys or types != self._types) and not self._set_columns(dicts[0], keys, types):
                return b""
            assert self.columns is not None
            return self.columns[3] + self._pack(*values)
        except Exception:  # also a number of more than 64 bits
            return b""

    def _set_columns(self, first: Mapping[str, Any], keys: list[str], types: list[type]) -> bool:
        own, names = types[: len(first)], tuple(first)
        # No key is twice in a dict: where all come again in the same order, each dict has them once.
        if keys != [*names] * self._slots or types != own * self._slots or not NUMBERS.issuperset(own):
            return False
        if not all(key and key[0] != "_" and key not in _SPECIAL for key in names):
            return False
        named = pickle.dumps((names, bytes([_CODES[kind] for kind in own])), protocol=5)
        if len(named) > 0xFFFF:
            return False
        head = _HEAD.pack(_NUMBERS, len(named), self._slots) + named
        columns = Columns(names, tuple(own))
        pack = struct.Struct("=" + columns.formats * self._slots).pack
        self.columns, self._pack, self._keys, self._types = columns.described(head), pack, keys, types
        return True


# --- the trainer's end ------------------------------------------------------------------------


class Illegible(Exception):  # noqa: N818 - internal
    """Raised when what the env returned cannot be unpickled in this process."""


@lru_cache(maxsize=256)
def _named(names: bytes) -> Columns:
    keys, codes = pickle.loads(names)
    return Columns(keys, tuple(_TYPES[code] for code in codes))


def unpack_extras(payload: bytes) -> tuple[Extras, dict[int, Exception]]:
    """Unpack what the payload of a reply holds: numbers, or slots with pickled infos, failures and so on.

    Returns:
        What it holds, and for each slot whose info cannot be unpickled here why.
    """
    if not payload:
        return Extras(), {}
    if payload[0] == _NUMBERS:
        return Extras(NumberInfos.of(payload)), {}
    pickled, failures, generators, spaces = pickle.loads(payload)
    infos: list[tuple[int, Any]] = []
    illegible: dict[int, Exception] = {}
    for slot, data in pickled:
        try:
            infos.append((slot, call_user_code(partial(pickle.loads, data), Illegible)))
        except Illegible as error:
            illegible[slot] = error
    return Extras(infos, failures, None, generators, spaces), illegible


def described(payload: bytes) -> tuple[tuple[str, ...], tuple[type, ...], bytes, bytes, Columns] | None:
    """Return the value of `InfoPacker.columns` for the infos in a payload, and their columns; ``None``: no numbers."""
    if payload[0] != _NUMBERS:
        return None
    infos = NumberInfos.of(payload)
    return *infos.columns.described(payload[: len(payload) - len(infos.rows)]), infos.columns


def numbers_in(payload: bytes) -> NumberInfos | None:
    """Return the infos, if the payload holds nothing else and they hold only numbers; else ``None``."""
    return NumberInfos.of(payload) if payload[0] == _NUMBERS else None


class InfoMerger:
    """Merges the infos of a batch as gymnasium merges them, if they are alike and hold only numbers.

    It reuses its memory and returns copies: to make new arrays each time takes longer.

    Args:
        count: Number of envs of the batch.
    """

    def __init__(self, count: int) -> None:
        self._every = np.ones(count, np.bool_)
        self._every.flags.writeable = False  # all batches have this one
        self._columns: Columns | None = None
        self._rows = memoryview(b"")
        self._empty: dict[str, Any] = {}  # all keys in their order, with the masks
        self._of_batch: list[tuple[str, np.ndarray[Any, Any]]] = []  # key, values

    def merged(self, parts: Sequence[Any]) -> dict[str, Any] | None:
        """Return an array for each key, and a read-only mask, all true; ``None``: they must be merged one by one."""
        columns = None
        for infos in parts:
            if type(infos) is not NumberInfos or (columns is not None and columns is not infos.columns):
                return None
            columns = infos.columns
        if columns is None:
            return None
        if columns is not self._columns:
            self._lay_out(columns)
        self._rows[:] = b"".join([infos.rows for infos in parts])
        merged = self._empty.copy()
        for key, column in self._of_batch:
            merged[key] = column.copy()
        return merged

    def _lay_out(self, columns: Columns) -> None:
        self._columns = None  # an interruption in here is not to leave it half done
        count, size = len(self._every), columns.row.size
        rows = bytearray(count * size)
        self._of_batch = [
            (key, np.ndarray((count,), kind, rows, column * _CELL, (size,)))
            for column, (key, kind) in enumerate(zip(columns.keys, columns.types, strict=True))
        ]
        self._empty = {name: value for key in columns.keys for name, value in ((key, None), (f"_{key}", self._every))}
        self._rows = memoryview(rows)
        self._columns = columns
