"""What several commands have in common: arguments and options, errors in one line, and plain output."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.status import Status

from multienv import SubprocessEnv
from multienv.cli.env_functions import Named, named
from multienv.cli.texts import visible
from multienv.cluster.cluster import import_ray
from multienv.config import Deadlines
from multienv.errors import EnvsFailedError, MultienvError, UsageError
from multienv.testing.probe import RAISE, walk

EnvArgument = Annotated[
    str,
    typer.Argument(
        metavar="ENV",
        help="The env: an id; module:id where a module registers it; module:function or module:Class; "
        "file.py:function or file.py:Class. Modules of the current directory are found.",
    ),
]
KwargsOption = Annotated[str, typer.Option(help="Arguments of the env, as JSON.", metavar="JSON")]
NumEnvsOption = Annotated[int, typer.Option("--envs", "--num-envs", min=1, help="How many of it.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else on stdout.")]
ReportsOption = Annotated[
    Path | None, typer.Option(help="Where the reports lie; else $MULTIENV_REPORTS, else the user's cache.")
]
BackendOption = Annotated[str, typer.Option(help="Where the envs are: subprocess or ray.")]

_TRIAL = Deadlines(reset=60.0, step=30.0)
_TRIAL_STEPS = 20

# What an env says is shown as it is.
plain_console = partial(Console, markup=False, highlight=False)


def refuse(text: str) -> NoReturn:
    """Say in one line on stderr what is wrong with what was asked for, and end with exit code 2."""
    print(visible(text), file=sys.stderr)
    raise typer.Exit(2)


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its type; of several errors that of the first."""
    if isinstance(error, EnvsFailedError):
        return first_line(next(iter(error.failures.values())))
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def arguments_of(env_kwargs: str) -> dict[str, Any]:
    """Return the arguments in ``--env-kwargs``; end the command if they are none."""
    try:
        arguments = json.loads(env_kwargs)
    except ValueError as error:
        refuse(f"--env-kwargs {env_kwargs}: this is not JSON: {error}.")
    if not isinstance(arguments, dict):
        refuse(f'--env-kwargs {env_kwargs}: give a JSON object, such as {{"size": 4}}.')
    return arguments


def checked_backend(backend: str) -> str:
    """Return the name of a backend; end the command if there is none of it, or what it needs is not installed."""
    if backend not in ("subprocess", "ray"):
        refuse(f"--backend {backend}: choose subprocess or ray.")
    if backend == "ray":
        try:
            import_ray()
        except UsageError as error:
            refuse(first_line(error))
    return backend


def named_env(env: str, env_kwargs: str) -> Named:
    """Return what builds the env, by its name on the command line; end the command if there is none."""
    try:
        return named(env, **arguments_of(env_kwargs))
    except UsageError as error:
        refuse(first_line(error))


def working_env(env: str, env_kwargs: str) -> Named:
    """Return the same; end the command if the env cannot be built, reset and stepped in a process of its own."""
    found = named_env(env, env_kwargs)
    try:
        with SubprocessEnv(found.env_fn, restart=RAISE, deadlines=_TRIAL, reports="") as worker:
            walk(worker, _TRIAL_STEPS, seconds=1.0)
    except MultienvError as error:
        refuse(f"{env} does not work: {first_line(error)} `multienv doctor {env}` says more.")
    return found


def share_import_path() -> None:
    """Have a Ray that this process starts find the env's module as this process does: its nodes inherit this."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))


@contextlib.contextmanager
def at_work(doing: str, *, as_json: bool) -> Iterator[Status]:
    """Show on a terminal what is being done, and keep from it what would only disturb.

    These are warnings of losses, which are meant here; and with ``as_json`` what envs print, which goes to stderr. What
    is printed meanwhile goes through the console of the status, which makes room for it.
    """
    logger, saved = logging.getLogger("multienv"), os.dup(1)
    level = logger.level
    logger.setLevel(logging.ERROR)
    if as_json:
        os.dup2(2, 1)
    try:
        with plain_console(stderr=as_json).status(doing) as status:
            yield status
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        logger.setLevel(level)


def vector_env_code(env: Named, num_envs: int, options: str) -> str:
    """Return the lines of Python that make a vector env of it, with these options of its constructor."""
    names = [name for name in ("Deadlines", "RestartPolicy") if f"{name}(" in options]
    lines = [
        env.imports,
        f"from multienv import {', '.join([*names, 'SubprocessVectorEnv'])}",
        f"envs = SubprocessVectorEnv([{env.code}] * {num_envs}{options and ', '}{options})",
    ]
    return "\n".join(lines)
