"""Shared by several commands: arguments and options, errors in one line, and plain output."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.status import Status
from rich.text import Text
from typer.core import TyperGroup

from multienv._engine.cores import cores
from multienv.cli.env_functions import NamedEnv
from multienv.cli.texts import visible
from multienv.errors import UsageError

EnvArgument = Annotated[
    str,
    typer.Argument(
        metavar="ENV",
        help="The env: an id; module:id if a module registers it; module:function or module:Class; "
        "file.py:function or file.py:Class. Modules in the current directory are found.",
    ),
]
KwargsOption = Annotated[str, typer.Option(help="Arguments for the env, as JSON.", metavar="JSON")]
NumEnvsOption = Annotated[int, typer.Option("--num-envs", min=1, help="Number of envs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else on stdout.")]
ReportsOption = Annotated[
    Path | None, typer.Option(help="Directory of the crash reports. Default: $MULTIENV_REPORTS, else the user's cache.")
]
VerboseOption = Annotated[bool, typer.Option("--verbose", help="Show all output of the env, on stderr.")]

# The env's output: how many lines are shown, and how many bytes are searched for them.
_LAST_LINES, _TAIL = 5, 2**14

# Text from an env is shown unchanged; with emoji codes, "file.py:Ferry:" would show a ferry.
plain_console = partial(Console, markup=False, highlight=False, emoji=False)


class Commands(TyperGroup):
    """Runs a command. A UsageError is printed on stderr, and the command ends with exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            print(visible(str(error)), file=sys.stderr)
            raise typer.Exit(2) from error


def arguments_of(env_kwargs: str) -> dict[str, Any]:
    """Return the arguments in ``--env-kwargs``. Raises UsageError."""
    try:
        arguments = json.loads(env_kwargs)
    except ValueError as error:
        raise UsageError(f"--env-kwargs {env_kwargs}: this is not JSON: {error}.") from error
    if not isinstance(arguments, dict):
        raise UsageError(f'--env-kwargs {env_kwargs}: give a JSON object, such as {{"size": 4}}.')
    return arguments


class Work:
    """Shows on a terminal what a command is doing, and keeps the last lines of the env's output.

    Args:
        status: The line on the terminal. The command prints through the console of this line.
        output: The file for the env's output; ``None``: the output is shown.

    Attributes:
        is_busy: Other programs had kept all cores busy before the work began.
    """

    def __init__(self, status: Status, output: IO[bytes] | None) -> None:
        self.console = status.console
        self._status, self._output, self._load = status, output, os.getloadavg()[0]
        self.is_busy = self._load > len(cores())
        self.printed = ""

    def update(self, doing: str) -> None:
        """Show what is being done now."""
        self._status.update(Text(doing))

    def warn_if_busy(self) -> None:
        """Say so on stderr if other programs had kept all cores busy."""
        if self.is_busy:
            print(f"This machine is busy (load {self._load:.0f}): do not trust these figures.", file=sys.stderr)

    def finish(self) -> None:
        """Set ``printed``: how much the env has printed, and the last lines; ``""`` if nothing, or if it was shown."""
        if self._output is None or not (size := os.fstat(self._output.fileno()).st_size):
            return
        tail = os.pread(self._output.fileno(), _TAIL, max(0, size - _TAIL))
        lines = [line[:200] for line in tail.decode(errors="replace").splitlines() if line.strip()]
        newest_first = dict.fromkeys(reversed(lines))  # each of them once: every process prints the same warnings
        last = "\n".join(f"    {line}" for line in [*newest_first][:_LAST_LINES][::-1])
        self.printed = visible(f"The env printed {decimal(size)}; --verbose shows all of it. The last lines:\n{last}")

    def print_document(self, document: dict[str, Any]) -> None:
        """Print the result as JSON, with what the env has printed."""
        print(json.dumps({**document, "printed": self.printed}, indent=1))

    def show_printed(self, console: Console) -> None:
        """Print the text that :meth:`finish` has set."""
        if self.printed:
            console.print(Text(self.printed, "dim"), soft_wrap=True)


@contextlib.contextmanager
def at_work(doing: str, *, as_json: bool, verbose: bool) -> Iterator[Work]:
    """Show on a terminal what is being done, and hide distracting output.

    Warnings about losses are hidden: these losses are intended. The env's output goes to stderr with ``verbose``.
    Otherwise only its last lines are kept, and a UsageError that is raised in the block ends with them.
    """
    logger = logging.getLogger("multienv")
    level = logger.level
    logger.setLevel(logging.ERROR)
    own: Any = sys.stderr if as_json else sys.stdout
    with contextlib.ExitStack() as stack:
        stack.callback(logger.setLevel, level)
        if own in (sys.__stdout__, sys.__stderr__):
            own = stack.enter_context(os.fdopen(os.dup(own.fileno()), "w", encoding=own.encoding))
        output = None if verbose else stack.enter_context(tempfile.TemporaryFile())
        hidden = 2 if output is None else output.fileno()
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            saved = os.dup(number)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, number)
            stack.callback(stream.flush)
            os.dup2(hidden, number)
        work = Work(stack.enter_context(plain_console(file=own).status(Text(doing))), output)
        try:
            yield work
        except UsageError as error:
            work.finish()
            raise UsageError("\n".join(filter(None, [str(error), work.printed]))) from error
        work.finish()


def vector_env_code(env: NamedEnv, num_envs: int, options: str, *, lists: bool = False) -> str:
    """Return the lines of Python that make a vector env of the env, with these constructor options.

    With ``lists``: a ``MultiEnv``, for an env that a vector env does not take.
    """
    names = [name for name in ("Deadlines", "RestartPolicy") if f"{name}(" in options]
    makers = ["MultiEnv", "create_subprocess_envs"] if lists else ["SubprocessVectorEnv"]
    made = f"{makers[-1]}([{env.code}] * {num_envs}{options and ', '}{options})"
    lines = [
        env.imports,
        f"from multienv import {', '.join(sorted([*names, *makers], key=str.swapcase))}",
        f"envs = MultiEnv({made})" if lists else f"envs = {made}",
    ]
    return "\n".join(lines)
