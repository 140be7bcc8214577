"""Find what the trainer has set in modules and C libraries, which its envs need in a worker, too.

What a script sets in a module (``sim.GRAVITY = 9.81``, ``sim.configure()``) or tells a C library (``LIB.init()``) does
not travel with the functions that make envs: nothing in them refers to it. Found and sent are

- variables of the user's own modules, and of their classes, that the source of the module sets to a literal, and that
  have another value now;
- what the main script assigns to modules anywhere, by the value that it has now;
- what numpy does about floating-point errors.

They are sent if they are plain data. Where that is impossible, and for calls of C libraries at the top of the script,
workers have to import it: :func:`lines_to_import`.
"""

from __future__ import annotations

import ast
import contextlib
import pickle
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from traceback import walk_stack
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from multienv._engine.worker.imports import file_of, is_own

# What is set in these is handed over (os.environ, sys.path), or is about the trainer.
_OF_TRAINER = {"jax", "logging", "matplotlib", "multienv", "os", "sys", "tensorflow", "torch", "warnings"}
# How a C library is loaded, by ctypes, numpy and cffi.
_LOADERS = ("CDLL", "LoadLibrary", "load_library", "dlopen")
_DATA = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, set, frozenset, dict)
_ASSIGNMENTS = ast.Assign | ast.AugAssign | ast.AnnAssign
_MOST = 2**20  # bytes of a value that is sent, about
# Names of modules that are not the user's, as found so far.
_others: set[str] = set()


class _Setting(NamedTuple):
    """Describes what a script sets: the line, the module, the names that lead from there to the variable."""

    line: int
    module: str
    path: tuple[str, ...]
    is_at_top: bool


class _Script(NamedTuple):
    """Describes a main script: what it sets, lines at its top that call C libraries, lines below its main guard."""

    settings: tuple[_Setting, ...] = ()
    library_lines: tuple[int, ...] = ()
    guarded: tuple[range, ...] = ()


def module_values() -> bytes:
    """Return what workers are to set: see ``worker.module_values``."""
    values: dict[str, dict[tuple[str, ...], Any]] = {}
    for name in sys.modules.keys() - _others:
        own = sys.modules.get(name)
        file = _file_of_own(name, own)
        if not file:
            _others.add(name)
        else:
            for path, literal in _literals(file).items():
                with contextlib.suppress(Exception):  # a module may do anything when one looks at it
                    found = _found(own, path)
                    if _is_data(found) and repr(found) != repr(literal):
                        values.setdefault(name, {})[path] = found
    for setting in _read(main_file()).settings:
        with contextlib.suppress(Exception):
            module, path = _placed(setting)
            if _is_data(found := _found(sys.modules[module], path)):
                values.setdefault(module, {})[path] = found
    return pickle.dumps((values, np.geterr()))


def lines_to_import() -> tuple[int, ...]:
    """Return the lines at the top of the main script that workers can only have by an import of it."""
    script = _read(main_file())
    unsent = {setting.line for setting in script.settings if setting.is_at_top and not _is_sent(setting)}
    return tuple(sorted(unsent.union(script.library_lines)))


def is_below_guard() -> bool:
    """Return whether the line that the main script is at is below its main guard: an import would not run it."""
    guarded = _read(main_file()).guarded
    script = vars(sys.modules["__main__"])
    for frame, line in walk_stack(sys._getframe(1)):
        if frame.f_code.co_name == "<module>" and frame.f_globals is script:
            return any(line in lines for lines in guarded)
    return bool(guarded)  # in another thread


def main_file() -> str:
    """Return the file of the main script, if it is one."""
    return str(getattr(sys.modules.get("__main__"), "__file__", None))


def _file_of_own(name: str, module: Any) -> str:
    """Return the source of a module of the user's; ``""`` for any other."""
    # Not of a subclass: those are loaded when one looks at them, or do whatever else.
    found = type(module) is ModuleType and is_own(module) and file_of(module).endswith(".py")
    is_known = name.partition(".")[0] in _OF_TRAINER or name in ("__main__", "__mp_main__")
    return file_of(module) if found and not is_known else ""


def _found(module: Any, path: Iterable[str]) -> Any:
    for name in path:
        module = getattr(module, name)
    return module


def _placed(setting: _Setting) -> tuple[str, tuple[str, ...]]:
    """Return the module in which something is set, and the names from there on: a module may be an attribute, too."""
    module, path = setting.module, setting.path
    while len(path) > 1 and f"{module}.{path[0]}" in sys.modules:
        module, path = f"{module}.{path[0]}", path[1:]
    return module, path


def _is_sent(setting: _Setting) -> bool:
    module, path = _placed(setting)
    try:
        return _is_data(_found(sys.modules[module], path))
    except Exception:  # not executed yet, or a look at it runs code of the user
        return True


