"""The command ``multienv``: ``run``, which needs no extra; :mod:`multienv.cli.commands` joins the others."""

from __future__ import annotations

import importlib
import sys

from multienv._engine.version import __version__
from multienv.cli.run import run_command

_HELP = """Usage: multienv COMMAND ...

Run gymnasium environments in processes that may die at any moment.

  run      Run a training script that nobody changed, in workers that may die.
  doctor   Examine an env: does it survive the death of its process?
  bench    Measure how fast a batch of an env steps, and in which layout.
  chaos    Step an env while its workers are killed, and compare.
  replay   Run a lost episode again, or list the crash reports.
  top      Show what the workers of a running trainer do.

`multienv COMMAND --help` tells more; `multienv --version` tells the version.
All but `run` need an extra: pip install "multienv-rl[cli]"."""


def app() -> None:
    """Run the subcommand that ``sys.argv`` names. Help and version need no extra either."""
    first = (sys.argv[1:] or ["--help"])[0]
    if first == "run":
        run_command(sys.argv[2:])
    elif first in ("--help", "--version"):
        print(_HELP if first == "--help" else __version__)
    elif first.endswith(".py"):
        sys.exit(f"There is no command {first}. To run a script: multienv run {' '.join(sys.argv[1:])}")
    else:
        importlib.import_module("multienv.cli.commands").app(prog_name="multienv")
