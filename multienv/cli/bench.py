"""``multienv bench``: measure a batch of an env in several layouts, and recommend one."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from multienv._engine.cores import cores
from multienv.cli.checks import working_env
from multienv.cli.measuring import WORTH_IT, Contender, measure, recommended
from multienv.cli.options import (
    EnvArgument,
    JsonOption,
    KwargsOption,
    NumEnvsOption,
    VerboseOption,
    at_work,
    plain_console,
    vector_env_code,
)
from multienv.errors import UsageError


def bench(
    env: EnvArgument,
    num_envs: NumEnvsOption = 8,
    seconds: Annotated[float, typer.Option(min=0.01, help="Length of each turn.")] = 0.25,
    repeats: Annotated[int, typer.Option(min=1, help="Number of turns per contender.")] = 7,
    step_deadline: Annotated[
        float | None,
        typer.Option(min=0.01, help="Seconds after which a step counts as hung. Default: by the times of the first."),
    ] = None,
    env_kwargs: KwargsOption = "{}",
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast a batch of an env steps. Which layout is best, and how close is it to the limit of the cores?

    All contenders are built first. Then they step in turn, with random actions.
    Ratios and shares are medians over the turns. Run it on an idle machine.

    The limit is the most that the cores can do: one process per core steps an env, and does nothing else.

    For example:

    multienv bench CartPole-v1 --num-envs 32

    multienv bench my_envs.py:MyEnv
    """
    with at_work("building ...", as_json=as_json, verbose=verbose) as work:
        found, walk = working_env(env, env_kwargs, step_deadline or 10.0)
        options: Any = {"step_deadline": step_deadline, "seconds": seconds, "repeats": repeats, "say": work.update}
        try:
            limit, contenders = measure(found.env_fn, num_envs, walk, **options)
        except UsageError as error:
            raise UsageError(f"{env} cannot be measured: {error}. For details, run `multienv doctor {env}`.") from error
    best = recommended(contenders)
    document = {
        "env": env,
        "num_envs": num_envs,
        "cores": len(cores()),
        "contenders": _rows(limit, contenders, best),
        "recommended": best.name,
        "code": vector_env_code(found, num_envs, best.options or ""),
        "printed": work.printed,
    }
    work.warn_if_busy()
    if as_json:
        print(json.dumps(document, indent=1))
        return
    console = plain_console()
    work.show_printed(console)
    _show(console, document)
    if any(one.is_local and (one.ratio(best) or 0.0) > WORTH_IT for one in contenders):
        console.print("This env is faster without processes. Use them only if it must survive crashes.")
    console.print(f"Recommended:\n{document['code']}", soft_wrap=True)


def _rows(limit: Contender, contenders: list[Contender], best: Contender) -> list[dict[str, Any]]:
    """Return the measurements as JSON values: the fastest first, then those that died, and the limit last."""
    return [
        {
            "package": one.package,
            "name": one.name,
            "died": one.died,
            "steps_per_second": one.rate,
            "share_of_limit": one.ratio(limit),
            "recommended_is_faster_by": best.ratio(one),
            "rates": one.rates,
        }
        for one in (*sorted(contenders, key=lambda one: -one.rate), limit)
    ]


def _show(console: Console, document: dict[str, Any]) -> None:
    console.print(f"{document['env']} × {document['num_envs']} on {document['cores']} cores", soft_wrap=True)
    table = Table("", box=None, pad_edge=False)
    for header in ("steps/s", "of the\nlimit", "recommended\nis faster by"):
        table.add_column(header, justify="right")
    for one in document["contenders"]:
        is_best = one["name"] == document["recommended"]
        is_compared = not is_best and one["package"] != "limit"
        share, ratio = one["share_of_limit"], one["recommended_is_faster_by"]
        owner = "gymnasium's " if one["package"] == "gymnasium" else ""
        table.add_row(
            owner + one["name"].replace("(env_fns, ", "(").removesuffix("(env_fns)"),
            "died" if one["died"] else f"{one['steps_per_second']:,.0f}",
            "" if share is None else f"{share:.2f}",
            "" if ratio is None or not is_compared else f"{ratio:.2f} ×",
            style="bold" if is_best else "",
        )
    console.print(table)
    for one in document["contenders"]:
        if one["died"]:
            console.print(f"Died: {one['name']}: {one['died']}", style="yellow", soft_wrap=True)
