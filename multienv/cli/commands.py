"""The subcommands of ``multienv``. Each is a module with the same name; this module joins them."""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import psutil  # noqa: F401 - imported here so that one line can say what to install
    import rich  # noqa: F401
    import typer
except ImportError as missing:
    sys.exit(
        f'This command needs {missing.name}: pip install "multienv-rl[cli]". `multienv run` works without: see '
        "`multienv run --help`."
    )

from multienv import __version__
from multienv.cli import bench, chaos, doctor, replay, top
from multienv.cli.options import refusing
from multienv.cli.run import run_command

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


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def run(context: typer.Context) -> None:
    """Run a training script that nobody changed, in workers that may die: `multienv run train.py`."""
    run_command(context.args)


for command in (doctor.doctor, chaos.chaos, bench.bench, replay.replay, top.top):
    app.command()(refusing(command))
