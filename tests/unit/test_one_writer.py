"""Each state of a worker is written by the modules that the table in docs/design.md names, and by no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import multienv
from multienv._engine.recovery.hot_path import StepBuffers
from multienv._engine.recovery.journal import Journal
from multienv._engine.recovery.loss_recovery import LossRecovery
from multienv._engine.recovery.maintenance import Maintenance
from multienv._engine.recovery.pending import Pending
from multienv._engine.recovery.position import Position
from multienv._engine.recovery.recoverer import Recoverer

PACKAGE = Path(multienv.__file__).parent
DESIGN = PACKAGE.parent / "docs" / "design.md"
# First words of a row -> how code calls the object that holds the state, its class, and attributes that it counts for;
# (): all of them.
OWNERS: dict[str, tuple[set[str], str, set[str]]] = {
    "what the worker": ({"supervisor", "worker"}, "Supervisor", {"state", "last_answer"}),
    "what the caller": ({"position", "_position"}, Position.__name__, set()),
    "what drove": ({"journal", "_journal"}, Journal.__name__, set()),
    "the pending": ({"pending", "_pending"}, Pending.__name__, set()),
    "the process": ({"supervisor", "worker"}, "Supervisor", {"channel", "segment", "buffers"}),
    "the loss": ({"loss_recovery"}, LossRecovery.__name__, set()),
    "whether": ({"maintenance", "_maintenance"}, Maintenance.__name__, set()),
    "how the envs": ({"recoverer"}, Recoverer.__name__, set()),
}
# Methods that change their object, and what is no attribute of it but a value in it.
CHANGES = {
    "Position": {
        "count_reset",
        "count_step",
        "count_rollout",
        "count_left_alone",
        "count_truncation",
        "count_ends",
        "record_replay_points",
        "count_time",
        "move_to",
        "set_shown",
        "load",
    },
    "Journal": {
        "clear",
        "record",
        "record_rollout",
        "drop_after",
        "record_replay_point",
        "record_ends",
        "drop_replay_points",
        "drop_before",
        "trim",
        "apply_limits",
        "lay_out",
        "load",
    },
    "Pending": {
        "set_request",
        "set_step",
        "set_step_without_process",
        "start_deadline",
        "set_deadline",
        "set_found_deadline",
        "record_time",
        "find_deadlines",
        "lengthen_deadline",
        "lengthen_after_hang",
        "save_step",
    },
    "LossRecovery": set(),
    "Maintenance": {"restart_counts", "mark_for_rebuild", "put_off", "update_due"},
    "Recoverer": {"launch", "await_build", "mark_owned", "close", "release"},
    "Supervisor": set(),
}


def rows() -> dict[str, set[str]]:
    """Return the table: the first words of what it is -> the modules that write it."""
    text = DESIGN.read_text().split("## Who writes what")[1].split("\n## ")[0]
    found = {}
    for what, _, writers in re.findall(r"^\| (?!what \|)([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE):
        name = next(begin for begin in OWNERS if what.startswith(begin))
        found[name] = set(re.findall(r"`([a-z_]+\.py)`", writers))
    return found


def targets_of(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a statement assigns to, one by one."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    for target in targets:
        yield from target.elts if isinstance(target, ast.Tuple) else [target] if target is not None else []


@cache
def written_by_modules() -> list[tuple[str, tuple[str, str, str]]]:
    """Return the name of each module with what it writes, one by one."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return [(path.name, one) for path in paths for one in written(ast.parse(path.read_text()))]


def written(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Yield (class around it, name of the object, attribute or method) for each store and each call of a method."""
    classes = {
        id(inside): one.name for one in ast.walk(tree) if isinstance(one, ast.ClassDef) for inside in ast.walk(one)
    }
    for node in ast.walk(tree):
        around = classes.get(id(node), "")
        places = list(targets_of(node)) if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) else []
        places += [node.func] if isinstance(node, ast.Call) else []
        for place in places:
            while isinstance(place, ast.Subscript):
                place = place.value
            if isinstance(place, ast.Attribute):
                kind = "()" if isinstance(node, ast.Call) else ""
                yield around, ast.unparse(place.value).split(".")[-1], place.attr + kind


def writers(name: str) -> set[str]:
    """Return the modules that write a state."""
    names, owner, only = OWNERS[name]
    found = set()
    for module, (around, of, what) in written_by_modules():
        is_own = of == "self" and around == owner
        attribute = what.removesuffix("()")
        is_change = attribute in CHANGES[owner] if what.endswith("()") else attribute in only or not only
        if (of in names or is_own) and is_change:
            found.add(module)
    return found


@pytest.mark.parametrize("name", list(OWNERS))
def test_a_state_is_written_where_the_table_says(name: str) -> None:
    assert writers(name) == rows()[name]


def test_the_table_has_all_rows() -> None:
    assert rows().keys() == OWNERS.keys()


def test_what_the_hot_path_writes_has_a_place_in_one_object() -> None:
    """So the C code, which finds attributes by their place, writes no more than the table says."""
    assert {"number", "seen", "steps", "journal"} <= set(Position.__slots__)
    assert {"limit", "until", "step_limit"} <= set(Pending.__slots__)
    assert "limit" not in StepBuffers.__slots__
