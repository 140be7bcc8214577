"""Actions in a bank: exactly what the caller passed.

The env must see the value and type it would have seen in-process: an ``int`` stays an ``int``, a float64 array given to
a float32 Box stays float64. The common cases lie in the bank, the rest travels pickled in the payload.
"""

from __future__ import annotations

import copy
import math
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from multienv._engine.wire.banks import HEAD, STEP, STEPPED, U32
from multienv._engine.wire.messages import call_user_code, dumps
from multienv._engine.wire.rows import ARRAYS, SOLID
from multienv._engine.wire.segment import Segment
from multienv.errors import ActionError

# Writes head and action of a step request into its bank; raises ActionError before anything is written.
Encode = Callable[[int, Any], None]
# Takes the action of request `number` out of its bank, whose action tag is given.
Decode = Callable[[int, int], Any]

PICKLED = 0
INT = 1
INT64 = 2
ARRAY = 8  # + the index of its dtype in DTYPES

DTYPES = tuple(np.dtype(name) for name in ("f4", "f8", "i8", "i4", "i2", "i1", "u1", "u2", "u4", "u8", "?", "f2"))
_TAG_OF = {dtype: ARRAY + index for index, dtype in enumerate(DTYPES)}
_INTEGER = struct.Struct("<q")


def _step_head(tag: int) -> int:
    """Return the first 8 bytes of a bank with a step, as an integer."""
    return STEP | tag << 8 | STEPPED << 16


INT_STEP, INT64_STEP = _step_head(INT), _step_head(INT64)


def number_of(space: Any) -> int:
    """Return how many numbers the array has that an action of this space is; 0: it is no array."""
    return math.prod(space.shape) if type(space) in ARRAYS else 0


def step_head_of(dtype: np.dtype[Any]) -> int:
    """Return the first 8 bytes, as an integer, of a bank with an array of this dtype; 0: such an array is pickled."""
    tag = _TAG_OF.get(dtype)
    return 0 if tag is None else _step_head(tag)


def action_bytes(space: spaces.Space[Any]) -> int:
    """Return the bytes that a bank has for an action of this space of any dtype; 0: it always travels as a payload."""
    return 8 if type(space) is spaces.Discrete else 8 * number_of(space)


def action_encoder(space: spaces.Space[Any], segment: Segment, check: Callable[[Any], str]) -> Encode:
    """Return the function that writes a step with an action of this space, which may be that of a batch.

    Args:
        space: The action space.
        segment: Where it writes.
        check: Tells what is wrong with an action, or returns ``""``.
    """
    if type(space) is spaces.Discrete:
        return _integer_encoder(check, segment)
    if type(space) in ARRAYS:
        return _array_encoder(space, check, segment)
    return partial(_encode_any, check, segment)


def _integer_encoder(check: Callable[[Any], str], segment: Segment) -> Encode:
    int64, least, most = np.int64, -(2**63), 2**63 - 1
    heads = [bank.head for bank in segment.banks]
    values = [bank.view[HEAD.size : HEAD.size + 8].cast("q") for bank in segment.banks]

    def encode(number: int, action: Any) -> None:
        kind = type(action)
        if kind is int64 or (kind is int and least <= action <= most):
            side = number & 1
            head = heads[side]
            head[0], head[1] = INT_STEP if kind is int else INT64_STEP, number & U32
            values[side][0] = action
        else:
            _encode_any(check, segment, number, action)

    return encode


def _array_encoder(space: spaces.Space[Any], check: Callable[[Any], str], segment: Segment) -> Encode:
    shape, ndarray = space.shape, np.ndarray
    heads, views = [bank.head for bank in segment.banks], [bank.view for bank in segment.banks]
    assert shape is not None
    # For each dtype the head of a step, and the array over the actions in either bank.
    targets = {
        dtype: (_step_head(ARRAY + index), [ndarray(shape, dtype, view, HEAD.size) for view in views])
        for index, dtype in enumerate(DTYPES)
    }
    last = np.dtype(np.float32)
    step, arrays = targets[last]

    def encode(number: int, action: Any) -> None:
        nonlocal last, step, arrays
        if type(action) is ndarray and action.shape == shape:
            # Looked up when it changes: to hash a dtype takes as long as to copy a few actions.
            if action.dtype is not last and action.dtype in targets:
                last, (step, arrays) = action.dtype, targets[action.dtype]
            if action.dtype is last:
                side = number & 1
                head = heads[side]
                head[0], head[1] = step, number & U32
                arrays[side][...] = action
                return
        _encode_any(check, segment, number, action)

    return encode


