"""A journal as plain arrays, one row a request, and back.

A row of ``kind`` is a step (2), a reset (3) or a message (1): a reset with options, a call, an attribute set. The
actions of steps are in ``actions_*``, in the order of their rows, named by what the caller gave:
``actions_array_float32``, ``actions_python_int``, ``actions_numpy_int64``. What travels pickled lies end to end in
``pickles``, and beside it, a line each, its plain form in ``plain``. Of the answers there are ``reward``, ``flags``
(1 terminated, 2 truncated, 4 in ``answer_pickles`` with its reward, 8 an anchor) and ``observations``, or their
``digests`` where they travelled in shared memory. The last request has no answer where the process was lost in it.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from multienv.reports.plain import NeedsTrust, decode, glimpse, glimpse_of_group, pickled_for_group, text_of
from multienv.wire.actions import ARRAY, ARRAY_DTYPES, INT, INT64, PICKLED
from multienv.wire.messages import (
    IRREGULAR,
    MESSAGE,
    PLAIN_RESET,
    REPLY,
    REQUEST,
    RESET,
    STEP,
    STEP_INTEGER,
    STEPPED,
    TAILED,
    Branch,
    Call,
    GetAttribute,
    HasAttribute,
    Message,
    Render,
    Reset,
    SetAttribute,
    pack_message,
)

Arrays = dict[str, "np.ndarray[Any, Any]"]
_AT_A_TIME = 4096
_LENGTH = struct.Struct("<I")
_DRAWS = frozenset(name for name in dir(np.random.Generator) if not name.startswith("_"))
_SCALARS = {INT: "actions_python_int", INT64: "actions_numpy_int64"}


@dataclass(frozen=True)
class Shape:
    """What the arrays are to be shaped as.

    Attributes:
        action: Of an action that is an array.
        observation: dtype and shape of an observation, for a Box.
        digests: Observations lie in shared memory, and the journal has digests of them.
    """

    action: tuple[int, ...] | None = None
    observation: tuple[np.dtype[Any], tuple[int, ...]] | None = None
    digests: bool = False


@dataclass(frozen=True)
class Row:
    """One request, and what had been answered to it, ``b""`` for the last one.

    Attributes:
        frame: The request.
        evidence: See ``wire.messages.evidence_of``.
        known: Its answer's plain form is all of it; else only that there was one can be compared.
    """

    frame: bytes
    evidence: bytes
    known: bool = True


# --- there ------------------------------------------------------------------------------------


def to_arrays(history: bytes, shape: Shape) -> Arrays:
    """The frames that lie end to end, a request and its evidence in turns, the last without any perhaps."""
    data = np.frombuffer(history, np.uint8)
    starts, lengths = _frames(history)
    requests, replies, sizes = starts[::2], starts[1::2], lengths[::2]
    kind, tag = data[requests + 8], data[requests + 9]
    arrays: Arrays = {
        "kind": kind,
        "tag": tag,
        "seq": _gather(data, requests + 4, 4).view("<u4").reshape(-1),
        "seed": _gather(data, requests[kind == RESET] + REQUEST.size, 8).view("<i8").reshape(-1),
    }
    steps = kind == STEP
    for number, name in _SCALARS.items():
        chosen = steps & (tag == number)
        if chosen.any():
            arrays[name] = _gather(data, requests[chosen] + REQUEST.size, 8).view("<i8").reshape(-1)
    for number in np.unique(tag[steps & (tag >= ARRAY)]):
        chosen = steps & (tag == number)
        dtype, size = ARRAY_DTYPES[number - ARRAY], int(sizes[chosen][0]) - REQUEST.size
        actions = _gather(data, requests[chosen] + REQUEST.size, size).view(dtype)
        wanted = (len(actions), *(shape.action or ()))
        arrays[f"actions_array_{dtype.name}"] = actions.reshape(wanted) if actions.size == np.prod(wanted) else actions
    chosen = _is_pickled(kind, tag)
    foreign = (steps & (tag != PICKLED))[chosen]  # pickled twice: of the trainer's main script
    looks = [_opaque if strange else glimpse for strange in foreign]
    arrays |= _pickles("", history, requests[chosen] + REQUEST.size, (requests + sizes)[chosen], looks)
    return arrays | _answers(history, data, replies, lengths[1::2], shape)


def _answers(history: bytes, data: np.ndarray[Any, Any], replies: Any, sizes: Any, shape: Shape) -> Arrays:
    kind, flags = data[replies + 12], data[replies + 13]
    arrays: Arrays = {
        "answer_kind": kind,
        "flags": flags,
        "reward_tag": data[replies + 14],
        "reward": _gather(data, replies + 16, 8).view("<f8").reshape(-1),
    }
    regular, irregular = _is_regular(kind, flags), _is_irregular(kind, flags)
    if regular.any():
        size = int(sizes[regular][0]) - REPLY.size
        body = _gather(data, replies[regular] + REPLY.size, size)
        arrays["observation_size"] = np.array(size)
        if shape.digests:
            arrays["digests"] = body.view("<u8").reshape(-1)
        else:
            arrays["observations"] = _observations(body, shape.observation)
    if irregular.any():
        looks = [glimpse_of_group if tailed else glimpse for tailed in (flags & TAILED)[irregular]]
        ends = replies + sizes - np.where(flags & TAILED, arrays["reward"], 0).astype(np.int64)
        arrays |= _pickles("answer_", history, replies[irregular] + REPLY.size, ends[irregular], looks)
    return arrays


def _observations(body: np.ndarray[Any, Any], box: tuple[np.dtype[Any], tuple[int, ...]] | None) -> Any:
    if box is None:
        return body  # as they lie in memory
    dtype, shape = box
    size = dtype.itemsize * int(np.prod(shape))
    return (
        np.ascontiguousarray(body[:, :size]).view(dtype).reshape(len(body), *shape)
    )  # without what fills it up to words


def _opaque(pickled: bytes) -> Any:
    return {"$opaque": "the main script"}


def _pickles(prefix: str, history: bytes, begins: Any, ends: Any, looks: Sequence[Callable[[bytes], Any]]) -> Arrays:
    if not len(begins):
        return {}
    pieces = [history[begin:end] for begin, end in zip(begins, ends, strict=True)]
    lines = [text_of(look(piece) if piece else None) for piece, look in zip(pieces, looks, strict=True)]
    return {
        f"{prefix}pickles": np.frombuffer(b"".join(pieces), np.uint8),
        f"{prefix}pickle_ends": np.cumsum([len(piece) for piece in pieces], dtype=np.int64),
        f"{prefix}plain": np.frombuffer("\n".join(lines).encode(), np.uint8),
    }


def _frames(history: bytes) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Where each frame begins, and its length."""
    starts, start, end, unpack = [], 0, len(history), _LENGTH.unpack_from
    while start < end:
        starts.append(start)
        start += unpack(history, start)[0]
    begins = np.array(starts, np.int64)
    return begins, np.diff(begins, append=end)


def _gather(data: np.ndarray[Any, Any], starts: Any, size: int) -> np.ndarray[Any, Any]:
    """``size`` bytes from each of these places on; a few at a time, because indices take more than what they fetch."""
    rows, within = np.empty((len(starts), size), np.uint8), np.arange(size)
    for begin in range(0, len(starts), _AT_A_TIME):
        rows[begin : begin + _AT_A_TIME] = data[starts[begin : begin + _AT_A_TIME, None] + within]
    return rows


def _is_pickled(kind: Any, tag: Any) -> Any:
    return (kind == MESSAGE) | ((kind == STEP) & (tag < ARRAY) & (tag != INT) & (tag != INT64))


def _is_regular(kind: Any, flags: Any) -> Any:
    return (kind == STEPPED) & (flags & IRREGULAR == 0)


def _is_irregular(kind: Any, flags: Any) -> Any:
    return (kind == STEPPED) & (flags & IRREGULAR != 0)


# --- and back ---------------------------------------------------------------------------------


def to_rows(arrays: Arrays, *, trust: bool = False) -> list[Row]:
    """The requests, and what was answered. Unpickles nothing; with ``trust`` pickles become part of the frames.

    Raises:
        NeedsTrust: A request has no plain form; the message says which.
        ValueError, KeyError, IndexError, TypeError, struct.error, …: These are no such arrays.
    """
    return list(_rows(arrays, trust))


