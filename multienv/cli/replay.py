"""``multienv replay``: run a lost episode again in a process of its own, or list the crash reports.

The journal of the report is run with the same host as in a worker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import pdb
import pickle
import signal
import sys
import time
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from multienv._engine.building.building import EnvFn
from multienv._engine.processes.environment import worker_environment
from multienv._engine.recovery.verification import differences
from multienv._engine.reports import store
from multienv._engine.reports.crash import Report, action_of
from multienv._engine.reports.read import load, summary_of
from multienv._engine.reports.texts import counted, exit_text, what_happened
from multienv._engine.wire.banks import FAILED, HEAD, MESSAGE, STEPPED, U32, split_entries
from multienv._engine.wire.codecs import payload_of
from multienv._engine.wire.infos import unpack_extras
from multienv._engine.wire.messages import Description, Failure, Message, Replay, message_of, pack_message
from multienv._engine.wire.segment import Segment
from multienv._engine.worker.host import Host
from multienv.cli.env_functions import env_functions
from multienv.cli.options import JsonOption, KwargsOption, ReportsOption, arguments_of, plain_console
from multienv.cli.texts import duration, report_line, visible
from multienv.errors import UsageError

_LATEST = "latest"
# How often a replay begins again if a fault strikes by chance before the fatal request.
_TRIES = 5
# Seconds that a request before the fatal one has at most by default, and those that a build has.
_MOST, _BUILD = 30.0, 120.0


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
    arguments, say = arguments_of(env_kwargs), partial(_report_event, as_json)
    if debug or here:
        try:
            code = _run(say, path, env, arguments, step_deadline, debug=debug)
        except BdbQuit:
            raise typer.Abort from None
    else:
        code = _run_elsewhere(say, path, env, arguments, step_deadline)
    raise typer.Exit(code)


def _report_event(as_json: bool, text: str, **facts: Any) -> None:
    """Report an event: as text for people, or as named values for programs."""
    plain_console(soft_wrap=True).print(json.dumps(facts) if as_json else visible(text))
    sys.stdout.flush()


def _run(say: Callable[..., None], path: Path, *arguments: Any, **options: Any) -> int:
    """Run the report again in this process. Return the exit code. See :func:`_replay`."""
    try:
        _replay(say, load(path), *arguments, **options)
    except EnvRaised as raised:
        what, failure = raised.args
        text = f"{failure.traceback.rstrip()}\nThe env raised: {what.rstrip('.')}."
        say(text, raised=what, traceback=failure.traceback)
        return 1
    return 0


def _run_for_parent(told: Connection, is_first: bool, *arguments: Any) -> None:
    """Run the report again, in a process started for it. Tell what :func:`_replay` has reached, and the exit code."""
    try:
        told.send(_run(*arguments, is_first=is_first, reached=told.send))
    except UsageError as error:
        print(visible(str(error)), file=sys.stderr)
        told.send(2)
    except KeyboardInterrupt:
        pass  # the command says that it was interrupted


def _run_elsewhere(say: Callable[..., None], *arguments: Any) -> int:
    """Run the report again in a process of its own, more than once if a fault strikes by chance on the way.

    Returns:
        The exit code of the command.
    """
    spawning = multiprocessing.get_context("spawn")
    for number in range(1, _TRIES + 1):
        reader, told = spawning.Pipe(duplex=False)
        process = spawning.Process(target=_run_for_parent, args=(told, number == 1, say, *arguments))
        process.start()
        try:
            process.join()
        except KeyboardInterrupt:  # a terminal interrupts both; a program perhaps only this one
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):  # it may have ended of its own, and been reaped
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
        say: See :func:`_report_event`.
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


class EnvRaised(Exception):  # noqa: N818 - it is not an error of the command
    """Raised when the env raised, while it was built or in the fatal request. ``args``: what, and its Failure."""


@contextlib.contextmanager
def _ended_after(seconds: float, file: int = 2) -> Iterator[None]:
    """Print the stack to a file and end this process if the block takes so many seconds, or at Ctrl-C.

    Both also work in C code that holds the GIL and never returns.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.register(signal.SIGINT, file, chain=True)
    faulthandler.dump_traceback_later(seconds, file=file, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGINT)
        signal.signal(signal.SIGINT, handler)


