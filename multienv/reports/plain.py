"""Turn values into JSON: any value, to be read; and resets exactly, so that a replay of them unpickles nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from multienv.wire.messages import Reset

# Elements of an array, and members of a container, that are shown.
_SHOWN = 1000
_DEEPEST = 8


def readable(value: Any, depth: int = 0) -> Any:
    """Return a JSON value that shows ``value``; arrays with their dtype, what JSON has no form for as text."""
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else repr(value)
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


def reset_as_json(message: Reset) -> dict[str, Any] | None:
    """Return a reset in a form that JSON keeps exactly; ``None`` if its seeds or options have no such form."""
    seeds, options = message.seeds, message.options
    if not (isinstance(seeds, tuple) and isinstance(options, tuple) and all(map(_is_exact, [*seeds, *options]))):
        return None
    mask = None if message.mask is None else [bool(one) for one in message.mask]
    return {"seeds": list(seeds), "options": list(options), "mask": mask, "anchor": bool(message.anchor)}


def reset_from_json(fields: Mapping[str, Any]) -> Reset:
    """Return the reset that :func:`reset_as_json` was given.

    Raises:
        ValueError, KeyError, TypeError: The fields are damaged.
    """
    seeds, options, mask = fields["seeds"], fields["options"], fields["mask"]
    if not all(seed is None or type(seed) is int for seed in seeds) or len(options) != len(seeds):
        raise ValueError(f"no reset: {fields!r:.200}")
    return Reset(
        tuple(seeds), tuple(options), None if mask is None else tuple(map(bool, mask)), anchor=bool(fields["anchor"])
    )


def _is_exact(value: Any) -> bool:
    """Tell whether JSON returns an equal value of the same types."""
    if value is None or type(value) in (bool, int, str):
        return True
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is list:
        return all(map(_is_exact, value))
    return type(value) is dict and all(type(key) is str and _is_exact(one) for key, one in value.items())
