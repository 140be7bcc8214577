"""Runs a command, in this process or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

import multienv
from multienv.cli.commands import app

ODD_ENVS = Path(__file__).with_name("odd_envs.py")


def run(*arguments: str) -> tuple[Result, dict[str, Any]]:
    """What the command says, and what it prints on stdout if JSON was asked for."""
    result = CliRunner().invoke(app, [*arguments], env={**os.environ, "COLUMNS": "120"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result, json.loads(result.stdout) if "--json" in arguments and result.stdout else {}


def run_process(*arguments: str, cwd: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The real command, as it is typed."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(multienv.__file__).parents[1])])
    return subprocess.run(
        [sys.executable, "-m", "multienv", *arguments],
        cwd=cwd, input=stdin, capture_output=True, text=True, timeout=110,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "120"},
    )  # fmt: skip
