"""Observations on the wire: inline in the reply when small, in shared memory when not.

In shared memory there are two places, used in turn: while the worker writes one observation, the one
before it, which the caller has seen, stays whole as evidence. The reply then carries a digest.
"""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from multienv.wire.layout import Layout, layout_of
from multienv.wire.memory import Block
from multienv.wire.messages import ANCHORED, IRREGULAR, REPLY, STEPPED, TERMINATED, TRUNCATED, dumps
from multienv.wire.numbers import holds_numbers, pack_numbers, unpack_numbers

# Up to this many bytes an observation travels in the reply itself, which the journal keeps whole.
INLINE_LIMIT = 1024
# A digest reads at most this many words, evenly spread: about 5 µs for a stack of four 84×84 frames.
_DIGEST_WORDS = 16_384
_DIGEST = struct.Struct("<Q")

Pack = Callable[[int, Any, Any, bool, bool, Any, int], bytes]

_REWARD_TYPES: tuple[type, ...] = (float, np.float64, np.float32, int, np.int64, bool)
_REWARD_TAG = {kind: tag for tag, kind in enumerate(_REWARD_TYPES)}
_INTEGER_TAGS = 3  # from here on; a float64 holds them exactly up to the next line
_EXACT_INTEGER = 2**53


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a space's observations travel: inline, in a block of memory, or pickled."""

    layout: Layout | None
    inline: bool

    @classmethod
    def of(cls, space: spaces.Space[Any], inline_limit: int) -> Placement:
        """The placement for ``space``; ``inline_limit`` is :data:`INLINE_LIMIT`, or -1 without shared memory."""
        layout = layout_of(space)
        inline = layout is not None and (inline_limit < 0 or layout.size <= inline_limit)
        return cls(layout, inline)

    @property
    def block_size(self) -> int:
        """Bytes of shared memory this needs; 0 for none."""
        return 0 if self.layout is None or self.inline else 2 * self.layout.size

    @property
    def plain_size(self) -> int:
        """Bytes of a reply with a regular observation and no info."""
        if self.layout is None:
            return REPLY.size
        return REPLY.size + (self.layout.size if self.inline else _DIGEST.size)


# --- the worker's end -------------------------------------------------------------------------


def packer(space: spaces.Space[Any], placement: Placement, block: Block | None) -> Pack:
    """The function that makes a reply of what ``step`` or ``reset`` returned."""
    layout = placement.layout
    if layout is None:
        return _pack_irregular
    if placement.inline and type(space) is spaces.Box:
        return _box_packer(space, layout)
    store = _inline_store(layout) if placement.inline else _block_store(layout, block)
    pack, header, tag_of = REPLY.pack, REPLY.size, _REWARD_TAG.get

    def pack_reply(
        seq: int, observation: Any, reward: Any, terminated: bool, truncated: bool, info: Any, flags: int
    ) -> bytes:
        tag = tag_of(type(reward))
        if tag is None or (tag >= _INTEGER_TAGS and not -_EXACT_INTEGER <= reward <= _EXACT_INTEGER):
            return _pack_irregular(seq, observation, reward, terminated, truncated, info, flags)
        data = store(observation, seq)
        if data is None:
            return _pack_irregular(seq, observation, reward, terminated, truncated, info, flags)
        if terminated:
            flags |= TERMINATED
        if truncated:
            flags |= TRUNCATED
        if info:
            packed = pack_numbers(info) or dumps(info)
            return pack(header + len(data) + len(packed), seq, len(packed), STEPPED, flags, tag, reward) + data + packed
        return pack(header + len(data), seq, 0, STEPPED, flags, tag, reward) + data

    return pack_reply


def _box_packer(space: spaces.Box, layout: Layout) -> Pack:
    """The commonest case in one function: every call counts here."""
    dtype, shape, pack, ndarray, tag_of = space.dtype, space.shape, REPLY.pack, np.ndarray, _REWARD_TAG.get
    size = dtype.itemsize * math.prod(shape)
    padding, length = bytes(layout.size - size), REPLY.size + layout.size

    def pack_reply(
        seq: int, observation: Any, reward: Any, terminated: bool, truncated: bool, info: Any, flags: int
    ) -> bytes:
        tag = tag_of(type(reward))
        if (
            tag is None
            or (tag >= _INTEGER_TAGS and not -_EXACT_INTEGER <= reward <= _EXACT_INTEGER)
            or type(observation) is not ndarray
            or (observation.dtype is not dtype and observation.dtype != dtype)
            or observation.shape != shape
        ):
            return _pack_irregular(seq, observation, reward, terminated, truncated, info, flags)
        if terminated:
            flags |= TERMINATED
        if truncated:
            flags |= TRUNCATED
        data: bytes = observation.tobytes()
        if padding:
            data += padding
        if info:
            packed = pack_numbers(info) or dumps(info)
            return pack(length + len(packed), seq, len(packed), STEPPED, flags, tag, reward) + data + packed
        return pack(length, seq, 0, STEPPED, flags, tag, reward) + data

    return pack_reply


def _inline_store(layout: Layout) -> Callable[[Any, int], bytes | None]:
    fits, write, size = layout.fits, layout.write, layout.size

    def store(observation: Any, seq: int) -> bytes | None:
        if not fits(observation):
            return None
        scratch = bytearray(size)  # new each time: what a value does not cover must not depend on the last
        write(observation, scratch, 0)
        return bytes(scratch)

    return store


