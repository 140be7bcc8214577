"""Show any value as JSON; and unpickle what is plain, so that no code but ours runs."""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from multienv.wire import messages

# Elements of an array, and members of a container, that are shown.
_SHOWN = 1000
_DEEPEST = 8


def readable(value: Any, depth: int = 0) -> Any:
    """Return a JSON value that shows ``value``; arrays with their dtype, what JSON has no form for as text."""
    if value is None or type(value) in (bool, str, int) or (type(value) is float and math.isfinite(value)):
        return value
    if depth < _DEEPEST:
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject and value.size <= _SHOWN:
            values = readable(value.tolist(), depth + 1)
            return {"dtype": value.dtype.name, "shape": list(value.shape), "values": values}
        if isinstance(value, Mapping) and len(value) <= _SHOWN:
            return {str(key): readable(member, depth + 1) for key, member in value.items()}
        if isinstance(value, tuple | list) and len(value) <= _SHOWN:
            return [readable(member, depth + 1) for member in value]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: readable(getattr(value, field.name), depth + 1) for field in dataclasses.fields(value)}
    try:
        return f"{value!r:.1000}"
    except Exception:  # foreign code
        return f"<a {type(value).__name__}>"


class PlainUnpickler(pickle.Unpickler):
    """Unpickles plain values, and refuses everything else.

    Plain are Python's own numbers, texts and containers, numpy's numbers and arrays without objects, and ``Build`` and
    ``Reset`` of these. A pickle calls nothing but what :meth:`find_class` returns. It has numpy's arrays made by
    functions of this module: numpy's own take a dtype at its word, whose fields may lie outside of the array. A pickle
    can also set attributes of what it gets: what makes values refuses that.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the two classes, or what makes a plain value."""
        if module == messages.__name__ and name in ("Build", "Reset"):
            return getattr(messages, name)
        found = _PLAIN.get((module.replace("numpy.core.", "numpy._core."), name))  # numpy 1 and 2
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} is not plain")
        return found


class _Maker:
    """Calls a function. A pickle that gets it can only call it too: it can be neither changed nor pickled."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("what makes a value cannot be changed")

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("what makes a value is not plain")


class _Ordered(OrderedDict[Any, Any]):
    """Stands for an ``OrderedDict``, which has attributes: a pickle could set those that say how it is pickled."""

    __setstate__ = _Maker.__setstate__

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(self.items())


class _Kind:
    """Stands for a dtype while a pickle is read; it cannot be pickled itself."""

    def __init__(self, name: str, align: bool = False, copy: bool = False) -> None:
        self.dtype = _without_objects(np.dtype(str(name)))

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        # Version, byte order, subarray, names, fields, and what the name has said.
        _, order, *structure = state[:5]
        if structure != [None, None, None] or any(state[8:]):
            raise pickle.UnpicklingError("a dtype with parts is not plain")
        self.dtype = self.dtype.newbyteorder(order)

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("a dtype is not plain")


def _without_objects(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.hasobject or dtype.fields or dtype.subdtype:
        raise pickle.UnpicklingError(f"{dtype} is not plain")
    return dtype


def _dtype_of(kind: Any) -> np.dtype[Any]:
    if type(kind) is not _Kind:
        raise pickle.UnpicklingError(f"a {type(kind).__name__} is no dtype")
    return kind.dtype


def _scalar(kind: _Kind, data: bytes) -> Any:
    (value,) = np.frombuffer(bytes(data), _dtype_of(kind))
    return value


def _array(data: bytes, kind: _Kind, shape: tuple[int, ...], order: str) -> np.ndarray[Any, Any]:
    # A bytearray: the array can be written to, as the one that was pickled.
    flat = np.frombuffer(bytearray(data), _dtype_of(kind))
    return flat.reshape(tuple(map(int, shape)), order="F" if order == "F" else "C")


_PLAIN = {
    ("collections", "OrderedDict"): _Maker(_Ordered),
    ("numpy", "dtype"): _Maker(_Kind),
    ("numpy._core.multiarray", "scalar"): _Maker(_scalar),
    ("numpy._core.numeric", "_frombuffer"): _Maker(_array),
}


def plain_value(data: bytes) -> Any:
    """Return the plain value, or message, that was pickled. Raises an exception of any kind if it is something else."""
    return PlainUnpickler(io.BytesIO(data)).load()


def made_anew(data: bytes) -> bytes:
    """Return a pickle of the same plain value that this process has made: it can be unpickled like any of our own.

    Raises an exception of any kind if the value is not plain.
    """
    return pickle.dumps(plain_value(data), protocol=5)


def reset_made_anew(data: bytes) -> bytes:
    """Do the same with a pickle that must be that of a ``Reset``."""
    message = plain_value(data)
    if type(message) is not messages.Reset:
        raise TypeError(f"{type(message).__name__} is no Reset")
    return pickle.dumps(dataclasses.replace(message), protocol=5)  # raises AttributeError unless all fields are there
