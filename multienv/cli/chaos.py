"""``multienv chaos``: kills for a while, beside an undisturbed run."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from multienv.cli.options import EnvArgument, KwargsOption
from multienv.cli.options import working_env_function as env_function
from multienv.config import Deadlines, RestartPolicy
from multienv.testing.chaos import Chaos, run_chaos


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
    env_fn = env_function(env, env_kwargs)
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
