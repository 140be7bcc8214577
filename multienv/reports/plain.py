"""Show any value as JSON; and unpickle what is plain, so that no code but ours runs."""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
from collections.abc import Mapping
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
    """Unpickles a ``Build`` or a ``Reset`` of Python's own plain values, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the two classes: a pickle calls nothing but what this returns."""
        if module != messages.__name__ or name not in ("Build", "Reset"):
            raise pickle.UnpicklingError(f"{module}.{name} is not plain")
        return getattr(messages, name)


def plain_message(data: bytes) -> Any:
    """Return the plain message that was pickled. Raises an exception of any kind if it is something else."""
    return PlainUnpickler(io.BytesIO(data)).load()


def is_plain_reset(data: bytes) -> bool:
    """Tell whether this is a pickled ``Reset`` that can be executed without running foreign code."""
    try:
        message = plain_message(data)
        return type(message) is messages.Reset and dataclasses.replace(message) == message  # all fields are there
    except Exception:  # any damage
        return False
