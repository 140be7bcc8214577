"""Show any value as JSON, for people to read."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

# Elements of an array, and members of a container, that are shown.
_SHOWN = 1000
_DEEPEST = 8
# Characters of what is shown of one value.
_LONGEST = 2**20


def readable(value: Any) -> Any:
    """Return a JSON value that shows ``value``; arrays with their dtype, what JSON has no form for as text."""
    shown = _readable(value, 0)
    return shown if len(json.dumps(shown)) <= _LONGEST else f"{shown!r:.1000}"


def _readable(value: Any, depth: int) -> Any:
    if value is None or type(value) in (bool, str, int) or (type(value) is float and math.isfinite(value)):
        return value
    if depth < _DEEPEST:
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject and value.size <= _SHOWN:
            values = _readable(value.tolist(), depth + 1)
            return {"dtype": value.dtype.name, "shape": list(value.shape), "values": values}
        if isinstance(value, Mapping) and len(value) <= _SHOWN:
            return {str(key): _readable(member, depth + 1) for key, member in value.items()}
        if isinstance(value, tuple | list) and len(value) <= _SHOWN:
            return [_readable(member, depth + 1) for member in value]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: _readable(getattr(value, field.name), depth + 1) for field in dataclasses.fields(value)}
    try:
        return f"{value!r:.1000}"
    except Exception:  # code of the user
        return f"<a {type(value).__name__}>"
