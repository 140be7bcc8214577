"""A bank: one request and its reply whole, in one record of bytes; and journal entries, which are copies of it.

::

    head      16  kind, action tag, reply kind, flags, reward tag | request number, bytes of the irregular part
    actions       of all slots
    skipped    n   1: this slot takes no part in the request; 2: nor does its next episode begin in it
    rewards   8n  float64
    terminated, truncated, failed: n bytes each; failed: the env raised
    shown         observations, or a digest of 8 bytes for each slot where they take more than 1 KiB a slot
    ------------- here the record ends that is journalled and compared
    large         the observations whose digests are shown

A journal entry is this record, alone for a plain step. Any other request has behind it what its payload said:
``EXTRAS`` (two lengths), the payload of the request, and the *irregular part* of the reply: what does not fit into the
bank, pickled, with which the payload of a reply begins. Of a message whose reply has no rows the head alone is kept of
the record.
"""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

# kind, action tag, reply kind, flags, reward tag | number, irregular part
HEAD = struct.Struct("<BBBBBxxxII")
# A head holds the lower half of a number; the words of the segment hold all of it.
U32 = 0xFFFF_FFFF
EXTRAS = struct.Struct("<II")
NUMBER_AT, IRREGULAR_AT = 8, 12
_NUMBER = struct.Struct("<I")

# Kinds of request.
STEP = 1
MESSAGE = 2  # a pickled message in the payload
BEGIN = 3  # a reset of all envs, without seed and options: as cheap as a step

# Added to the action tag: a slot is skipped.
SKIPPED = 0x80

# Of an skipped slot: it is not reset in this step either.
NOT_RESET = 2

# Kinds of reply.
STEPPED = 16  # rows were written: a step or a reset
VALUE = 17  # the payload is a pickled value
FAILED = 18  # the payload is a pickled Failure: nothing, or not all, was done

# Flags of a reply.
ENDED = 1  # some slot has terminated or truncated
RAISED = 2  # some slot has failed
IRREGULAR = 4  # observations (and the reward of a single env) are in the payload: the irregular part at its beginning

# Up to so many bytes a slot observations are in the record themselves.
INLINE_LIMIT = 1024
_LINE = 64
# A digest reads at most this many words of 4 bytes, evenly spread: about 5 µs for a stack of four 84×84 frames.
_DIGEST_WORDS = 16_384

Array = np.ndarray[Any, Any]


