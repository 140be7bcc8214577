"""``multienv replay``: run a lost episode again in a process of its own, or list the crash reports."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
from bdb import BdbQuit
from collections.abc import Callable
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from multienv._engine.reports import store
from multienv._engine.reports.crash import Report
from multienv._engine.reports.read import load, summary_of
from multienv._engine.reports.texts import counted, exit_text, what_happened
from multienv.cli.env_functions import env_functions
from multienv.cli.options import JsonOption, KwargsOption, ReportsOption, arguments_of, plain_console
from multienv.cli.replaying import EnvRaised, Rerun
from multienv.cli.texts import duration, report_line, visible
from multienv.errors import UsageError

_LATEST = "latest"
# How often a replay begins again if a fault strikes by chance before the fatal request.
_TRIES = 5


def replay(
    report: Annotated[
        str | None,
        typer.Argument(help="The .json file of a crash report; the log and the error name it. 'latest': the newest."),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(help="How to build the env: its id, 'module:id' or 'module:function'. Default: the report's own."),
    ] = None,
    env_kwargs: KwargsOption = "{}",
    debug: Annotated[
        bool, typer.Option("--pdb", help="Stop in the debugger before the fatal request. Implies --here.")
    ] = False,
    here: Annotated[
        bool, typer.Option("--here", help="Run in this process, which a fault then ends: for gdb and the like.")
    ] = False,
    step_deadline: Annotated[
        float | None,
        typer.Option(min=0.01, help="Seconds after which a step counts as hung. Default: by the report, at most 30."),
    ] = None,
    last: Annotated[int, typer.Option(min=1, help="Without an argument: how many of the newest reports to list.")] = 10,
    reports: ReportsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a lost episode again in a process of its own, up to the request in which its worker was lost.

    Without an argument: list the last ten crash reports, the newest last.

    Each answer on the way is compared with the recorded one. If the env crashes or hangs by chance before the fatal
    request, the replay is tried again, five times in all, then from a later reset if the report knows one. Modules of
    --env are also found in the current directory. A report is a pickle: only replay reports that you trust.
    With --json each event is a line of JSON, and the list one document.

    Exit code 0: the fault did not happen again; 1: it happened again: the env raised, hung or ended its process;
    2: the report cannot be replayed; 3: a fault has struck by chance in each try.

    For example:

    multienv replay

    multienv replay latest --pdb

    multienv replay latest --env my_envs.py:MyEnv --env-kwargs '{"size": 4}'
    """
    directory = store.directory_for(reports)
    if report is None:
        _list(plain_console(soft_wrap=True), directory, last, as_json=as_json)
        return
    path = _path(report, directory)
    arguments = arguments_of(env_kwargs)
    if debug or here:
        try:
            code = _run(as_json, path, env, arguments, step_deadline, debug=debug)
        except BdbQuit:
            raise typer.Abort from None
    else:
        code = _run_elsewhere(as_json, path, env, arguments, step_deadline)
    raise typer.Exit(code)


def _say(as_json: bool, text: str, **facts: Any) -> None:
    """Report an event: as text for people, or as named values for programs."""
    plain_console(soft_wrap=True).print(json.dumps(facts) if as_json else visible(text))
    sys.stdout.flush()


def _run(as_json: bool, path: Path, *arguments: Any, **options: Any) -> int:
    """Run the report again in this process. Return the exit code. See :func:`_replay`."""
    say = partial(_say, as_json)
    try:
        _replay(say, load(path), *arguments, **options)
    except EnvRaised as raised:
        text = f"{raised.failure.traceback.rstrip()}\nThe env raised: {str(raised).rstrip('.')}."
        say(text, raised=str(raised), traceback=raised.failure.traceback)
        return 1
    return 0


def _run_and_tell(told: Connection, is_first: bool, *arguments: Any) -> None:
    """Run the report again, in a process started for it. Tell what :func:`_replay` has reached, and the exit code."""
    try:
        told.send(_run(*arguments, is_first=is_first, reached=told.send))
    except UsageError as error:
        print(visible(str(error)), file=sys.stderr)
        told.send(2)
    except KeyboardInterrupt:
        pass  # the command says that it was interrupted


