"""Find out what keeps a function from being pickled: as a rule a global of the main script that its env uses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any


def culprit_in(env_fns: tuple[Any, ...], seen: list[Any], error: Exception | None) -> str:
    """Say which function cannot be pickled, why, and what global, captured variable or attribute keeps it from that.

    Args:
        env_fns: The functions.
        seen: All values that were begun to be pickled; the last one is what cannot be.
        error: What that raised.
    """
    env_fn = next((one for one in reversed(seen) if any(one is env_fn for env_fn in env_fns)), env_fns)
    why, used = f"{type(error).__name__}: {str(error).rstrip('.')}.", _used(seen)
    return f"env_fn {env_fn!r:.100} cannot be sent to a process: {why}{' ' if used else ''}{used}"


def _used(seen: list[Any]) -> str:
    """Say what uses the last of these values, each of which was pickled with one before it; ``""``: not found."""
    culprit = wanted = seen[-1] if seen else None
    told = ""
    for user in reversed(seen[:-1]):
        what = next((what for what, part in _parts(user) if _holds(part, wanted)), "")
        if what:
            found = f"A {type(culprit).__module__}.{type(culprit).__qualname__} is in {what}."
            told, wanted = told or found, user
            if isinstance(user, type | FunctionType):
                return found
    return told


def _holds(part: Any, wanted: Any) -> bool:
    if isinstance(part, dict):
        part = (*part, *part.values())
    return part is wanted or (isinstance(part, list | tuple | set) and any(_holds(one, wanted) for one in part))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is pickled with a value, each part with a text that says what it is."""
    if isinstance(value, partial):
        yield f"the arguments of partial({_name(value.func)})", (value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield f"the object of {_name(value)}()", value.__self__
    elif isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    else:
        owner = f"class {_name(value)}" if isinstance(value, type) else f"a {_name(type(value))}"
        attributes = getattr(value, "__dict__", {})
        yield from ((f"the attribute {name} of {owner}", part) for name, part in attributes.items())


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    user = f"{function.__qualname__}() ({code.co_filename}:{code.co_firstlineno})"
    for name in sorted(_names_in(code) & function.__globals__.keys()):
        yield f"the global {name}, which {user} uses", function.__globals__[name]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"the variable {name}, which {user} has captured", cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    yield f"the default values of {user}", (function.__defaults__, function.__kwdefaults__)


def _names_in(code: CodeType) -> set[str]:
    """Return the names of the globals that code uses, and of attributes, also in the functions inside it."""
    return {*code.co_names}.union(*[_names_in(part) for part in code.co_consts if isinstance(part, CodeType)])


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", None) or type(value).__qualname__