def _rows(arrays: Arrays, trust: bool) -> Iterator[Row]:
    kinds, tags, seqs = (arrays[name].tolist() for name in ("kind", "tag", "seq"))
    seeds = iter(arrays["seed"].tolist())
    sources = {number: iter(arrays[name].tolist()) for number, name in _SCALARS.items() if name in arrays}
    for place, dtype in enumerate(ARRAY_DTYPES):
        if f"actions_array_{dtype.name}" in arrays:
            sources[ARRAY + place] = map(_bytes_of, arrays[f"actions_array_{dtype.name}"])
    pickles = _pieces("", arrays)
    answers = _evidence(arrays, trust)
    for row, (kind, tag, seq) in enumerate(zip(kinds, tags, seqs, strict=True)):
        if kind == RESET:
            frame = PLAIN_RESET.pack(PLAIN_RESET.size, seq, RESET, tag, next(seeds))
        elif kind == STEP and tag in _SCALARS:
            frame = STEP_INTEGER.pack(STEP_INTEGER.size, seq, STEP, tag, next(sources[tag]))
        elif kind == STEP and tag >= ARRAY:
            frame = _request(seq, STEP, tag, next(sources[tag]))
        else:
            piece, form = next(pickles)
            frame = _request(seq, kind, tag, piece) if trust else _rebuilt(row, kind, seq, form)
        yield Row(frame, *next(answers, (b"", True)))


def _bytes_of(item: Any) -> bytes:
    data: bytes = item.tobytes()
    return data


def _request(seq: int, kind: int, tag: int, payload: bytes) -> bytes:
    return REQUEST.pack(REQUEST.size + len(payload), seq, kind, tag) + payload


def _rebuilt(row: int, kind: int, seq: int, form: Any) -> bytes:
    try:
        if kind == STEP:
            return _request(seq, STEP, PICKLED, pickle.dumps(decode(form), protocol=5))
        return pack_message(seq, message_of(form))
    except NeedsTrust as needs:
        what = "the action of" if kind == STEP else "what was asked by"
        raise NeedsTrust(f"{what} request {row + 1} ({needs})") from None


def message_of(form: Any) -> Message:
    """The message of which this is the plain form."""
    (name, parts), *_ = form.items()
    if name.startswith("$"):
        raise NeedsTrust(f"an object of {parts}")
    return _MESSAGES[name](parts)


def _reset(parts: Any) -> Reset:
    states = parts["generators"]
    generators = None if states is None else pickle.dumps(decode(states), protocol=5)
    return Reset(decode(parts["seed"]), decode(parts["options"]), parts["anchor"], generators)


def _call(parts: Any) -> Call:
    name, _, drawn = parts["name"].partition(".")
    # Through attributes of attributes a call might reach anything at all.
    if name.startswith("_") or (drawn and (name != "np_random" or drawn not in _DRAWS)):
        raise NeedsTrust(f"a call of {parts['name']!r}")
    return Call(parts["name"], tuple(decode(parts["args"])), decode(parts["kwargs"]))


_MESSAGES: dict[str, Callable[[Any], Message]] = {
    "reset": _reset,
    "call": _call,
    "set_attr": lambda parts: SetAttribute(parts["name"], decode(parts["value"])),
    "get_attr": lambda parts: GetAttribute(parts["name"]),
    "has_attr": lambda parts: HasAttribute(parts["name"]),
    "snapshot": lambda parts: Branch(parts["token"]),
    "render": lambda parts: Render(),
}


def _pieces(prefix: str, arrays: Arrays) -> Iterator[tuple[bytes, Any]]:
    if f"{prefix}pickles" not in arrays:
        return
    joined, start = arrays[f"{prefix}pickles"].tobytes(), 0
    lines = arrays[f"{prefix}plain"].tobytes().decode().split("\n")
    for end, line in zip(arrays[f"{prefix}pickle_ends"].tolist(), lines, strict=True):
        yield joined[start:end], json.loads(line)
        start = end


def _evidence(arrays: Arrays, trust: bool) -> Iterator[tuple[bytes, bool]]:
    columns: Sequence[list[Any]] = [arrays[name].tolist() for name in ("answer_kind", "flags", "reward_tag", "reward")]
    bodies, pickles = _bodies(arrays), _pieces("answer_", arrays)
    for kind, flags, tag, reward in zip(*columns, strict=True):
        body, known = b"", True
        if kind == STEPPED and flags & IRREGULAR:
            body, form = next(pickles)
            if body and not trust:
                try:
                    body = pickled_for_group(form) if flags & TAILED else pickle.dumps(decode(form), protocol=5)
                except NeedsTrust:
                    body, known = b"", False
        elif kind == STEPPED:
            body = next(bodies)
        yield REPLY.pack(REPLY.size + len(body), 0, 0, kind, flags, tag, reward) + body, known


def _bodies(arrays: Arrays) -> Iterator[bytes]:
    if "observation_size" not in arrays:
        return
    size = int(arrays["observation_size"])
    name = "digests" if "digests" in arrays else "observations"
    for one in arrays[name]:
        yield one.tobytes().ljust(size, b"\0")