def _is_data(value: Any) -> bool:
    """Return whether a value is data of builtin types or of numpy, and not large."""
    left, room = [value], _MOST
    while left:
        one = left.pop()
        kind = type(one)
        size = one.nbytes if kind is np.ndarray else 64 * len(one) if kind in _CONTAINERS else 1
        room -= len(one) if kind in (str, bytes) else size
        if room < 0 or (kind is np.ndarray and one.dtype.hasobject):
            return False
        if kind is dict:
            left += [*one.keys(), *one.values()]
        elif kind in _CONTAINERS:
            left += one
        elif kind is type and one.__module__ == "builtins":  # np.bool = bool
            continue
        elif kind is not np.ndarray and kind not in _DATA and not isinstance(one, np.generic):
            return False
    return True


# --- source ---------------------------------------------------------------------------------------


def _body(file: str) -> list[ast.stmt]:
    try:
        return ast.parse(Path(file).read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # in an archive, or no Python
        return []


@cache
def _literals(file: str) -> dict[tuple[str, ...], Any]:
    """Return the variables of a module and of its classes that are set once, to a literal."""
    return dict(_literals_in(_body(file), ()))


def _literals_in(statements: Iterable[ast.stmt], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path of names and value of each literal that these statements assign, in classes too."""
    for one in statements:
        if isinstance(one, ast.ClassDef):
            yield from _literals_in(one.body, (*path, one.name))
        elif isinstance(one, ast.Assign | ast.AnnAssign) and one.value is not None:
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            with contextlib.suppress(ValueError):
                literal = ast.literal_eval(one.value)
                for target in targets:
                    yield from _named(target, literal, path)


def _named(target: ast.expr, literal: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(target, ast.Tuple) and isinstance(literal, tuple) and len(literal) == len(target.elts):
        for one, part in zip(target.elts, literal, strict=True):
            yield from _named(one, part, path)
    elif isinstance(target, ast.Name) and not target.id.startswith("__"):
        yield (*path, target.id), literal


@cache
def _read(file: str) -> _Script:
    body = _body(file)
    guards = [one for one in body if isinstance(one, ast.If) and "__name__" in ast.unparse(one.test)]
    at_top = list(_flat(one for one in body if one not in guards))
    everywhere = [node for one in body for node in ast.walk(one)]
    imported, lines = dict(_imported(everywhere)), {id(one) for one in at_top}
    settings = tuple(
        _Setting(one.lineno, *where, id(one) in lines)
        for one in everywhere
        if isinstance(one, _ASSIGNMENTS)
        for target in (one.targets if isinstance(one, ast.Assign) else [one.target])
        if (where := _where(target, imported)) is not None
    )
    ranges = tuple(range(one.lineno, (one.end_lineno or one.lineno) + 1) for one in guards)
    return _Script(settings, tuple(_library_lines(at_top)), ranges)


def _flat(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield these statements and those in their blocks, but for those of functions and classes."""
    for one in statements:
        yield one
        if isinstance(one, ast.If | ast.For | ast.While | ast.Try | ast.ExceptHandler | ast.With):
            yield from _flat(ast.iter_child_nodes(one))


def _imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, tuple[str, tuple[str, ...]]]]:
    """Yield the names that imports make; of each the module, and the names that lead from there to it."""
    for one in nodes:
        if isinstance(one, ast.Import):
            for name in one.names:
                top = name.name.partition(".")[0]
                yield name.asname or top, (name.name if name.asname else top, ())
        elif isinstance(one, ast.ImportFrom) and one.module and not one.level:
            for name in one.names:
                yield name.asname or name.name, (one.module, (name.name,))


def _where(target: ast.AST, imported: dict[str, tuple[str, tuple[str, ...]]]) -> tuple[str, tuple[str, ...]] | None:
    """Return the module and the names that lead to what ``name.attribute["key"] = …`` sets; ``None``: in none."""
    is_set, names = False, list[str]()
    while isinstance(target, ast.Attribute | ast.Subscript):
        is_set, names = True, [target.attr, *names] if isinstance(target, ast.Attribute) else []
        target = target.value
    if not is_set or not isinstance(target, ast.Name) or target.id not in imported:
        return None
    module, path = imported[target.id]
    path = (*path, *names)
    return (module, path) if path and module.partition(".")[0] not in _OF_TRAINER else None


def _library_lines(statements: Iterable[ast.AST]) -> Iterator[int]:
    """Yield the lines that call a C library which a line before has loaded, whatever becomes of the result."""
    libraries = set[str]()
    for one in statements:
        value = getattr(one, "value", None) if isinstance(one, ast.Expr | _ASSIGNMENTS) else None
        called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if called.endswith(_LOADERS) and isinstance(one, ast.Assign):
            libraries |= {ast.unparse(target) for target in one.targets}
        elif called.partition(".")[0] in libraries:
            yield one.lineno  # type: ignore[attr-defined]
