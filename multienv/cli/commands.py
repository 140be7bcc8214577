"""The subcommands of ``multienv`` that need an extra. Each is a module with the same name; this module joins them."""

from __future__ import annotations

import sys

try:
    import psutil  # noqa: F401 - imported here so that one line can say what to install
    import rich  # noqa: F401
    import typer
except ImportError as missing:
    sys.exit(
        f'This command needs {missing.name}: pip install "multienv-rl[cli]". `multienv run` works without: see '
        "`multienv run --help`."
    )

from multienv.cli import bench, chaos, doctor, replay, top
from multienv.cli.options import Commands

app = typer.Typer(name="multienv", cls=Commands, add_completion=False)

for command in (doctor.doctor, chaos.chaos, bench.bench, replay.replay, top.top):
    app.command()(command)