def _encode_any(check: Callable[[Any], str], segment: Segment, number: int, action: Any) -> None:
    try:
        problem = check(action)
        payload = b"" if problem else dumps(action)
    except Exception as error:  # code of the user
        raise ActionError(f"The action {shown(action)} cannot be pickled: {shown(error)}. Nothing was sent.") from error
    if problem:
        raise ActionError(f"{problem} Nothing was sent; the episode goes on with the next step().")
    segment.write_request_payload(number, payload)
    HEAD.pack_into(segment.banks[number & 1].view, 0, STEP, PICKLED, STEPPED, 0, 0, number & U32, 0)


def action_decoder(space: spaces.Space[Any], segment: Segment) -> Decode:
    """Return the function that reads the action out of a bank, as a copy that the env may keep."""
    unpack_integer, int64 = _INTEGER.unpack_from, np.int64
    views = [bank.view for bank in segment.banks]
    arrays: dict[int, list[np.ndarray[Any, Any]]] = {}
    if type(space) in ARRAYS:
        assert space.shape is not None
        for index, dtype in enumerate(DTYPES):
            arrays[ARRAY + index] = [np.ndarray(space.shape, dtype, view, HEAD.size) for view in views]

    def decode(number: int, tag: int) -> Any:
        if tag == INT:
            return unpack_integer(views[number & 1], HEAD.size)[0]
        if tag == INT64:
            return int64(unpack_integer(views[number & 1], HEAD.size)[0])
        if tag >= ARRAY:
            return arrays[tag][number & 1].copy()
        try:
            return pickle.loads(segment.read_request_payload(number))
        except Exception as error:
            raise ActionError(
                f"The action cannot be unpickled in the env's process; the env has not seen it: {shown(error)}."
            ) from error

    return decode


def misfit(space: spaces.Space[Any], action: Any) -> str:
    """Return why an action cannot be one of ``space``: structure, shape, no integer of 64 bits; else ``""``.

    Bounds are the env's to judge, as in gymnasium: many envs clip.
    """
    if type(space) is spaces.Dict:
        if not isinstance(action, Mapping) or set(action) != set(space.spaces):
            return f"The action {shown(action)} is not a dict with the keys {list(space.spaces)}."
        return next(filter(None, (misfit(member, action[key]) for key, member in space.spaces.items())), "")
    if type(space) is spaces.Tuple:
        is_sequence = isinstance(action, Sequence) or (isinstance(action, np.ndarray) and action.ndim > 0)
        if not is_sequence or len(action) != len(space.spaces):
            return f"The action {shown(action)} is not a tuple of {len(space.spaces)} actions."
        pairs = zip(space.spaces, action, strict=True)
        return next(filter(None, (misfit(member, item) for member, item in pairs)), "")
    if type(space) not in SOLID:
        return ""
    if action is None:
        return f"The action is None; the env's action space is {space}."
    try:
        shape = np.shape(action)
    except ValueError:
        return f"The action {shown(action)} is ragged; the env's action space is {space}."
    if shape != space.shape:
        return f"The action {shown(action)} has shape {shape}; the env's action space {space} wants {space.shape}."
    if type(space) is spaces.Discrete and np.asarray(action).dtype.kind not in "iub":
        return f"The action {shown(action)} is not an integer of 64 bits; the env's action space is {space}."
    return ""


def own_copy(action: Any, name: str) -> Any:
    """Return a copy of an action that the env is sent later; raise ActionError if it cannot be copied.

    Args:
        action: Of one env, or of several.
        name: Of the call, for messages.
    """
    return call_user_code(
        lambda: copy.deepcopy(action),
        lambda error: ActionError(
            f"{name}: the action {shown(action)} cannot be copied: {shown(error)}. Nothing was sent."
        ),
    )


def shown(value: object, most: int = 200) -> str:
    """Return a text of a value whose own code may raise, of so many characters at the most."""
    try:
        return f"{value!r:.{most}}"
    except Exception:  # code of the user
        return f"<a {type(value).__name__}>"
