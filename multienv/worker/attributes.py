"""The attributes an object holds itself, by name, without making it slower.

Before 3.13 CPython is slower with the attributes of an object whose ``__dict__`` has once been asked for: each later
step of CartPole would cost 6 % more. The garbage collector tells the values without that, and the code of the object's
classes tells which names there may be; together they account for everything, or ``__dict__`` is asked after all.
"""

from __future__ import annotations

import copyreg
import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

_MISSING = object()
# From here on asking costs nothing.
FREE_TO_ASK = sys.version_info >= (3, 13)


def attributes_of(holder: Any, kin: Iterable[type] = ()) -> dict[str, Any]:
    """What lies in its instance dictionary and in its slots.

    Args:
        holder: The object.
        kin: Classes whose code may set attributes of it, besides its own.
    """
    kind: type = type(holder)
    slots = {name: getattr(holder, name, _MISSING) for name in _slots(kind)}
    held = {name: value for name, value in slots.items() if value is not _MISSING}
    found = None if FREE_TO_ASK else _without_asking(holder, held, kin)
    return {**(getattr(holder, "__dict__", {}) if found is None else found), **held}


@cache
def _slots(kind: type) -> tuple[str, ...]:
    return tuple(copyreg._slotnames(kind) or ())  # type: ignore[attr-defined]


def _without_asking(holder: Any, slots: dict[str, Any], kin: Iterable[type]) -> dict[str, Any] | None:
    """The instance dictionary, if every value the collector knows of can be told by its name."""
    values = gc.get_referents(holder)
    if not values:  # it does not take part in collections
        return None
    kind: type = type(holder)
    unnamed = Counter(map(id, values))
    unnamed.subtract(map(id, (kind, *slots.values())))
    found: dict[str, Any] = {}
    shared = set()
    for name, of_class in _candidates(kind, tuple(kin)).items():
        try:
            value = object.__getattribute__(holder, name)
        except AttributeError:
            continue
        if unnamed[id(value)] > 0:
            found[name] = value
            if value is of_class:  # it may not be the object's own; that it becomes so changes nothing
                shared.add(id(value))
            else:
                unnamed[id(value)] -= 1
    complete = all(count <= 0 or identity in shared for identity, count in unnamed.items())
    return found if complete else None


@cache
def _candidates(kind: type, kin: tuple[type, ...]) -> dict[str, Any]:
    """Names that the code of these classes mentions, each with what the class itself holds under it.

    Those are left out to look at which would run somebody's code, as properties do.
    """
    names: dict[str, None] = {}
    for one in (kind, *kin):
        for base in one.__mro__:
            for value in vars(base).values():
                code = getattr(_function(value), "__code__", None)
                if code is not None:
                    names |= dict.fromkeys(_names_in(code))
    held = {name: _of_class(kind, name) for name in names if not name.startswith("__")}
    return {name: value for name, value in held.items() if not _runs_code(value)}


def _of_class(kind: type, name: str) -> Any:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _MISSING)


def _runs_code(of_class: Any) -> bool:
    return hasattr(type(of_class), "__get__") and not isinstance(of_class, FunctionType | classmethod | staticmethod)


def _function(value: Any) -> Any:
    if isinstance(value, property):
        value = value.fset
    value = getattr(value, "__func__", value)
    while not isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant
