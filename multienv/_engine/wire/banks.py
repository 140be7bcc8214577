"""A bank: one request and its reply whole, in one record of bytes; and journal entries, which are copies of it.

::

    head      16  kind, action tag, reply kind, flags, reward tag | request number, bytes of the pickled part
    actions       of all slots
    skipped    n   1: this slot takes no part in the request, and its episode ends; 2: nor does the next one begin
                   in it; 3: it is left alone, and its episode goes on; 4: its episode had ended, the next one begins
    rewards   8n  float64
    terminated, truncated, failed: n bytes each; failed: the env raised
    finals    8n  digests of observations that ended an episode, where the next one begins in the same step
    shown         observations, or a digest of 8 bytes for each slot where they take more than 1 KiB a slot
    ------------- here the record ends that is journalled and compared
    large         the observations whose digests are shown

A journal entry is this record, alone for a plain step. Any other request has behind it what its payload said:
``EXTRAS`` (two lengths), the payload of the request, and the evidence of what does not fit into the bank: a digest for
each slot. Of a message whose reply has no rows the head alone is kept of the record.

What an env returns may not fit its row of the bank. It then travels as a *pickled row* in the payload of the reply. The
payload begins with the *pickled part*: the evidence, and behind it the pickled rows.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

# kind, action tag, reply kind, flags, reward tag | number, pickled part
HEAD = struct.Struct("<BBBBBxxxII")
# A head holds the lower half of a number; the words of the segment hold all of it.
U32 = 0xFFFF_FFFF
EXTRAS = struct.Struct("<II")
NUMBER_AT, PICKLED_AT = 8, 12
LENGTH = struct.Struct("<I")

# Kinds of request.
STEP = 1
MESSAGE = 2  # a pickled message in the payload
RESET = 3  # a reset of all envs, without seed and options: as cheap as a step

# Added to the action tag: a slot is skipped.
SKIPPED = 0x80

# Of a skipped slot: it is not reset in this step either; its episode goes on with a later step; it is reset at once.
NOT_RESET, LEFT_ALONE, BEGUN = 2, 3, 4

# Kinds of reply.
STEPPED = 16  # rows were written: a step or a reset
VALUE = 17  # the payload is a pickled value
FAILED = 18  # the payload is a pickled Failure: nothing, or not all, was done

# Flags of a reply.
ENDED = 1  # some slot has terminated or truncated
RAISED = 2  # some slot has failed
PICKLED_ROWS = 4  # some rows do not fit into the bank: they are pickled, in the pickled part of the payload

# Bytes that Python takes for an entry of a journal beside the entry itself: two objects, and a place in a dict.
OVERHEAD = 128

# Up to so many bytes a slot observations are in the record themselves.
INLINE_LIMIT = 1024
_LINE = 64

Array = np.ndarray[Any, Any]


def _aligned(size: int, to: int = 8) -> int:
    return -(-size // to) * to


@dataclass
class BankLayout:
    """Says where things lie in a bank.

    Args:
        slots: Number of envs; 0 for the small banks.
        action_bytes: Bytes of the actions of all slots; 0 where they travel as a payload.
        leaf_bytes: For each array of a slot's observation its bytes; empty where observations travel as a payload.
        has_finals: A step may end an episode and begin the next one.

    Attributes:
        skipped, rewards, terminated, truncated, failed, finals, shown: Where these begin; actions follow the head.
        leaves: Where the array of all slots begins, for each leaf of the observation.
        end: Length of the record that is journalled.
        size: Bytes of the whole bank.
        is_digested: Digests are shown, and observations lie behind.
    """

    slots: int = 0
    action_bytes: int = 0
    leaf_bytes: tuple[int, ...] = ()
    has_finals: bool = False

    def __post_init__(self) -> None:
        """Add up the offsets."""
        n = self.slots
        self.skipped = HEAD.size + _aligned(self.action_bytes)
        self.rewards = self.skipped + _aligned(n)
        self.terminated = self.rewards + 8 * n
        self.truncated, self.failed = self.terminated + n, self.terminated + 2 * n
        self.finals = self.terminated + _aligned(3 * n)
        self.shown = self.finals + 8 * n * self.has_finals
        self.is_digested = sum(self.leaf_bytes) > INLINE_LIMIT
        widths = [_aligned(n * width, _LINE if self.is_digested else 8) for width in self.leaf_bytes]
        self.end = self.shown + (8 * n if self.is_digested else sum(widths))
        start = _aligned(self.end, _LINE) if self.is_digested else self.shown
        self.leaves = tuple(start + sum(widths[:index]) for index in range(len(widths)))
        self.size = _aligned(start + sum(widths) if self.is_digested else self.end, _LINE)


# For requests before the layout is known, building the envs for instance; two fit between the words and 4096.
SMALL = BankLayout()


class Bank:
    """Holds the arrays of one bank, over the memory of a segment.

    Attributes:
        view: All of the bank.
        record: The part that is journalled.
        head: The head as two integers: kind, action tag, reply kind, flags, reward tag; number, pickled part.
        skipped, rewards, terminated, truncated, failed: One value for each slot.
        digests: One integer for each slot, where observations are digested.
        finals: One integer for each slot, where a step may end an episode and begin the next one.
    """

    def __init__(self, layout: BankLayout, memory: memoryview, offset: int) -> None:
        self.layout = layout
        view = self.view = memory[offset : offset + layout.size]
        self.record = view[: layout.end]
        self.head = view[: HEAD.size].cast("Q")
        n = layout.slots
        array: Callable[[int, Any], Array] = lambda start, kind: np.frombuffer(view, kind, n, start)  # noqa: E731
        self.skipped = array(layout.skipped, np.uint8)
        self.rewards = array(layout.rewards, np.float64)
        self.terminated = array(layout.terminated, np.bool_)
        self.truncated = array(layout.truncated, np.bool_)
        self.failed = array(layout.failed, np.bool_)
        self.finals = array(layout.finals, np.uint64) if layout.has_finals else None
        self.digests = array(layout.shown, np.uint64) if layout.is_digested else None

    def leaf(self, index: int, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return the array of one leaf of the observation, a row for each slot."""
        count = self.layout.slots * math.prod(shape)
        return np.frombuffer(self.view, dtype, count, self.layout.leaves[index]).reshape((self.layout.slots, *shape))


