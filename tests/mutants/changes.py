"""Finds the place that a mutant names, and makes its change there.

A place of Python code is a module by the last of its names, and a definition in it by its qualified name:
``"journal:Journal.plans"``. Two modules are called ``rollouts``: ``"recovery.rollouts:RolloutReader.read"``. A
definition is a function, a class, or an assignment outside functions (``"relay:TOLD"``). If there are two of one name,
such as a property and its setter, the change may be in either.

The change is one of the syntax tree: spaces, line breaks, quotes and comments do not matter, neither in ``old`` nor in
the package. C is not parsed here: its mutants name a file, ``"_native.c"``, and quote its text.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mutants.mutants import Mutant


class Edit(NamedTuple):
    """What stands in place of nodes of a syntax tree that follow each other.

    Attributes:
        first, last: The nodes.
        text: What replaces their text.
    """

    first: ast.expr | ast.stmt | ast.keyword
    last: ast.expr | ast.stmt | ast.keyword
    text: str


def file_of(place: str, package: Path) -> Path:
    """Return the file of a place. Raises ValueError unless the package has exactly one."""
    module, is_python, _ = place.partition(":")
    if is_python:
        names = module.split(".")
        found = [path for path in package.rglob("*.py") if _names_of(path, package)[-len(names) :] == names]
    else:
        found = list(package.rglob(place))
    if len(found) != 1:
        those = ", ".join(sorted(str(path.relative_to(package)) for path in found)) or "none"
        raise ValueError(f"{place}: names {len(found)} files, not one: {those}")
    return found[0]


def applied(mutant: Mutant, text: str) -> str:
    """Return the text of a mutant's file with the defect.

    The rest of the text stays as it is; lines keep their numbers unless ``new`` has more of them than ``old`` in the
    file. Raises ValueError unless ``old`` is there exactly once, and what comes out is a program.
    """
    _, is_python, definition = mutant.place.partition(":")
    if not is_python:
        _check(mutant, text.count(mutant.old))
        return text.replace(mutant.old, mutant.new)
    scopes = _definitions(ast.parse(text).body, definition.split("."))
    if not scopes:
        raise ValueError(f"{mutant.place}: is not defined ({mutant.name})")
    try:
        edits = [edit for scope in scopes for edit in _edits(scope, mutant.old, mutant.new)]
        _check(mutant, len(edits))
        broken = _edited(text, edits[0])
        ast.parse(broken)
    except SyntaxError as error:
        raise ValueError(f"{mutant.place}: {error}: {mutant.old!r}, {mutant.new!r} ({mutant.name})") from error
    return broken


def _check(mutant: Mutant, found: int) -> None:
    if found != 1:
        raise ValueError(f"{mutant.place}: stands there {found} times: {mutant.old!r} ({mutant.name})")


def _names_of(path: Path, package: Path) -> list[str]:
    """Return the names of a module: ``["multienv", "_engine", "native"]``."""
    names = list(path.relative_to(package.parent).with_suffix("").parts)
    return names[:-1] if names[-1] == "__init__" else names


def _definitions(nodes: Sequence[ast.AST], names: Sequence[str]) -> list[ast.stmt]:
    """Return what has this qualified name, where ``names[0]`` is defined by one of these nodes."""
    found: list[ast.stmt] = []
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == names[0]:
                found += _definitions(node.body, names[1:]) if names[1:] else [node]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(one, ast.Name) and [one.id] == names for one in targets):
                found.append(node)
        elif not isinstance(node, ast.expr):  # if, try, with: what they hold is defined where they are
            found += _definitions(list(ast.iter_child_nodes(node)), names)
    return found


def _edits(scope: ast.stmt, old: str, new: str) -> Iterator[Edit]:
    """Yield all ways to make this change in a definition."""
    olds, news = (ast.parse(textwrap.dedent(fragment).strip()).body for fragment in (old, new))
    if _is_expression(olds) and _is_expression(news):
        for node in _nodes(scope):
            if isinstance(node, ast.expr) and _equal([node], [olds[0].value]):
                yield _expression(node, news[0].value)
        return
    if _is_setting(olds) and _is_setting(news):
        name, value = olds[0].targets[0].id, olds[0].value
        for node in _nodes(scope):
            if isinstance(node, ast.keyword) and node.arg == name and _equal([node.value], [value]):
                yield _expression(node, news[0].value, f"{news[0].targets[0].id}=")
    for statements in _blocks(scope):
        for begin in range(len(statements) - len(olds) + 1):
            those = statements[begin : begin + len(olds)]
            if those and _equal(those, olds):
                yield _statements(those, news or [ast.Pass()])


def _is_expression(fragment: Sequence[ast.AST]) -> bool:
    return len(fragment) == 1 and isinstance(fragment[0], ast.Expr)


def _is_setting(fragment: Sequence[ast.AST]) -> bool:
    """Return whether this is ``name = value``: an assignment, or an argument that is passed by its name."""
    return (
        len(fragment) == 1
        and isinstance(fragment[0], ast.Assign)
        and len(fragment[0].targets) == 1
        and isinstance(fragment[0].targets[0], ast.Name)
    )


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below, except what is in an f-string: before Python 3.12 those have wrong positions."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from _nodes(child)


def _blocks(scope: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield all lists of statements.

    An ``elif`` is an ``if`` in a list by itself, but no text could stand in its place: a mutant changes its condition,
    or statements in it.
    """
    yield [scope]
    for node in _nodes(scope):
        for field, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                is_elif = field == "orelse" and isinstance(node, ast.If) and node.col_offset == value[0].col_offset
                if not is_elif:
                    yield value


