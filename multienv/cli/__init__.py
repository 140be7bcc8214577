"""The command ``multienv``: ``run``, which needs no extra; :mod:`multienv.cli.commands` joins the others."""

from __future__ import annotations

import importlib
import sys

from multienv.cli.run import run_command


def app(prog_name: str = "multienv") -> None:
    """Run the subcommand that ``sys.argv`` names."""
    if sys.argv[1:2] == ["run"]:
        run_command(sys.argv[2:])
    elif sys.argv[1:] and sys.argv[1].endswith(".py"):
        sys.exit(f"There is no command {sys.argv[1]}. To run a script: multienv run {' '.join(sys.argv[1:])}")
    else:
        importlib.import_module("multienv.cli.commands").app(prog_name=prog_name)
