"""Values as JSON and back, to the type and to the bit; and what of a pickle can be told without running its code.

What JSON has no form for is an object with one key that begins with ``$``. What has no plain form at all is
``{"$opaque": "what it is"}``: only its pickle has it, and that is loaded from a report on request alone.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import GraphInstance

from multienv.errors import MultienvError
from multienv.wire.messages import (
    Branch,
    Call,
    GetAttribute,
    GroupOptions,
    HasAttribute,
    Render,
    Reset,
    RestoreState,
    SetAttribute,
)

_BIT_GENERATORS = {
    kind.__name__: kind
    for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}


_MESSAGES = (Reset, Call, GetAttribute, HasAttribute, SetAttribute, Branch, RestoreState, Render)


class NeedsTrust(MultienvError):  # noqa: N818 - internal
    """The plain form is not all of it."""


def encode(value: Any) -> Any:
    """What ``json.dumps`` takes, and :func:`decode` makes the same value of."""
    kind = type(value)
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value)
    if isinstance(value, np.generic) and _is_plain(value.dtype):
        return {"$scalar": [value.dtype.name, _numbers(np.asarray(value))[0]]}
    if kind.__name__ in _BIT_GENERATORS and kind is _BIT_GENERATORS[kind.__name__]:
        return {"$bit_generator": encode(value.state)}
    return {"$opaque": getattr(value, "shown", None) or f"{kind.__module__}.{kind.__qualname__}"}


def decode(form: Any) -> Any:
    """The value. Raises :class:`NeedsTrust`; and ValueError, TypeError or KeyError if it is no such form."""
    if isinstance(form, list):
        return [decode(item) for item in form]
    if not isinstance(form, dict):
        return form
    name = next(iter(form), "")
    if not name.startswith("$"):
        return {key: decode(value) for key, value in form.items()}
    if name == "$opaque":
        raise NeedsTrust(f"an object of {form[name]}")
    return _DECODERS[name](form[name])


def is_whole(form: Any) -> bool:
    """Whether :func:`decode` has all it takes."""
    if isinstance(form, dict):
        return "$opaque" not in form and all(map(is_whole, form.values()))
    return all(map(is_whole, form)) if isinstance(form, list) else True


def text_of(form: Any) -> str:
    """JSON on one line."""
    return json.dumps(form, allow_nan=False, separators=(",", ":"))


# --- there ------------------------------------------------------------------------------------


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return dtype.isnative and dtype.kind in "biuf" and dtype.itemsize <= 8


def _numbers(array: np.ndarray[Any, Any]) -> list[Any]:
    """Its elements in a row; NaN's payload and the rest of what JSON has no numbers for as bits."""
    flat = array.reshape(-1)
    if array.dtype.kind != "f" or np.isfinite(flat).all():
        return list(flat.tolist())
    return [f"0x{flat.tobytes().hex()}"]


def _encode_array(array: np.ndarray[Any, Any]) -> Any:
    if not _is_plain(array.dtype):
        return {"$opaque": f"array of {array.dtype}"}
    return {"$array": [array.dtype.name, list(array.shape), _numbers(array)]}


def _encode_float(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": np.float64(value).tobytes().hex()}


def _encode_string(value: str) -> Any:
    return value  # lone surrogates too: JSON escapes them


def _encode_dict(value: dict[Any, Any]) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item) for key, item in value.items()}
    return {"$dict": [[encode(key), encode(item)] for key, item in value.items()]}


def _encode_generator(value: np.random.Generator) -> Any:
    return {"$generator": encode(value.bit_generator)}


def _encode_group(value: GroupOptions) -> Any:
    if value.anew:
        return {"$opaque": "requests to an env that is built anew"}
    return {"$group": encode([value.mask, value.options, value.left_out])}


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: lambda value: value,
    float: _encode_float,
    str: _encode_string,
    list: lambda value: [encode(item) for item in value],
    dict: _encode_dict,
    tuple: lambda value: {"$tuple": [encode(item) for item in value]},
    bytes: lambda value: {"$bytes": base64.b64encode(value).decode()},
    np.ndarray: _encode_array,
    np.random.Generator: _encode_generator,
    GraphInstance: lambda value: {"$graph": [encode(item) for item in value]},
    Reset: lambda value: {
        "reset": {
            "seed": encode(value.seed),
            "options": encode(value.options),
            "anchor": bool(value.anchor),
            "generators": None if value.generators is None else glimpse(value.generators),
        }
    },
    GroupOptions: _encode_group,
    Call: lambda value: {
        "call": {"name": value.name, "args": encode(list(value.args)), "kwargs": _encode_dict(value.kwargs)}
    },
    SetAttribute: lambda value: {"set_attr": {"name": value.name, "value": encode(value.value)}},
    GetAttribute: lambda value: {"get_attr": {"name": value.name}},
    HasAttribute: lambda value: {"has_attr": {"name": value.name}},
    Branch: lambda value: {"snapshot": {"token": value.token}},
    Render: lambda value: {"render": {}},
    RestoreState: lambda value: {"$opaque": "the env's own state"},
}


