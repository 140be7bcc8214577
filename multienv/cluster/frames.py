"""What travels between a courier and its relay: lists of frames, and the banks beside them.

A frame is a tuple whose first item says what it is and whose second one names a channel. A courier that does not know
whether a call was executed makes it again. So calls are numbered: the frames of one are carried out once, and in order;
and a request that was executed is answered again from its bank.

The banks and payloads of all answers lie one behind the other in one record of bytes. A short one travels with the
frames; a long one as an array of its own, which Ray keeps in its object store and hands out without a copy.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

# From the trainer.
LAUNCH = "launch"  # channel, method, native threads, title
WAKE = "wake"  # channel, the channel of the lost worker
WAKE_KEPT = "wake kept"  # channel, token
FREE = "free"  # token
ASK = "ask"  # channel, number, layout of the banks or None if it is known, request part of the bank, payload or None
AWAIT = "await"  # channel, number: its answer is wanted, or its end, once more if it was told; 0: only its end
STACK = "stack"  # channel
KILL = "kill"  # channel, cause, whether the stack is wanted, detail
CLOSE = "close"  # channel, seconds
RELEASE = "release"  # channel

# From the relay.
ANSWER = "answer"  # channel, number, words, length of the payload, lengths of head and rows: they lie in the record
PROGRESS = "progress"  # channel, words
STACKS = "stacks"  # channel, text
GONE = "gone"  # channel, arguments of Gone

# Up to so many bytes travel with the frames: Ray puts what is longer than 100 kB into its object store.
INLINE = 64 * 1024

Frame = tuple[Any, ...]
_LENGTH = struct.Struct("<I")


class Sent(NamedTuple):
    """Holds what one call brings.

    Attributes:
        serial: Number of the call, from 1: its frames are carried out after those of the call before, and once.
        frames: In order.
        again: Of the kind AWAIT: what is asked, and may have been told in vain; carried out in any case.
        most: Bytes of answers wanted in one reply, about; more come with the next.
    """

    serial: int
    frames: list[Frame]
    again: list[Frame]
    most: int

    def packed(self) -> bytes:
        """Return the bytes that travel."""
        return pickle.dumps(tuple(self), pickle.HIGHEST_PROTOCOL)

    @classmethod
    def of(cls, data: bytes) -> Sent:
        """Unpack what :meth:`packed` returned."""
        return cls(*pickle.loads(data))


def pack_reply(frames: Sequence[Frame], parts: Sequence[Any]) -> Any:
    """Pack frames for the trainer.

    Args:
        frames: In order.
        parts: The buffers of all answers, in the same order; each is copied once.

    Returns:
        Bytes; or a pair of bytes and an array.
    """
    told = pickle.dumps(list(frames), pickle.HIGHEST_PROTOCOL)
    size = sum(len(part) for part in parts)
    if size <= INLINE:
        return b"".join((_LENGTH.pack(len(told)), told, *parts))
    record, place = np.empty(size, np.uint8), 0
    for part in parts:
        record[place : place + len(part)] = np.frombuffer(part, np.uint8)
        place += len(part)
    return told, record


def unpack_reply(reply: Any) -> tuple[list[Frame], memoryview]:
    """Return the frames, and the record their answers lie in."""
    if isinstance(reply, bytes):
        (length,) = _LENGTH.unpack_from(reply)
        start = _LENGTH.size + length
        return pickle.loads(memoryview(reply)[_LENGTH.size : start]), memoryview(reply)[start:]
    told, record = reply
    return pickle.loads(told), memoryview(record)


def split(reply: Any, parts: int, size: int) -> list[Any]:
    """Cut a packed reply into so many parts of ``size`` bytes; the last one has all that is left."""
    if isinstance(reply, bytes):
        return [reply, *([None] * (parts - 1))]
    told, record = reply
    cuts = [min(place * size, len(record)) for place in range(parts - 1)]
    return [told, *(record[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(record)], strict=True))]


def join(parts: Sequence[Any]) -> Any:
    """Return the packed reply that :func:`split` has cut."""
    return parts[0] if parts[1] is None else (parts[0], np.concatenate(parts[1:]))


def size_of(reply: Any) -> int:
    """Return how many bytes a reply takes."""
    return len(reply) if isinstance(reply, bytes) else len(reply[0]) + len(reply[1])
