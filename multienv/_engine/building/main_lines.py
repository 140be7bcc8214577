"""Find what the main script does to modules and C libraries, which its envs need in a worker, too.

What a script assigns to an attribute of a module (``sim.GRAVITY = 9.81``) or tells a C library (``LIB.init()``) does
not travel with the functions that make envs: nothing in them refers to it. It is found in the source of the script.
Calls of functions of modules are not looked for: most of them are about the trainer.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType

# What is set in these is handed over (os.environ, sys.path), or is about the trainer.
_OF_TRAINER = {"jax", "logging", "matplotlib", "os", "sys", "tensorflow", "torch", "warnings"}
# How a C library is loaded, by ctypes, numpy and cffi.
_LOADERS = ("CDLL", "LoadLibrary", "load_library", "dlopen")
_Lines = tuple[tuple[int, ...], tuple[range, ...]]


def found_in(file: str) -> tuple[int, ...]:
    """Return the lines in which a script sets something in a module or a C library, outside functions and guard."""
    return _read(file)[0]


def is_below_guard(file: str) -> bool:
    """Return whether the line that the main script is at is below its main guard: an import would not run it."""
    guarded = _read(file)[1]
    script = vars(sys.modules["__main__"])
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is script:
            return any(frame.f_lineno in lines for lines in guarded)
        frame = frame.f_back
    return bool(guarded)  # in another thread


@cache
def _read(file: str) -> _Lines:
    try:
        statements = ast.parse(Path(file).read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # in an archive, or no Python
        return (), ()
    guards = [one for one in statements if isinstance(one, ast.If) and "__name__" in ast.unparse(one.test)]
    ranges = tuple(range(one.lineno, (one.end_lineno or one.lineno) + 1) for one in guards)
    return tuple(_setting(_flat(one for one in statements if one not in guards))), ranges


def _flat(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield these statements and those in their blocks, but for those of functions and classes."""
    for one in statements:
        yield one
        if isinstance(one, ast.If | ast.For | ast.While | ast.Try | ast.ExceptHandler | ast.With):
            yield from _flat(ast.iter_child_nodes(one))


def _setting(statements: Iterable[ast.AST]) -> Iterator[int]:
    modules, libraries = set[str](), set[str]()
    for one in statements:
        value = getattr(one, "value", None)
        called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if isinstance(one, ast.Import | ast.ImportFrom):
            of = getattr(one, "module", None)
            names = [name for name in one.names if (of or name.name).partition(".")[0] not in _OF_TRAINER]
            modules |= {(name.asname or name.name).partition(".")[0] for name in names}
        elif isinstance(one, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            if called.endswith(_LOADERS):
                libraries |= {ast.unparse(target) for target in targets}
            set_here = [target for target in targets if isinstance(target, ast.Attribute | ast.Subscript)]
            if any(_root(target) in modules for target in set_here):
                yield one.lineno
        elif isinstance(one, ast.Expr) and (called.partition(".")[0] in libraries or called.endswith(".seterr")):
            yield one.lineno


def _root(target: ast.AST) -> str:
    """Return the name that ``name.attribute["key"]`` begins with."""
    while isinstance(target, ast.Attribute | ast.Subscript):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""