def _equal(some: Sequence[ast.AST], others: Sequence[ast.AST]) -> bool:
    """Compare nodes by what they say; whether a name is read or set is not said by the fragment alone."""
    return len(some) == len(others) and all(
        type(one) is type(other) and _dumped(one) == _dumped(other) for one, other in zip(some, others, strict=True)
    )


def _dumped(node: ast.AST) -> str:
    return re.sub(r"(, )?ctx=(Load|Store|Del)\(\)", "", ast.dump(node))


def _expression(node: ast.expr | ast.keyword, new: ast.expr, before: str = "") -> Edit:
    """Return the edit that puts an expression in place of a node: in parentheses, so that nothing around binds it."""
    return Edit(node, node, f"{before}({ast.unparse(new)}{_filling(node, node, 1)})")


def _statements(those: Sequence[ast.stmt], news: Sequence[ast.stmt]) -> Edit:
    """Return the edit that puts statements in place of others."""
    lines = ast.unparse(ast.Module(list(news), [])).splitlines()
    text = ("\n" + " " * those[0].col_offset).join(lines)
    return Edit(those[0], those[-1], text + _filling(those[0], those[-1], len(lines)))


def _filling(first: ast.expr | ast.stmt | ast.keyword, last: ast.expr | ast.stmt | ast.keyword, lines: int) -> str:
    """Return empty lines, so that the lines below keep their numbers."""
    return "\n" * ((last.end_lineno or 0) - _first_line(first) + 1 - lines)


def _first_line(node: ast.expr | ast.stmt | ast.keyword) -> int:
    """Return the line that a node begins on; a function begins with its decorators."""
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])


def _edited(text: str, edit: Edit) -> str:
    """Return the text with an edit."""
    octets = text.encode()  # the columns of a syntax tree count bytes
    begins = [0]
    for line in octets.split(b"\n"):
        begins.append(begins[-1] + len(line) + 1)
    start = begins[_first_line(edit.first) - 1] + edit.first.col_offset
    end = begins[(edit.last.end_lineno or 0) - 1] + (edit.last.end_col_offset or 0)
    return (octets[:start] + edit.text.encode() + octets[end:]).decode()
