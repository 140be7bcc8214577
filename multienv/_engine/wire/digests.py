"""Digests of what an env returned: two digests are equal if all bytes are, and practically only then.

The digest of memory is one number of 64 bits. It is a sum over words of 8 bytes, of which each is mixed with a key of
its place and multiplied, half by half, as NH does (Black et al., "UMAC: Fast and Secure Message Authentication", 1999;
XXH3 is built on it). ``_native.c`` computes the same at the speed of memory; this module is the reference. The keys are
constants: journals, crash reports and saved states compare digests that different trainers have computed. So it is no
protection against an env that constructs two observations with the same digest.

The digest of a value without a fixed layout has 16 bytes. It is computed of the items of containers of builtin types,
and of the memory of arrays; of a tensor also of its attributes. Of any other value it is computed of what the value is
pickled to, if that is the same twice.
"""

from __future__ import annotations

import copyreg
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from multienv._engine.native import native
from multienv._engine.wire.messages import dumps

Array = np.ndarray[Any, Any]

_WORDS = 128  # of 8 bytes in a block: each has a key of its own
_BLOCK = 8 * _WORDS
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFF_FFFF)
# The multiplier of SplitMix64's first step, that of its state, and an odd one by which blocks are put together.
_MIX, _STEP, _NEXT = (
    np.uint64(0xBF58_476D_1CE4_E5B9),
    np.uint64(0x9E37_79B9_7F4A_7C15),
    np.uint64(0xD6E8_FEB8_6659_FD93),
)


def _mixed(words: Array) -> Array:
    words = (words ^ (words >> _HALF)) * _MIX
    return words ^ (words >> _HALF)  # type: ignore[no-any-return]


_KEYS = _mixed(np.arange(1, _WORDS + 1, dtype=np.uint64) * _STEP)

# A value that cannot be compared has these bytes instead of a digest, and behind them the name of its type.
MARK = b"no bytes"
_DIGEST_BYTES = 16
# Arrays of at least so many bytes are represented by the digest of their memory.
_LONG = 1024
_NUMBERS = "?bBhHiIlLqQefd"  # characters of the types of which all bytes count
_PADDED = "gG"  # np.longdouble and its complex kin
# Bytes of such a number that count: on x86 the other 6 of 16 are never written.
_LONG_DOUBLE = 10 if np.finfo(np.longdouble).nmant == 63 else np.dtype("g").itemsize
_NAME_BYTES = 200  # of the name of a type, at the most
_FLOAT = struct.Struct("<d")


def digester(shown: Array, leaves: Sequence[Array]) -> Callable[[], None]:
    """Return a function that writes a digest of each slot's observation to ``shown``.

    Args:
        shown: One number for each slot.
        leaves: For each leaf of the observation an array with a row for each slot.
    """
    leaves = [leaf for leaf in leaves if leaf.nbytes]
    if native is not None:
        return partial(native.write_digests, shown, *(leaf.reshape(-1).view(np.uint8) for leaf in leaves))
    rows = [_row_digests(leaf) for leaf in leaves]

    def digest() -> None:
        total = np.zeros(len(shown), np.uint64)
        for digests in rows:
            total = total * _NEXT + digests()
        shown[:] = total

    return digest


