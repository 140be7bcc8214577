"""Benchmarks are run by hand: that what they import from the package is still there is tested here."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_what_a_benchmark_imports_from_the_package_is_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "multienv":
            module = importlib.import_module(str(node.module))
            for one in node.names:
                if not hasattr(module, one.name):
                    importlib.import_module(f"{node.module}.{one.name}")
