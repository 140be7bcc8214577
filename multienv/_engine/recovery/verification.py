"""Compare a replay with the journal, slot by slot: are the replayed envs the lost ones?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any

from multienv._engine.wire.banks import RAISED, STEPPED, BankLayout, Entry, split_entries
from multienv._engine.wire.digests import MARK, evidence_of, unpack_evidence

# How a difference ends that says nothing of the env: no value of this type can be compared.
_INCOMPARABLE = "cannot be compared"


def is_comparable(what: str) -> bool:
    """Tell whether a difference, as :func:`differences` words it, was found by comparing."""
    return _INCOMPARABLE not in what


def differences(
    recorded: bytes,
    replayed: bytes,
    layout: BankLayout,
    *,
    verbatim: bool,
    starts: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, str]:
    """Return the first difference for each slot that is replayed otherwise; ``{}`` when all agree to the bit.

    What cannot be compared counts as a difference: nothing shows that it is the same.

    Args:
        recorded: Journal entries.
        replayed: The entries of the same requests, run again.
        layout: Of the banks they were copied from.
        verbatim: They are of a single env, not of a batch.
        starts: Slot → index of the entry in which it was reset. It took no part in the replay before. Of that entry its
            observation alone is compared: the rest may be of the step that ended the episode before.
    """
    if recorded == replayed and MARK not in recorded:
        return {}
    found: dict[int, str] = {}
    before, after = list(split_entries(recorded, layout.end)), list(split_entries(replayed, layout.end))
    if len(before) != len(after):
        return dict.fromkeys(range(layout.slots), f"{len(before)} requests were replayed as {len(after)}")
    for index, (one, other) in enumerate(zip(before, after, strict=True)):
        if one != other or MARK in one.record or MARK in one.evidence:
            waiting = {slot for slot, start in starts.items() if index < start}
            starting = set() if verbatim else {slot for slot, start in starts.items() if index == start}
            for slot, what in _of_entries(one, other, layout, waiting, starting).items():
                found.setdefault(slot, f"{what} at request {index + 1} of {len(before)}")
    return found


def _of_entries(
    one: Entry, other: Entry, layout: BankLayout, waiting: AbstractSet[int], starting: AbstractSet[int]
) -> dict[int, str]:
    everyone = [slot for slot in range(layout.slots) if slot not in waiting]
    if one.record[2] != other.record[2]:
        return dict.fromkeys(everyone, "one raised and the other did not")
    if one.record[2] != STEPPED:  # a call: which slots raised is not told
        differs = (one.record[3] ^ other.record[3]) & RAISED
        return dict.fromkeys(everyone, "one call raised and the other did not") if differs else {}
    found: dict[int, str] = {}
    for slot, what in _of_records(one.record, other.record, layout, everyone, starting):
        found.setdefault(slot, what)
    if one.record[:8] != other.record[:8] and not (found or waiting or starting):
        return dict.fromkeys(everyone, "the type of what it returned differs")
    for slot, what in _of_evidence(one.evidence, other.evidence):
        if slot not in waiting:
            found.setdefault(slot, what)
    return found


def _of_records(
    one: bytes, other: bytes, layout: BankLayout, everyone: list[int], starting: AbstractSet[int]
) -> Iterator[tuple[int, str]]:
    """Yield each slot whose row differs, or cannot be compared, and in what."""
    going_on = [slot for slot in everyone if slot not in starting]
    parts = [
        ("the flags differ", layout.terminated, 1, going_on),
        ("the flags differ", layout.truncated, 1, going_on),
        ("one raised and the other did not", layout.failed, 1, going_on),
        ("the reward differs", layout.rewards, 8, going_on),
    ]
    if layout.has_finals:
        parts.append(("the final observation differs", layout.finals, 8, going_on))
    if layout.is_digested:
        parts.append(("the observation differs", layout.shown, 8, everyone))
    else:
        parts += [
            ("the observation differs", start, width, everyone)
            for start, width in zip(layout.leaves, layout.leaf_bytes, strict=True)
        ]
    for what, start, width, slots in parts:
        for slot in slots:
            part = slice(start + slot * width, start + (slot + 1) * width)
            if one[part] != other[part]:
                yield slot, what
    if layout.has_finals:
        for slot in going_on:
            if one[layout.finals + 8 * slot :].startswith(MARK):
                yield slot, f"the final observation {_INCOMPARABLE}"


def _of_evidence(one: bytes, other: bytes) -> Iterator[tuple[int, str]]:
    """Yield each slot whose observation differs, or cannot be compared, and which of the two."""
    for slot, (before, after) in enumerate(zip(unpack_evidence(one), unpack_evidence(other), strict=False)):
        if before.startswith(MARK):
            name = before[len(MARK) :].decode(errors="replace")
            yield slot, f"the observation holds a value of type {name}, which {_INCOMPARABLE}"
        elif before != after:
            yield slot, "the observation differs"


def same(one: Any, other: Any) -> bool:
    """Tell whether two values are equal to the bit, through nested containers; NaN equals NaN."""
    evidence = evidence_of(one)
    return evidence == evidence_of(other) and not evidence.startswith(MARK)
