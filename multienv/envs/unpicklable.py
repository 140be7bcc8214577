"""Find out what keeps a function from being pickled: as a rule a global of the main script that its env uses."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

# How many objects are looked at, each of which is pickled with all that it refers to.
_MOST = 200


def culprit_in(value: Any, can_be_pickled: Callable[[Any], bool]) -> str:
    """Say which global, captured variable or attribute cannot be pickled, and what refers to it; ``""``: not found.

    Args:
        value: What cannot be pickled.
        can_be_pickled: Tries it.
    """
    return _Search(can_be_pickled).search(value)


class _Search:
    def __init__(self, can_be_pickled: Callable[[Any], bool]) -> None:
        self._can_be_pickled = can_be_pickled
        self._seen: dict[int, Any] = {}  # held, or another object might get the number

    def search(self, value: Any) -> str:
        self._seen[id(value)] = value
        for what, part in _parts(value):
            if id(part) in self._seen or len(self._seen) >= _MOST or self._can_be_pickled(part):
                continue
            is_inner = isinstance(part, FunctionType | MethodType | type | partial)
            found = self.search(part)
            if found or not is_inner:
                return found or f"{what} is a {type(part).__module__}.{type(part).__qualname__}"
        return ""


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is pickled with a value, each part with a text that says what it is."""
    if isinstance(value, partial):
        yield "the function of a partial", value.func
        yield from ((f"an argument of partial({_name(value.func)})", part) for part in value.args)
        yield from (
            (f"the argument {name} of partial({_name(value.func)})", part) for name, part in value.keywords.items()
        )
    elif isinstance(value, MethodType):
        yield f"the object of {_name(value)}()", value.__self__
        yield f"{_name(value)}()", value.__func__
    elif isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, type):
        for name, part in vars(value).items():
            for inner in (part, *(getattr(part, one, None) for one in ("__func__", "fget", "fset", "func"))):
                if isinstance(inner, FunctionType):
                    yield f"{_name(value)}.{name}", inner
            if isinstance(part, type) or not (callable(part) or name in ("__dict__", "__weakref__")):
                yield f"the attribute {name} of class {_name(value)}", part
        yield from ((f"the base class {_name(base)}", base) for base in value.__bases__)
    else:
        yield f"the class {_name(type(value))}", type(value)
        attributes = getattr(value, "__dict__", {})
        yield from ((f"the attribute {name} of a {_name(type(value))}", part) for name, part in attributes.items())


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    user = f"{function.__qualname__}() ({code.co_filename}:{code.co_firstlineno})"
    for name in sorted(_globals_in(code)):
        if name in function.__globals__:
            yield f"the global {name}, which {user} uses,", function.__globals__[name]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"the variable {name}, which {user} has captured,", cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    for part in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield f"a default value of {user}", part


def _globals_in(code: CodeType) -> set[str]:
    """Return the names of the globals that code uses, also in the functions inside it."""
    inner = [_globals_in(part) for part in code.co_consts if isinstance(part, CodeType)]
    return {one.argval for one in dis.get_instructions(code) if one.opname.endswith("_GLOBAL")}.union(*inner)


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", None) or type(value).__qualname__
