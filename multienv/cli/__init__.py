"""The command line: ``multienv replay``, ``multienv chaos``, ``multienv bench``."""

from __future__ import annotations

import faulthandler
import json
import sys
from bdb import BdbQuit
from functools import partial
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as missing:
    # Not "multienv[cli]" alone: on the package index that name belongs to another project.
    sys.exit(f'The multienv command needs {missing.name}: pip install -e ".[cli]" in a checkout of multienv.')

import gymnasium

from multienv.cli.bench import measure
from multienv.cli.env_functions import EnvFn, env_functions, named
from multienv.cli.replaying import EnvRaised, Rerun
from multienv.config import Deadlines, RestartPolicy
from multienv.errors import UsageError
from multienv.reports.read import Report, load
from multienv.testing.chaos import Chaos, run_chaos

app = typer.Typer(add_completion=False, no_args_is_help=True)

EnvArgument = Annotated[
    str, typer.Argument(help="The env's id, 'module:id' where a module registers it, or 'module:function'.")
]
KwargsOption = Annotated[str, typer.Option(help="Arguments of the env, as JSON.")]


@app.callback()
def main() -> None:
    """Run gymnasium environments in processes that may die at any moment."""


@app.command()
def chaos(
    env: EnvArgument,
    num_envs: Annotated[int, typer.Option(min=1, help="How many of it.")] = 4,
    kills: Annotated[int, typer.Option(min=1, help="End after so many workers lost.")] = 100,
    minutes: Annotated[float | None, typer.Option(min=0.0, help="End after this time.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides actions, victims, manners and pauses.")] = 0,
    env_kwargs: KwargsOption = "{}",
    step_deadline: Annotated[float, typer.Option(help="Seconds after which a stopped worker counts as hung.")] = 0.5,
    reset_deadline: Annotated[float, typer.Option(help="The same for a reset.")] = 5.0,
    pause: Annotated[float, typer.Option(min=0.0, help="Longest pause between two strikes, in seconds.")] = 0.05,
    snapshot_every: Annotated[int | None, typer.Option(min=1, help="Steps between two snapshots.")] = None,
    snapshots: Annotated[bool, typer.Option(help="Recover from forked snapshots, or by replay alone.")] = True,
) -> None:
    """Step an env while its workers are killed, and hold every transition against an undisturbed run.

    Exit code 1 if any differs silently. An episode that could not be brought back exactly ends with a reason instead.
    """
    policy = RestartPolicy(snapshots=snapshots, snapshot_every=snapshot_every, max_restarts=1_000_000)
    env_fn = _env_function(env, env_kwargs)
    console = Console()
    with console.status("building ...") as status:
        result = run_chaos(
            env_fn,
            num_envs=num_envs,
            kills=kills,
            seconds=float("inf") if minutes is None else 60 * minutes,
            seed=seed,
            interval=(0.0, pause),
            progress=lambda so_far: status.update(
                f"{so_far.kills} of {kills} workers lost, {so_far.steps:,} steps ..."
            ),
            restart=policy,
            deadlines=Deadlines(step=step_deadline, reset=reset_deadline),
        )
    console.print(_chaos_table(env, result))
    for mismatch in result.mismatches:
        console.print(f"[red]{mismatch}")
    raise typer.Exit(1 if result.mismatches else 0)


@app.command()
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


@app.command()
def bench(
    env: EnvArgument,
    num_envs: Annotated[int, typer.Option(min=1, help="How many of it.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each way is measured.")] = 2.0,
    env_kwargs: KwargsOption = "{}",
) -> None:
    """Step a batch of an env in several ways, and recommend one: in this process, or so many envs a worker."""
    env_fn = _env_function(env, env_kwargs)
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


def _env_function(env: str, env_kwargs: str) -> EnvFn:
    """Return a function that builds the env; raise BadParameter if a first try fails."""
    try:
        env_fn = named(env, **json.loads(env_kwargs))
        env_fn().close()
    except (ValueError, TypeError, gymnasium.error.Error, ImportError) as error:
        raise typer.BadParameter(f"{env} cannot be made: {error}") from error
    return env_fn


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


def _chaos_table(env: str, result: Chaos) -> Table:
    title = f"{env}: {result.steps:,} steps held against an undisturbed run"
    table = Table(title=title, show_header=False, min_width=len(title))
    table.add_column("")
    table.add_column("", justify="right")
    for title, counts in (("struck", result.strikes), ("lost", result.losses), ("brought back by", result.rungs)):
        for name, number in sorted(counts.items()):
            table.add_row(f"{title}: {name}", f"{number:,}")
    table.add_section()
    table.add_row("time to recover, median", f"{1000 * result.quantile(0.5):.1f} ms")
    table.add_row("time to recover, 99 of 100", f"{1000 * result.quantile(0.99):.1f} ms")
    if len(result.usage) == 2:
        before, after = result.usage
        table.add_row("memory of the trainer", f"{before.rss / 2**20:.1f} → {after.rss / 2**20:.1f} MiB")
        table.add_row("its descriptors", f"{before.descriptors} → {after.descriptors}")
        table.add_row("its processes", f"{before.processes} → {after.processes}")
    table.add_section()
    table.add_row("episodes ended with a reason", f"{len(result.inexact):,}")
    table.add_row("mismatches", f"{len(result.mismatches):,}", style="red" if result.mismatches else "green")
    return table