def _block_store(layout: Layout, block: Block | None) -> Callable[[Any, int], bytes | None]:
    assert block is not None
    fits, write, size, view = layout.fits, layout.write, layout.size, block.view
    digest, pack = digester(block, size), _DIGEST.pack
    blank = None if layout.solid else bytes(size)

    def store(observation: Any, seq: int) -> bytes | None:
        if not fits(observation):
            return None
        place = (seq & 1) * size
        if blank is not None:
            view[place : place + size] = blank
        write(observation, view, place)
        return pack(digest(seq & 1))

    return store


def digester(block: Block, size: int) -> Callable[[int], int]:
    """A function that sums up the observation in place 0 or 1."""
    all_words = np.frombuffer(block.view, np.uint32, 2 * size // 4)
    even, total = weighted_sum(all_words[: size // 4])
    odd, _ = weighted_sum(all_words[size // 4 :])
    places = even, odd
    return lambda place: total(places[place])


def weighted_sum(words: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], Callable[[np.ndarray[Any, Any]], int]]:
    """Those of the words that are looked at, and a function that sums them up, whatever they are by then.

    A weighted sum of 32-bit words, or of bytes: cheap enough for every step, and, unlike a plain sum, it changes when
    equal words trade places, as the pixels of a moving sprite do.
    """
    seen = words[:: max(1, len(words) // _DIGEST_WORDS)]
    # The same in every process, and in no simple relation to each other.
    weights = np.random.default_rng(0).integers(1, 2**32, len(seen), dtype=np.uint32)
    scratch, half = np.empty_like(weights), np.uint32(16)
    shift, multiply, add = np.right_shift, np.multiply, np.add.reduce

    def total(seen: np.ndarray[Any, Any]) -> int:
        multiply(seen, weights, out=scratch)
        low = int(add(scratch, dtype=np.uint32))
        # The upper halves once more: a word like 1.0f, all zeros below, loses most of its weight modulo 2**32.
        shift(seen, half, out=scratch)
        multiply(scratch, weights, out=scratch)
        return low | int(add(scratch, dtype=np.uint32)) << 32

    return seen, total


def _pack_irregular(
    seq: int, observation: Any, reward: Any, terminated: bool, truncated: bool, info: Any, flags: int
) -> bytes:
    data = dumps((observation, reward, terminated, truncated))
    packed = dumps(info) if info else b""
    length = REPLY.size + len(data) + len(packed)
    flags |= IRREGULAR | (TERMINATED if terminated else 0) | (TRUNCATED if truncated else 0)
    # The header repeats a reward that is a number: it stays as evidence when the rest is too large to keep.
    try:
        number = float(reward) if isinstance(reward, int | float | np.integer | np.floating) else 0.0
    except OverflowError:
        number = 0.0
    return REPLY.pack(length, seq, len(packed), STEPPED, flags, 0, number) + data + packed


# --- the trainer's end ------------------------------------------------------------------------


def reader(space: spaces.Space[Any], placement: Placement, block: Block | None) -> Callable[[bytes, int], Any]:
    """The function that takes the observation out of a regular reply, as a value of its own."""
    layout, header = placement.layout, REPLY.size
    if layout is None:
        return lambda reply, seq: None  # never asked: all replies are irregular
    read = layout.read
    if not placement.inline:
        assert block is not None
        view, size = block.view, layout.size
        return lambda reply, seq: read(view, (seq & 1) * size)
    if type(space) is spaces.Box:
        ndarray, dtype, shape = np.ndarray, space.dtype, space.shape
        return lambda reply, seq: ndarray(shape, dtype, reply, header).copy()
    return lambda reply, seq: read(reply, header)


def array_views(
    space: spaces.Space[Any], placement: Placement, block: Block | None, buffer: bytearray
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """For a Box: arrays over the places where the observations of even and odd requests arrive.

    To copy such an array is the cheapest way to an observation. ``buffer`` is where replies are read into.
    """
    if type(space) is not spaces.Box or placement.layout is None:
        return None
    if placement.inline:
        if REPLY.size + placement.layout.size > len(buffer):
            return None
        view: np.ndarray[Any, Any] = np.ndarray(space.shape, space.dtype, buffer, REPLY.size)
        return view, view
    assert block is not None
    # Unlike np.ndarray(buffer=), this keeps the memory mapped for whoever copies while another thread closes the env.
    count = math.prod(space.shape)
    even, odd = (np.frombuffer(block.view, space.dtype, count, place * placement.layout.size) for place in (0, 1))
    return even.reshape(space.shape), odd.reshape(space.shape)


def reward_of(tag: int, number: float) -> Any:
    """The reward in the type the env gave it."""
    return number if tag == 0 else _REWARD_TYPES[tag](number)


def body_of(reply: bytes) -> bytes:
    """Observation, reward and flags of an irregular reply, pickled; what else it tells comes behind them."""
    info_length = REPLY.unpack_from(reply)[2]
    return reply[REPLY.size : len(reply) - info_length]


def irregular_parts(reply: bytes) -> tuple[Any, Any, bool, bool]:
    """Observation, reward and flags of an irregular reply; of a group each env's, the observations pickled."""
    parts: tuple[Any, Any, bool, bool] = pickle.loads(memoryview(reply)[REPLY.size :])
    return parts


def info_of(reply: bytes) -> tuple[dict[str, Any], bytes | None]:
    """The info, or what a group tells besides its rows, and the random generators' state where one was asked for."""
    _, _, info_length, _, flags, _, _ = REPLY.unpack_from(reply)
    if not info_length:
        return {}, None
    start = len(reply) - info_length
    if holds_numbers(reply[start]):
        return unpack_numbers(reply[start:]), None
    info: Any = pickle.loads(memoryview(reply)[start:])
    return (info[0], info[1]) if flags & ANCHORED else (info, None)
