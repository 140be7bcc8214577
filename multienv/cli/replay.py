"""``multienv replay``: runs a lost episode again in this very process."""

from __future__ import annotations

import faulthandler
import sys
from bdb import BdbQuit
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from multienv.cli.env_functions import env_functions
from multienv.cli.replaying import EnvRaised, Rerun
from multienv.errors import UsageError
from multienv.reports.read import Report, load


def replay(
    report: Annotated[Path, typer.Argument(help="The .json that a loss has written; the log and the error name it.")],
    env: Annotated[
        str | None, typer.Option(help="What builds the env: its id, 'module:id', or 'module:function'.")
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Load what is pickled in it: its author can run any code here.")
    ] = False,
    debug: Annotated[bool, typer.Option("--pdb", help="Stop in the debugger before the fatal request.")] = False,
) -> None:
    """Run a lost episode again in this very process, up to the request its process was lost in.

    Each answer on the way is compared with the recorded one. If the fault happens again it ends this process as it
    ended the worker. Exit code 0: the fault did not happen again; 1: the env raised; 2: the report cannot be replayed.
    """
    faulthandler.enable()
    # What a report says is shown as it is.
    plain = partial(Console, markup=False, highlight=False, soft_wrap=True)
    console = plain()
    try:
        _replay(console, load(report, trust=trust), env, debug=debug)
    except UsageError as error:
        plain(stderr=True).print(str(error))
        raise typer.Exit(2) from error
    except EnvRaised as raised:
        console.print(raised.failure.traceback.rstrip())
        console.print(f"The env raised: {str(raised).rstrip('.')}.")
        raise typer.Exit(1) from raised
    except BdbQuit:
        raise typer.Abort from None


def _replay(console: Console, report: Report, env: str | None, *, debug: bool) -> None:
    """Run the report again and print each step; the output is flushed before the fatal request runs."""
    console.print(report.what)
    run = Rerun(report, env_functions(report, env))
    if run.was_building:
        console.print("It was being built: building the env ...")
        sys.stdout.flush()
        run.build()
        console.print("The fault did not come again: the env was built.")
        return
    run.build()
    with console.status(f"running {run.length} requests ..."):
        differences = run.run()
    if differences:
        console.print(f"Not all {run.length} answers are as they were recorded: {'; '.join(differences)}.")
        console.print("Is it the same env, and deterministic?")
    else:
        console.print(f"All {run.length} answers are as they were recorded.")
    if run.unknown:
        console.print(f"Of {run.unknown} only the flags could be compared: their observations are pickled (--trust).")
    fatal = run.request()
    if fatal:
        console.print(f"Now what was fatal: {fatal}")
    sys.stdout.flush()
    if debug:
        run.stop()
    if fatal:
        console.print(f"The fault did not come again: {run.run_fatal()}.")
    else:
        console.print("The process was lost between two requests: there is none that can be fatal.")
    run.close()
