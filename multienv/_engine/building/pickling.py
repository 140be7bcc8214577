"""Pickle what builds the envs: by value; if that is impossible, what belongs to the main script by name.

What can be pickled in neither way is refused, with what keeps it from that.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
from collections.abc import Callable, Iterator
from functools import cache, partial
from operator import itemgetter
from types import CodeType, FunctionType, MethodType
from typing import Any

from multienv._engine.building.module_state import is_below_guard, lines_to_import, main_file
from multienv._engine.wire.messages import workers_import_main
from multienv._engine.wire.reducers import LruCache, PickledCall, Pickler
from multienv._engine.worker.main_module import (
    REMEDY,
    can_be_imported,
    import_script,
    is_of_main,
    main_script,
    names_here,
    of_script,
    offered,
    registered_in_main,
)
from multienv.errors import UsageError

logger = logging.getLogger("multienv")

_IMPORTED = "workers have to do this, too, so they import the script, with all that it does at its top."
_NOT_DONE = (
    "this sets something in this process alone. If the envs need it, do it where they are made, or make the envs below "
    "`if __name__ == '__main__':`; then the workers import the script."
)
_BufferCallback = Callable[[pickle.PickleBuffer], bool]
_Pickled = tuple[bytes, list[memoryview]]


class _ByValue(Pickler):
    """Notes what it pickles.

    Args:
        seen: All values, in their order; filled.
        of_main: Functions and classes of the main script, by name, which travel by value; filled.
    """

    def __init__(
        self, file: io.BytesIO, buffer_callback: _BufferCallback, seen: list[Any], of_main: dict[str, Any]
    ) -> None:
        super().__init__(file, buffer_callback=buffer_callback)
        self._seen, self._of_main = seen, of_main

    def reducer_override(self, value: Any) -> Any:
        """Reduce a value as every pickler of multienv does."""
        self._seen.append(value)
        if isinstance(value, type | FunctionType) and is_of_main(value):
            self._of_main[value.__name__] = value
        return super().reducer_override(value)


class _ByName(Pickler):
    """Leaves functions and classes of the main script to the worker's import of it, and globals that cannot be pickled.

    All functions and classes: if some travelled by value, there would be two of a class.
    """

    def __init__(self, file: io.BytesIO, buffer_callback: _BufferCallback | None, tried: dict[int, bool]) -> None:
        super().__init__(file, buffer_callback=buffer_callback)
        self._tried = tried  # number of a global → whether it can be pickled

    def reducer_override(self, value: Any) -> Any:
        """Reduce a value; what has a name in the main script by that name."""
        if isinstance(value, type | FunctionType | LruCache) and is_of_main(value) and "<" not in value.__qualname__:
            return value.__name__
        reduced = super().reducer_override(value)
        if isinstance(value, FunctionType) and value.__globals__ is names_here():  # a lambda, or one of a function
            used = reduced[2][1]["__globals__"]
            used.update(
                {name: PickledCall(of_script, name) for name, one in used.items() if not self._can_be_pickled(one)}
            )
        return reduced

    def _can_be_pickled(self, value: Any) -> bool:
        if id(value) not in self._tried:
            self._tried[id(value)] = True  # if a function in it uses it
            try:
                _ByName(io.BytesIO(), None, self._tried).dump(value)
            except Exception:  # pickling runs code of the user
                self._tried[id(value)] = False
        return self._tried[id(value)]


def pickled_env_fns(env_fns: tuple[Any, ...], least: int | None = None) -> _Pickled:
    """Pickle the functions that build envs, with what they need of the main script.

    Unpickled, it is the tuple; ``__main__`` then has the functions and classes of the main script that travelled with
    it, and entry points of registered envs if they can be pickled. If that is impossible, or if the script tells
    a C library something at its top, the worker imports the script.

    Args:
        env_fns: The functions.
        least: Bytes from which on a buffer, that of a numpy array, is left out; ``None``: none is.

    Returns:
        The pickle, and the buffers that ``pickle.loads`` is to be given with it: memory of what was pickled itself.

    Raises:
        UsageError: A function cannot be pickled, and there is no script to import.
    """
    file, lines = main_file(), lines_to_import()
    if lines and is_below_guard():
        told = f"{file}, line {lines[0]}: workers have to do this, too."
        with contextlib.suppress(Exception):
            data = _by_name(env_fns, told, least)
            _warn_once(file, lines[0], _IMPORTED)
            return data
    for line in lines:
        _warn_once(file, line, _NOT_DONE)
    registered, failure, seen = registered_in_main(), None, list[Any]()
    for names in (registered, {}) if registered else ({},):
        of_main: dict[str, Any] = {}  # filled while what comes before it is pickled
        offer = PickledCall(offered, env_fns, names, of_main)
        seen.clear()
        try:
            return _dumped(offer, least, partial(_ByValue, seen=seen, of_main=of_main))
        except Exception as error:  # pickling runs code of the user
            failure = error
    told = _culprit_in(env_fns, seen[1:], failure)
    if can_be_imported(main_script()):
        with contextlib.suppress(Exception):
            return _by_name(env_fns, told, least)
    raise UsageError(f"{told} {REMEDY.capitalize()}") from failure


@cache
def _warn_once(file: str, line: int, text: str) -> None:
    """Log what becomes of a line of the main script in workers; once."""
    logger.warning("%s, line %d: %s", file, line, text)


def _by_name(env_fns: tuple[Any, ...], told: str, least: int | None) -> _Pickled:
    imported = PickledCall(import_script, told, main_script())
    data = _dumped(PickledCall(itemgetter(1), (imported, env_fns)), least, partial(_ByName, tried={}))
    workers_import_main()
    return data


def _dumped(value: Any, least: int | None, make: Callable[[io.BytesIO, _BufferCallback], Pickler]) -> _Pickled:
    file, buffers = io.BytesIO(), list[memoryview]()

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        with memoryview(buffer) as view:
            if least is None or view.nbytes < least or not view.contiguous:
                return True
        buffers.append(buffer.raw())
        return False

    make(file, stays_inside).dump(value)
    return file.getvalue(), buffers


# --- what cannot be pickled: as a rule a global of the main script that an env uses ------------------


def _culprit_in(env_fns: tuple[Any, ...], seen: list[Any], error: Exception | None) -> str:
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