def _aligned(size: int, to: int = 8) -> int:
    return -(-size // to) * to


@dataclass(frozen=True, slots=True)
class BankLayout:
    """Says where things lie in a bank.

    Args:
        slots: Number of envs; 0 for the small banks.
        action_bytes: Bytes of the actions of all slots; 0 where they travel as a payload.
        leaf_bytes: For each array of a slot's observation its bytes; empty where observations travel as a payload.

    Attributes:
        end: Length of the record that is journalled.
        size: Bytes of the whole bank.
        is_digested: Digests are shown, and observations lie behind.
    """

    slots: int = 0
    action_bytes: int = 0
    leaf_bytes: tuple[int, ...] = ()
    actions: int = field(init=False, default=HEAD.size)
    skipped: int = field(init=False)
    rewards: int = field(init=False)
    terminated: int = field(init=False)
    truncated: int = field(init=False)
    failed: int = field(init=False)
    shown: int = field(init=False)
    end: int = field(init=False)
    leaves: tuple[int, ...] = field(init=False)  # where the array of all slots begins, for each leaf
    size: int = field(init=False)
    is_digested: bool = field(init=False)

    def __post_init__(self) -> None:
        """Add up the offsets."""
        put: Callable[[str, Any], None] = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        n = self.slots
        skipped = HEAD.size + _aligned(self.action_bytes)
        rewards = skipped + _aligned(n)
        terminated = rewards + 8 * n
        shown = terminated + _aligned(3 * n)
        digested = sum(self.leaf_bytes) > INLINE_LIMIT
        widths = [_aligned(n * width, _LINE if digested else 8) for width in self.leaf_bytes]
        end = shown + (8 * n if digested else sum(widths))
        start = _aligned(end, _LINE) if digested else shown
        put("skipped", skipped)
        put("rewards", rewards)
        put("terminated", terminated)
        put("truncated", terminated + n)
        put("failed", terminated + 2 * n)
        put("shown", shown)
        put("end", end)
        put("leaves", tuple(start + sum(widths[:place]) for place in range(len(widths))))
        put("size", _aligned(start + sum(widths) if digested else end, _LINE))
        put("is_digested", digested)


# For requests before the layout is known, building the envs for instance; two fit between the words and 4096.
SMALL = BankLayout()


class Bank:
    """Holds the arrays of one bank, over the memory of a segment.

    Attributes:
        view: All of the bank.
        record: The part that is journalled.
        head: The head as two integers: kind, action tag, reply kind, flags, reward tag; number, irregular part.
        skipped, rewards, terminated, truncated, failed: One value for each slot.
        digests: One integer for each slot, where observations are digested.
    """

    __slots__ = (
        "digests",
        "failed",
        "head",
        "layout",
        "record",
        "rewards",
        "skipped",
        "terminated",
        "truncated",
        "view",
    )

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
        self.digests = array(layout.shown, np.uint64) if layout.is_digested else None

    def leaf(self, place: int, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return the array of one leaf of the observation, a row for each slot."""
        count = self.layout.slots * math.prod(shape)
        found: Array = np.frombuffer(self.view, dtype, count, self.layout.leaves[place])
        return found.reshape((self.layout.slots, *shape))


# --- journal entries --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """Holds one request with its reply, as the journal keeps it."""

    record: bytes
    request_payload: bytes = b""
    irregular: bytes = b""

    @property
    def number(self) -> int:
        """Return the number of the request."""
        return int(_NUMBER.unpack_from(self.record, NUMBER_AT)[0])

    @property
    def is_step(self) -> bool:
        """Whether the request is a step."""
        return self.record[0] == STEP

    def packed(self) -> bytes:
        """Return the bytes of the entry."""
        if is_plain(self.record):
            return self.record
        sizes = EXTRAS.pack(len(self.request_payload), len(self.irregular))
        record = self.record[: HEAD.size] if _is_head_alone(self.record) else self.record
        return record + sizes + self.request_payload + self.irregular


# Evidence longer than this is not kept. Of rows a digest of each slot's observation is; of a single env rewards and
# flags alone, which are in the bank too, are held against a replay: its observations may be tensors, whose pickles hold
# the address of their memory.
LARGE_IRREGULAR = 4096
# No pickle of today's protocols begins so.
_DIGESTS = b"#"
_DIGEST_BYTES = 8


def slot_digests(irregular: bytes) -> list[bytes]:
    """Return a digest of each slot's observation; ``irregular`` is that of rows, or the digests of one."""
    if irregular.startswith(_DIGESTS):
        places = range(len(_DIGESTS), len(irregular), _DIGEST_BYTES)
        return [irregular[place : place + _DIGEST_BYTES] for place in places]
    return [blake2b(one or b"", digest_size=_DIGEST_BYTES).digest() for one in pickle.loads(irregular)]


def are_digests(irregular: bytes) -> bool:
    """Tell whether irregular part was too large to be kept, and these are digests in its place."""
    return irregular.startswith(_DIGESTS)


def entry_of(bank: Bank, request_payload: bytes, irregular: bytes, *, exact: bool) -> bytes:
    """Return the journal entry of the request and the reply in a bank; trainer and worker both make it so.

    What the request or the reply does not use is zero in it, whatever an earlier request left there: entries of equal
    requests with equal outcomes are equal bytes. ``exact``: it is of the exact codec.
    """
    record, layout = bank.record, bank.layout
    tag, reply_kind, flags = record[1:4]
    if is_plain(record):
        return bytes(record)
    parts = [
        bytes(record[: HEAD.size]),
        bytes(record[HEAD.size : layout.skipped]) if tag & ~SKIPPED else bytes(layout.skipped - HEAD.size),
        bytes(record[layout.skipped : layout.rewards]) if tag & SKIPPED else bytes(layout.rewards - layout.skipped),
        bytes(record[layout.rewards : layout.shown]) if reply_kind == STEPPED else bytes(layout.shown - layout.rewards),
        bytes(record[layout.shown :])
        if reply_kind == STEPPED and not flags & IRREGULAR
        else bytes(layout.end - layout.shown),
    ]
    if len(irregular) > LARGE_IRREGULAR:
        irregular = b"" if exact else _DIGESTS + b"".join(slot_digests(irregular))
    head = bytearray(parts[0])
    _NUMBER.pack_into(head, IRREGULAR_AT, len(irregular))
    return Entry(bytes(head) + b"".join(parts[1:]), request_payload, irregular).packed()


def is_plain(record: bytes | memoryview, start: int = 0) -> bool:
    """Tell whether an entry is a step, or a reset, without payload: its length is that of the record."""
    kind, tag, reply_kind, flags = record[start : start + 4]
    is_laid_out = kind == BEGIN or (kind == STEP and tag & ~SKIPPED != 0)
    return is_laid_out and reply_kind == STEPPED and not flags & IRREGULAR


def _is_head_alone(record: bytes) -> bool:
    """Tell whether an entry has nothing behind its head but payload: a message that was not answered by rows."""
    return record[0] == MESSAGE and record[2] != STEPPED


def split_entries(data: bytes | bytearray | memoryview, end: int) -> Iterator[Entry]:
    """Take journal entries apart; ``end`` is the length of the record (``BankLayout.end``).

    Raises:
        ValueError: The last entry is cut short.
    """
    place, stop = 0, len(data)
    while place < stop:
        record = bytes(data[place : place + end])
        if is_plain(record):
            place += end
            yield Entry(record)
            continue
        if _is_head_alone(record):
            record = record[: HEAD.size] + bytes(end - HEAD.size)
            place += HEAD.size
        else:
            place += end
        request, irregular = EXTRAS.unpack_from(data, place)
        place += EXTRAS.size
        yield Entry(
            record, bytes(data[place : place + request]), bytes(data[place + request : place + request + irregular])
        )
        place += request + irregular
    if place != stop:
        raise ValueError("the last request is cut short")


# --- digests ----------------------------------------------------------------------------------


def digester(shown: Array, leaves: Sequence[Array]) -> Callable[[], None]:
    """Return a function that writes a digest of each slot's observation to ``shown``.

    A digest is a weighted sum of words: cheap enough for every step and, unlike a plain sum, it changes when equal
    words trade places, as the pixels of a moving sprite do.
    """
    sums = [_weighted_sums(leaf) for leaf in leaves if leaf.nbytes]

    def digest() -> None:
        total = sums[0]()
        for place, more in enumerate(sums[1:], 2):
            total += np.uint64(place) * more()
        shown[:] = total

    return digest


def _weighted_sums(leaf: Array) -> Callable[[], Array]:
    octets = leaf.reshape(len(leaf), -1).view(np.uint8)
    width = octets.shape[1]
    words = octets.view(np.uint32 if width % 4 == 0 else np.uint16 if width % 2 == 0 else np.uint8)
    seen = words[:, :: max(1, words.shape[1] // _DIGEST_WORDS)]
    # The same in every process, and in no simple relation to each other.
    weights = np.random.default_rng(0).integers(1, 2**32, seen.shape[1], dtype=np.uint32)
    scratch, half, shift_up = np.empty(seen.shape, np.uint32), np.uint32(16), np.uint64(32)
    shift, multiply, add = np.right_shift, np.multiply, np.add.reduce

    def sums() -> Array:
        multiply(seen, weights, out=scratch)
        low: Array = add(scratch, axis=1, dtype=np.uint32).astype(np.uint64)
        # The upper halves once more: a word like 1.0f, all zeros below, loses most of its weight modulo 2**32.
        shift(seen, half, out=scratch, casting="unsafe")
        multiply(scratch, weights, out=scratch)
        high: Array = add(scratch, axis=1, dtype=np.uint32).astype(np.uint64)
        total: Array = low | high << shift_up
        return total

    return sums