# --- journal entries --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """Holds one request with its reply, as the journal keeps it."""

    record: bytes
    request_payload: bytes = b""
    evidence: bytes = b""

    @property
    def number(self) -> int:
        """Return the number of the request."""
        return int(LENGTH.unpack_from(self.record, NUMBER_AT)[0])

    @property
    def is_step(self) -> bool:
        """Whether the request is a step."""
        return self.record[0] == STEP

    def packed(self) -> bytes:
        """Return the bytes of the entry."""
        if is_plain(self.record):
            return self.record
        sizes = EXTRAS.pack(len(self.request_payload), len(self.evidence))
        record = self.record[: HEAD.size] if _is_head_alone(self.record) else self.record
        return record + sizes + self.request_payload + self.evidence


def entry_of(bank: Bank, request_payload: bytes, evidence: bytes) -> bytes:
    """Return the journal entry of the request and the reply in a bank; trainer and worker both make it so.

    What the request or the reply does not use is zero in it, whatever an earlier request left there: entries of equal
    requests with equal outcomes are equal bytes.

    Args:
        bank: Holds both.
        request_payload: What the request carries beside it.
        evidence: Of what the reply carries beside it instead of observations; ``b""``: nothing.
    """
    record, layout = bytearray(bank.record), bank.layout
    if is_plain(record):
        return bytes(record)
    tag, has_rows, has_pickled_rows = record[1], record[2] == STEPPED, record[3] & PICKLED_ROWS
    for is_used, begin, end in (
        (tag & ~SKIPPED, HEAD.size, layout.skipped),
        (tag & SKIPPED, layout.skipped, layout.rewards),
        (has_rows, layout.rewards, layout.shown),
        (has_rows and not has_pickled_rows, layout.shown, layout.end),
    ):
        if not is_used:
            record[begin:end] = bytes(end - begin)
    LENGTH.pack_into(record, PICKLED_AT, len(evidence))
    return Entry(bytes(record), request_payload, evidence).packed()


def is_plain(record: bytes | bytearray | memoryview) -> bool:
    """Tell whether an entry is a step, or a reset, without payload: its length is that of the record."""
    kind, tag, reply_kind, flags = record[:4]
    is_laid_out = kind == RESET or (kind == STEP and tag & ~SKIPPED != 0)
    return is_laid_out and reply_kind == STEPPED and not flags & PICKLED_ROWS


def _is_head_alone(record: bytes) -> bool:
    """Tell whether an entry has nothing behind its head but payload: a message that was not answered by rows."""
    return record[0] == MESSAGE and record[2] != STEPPED


def split_entries(data: bytes | bytearray | memoryview, end: int) -> Iterator[Entry]:
    """Split journal entries; ``end`` is the length of the record (``BankLayout.end``).

    Raises:
        ValueError: The last entry is cut short.
    """
    offset, stop = 0, len(data)
    while offset < stop:
        record = bytes(data[offset : offset + end])
        if is_plain(record):
            offset += end
            yield Entry(record)
            continue
        if _is_head_alone(record):
            record = record[: HEAD.size] + bytes(end - HEAD.size)
            offset += HEAD.size
        else:
            offset += end
        request, evidence = EXTRAS.unpack_from(data, offset)
        offset += EXTRAS.size
        middle, end_of_entry = offset + request, offset + request + evidence
        yield Entry(record, bytes(data[offset:middle]), bytes(data[middle:end_of_entry]))
        offset = end_of_entry
    if offset != stop:
        raise ValueError("the last request is cut short")
