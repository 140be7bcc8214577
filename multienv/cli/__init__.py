"""The command ``multienv``. Each subcommand is a module with the same name; this module joins them."""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import psutil  # noqa: F401 - imported here so that one line can say what to install
    import rich  # noqa: F401
    import typer
except ImportError as missing:
    sys.exit(f'The multienv command needs {missing.name}: pip install "multienv-rl[cli]"')

from multienv import __version__
from multienv.cli import bench, chaos, doctor, replay, top
from multienv.cli.options import refusing

app = typer.Typer(name="multienv", add_completion=False, no_args_is_help=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Run gymnasium environments in processes that may die at any moment."""


for command in (doctor.doctor, chaos.chaos, bench.bench, replay.replay, top.top):
    app.command()(refusing(command))