def _row_digests(leaf: Array) -> Callable[[], Array]:
    """Return a function that computes the digest of each row of an array."""
    octets = leaf.reshape(len(leaf), -1).view(np.uint8)
    slots, width = octets.shape
    blocks = -(-width // _BLOCK)
    padded = np.zeros((slots, blocks * _BLOCK), np.uint8)
    words = padded.view(np.uint64).reshape(slots, blocks, _WORDS)
    weights = np.ones(blocks, np.uint64)
    weights[1:] = _NEXT
    weights = np.cumprod(weights, dtype=np.uint64)[::-1]

    low, high = np.empty_like(words), np.empty_like(words)  # always the same memory: to get it anew takes longer

    def digests() -> Array:
        padded[:, :width] = octets
        np.bitwise_xor(words, _KEYS, out=low)
        np.right_shift(low, _HALF, out=high)
        np.bitwise_and(low, _LOW, out=low)
        np.multiply(low, high, out=low)
        np.add(low, words, out=low)
        sums = low.sum(axis=2, dtype=np.uint64)
        return (_mixed(sums) * weights).sum(axis=1, dtype=np.uint64)  # type: ignore[no-any-return]

    return digests


# --- values -----------------------------------------------------------------------------------


class IncomparableError(Exception):
    """Raised for a value that cannot be compared with a copy of it; the argument is the name of its type."""


def evidence_of(value: Any) -> bytes:
    """Return a digest of a value, whatever its type; for one that cannot be compared ``MARK`` and its type.

    Equal digests mean equal types, order, shapes and bits. NaN equals NaN.
    """
    if type(value) is np.ndarray and value.dtype.char in _NUMBERS and value.nbytes < _LONG:  # most are
        described = f"{value.dtype.str}{value.shape}".encode() + value.tobytes()
        return blake2b(described, digest_size=_DIGEST_BYTES).digest()
    # If the walk raises, or does not end because the value holds itself, the value goes by its pickle.
    for parts in (_parts_of, lambda whole: (_pickled(whole),)):
        try:
            return blake2b(b"".join(parts(value)), digest_size=_DIGEST_BYTES).digest()
        except IncomparableError as error:
            return MARK + str(error).encode()[:_NAME_BYTES]
        except Exception:  # noqa: S112 - code of the user
            continue
    return MARK + type(value).__name__.encode()[:_NAME_BYTES]


def _parts_of(value: Any) -> Iterator[bytes]:
    """Yield bytes that tell a value from any other: its type, its length, and what it holds."""
    kind: Any = type(value)
    yield f"<{kind.__module__}.{kind.__qualname__}>".encode()
    if kind in _PARTS:
        yield from _PARTS[kind](value)
    elif isinstance(value, np.generic) or (hasattr(kind, "__dlpack__") and hasattr(kind, "__array__")):
        yield from _parts_of_tensor(value)
    else:
        yield from _parts_of_reduced(value, _pickled(value))


def _parts_of_reduced(value: Any, pickle: bytes) -> Iterator[bytes]:
    """Yield the parts of what an instance of any other class is pickled to: the trainer gets no more of it."""
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    except Exception:  # a class or function, or what only reducers of the pickler know
        reduced = ""
    if isinstance(reduced, str):
        yield pickle
        return
    make, *parts = reduced
    yield f"{make.__module__}.{make.__qualname__}".encode()
    yield from _parts_of([[*part] if isinstance(part, Iterator) else part for part in parts])


def _pickled(value: Any) -> bytes:
    """Return the pickle of a value if that is the same twice; raise :class:`IncomparableError` if it is not."""
    try:
        one, other = dumps(value), dumps(value)
    except Exception as error:  # code of the user
        raise IncomparableError(type(value).__name__) from error
    if one != other:
        raise IncomparableError(type(value).__name__)
    return one


def _counted(data: bytes) -> Iterator[bytes]:
    yield b"%d:" % len(data)
    yield data


def _parts_of_items(value: Any) -> Iterator[bytes]:
    yield b"%d:" % len(value)
    for item in value:
        yield from _parts_of(item)


def _parts_of_set(value: Any) -> Iterator[bytes]:
    yield b"%d:" % len(value)
    yield from sorted(b"".join(_parts_of(item)) for item in value)


def _parts_of_tensor(value: Any) -> Iterator[bytes]:
    """Yield the parts of a tensor of torch or the like; one with gradients, or on a device, is first copied.

    Not of its pickle, which may hold addresses.
    """
    yield str(value.dtype).encode()
    yield from _parts_of(getattr(value, "__dict__", None))
    for bring in ("detach", "cpu"):
        value = getattr(value, bring, lambda same=value: same)()
    yield from _parts_of_array(np.asarray(value))


def _parts_of_array(array: Array) -> Iterator[bytes]:
    dtype = array.dtype
    yield f"{dtype.descr if dtype.names else dtype.str}{array.shape}".encode()
    if dtype.names:  # between its fields there may be bytes that say nothing
        for name in dtype.names:
            yield from _parts_of_array(array[name])
    elif dtype.char in _PADDED:
        octets = np.ascontiguousarray(array, dtype.newbyteorder("=")).reshape(-1).view(np.uint8)
        yield octets.reshape(-1, np.dtype("g").itemsize)[:, :_LONG_DOUBLE].tobytes()
    elif dtype.hasobject:
        for item in array.flat:
            yield from _parts_of(item)
    elif array.nbytes < _LONG:
        yield array.tobytes()
    else:
        digest = np.zeros(1, np.uint64)
        digester(digest, [np.ascontiguousarray(array).reshape(1, -1)])()
        yield digest.tobytes()


_Parts = Callable[[Any], Iterator[bytes]]
_PARTS: dict[type, _Parts] = {
    **dict.fromkeys((type(None), bool, int, type(Ellipsis)), lambda value: iter((repr(value).encode(),))),
    float: lambda value: iter((_FLOAT.pack(value),)),
    complex: lambda value: iter((_FLOAT.pack(value.real), _FLOAT.pack(value.imag))),
    str: lambda value: _counted(value.encode("utf-8", "surrogatepass")),
    bytes: _counted,
    bytearray: _counted,
    **dict.fromkeys(np.sctypeDict.values(), lambda value: _parts_of_array(np.asarray(value))),
    np.ndarray: _parts_of_array,
    tuple: _parts_of_items,
    list: _parts_of_items,
    dict: lambda value: _parts_of_items(value.items()),
    OrderedDict: lambda value: _parts_of_items(value.items()),
    set: _parts_of_set,
    frozenset: _parts_of_set,
}

# --- several slots ----------------------------------------------------------------------------


def pack_evidence(slots: Sequence[bytes]) -> bytes:
    """Return the evidence of all slots end to end, each behind its length; ``b""`` stands for a slot without any."""
    return b"".join([bytes((len(one),)) + one for one in slots])


def unpack_evidence(packed: bytes) -> list[bytes]:
    """Return the evidence of each slot."""
    found, offset = [], 0
    while offset < len(packed):
        end = offset + 1 + packed[offset]
        found.append(packed[offset + 1 : end])
        offset = end
    return found
