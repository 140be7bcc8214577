"""Actions on the wire: exactly what the caller passed, in as few bytes as possible.

The env must see the value and type it would have seen in-process: an ``int`` stays an ``int``, a float64
array given to a float32 Box stays float64. Common cases are laid out; the rest is pickled.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import spaces

from multienv.errors import ActionError
from multienv.wire.messages import REQUEST, STEP, STEP_INTEGER, TAG_AT, LeftOut, dumps

EncodeStep = Callable[[int, Any], bytes]  # number of the request, action → frame
DecodeAction = Callable[[bytes], Any]  # frame → action

PICKLED = 0
INT = 1
INT64 = 2
_PICKLED_TWICE = 3  # by reference; and by value, for a process in which the references lead nowhere
LEAVING_OUT = 4  # the frame of another step, and which envs of the group do not take part in it
ARRAY = 8  # + the place of its dtype in ARRAY_DTYPES

ARRAY_DTYPES = tuple(
    np.dtype(name)
    for name in ("f4", "f8", "i8", "i4", "i2", "i1", "u1", "u2", "u4", "u8", "?", "f2")  # native byte order
)
_DTYPE_TAG = {dtype: ARRAY + place for place, dtype in enumerate(ARRAY_DTYPES)}


def action_encoder(space: spaces.Space[Any]) -> EncodeStep:
    """The function that packs a step for an env with this action space."""
    if type(space) is spaces.Discrete:
        return _integer_encoder(space)
    if type(space) in (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete):
        return _array_encoder(space)
    return lambda seq, action: _pack_any(space, seq, action)


def _integer_encoder(space: spaces.Discrete) -> EncodeStep:
    pack, size, int64 = STEP_INTEGER.pack, STEP_INTEGER.size, np.int64

    def encode(seq: int, action: Any) -> bytes:
        kind = type(action)
        if kind is int64:
            return pack(size, seq, STEP, INT64, action)
        if kind is int:
            # Beyond 64 bits the env shall say what it thinks of it. A suppress() would cost every step.
            try:
                return pack(size, seq, STEP, INT, action)
            except struct.error:
                return _pack_any(space, seq, action)
        return _pack_any(space, seq, action)

    return encode


def _array_encoder(space: spaces.Space[Any]) -> EncodeStep:
    pack, header, shape, ndarray, tag_of = REQUEST.pack, REQUEST.size, space.shape, np.ndarray, _DTYPE_TAG.get

    def encode(seq: int, action: Any) -> bytes:
        if type(action) is ndarray and action.shape == shape:
            tag = tag_of(action.dtype)
            if tag is not None:
                data = action.tobytes()
                return pack(header + len(data), seq, STEP, tag) + data
        return _pack_any(space, seq, action)

    return encode


def can(call: Callable[..., object], *arguments: Any) -> bool:
    """Whether this raises nothing: what it has raised the first time was a signal handler's then."""
    try:
        call(*arguments)
    except Exception:
        return False
    return True


def _pack_any(space: spaces.Space[Any], seq: int, action: Any) -> bytes:
    try:
        problem = misfit(space, action)
    except Exception as error:  # looking at it runs foreign code
        if can(misfit, space, action):
            raise  # the action is not to blame: a signal handler raised
        problem = f"The action {_shown(action)} cannot be looked at: {_shown(error)}."
    if problem:
        raise ActionError(f"{problem} Nothing was sent; the episode goes on with the next step().")
    try:
        tag, payload = _pickled(action)
    except Exception as error:
        reason = f"The action {_shown(action)} cannot be pickled: {_shown(error)}."
        raise ActionError(f"{reason} Nothing was sent.") from error
    return REQUEST.pack(REQUEST.size + len(payload), seq, STEP, tag) + payload


def _pickled(action: Any) -> tuple[int, bytes]:
    """Tag and payload. A forked worker has the trainer's ``__main__``, another one has not."""
    payload = dumps(action)
    if b"__main__" in payload:
        with contextlib.suppress(Exception):
            return _PICKLED_TWICE, pickle.dumps((payload, cloudpickle.dumps(action)), protocol=5)
    return PICKLED, payload


def _unpickled(tag: int, payload: memoryview) -> Any:
    if tag == _PICKLED_TWICE:
        by_reference, by_value = pickle.loads(payload)
        with contextlib.suppress(Exception):
            return pickle.loads(by_reference)
        return pickle.loads(by_value)
    return pickle.loads(payload)


def action_decoder(space: spaces.Space[Any]) -> DecodeAction:
    """The function that takes the action out of a step's frame."""
    unpack_integer, header, ndarray = STEP_INTEGER.unpack_from, REQUEST.size, np.ndarray
    int64, shape = np.int64, space.shape

    def decode(frame: bytes) -> Any:
        tag = frame[TAG_AT]
        if tag == INT:
            return unpack_integer(frame)[4]
        if tag == INT64:
            return int64(unpack_integer(frame)[4])
        if tag < ARRAY:
            try:
                return _unpickled(tag, memoryview(frame)[header:])
            except Exception as error:
                raise ActionError(
                    f"The action cannot be unpickled in the env's process; the env has not seen it: {_shown(error)}."
                ) from error
        assert shape is not None
        return ndarray(shape, ARRAY_DTYPES[tag - ARRAY], frame, header).copy()

    return decode


def leave_out(frame: bytes, who: Mapping[int, LeftOut]) -> bytes:
    """The step in ``frame`` of a group of envs, without some of them."""
    payload = dumps((frame, dict(who)))
    _, seq, kind, _ = REQUEST.unpack_from(frame)
    return REQUEST.pack(REQUEST.size + len(payload), seq, kind, LEAVING_OUT) + payload


def left_out(frame: bytes) -> tuple[bytes, dict[int, LeftOut]]:
    """The step in ``frame``, and who does not take part in it."""
    if frame[TAG_AT] != LEAVING_OUT:
        return frame, {}
    parts: tuple[bytes, dict[int, LeftOut]] = pickle.loads(memoryview(frame)[REQUEST.size :])
    return parts


def misfit(space: spaces.Space[Any], action: Any) -> str:
    """Why the action cannot be one of ``space`` in its shape or structure, or ``""``.

    Bounds are the env's to judge: many envs clip, and an in-process env would be asked too.
    """
    if type(space) is spaces.Dict:
        if not isinstance(action, Mapping) or set(action) != set(space.spaces):
            return f"The action {_shown(action)} is not a dict with the keys {list(space.spaces)}."
        return next(filter(None, (misfit(member, action[key]) for key, member in space.spaces.items())), "")
    if type(space) is spaces.Tuple:
        is_sequence = isinstance(action, Sequence) or (isinstance(action, np.ndarray) and action.ndim > 0)
        if not is_sequence or len(action) != len(space.spaces):
            return f"The action {_shown(action)} is not a tuple of {len(space.spaces)} actions."
        pairs = zip(space.spaces, action, strict=True)
        return next(filter(None, (misfit(member, item) for member, item in pairs)), "")
    if type(space) not in (spaces.Discrete, spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete):
        return ""
    if action is None:
        return f"The action is None; the env's action space is {space}."
    try:
        shape = np.shape(action)
    except ValueError:
        return f"The action {_shown(action)} is ragged; the env's action space is {space}."
    if shape != space.shape:
        return f"The action {_shown(action)} has shape {shape}; the env's action space {space} wants {space.shape}."
    return ""


def _shown(value: object) -> str:
    try:
        return f"{value!r:.200}"
    except Exception:  # foreign code
        return f"<a {type(value).__name__}>"
