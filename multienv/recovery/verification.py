"""Compare a replay with the journal, slot by slot: are the replayed envs the lost ones?"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any

import numpy as np

from multienv.wire.banks import RAISED, STEPPED, BankLayout, Entry, are_digests, slot_digests, split_entries


def differences(
    recorded: bytes,
    replayed: bytes,
    layout: BankLayout,
    *,
    exact: bool,
    starts: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, str]:
    """Return the first difference for each slot that is replayed otherwise; ``{}`` when all agree to the bit.

    Args:
        recorded: Journal entries.
        replayed: The entries of the same requests, run again.
        layout: Of the banks they were copied from.
        exact: They are of the exact codec.
        starts: Slot → index of the entry in which it was reset. It took no part in the replay before. Of that entry its
            observation alone is compared: the rest may be of the step that ended the episode before.
    """
    if recorded == replayed:
        return {}
    found: dict[int, str] = {}
    before, after = list(split_entries(recorded, layout.end)), list(split_entries(replayed, layout.end))
    if len(before) != len(after):
        return dict.fromkeys(range(layout.slots), f"{len(before)} requests were replayed as {len(after)}")
    for place, (one, other) in enumerate(zip(before, after, strict=True)):
        if one != other:
            waiting = {slot for slot, start in starts.items() if place < start}
            starting = set() if exact else {slot for slot, start in starts.items() if place == start}
            for slot, what in _of_entries(one, other, layout, exact, waiting, starting).items():
                found.setdefault(slot, f"{what} at request {place + 1} of {len(before)}")
    return found


def _of_entries(
    one: Entry, other: Entry, layout: BankLayout, exact: bool, waiting: AbstractSet[int], starting: AbstractSet[int]
) -> dict[int, str]:
    everyone = [slot for slot in range(layout.slots) if slot not in waiting]
    if one.record[2] != other.record[2]:
        return dict.fromkeys(everyone, "one raised and the other did not")
    if one.record[2] != STEPPED:  # a call: which slots raised is not told
        differs = (one.record[3] ^ other.record[3]) & RAISED
        return dict.fromkeys(everyone, "one call raised and the other did not") if differs else {}
    found: dict[int, str] = {}
    n = layout.slots
    going_on = [slot for slot in everyone if slot not in starting]
    parts = [
        ("the flags differ", layout.terminated, 1, going_on),
        ("the flags differ", layout.truncated, 1, going_on),
        ("one raised and the other did not", layout.failed, 1, going_on),
        ("the reward differs", layout.rewards, 8, going_on),
    ]
    if layout.is_digested:
        parts.append(("the observation differs", layout.shown, 8, everyone))
    else:
        parts += [
            ("the observation differs", start, width, everyone)
            for start, width in zip(layout.leaves, layout.leaf_bytes, strict=True)
        ]
    for what, start, width, slots in parts:
        size = n * width
        if one.record[start : start + size] != other.record[start : start + size]:
            for slot in slots:
                part = slice(start + slot * width, start + (slot + 1) * width)
                if one.record[part] != other.record[part]:
                    found.setdefault(slot, what)
    if one.record[:8] != other.record[:8] and not (found or waiting or starting):
        return dict.fromkeys(everyone, "the type of what it returned differs")
    if one.irregular != other.irregular:
        for slot in _of_irregular(one.irregular, other.irregular, layout.slots, exact):
            if slot not in waiting:
                found.setdefault(slot, "the observation differs")
    return found


def _of_irregular(one: bytes, other: bytes, slots: int, exact: bool) -> list[int]:
    """Return the slots whose observations differ: equal values do not always pickle to equal bytes."""
    if not one or not other:  # too large to be kept
        return []
    if exact:
        return [] if alike(one, other) else [0]
    if are_digests(one) or are_digests(other):
        digests = zip(slot_digests(one), slot_digests(other), strict=True)
        return [slot for slot, (before, after) in enumerate(digests) if before != after]
    try:
        pairs = list(zip(pickle.loads(one), pickle.loads(other), strict=True))
    except Exception:  # foreign code
        return list(range(slots))
    return [slot for slot, (before, after) in enumerate(pairs) if not alike(before, after)]


def alike(one: bytes, other: bytes) -> bool:
    """Tell whether two pickles hold equal values. Pickles that cannot be read here are compared as bytes."""
    if one == other:
        return True
    try:
        return same(pickle.loads(one), pickle.loads(other))
    except Exception:  # foreign code
        return False


def same(one: Any, other: Any) -> bool:
    """Tell whether two values are equal to the bit, through nested containers; NaN equals NaN."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and not one.dtype.hasobject:
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):  # of objects
        return one.dtype == other.dtype and one.shape == other.shape and all(map(same, one.flat, other.flat))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float | np.generic) and not np.asarray(one).dtype.hasobject:
        return np.asarray(one).tobytes() == np.asarray(other).tobytes()
    if hasattr(one, "__dlpack__") and hasattr(one, "__array__"):
        # A tensor of torch or the like: its pickle holds the address of its memory.
        return one.shape == other.shape and one.dtype == other.dtype and same(np.asarray(one), np.asarray(other))
    return pickle.dumps(one) == pickle.dumps(other) or bool(one == other)
