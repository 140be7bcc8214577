"""``multienv bench``: measures a batch of an env in several ways, and recommends one."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from multienv.cli.measuring import measure
from multienv.cli.options import EnvArgument, KwargsOption
from multienv.cli.options import working_env_function as env_function


def bench(
    env: EnvArgument,
    num_envs: Annotated[int, typer.Option(min=1, help="How many of it.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each way is measured.")] = 2.0,
    env_kwargs: KwargsOption = "{}",
) -> None:
    """Step a batch of an env in several ways, and recommend one: in this process, or so many envs a worker."""
    env_fn = env_function(env, env_kwargs)
    console = Console()
    with console.status("measuring ..."):
        rates = measure(env_fn, num_envs, seconds)
    table = Table("how", title=f"{env} × {num_envs}, random actions")
    table.add_column("env steps a second", justify="right")
    for way, rate in rates.items():
        table.add_row(way, f"{rate:,.0f}")
    console.print(table)
    best = max(rates, key=lambda way: rates[way])
    console.print(f"Fastest here: {best}", highlight=False)
    if best.startswith("Sync"):
        console.print(f"{num_envs} envs of this kind gain nothing from processes but survival.")