# --- and back ---------------------------------------------------------------------------------


def _decode_array(parts: Any) -> np.ndarray[Any, Any]:
    name, shape, numbers = parts
    dtype = np.dtype(name)
    if not _is_plain(dtype):
        raise ValueError(f"an array of {name}")
    if len(numbers) == 1 and isinstance(numbers[0], str):
        flat: np.ndarray[Any, Any] = np.frombuffer(bytes.fromhex(numbers[0][2:]), dtype).copy()
    else:
        flat = np.array(numbers, dtype)
    array: np.ndarray[Any, Any] = flat.reshape(shape)
    return array


def _decode_bit_generator(form: Any) -> Any:
    state = decode(form)
    generator: Any = _BIT_GENERATORS[state["bit_generator"]]()
    generator.state = state
    return generator


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": lambda form: float(np.frombuffer(bytes.fromhex(form), np.float64)[0]),
    "$tuple": lambda form: tuple(decode(item) for item in form),
    "$dict": lambda form: {decode(key): decode(value) for key, value in form},
    "$bytes": lambda form: base64.b64decode(form, validate=True),
    "$array": _decode_array,
    "$scalar": lambda form: _decode_array([form[0], [1], [form[1]]])[0],
    "$bit_generator": _decode_bit_generator,
    "$generator": lambda form: np.random.Generator(decode(form)),
    "$graph": lambda form: GraphInstance(*map(decode, form)),
    "$group": lambda form: GroupOptions(*decode(form)[:3]),  # the rest is unpickled by the worker
}


# --- into a pickle, without running what it asks for --------------------------------------------

# What builds numbers, arrays and generators, and the messages themselves.
_HARMLESS = {
    ("builtins", "bytearray"),
    ("_codecs", "encode"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("gymnasium.spaces.graph", "GraphInstance"),
    *(
        (f"numpy.{core}.{module}", name)
        for core in ("core", "_core")
        for module, name in (
            ("multiarray", "_reconstruct"),
            ("multiarray", "scalar"),
            ("numeric", "_frombuffer"),
        )
    ),
    *(("numpy.random._pickle", name) for name in ("__generator_ctor", "__bit_generator_ctor", "__randomstate_ctor")),
    *((f"numpy.random.{module}", name) for name in _BIT_GENERATORS for module in (f"_{name.lower()}", "_pcg64")),
    ("numpy.random.bit_generator", "SeedSequence"),
    ("numpy.random._bit_generator", "SeedSequence"),
    ("numpy.random.bit_generator", "__pyx_unpickle_SeedSequence"),
    ("numpy.random._bit_generator", "__pyx_unpickle_SeedSequence"),
    *(("multienv.wire.messages", kind.__name__) for kind in (*_MESSAGES, GroupOptions)),
}


class _Foreign:
    """Stands in for whatever is not harmless: takes what a pickle gives it, and does nothing."""

    shown = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Foreign:  # noqa: PYI034 - Self needs Python 3.11
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> _Foreign:
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass


class _Careful(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _HARMLESS:
            return getattr(importlib.import_module(module), name)
        return type("Foreign", (_Foreign,), {"shown": f"{module}.{name}"})


def glimpse(pickled: bytes | memoryview) -> Any:
    """The plain form of what was pickled, with ``$opaque`` where there is none; runs no foreign code."""
    return _looked_into(lambda: encode(_Careful(io.BytesIO(pickled)).load()))


def glimpse_of_group(pickled: bytes) -> Any:
    """The same of an answer of several envs, whose observations have been pickled one by one."""

    def look() -> Any:
        observations, *others = _Careful(io.BytesIO(pickled)).load()
        return [list(map(glimpse, observations)), *map(encode, others)]

    return _looked_into(look)


def pickled_for_group(form: Any) -> bytes:
    """That answer again."""
    observations, *others = decode(form)
    return pickle.dumps(([pickle.dumps(one, protocol=5) for one in observations], *others), protocol=5)


def _looked_into(look: Callable[[], Any]) -> Any:
    try:
        return look()
    except Exception as error:  # nested too deep, or of a shape that no harmless thing has
        return {"$opaque": f"something that cannot be looked into ({type(error).__name__})"}
