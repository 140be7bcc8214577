"""Arguments and options that several commands have in common."""

from __future__ import annotations

import json
from typing import Annotated

import gymnasium
import typer

from multienv.cli.env_functions import EnvFn, named

EnvArgument = Annotated[
    str, typer.Argument(help="The env's id, 'module:id' where a module registers it, or 'module:function'.")
]
KwargsOption = Annotated[str, typer.Option(help="Arguments of the env, as JSON.")]


def env_function(env: str, env_kwargs: str) -> EnvFn:
    """Return a function that builds the env; raise BadParameter if a first try fails."""
    try:
        env_fn = named(env, **json.loads(env_kwargs))
        env_fn().close()
    except (ValueError, TypeError, gymnasium.error.Error, ImportError) as error:
        raise typer.BadParameter(f"{env} cannot be made: {error}") from error
    return env_fn