def _run_elsewhere(as_json: bool, *arguments: Any) -> int:
    """Run the report again in a process of its own, more than once if a fault strikes by chance on the way.

    Returns:
        The exit code of the command.
    """
    say, spawning = partial(_say, as_json), multiprocessing.get_context("spawn")
    for number in range(1, _TRIES + 1):
        reader, told = spawning.Pipe(duplex=False)
        process = spawning.Process(target=_run_and_tell, args=(told, number == 1, as_json, *arguments))
        process.start()
        try:
            process.join()
        except KeyboardInterrupt:  # a terminal interrupts both; a program perhaps only this one
            assert process.pid is not None
            os.kill(process.pid, signal.SIGINT)
            process.join(5.0)
            process.kill()
            raise
        heard = []
        while reader.poll():
            heard.append(reader.recv())
        if heard and isinstance(heard[-1], int):
            return heard[-1]
        ended = heard[0] if heard and process.exitcode == 1 else exit_text(process.exitcode)
        if len(heard) > 1:
            say(f"The fault happened again: the process {ended}.", came_again=True, exit_code=process.exitcode)
            return 1
        text = f"A fault struck by chance, before the fatal request: the process {ended} (try {number} of {_TRIES})."
        say(text, by_chance=True, exit_code=process.exitcode)
    slow = " If it is only slow: a longer --step-deadline." if ended == "hung" else ""
    say(f"Give --env with a calm version of the env: one without this fault.{slow}", came_again=None)
    return 3


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
            console.print(report_line(one, Path(one["report"]).name), **at_width if console.is_terminal else {})


def _replay(
    say: Callable[..., None],
    report: Report,
    env: str | None,
    arguments: dict[str, Any],
    step_deadline: float | None,
    *,
    debug: bool = False,
    is_first: bool = True,
    reached: Callable[[str | int], object] | None = None,
) -> None:
    """Run the report again, and report each event.

    Args:
        say: See :func:`_say`.
        report: The report.
        env: See :func:`replay`.
        arguments: Arguments for ``env``.
        step_deadline: See :func:`replay`.
        debug: See :func:`replay`.
        is_first: Say how the process was lost, and run all that is known.
        reached: In a process of its own: called at first, and before the fatal request or the fatal build, with what
            its exit code 1 means; and with 0 when only the closing of the envs is left.
    """
    quiet, reached = reached is not None, reached or (lambda what: None)
    what = what_happened(report.loss)
    if is_first:
        say(what, report=report.path, what=what)
    # Of an env that exits with code 1 itself, the two look the same.
    ended = "exited with code 1" if report.loss.exit_code == 1 else "hung"
    reached(ended)
    env_fns = env_functions(report, env, arguments)
    run = Rerun(report, env_fns, step_deadline, short=not is_first, quiet=quiet)
    waiting, facts = "", {}
    if report.loss.cause == "hung" and (run.was_building or not debug):  # in the debugger nothing ends it
        waiting = f"\nIf it hangs again, its stack is printed after {duration(run.hang_seconds)}, or at once by Ctrl-C."
        waiting += " Then this command ends."
        facts["hang_seconds"] = run.hang_seconds
    if run.was_building:
        say(f"The process was lost while it built the env. Building the env ...{waiting}", fatal="initialize", **facts)
        faulthandler.enable()
        reached(ended)
        run.build()
        say("The fault did not happen again: the env was built.", came_again=False)
        return
    run.build()
    if run.length and (is_first or run.is_short):
        which = "since a later reset" if run.is_short else "that came before"
        text = f"Running the {counted(run.length, 'request')} {which}. One that takes {duration(run.seconds)} is ended."
        say(text, before=run.length, deadline=run.seconds)
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
        faulthandler.enable()
        reached(ended)
    if debug:
        run.stop()
    if fatal:
        run.run_fatal()
        say("The fault did not happen again: the request returned.", came_again=False)
    else:
        note = "The process was lost between two requests, so no request was fatal."
        say(note, came_again=False, note=note)
    reached(0)
    run.close()