class Rerun:
    """Runs the requests of a report.

    Args:
        report: The report.
        env_fns: The function that builds the env of each slot.
        short: Begin at a later reset, if the report has a replay that does.
        step_deadline: Seconds after which a request counts as hung; ``None``: found by the deadline in the report.
        quiet: Print no stack if a request before the fatal one hangs.

    Attributes:
        was_building: The process was lost while the envs were built.
        is_short: It begins at a later reset than the whole record.
        length: Number of requests before the fatal one.
        seconds: Seconds after which one of these counts as hung.
        hang_seconds: Seconds after which the fatal request, or the fatal build, counts as hung.
    """

    def __init__(
        self, report: Report, env_fns: Sequence[EnvFn], step_deadline: float | None, *, short: bool, quiet: bool
    ) -> None:
        self.was_building = report.loss.command == "initialize"
        self._report, self._verbatim = report, report.build.verbatim
        known = None if report.deadline is None else 2 * report.deadline + 1
        self.seconds = step_deadline or min(known or _MOST, _MOST)
        self.hang_seconds = (known or _BUILD) if self.was_building else step_deadline or known or _MOST
        self._fatal = next(split_entries(report.pending, report.end), None)
        self.is_short = short and len(report.replays) > 1
        # The host has a snapshot taken between two requests: that is when the next one gets its time.
        self._replay = replace((report.replays or (Replay(b""),))[-1 if self.is_short else 0], every=1)
        self._since, self._stacks = 0.0, os.open(os.devnull, os.O_WRONLY) if quiet else 2
        self.length = sum(1 for _ in split_entries(self._replay.entries, report.end))
        self._envs: list[Any] = []
        self._segment = Segment(-1)
        self._asked: Any = None  # the action, or the message, of the fatal request
        builders = [partial(self._build_one, env_fn) for env_fn in env_fns]
        self._host = Host(self._segment, load=lambda _: builders, on_keep=self._restart_timer)

    def _build_one(self, env_fn: EnvFn) -> Any:
        env = env_fn()
        self._envs.append(env)
        return env

    def _ask(self, number: int, message: Message) -> Any:
        """Return the host's answer to a message, which may be a ``Failure``."""
        HEAD.pack_into(self._segment.banks[number & 1].view, 0, MESSAGE, 0, 0, 0, 0, number & U32, 0)
        self._segment.write_request_payload(number, pack_message(message))
        self._host.handle(number)
        return pickle.loads(self._segment.read_reply_payload(number))

    def build(self) -> None:
        """Build the envs, as a worker does. Raises :class:`EnvRaised`."""
        os.environ.update(worker_environment())
        build = replace(self._report.build, env_fns=b"", snapshots=-1, replacement=False)
        with _ended_after(self.hang_seconds if self.was_building else _BUILD):
            answer = self._ask(-1, build)
        if isinstance(answer, Failure):
            raise EnvRaised(f"env_fn raised {answer.type_name}: {answer.text}", answer)
        description: Description = answer
        if self._report.layout not in (None, self._segment.layout):
            raise UsageError(
                f"{self._report.path}: the env that was built has other spaces than the lost env. Is it the same env?"
            )
        fatal = self._fatal
        if fatal is not None and fatal.is_step:
            self._asked = action_of(fatal, self._segment.layout, description, verbatim=self._verbatim)
        elif fatal is not None:
            self._asked = message_of(fatal.record[0], fatal.request_payload)

    def run(self) -> list[str]:
        """Run all requests before the fatal one. Return a line for each env whose answers differ from the record.

        The fault may happen again even if answers differ.
        """
        with _ended_after(self.seconds, self._stacks):
            answer = self._ask(-1, self._replay)
        if isinstance(answer, Failure):
            return [answer.text]
        starts = {one.slot: one.entry for one in self._replay.starts if one.waits}
        layout = self._segment.layout
        found = differences(self._replay.entries, answer, layout, verbatim=self._verbatim, starts=starts)
        return [f"env {slot}: {what}" for slot, what in found.items()]

    def _restart_timer(self, *last: int) -> str:
        """Give the next request its time. It may be a tenth less: a new timer takes as long as several quick steps."""
        if time.monotonic() > self._since + self.seconds / 10:
            self._since = time.monotonic()
            faulthandler.dump_traceback_later(self.seconds, file=self._stacks, exit=True)
        return ""

    # --- the fatal request ------------------------------------------------------------------------

    def request(self) -> str:
        """Return the fatal request and its place in the episode, as text; ``""`` if no request was pending."""
        loss, fatal = self._report.loss, self._fatal
        if fatal is None:
            return ""
        what = f"step({self._asked!r})" if fatal.is_step else f"{loss.command}: {self._asked!r:.500}"
        after = "" if loss.step is None else f", after {loss.step} steps of its episode"
        return f"{what}{after}" + ("" if loss.seed is None else f", last seed {loss.seed}")

    def run_fatal(self) -> None:
        """Run the request in which the process was lost. If the fault happens again, it ends this process.

        Raises:
            EnvRaised: The env raised.
        """
        fatal, segment = self._fatal, self._segment
        assert fatal is not None
        with _ended_after(self.hang_seconds):
            self._ask(~fatal.number, Replay(fatal.packed()))  # this number does not use the bank of the fatal request
        kind = segment.banks[fatal.number & 1].view[2]
        failures: dict[int, Failure] = {}
        if kind == FAILED:
            failures = {0: pickle.loads(segment.read_reply_payload(fatal.number))}
        elif kind == STEPPED and not self._verbatim:
            failures = unpack_extras(payload_of(segment, fatal.number).rest)[0].failures
        for slot, failure in failures.items():
            who = "it" if self._verbatim else f"env {slot}"
            raise EnvRaised(f"{who} raised {failure.type_name}: {failure.text}", failure)

    def stop(self) -> None:
        """Stop in a debugger with ``env`` and ``action``. If the request is not a step, ``action`` is the message."""
        env, action = self._envs[0] if self._verbatim else self._envs, self._asked
        pdb.Pdb().set_trace(sys._getframe())
        del env, action  # the debugger stops here: the next thing to try is `env.step(action)`

    def close(self) -> None:
        """Close the envs."""
        with _ended_after(self.seconds):
            self._host.close_envs()
