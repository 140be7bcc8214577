"""``multienv replay``: run a lost episode again in this process, or list the crash reports."""

from __future__ import annotations

import faulthandler
import json
import sys
from bdb import BdbQuit
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from multienv._engine.reports import store
from multienv._engine.reports.crash import Report
from multienv._engine.reports.read import load, summary_of
from multienv._engine.reports.texts import what_happened
from multienv.cli.env_functions import env_functions
from multienv.cli.options import ReportsOption, arguments_of, plain_console
from multienv.cli.replaying import EnvRaised, Rerun
from multienv.cli.texts import duration, report_line, visible
from multienv.errors import UsageError, counted

_LATEST = "latest"
# Reports an event: as text for people, and as named values for programs.
Say = Callable[..., None]


def replay(
    report: Annotated[
        str | None,
        typer.Argument(help="The .json file of a crash report; the log and the error name it. 'latest': the newest."),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(help="How to build the env: its id, 'module:id' or 'module:function'. Default: the report's own."),
    ] = None,
    env_kwargs: Annotated[str | None, typer.Option(help="Arguments for --env, as JSON.")] = None,
    debug: Annotated[bool, typer.Option("--pdb", help="Stop in the debugger before the fatal request.")] = False,
    last: Annotated[int, typer.Option(min=1, help="Without an argument: how many of the newest reports to list.")] = 10,
    reports: ReportsOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each event as a line of JSON, and the list as one document.")
    ] = False,
) -> None:
    """Run a lost episode again in this process, up to the request in which its worker was lost.

    Without an argument: list the last ten crash reports, the newest last.

    Each answer on the way is compared with the recorded one. If the fault happens again, it ends this process as it
    ended the worker. Modules of --env are also found in the current directory. A report is a pickle: only replay
    reports that you trust.

    Exit code 0: the fault did not happen again; 1: the env raised, or hung again; 2: the report cannot be replayed.

    For example:

    multienv replay

    multienv replay latest --pdb

    multienv replay latest --env my_envs.py:MyEnv --env-kwargs '{"size": 4}'
    """
    console = plain_console(soft_wrap=True)

    def say(text: str, **facts: Any) -> None:
        console.print(json.dumps(facts) if as_json else visible(text))

    directory = store.directory_for(reports)
    try:
        if report is None:
            _list(console, directory, last, as_json=as_json)
            return
        faulthandler.enable()
        found = load(_path(report, directory))
        _replay(say, found, env, None if env_kwargs is None else arguments_of(env_kwargs), debug=debug)
    except EnvRaised as raised:
        text = f"{raised.failure.traceback.rstrip()}\nThe env raised: {str(raised).rstrip('.')}."
        say(text, raised=str(raised), traceback=raised.failure.traceback)
        raise typer.Exit(1) from raised
    except BdbQuit:
        raise typer.Abort from None


def _path(report: str, directory: Path | None) -> Path:
    """Return the path of a report: a path, the name of a report in the directory, or the newest one there."""
    if report == _LATEST:
        for path in store.listed(directory):
            return path
        raise UsageError(f"There are no reports in {directory}.")
    path = Path(report)
    if directory is not None and path.name == report and not path.exists() and (directory / report).exists():
        return directory / report
    return path


def _list(console: Console, directory: Path | None, last: int, *, as_json: bool) -> None:
    """Print the last reports in the directory, one line each, the newest last."""
    paths = store.listed(directory)
    found = list(islice((summary for summary in map(summary_of, paths) if summary is not None), last))[::-1]
    if as_json:
        console.print(json.dumps(found, indent=2))
        return
    if not found:
        console.print(f"There are no reports in {directory}.")
    else:
        known = f" {len(found)} of {len(paths)};" if len(found) == last < len(paths) else ""
        console.print(
            f"Reports in {directory},{known} the newest last. To replay one: `multienv replay {_LATEST}`, or NAME."
        )
        at_width: dict[str, Any] = {"soft_wrap": False, "no_wrap": True, "overflow": "ellipsis"}
        for one in found:
            console.print(report_line(one), **at_width if console.is_terminal else {})
    for path in paths:
        if not path.is_file():  # a FIFO, or a link to a device: see reports.read
            console.print(f"Not read: {path.name} is not a regular file.")


def _replay(say: Say, report: Report, env: str | None, arguments: dict[str, Any] | None, *, debug: bool) -> None:
    """Run the report again, and report each event. The output is flushed before the fatal request runs."""
    what = what_happened(report.loss)
    say(what, report=report.path, what=what)
    run = Rerun(report, env_functions(report, env, arguments))
    waiting, facts = "", {}
    if run.hang_seconds is not None and (run.was_building or not debug):  # in the debugger nothing ends it
        waiting = f"\nIf it hangs again, its stack is printed after {duration(run.hang_seconds)}, or at once by Ctrl-C."
        waiting += " Then this command ends."
        facts["hang_seconds"] = run.hang_seconds
    if run.was_building:
        say(f"The process was lost while it built the env. Building the env ...{waiting}", fatal="initialize", **facts)
        sys.stdout.flush()
        run.build()
        say("The fault did not happen again: the env was built.", came_again=False)
        return
    run.build()
    if run.length:
        text = f"Running the {counted(run.length, 'request')} that came before. If this process ends or hangs here, a"
        say(f"{text} fault has struck by chance: run it again.", before=run.length)
        sys.stdout.flush()
    with Console(stderr=True).status(f"running {counted(run.length, 'request')} ..."):
        differences = run.run()
    known = {"requests": run.length, "differences": differences}
    if differences:
        text = f"Some of the {run.length} answers differ from the recorded ones: {'; '.join(differences)}.\n"
        say(f"{text}Is it the same env, and is it deterministic?", **known)
    else:
        say(f"All {run.length} answers match the recorded ones.", **known)
    fatal = run.request()
    if fatal:
        say(f"Now the fatal request: {fatal}{waiting}", fatal=fatal, **facts)
    sys.stdout.flush()
    if debug:
        run.stop()
    if fatal:
        run.run_fatal()
        say("The fault did not happen again: the request returned.", came_again=False)
    else:
        note = "The process was lost between two requests, so no request was fatal."
        say(note, came_again=False, note=note)
    run.close()
