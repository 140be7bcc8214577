"""``multienv chaos``: kill workers for a while, and compare with an undisturbed run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from multienv._engine.reports.texts import exit_text
from multienv.cli.checks import working_env
from multienv.cli.options import (
    EnvArgument,
    JsonOption,
    KwargsOption,
    NumEnvsOption,
    VerboseOption,
    at_work,
    plain_console,
)
from multienv.config import Deadlines, RestartPolicy
from multienv.errors import MultienvError, UsageError, first_line
from multienv.events import Event, Recovery
from multienv.testing.recovery_check import MANY_RESTARTS, check_env_recovers


def chaos(
    env: EnvArgument,
    num_envs: NumEnvsOption = 4,
    kills: Annotated[int, typer.Option(min=1, help="Stop after this many signals.")] = 100,
    minutes: Annotated[float, typer.Option(min=0.0, help="Stop after this many minutes.")] = float("inf"),
    seed: Annotated[int, typer.Option(min=0, help="Seed for actions, victims, signals and pauses.")] = 0,
    env_kwargs: KwargsOption = "{}",
    step_deadline: Annotated[float, typer.Option(help="Seconds after which a step counts as hung.")] = 0.5,
    reset_deadline: Annotated[float, typer.Option(help="The same for a reset.")] = 5.0,
    pause: Annotated[float, typer.Option(min=0.0, help="Longest pause between two signals, in seconds.")] = 0.05,
    snapshots: Annotated[bool, typer.Option(help="Recover from forked snapshots, or only by replay.")] = True,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Step an env while its workers are killed, and compare every transition with an undisturbed run.

    Workers are killed, crashed and stopped at random moments.
    A recovery is exact, or replayed from a reset, or the episode is truncated with a reason.
    Workers that the env itself loses are recovered too, and counted by themselves.

    Exit code 0: nothing differed silently: there was no difference after exact recoveries.
    1: something differed silently.
    2: the env is not deterministic, does not work, or does not exist.

    For example:

    multienv chaos CartPole-v1 --kills 200

    multienv chaos my_envs:make_my_env --kills 50 --no-snapshots
    """
    recoveries: list[Recovery] = []

    def show_progress(event: Event) -> None:
        if isinstance(event, Recovery):
            recoveries.append(event)
            work.update(f"{len(recoveries)} workers lost, {kills} signals in all ...")

    with at_work("building ...", as_json=as_json, verbose=verbose) as work:
        found, _ = working_env(env, env_kwargs)
        try:
            result = check_env_recovers(
                found.env_fn,
                num_envs=num_envs,
                kills=kills,
                seconds=60 * minutes,
                seed=seed,
                manners=("SIGKILL", "SIGSEGV", "SIGSTOP"),
                interval=(0.0, pause),
                hooks=[show_progress],
                restart=RestartPolicy(snapshots=snapshots, max_restarts=MANY_RESTARTS),
                deadlines=Deadlines(step=step_deadline, reset=reset_deadline),
            )
        except MultienvError as error:
            raise UsageError(
                f"{env} fails on its own: {first_line(error)} For details, run `multienv doctor {env}`."
            ) from error
    seconds = np.quantile([one.seconds for one in recoveries] or [0.0], [0.5, 0.99])
    killed = set(result.killed)
    own = _causes(one for one in recoveries if one.loss.pid not in killed)
    if undisturbed := result.own_losses - own.total():
        own["in the undisturbed run"] = undisturbed
    document = {
        "env": env,
        **{name: value for name, value in asdict(result).items() if name != "killed"},
        "causes": _causes(one for one in recoveries if one.loss.pid in killed),
        "own_causes": own,
        "outcomes": Counter(one.outcome for one in recoveries),
        "methods": Counter(one.method for one in recoveries if one.method),
        "seconds": {"median": seconds[0], "p99": seconds[1]},
    }
    if as_json:
        work.print_document(document)
    if result.undisturbed:
        raise UsageError(
            f"{env} is not deterministic: without any kill, two processes differ {result.undisturbed}. "
            f"So chaos cannot judge its recoveries. For details, run `multienv doctor {env}`."
        )
    if not as_json:
        console = plain_console()
        console.print(_table(document))
        work.show_printed(console)
        for style, differences in (("yellow", result.strayed), ("red", result.mismatches)):
            for difference in differences:
                console.print(difference, style=style)
        if result.own_losses:
            told = f"The env itself crashed or hung {result.own_losses} times, without a signal."
            console.print(f"{told} To see where: `multienv doctor {env}`.", style="yellow", soft_wrap=True)
    raise typer.Exit(1 if result.mismatches else 0)


def _causes(recoveries: Iterable[Recovery]) -> Counter[str]:
    """Count the losses by their cause."""
    return Counter(f"{one.loss.cause}: {exit_text(one.loss.exit_code).partition(' (')[0]}" for one in recoveries)


def _table(told: dict[str, Any]) -> Table:
    ends = f"{told['episodes']:,} ends of episodes" if told["episodes"] else "no end of an episode"
    title = f"{told['env']}: {told['steps']:,} steps and {ends} compared with an undisturbed run"
    table = Table(title=title, show_header=False, min_width=len(title))
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("signals sent", f"{told['kills']:,}")
    for name, counts in (
        ("lost", "causes"),
        ("lost by itself", "own_causes"),
        ("outcome", "outcomes"),
        ("recovered by", "methods"),
    ):
        for kind, number in sorted(told[counts].items()):
            kind = kind.removeprefix("died: ").replace(": ", ", ")
            table.add_row(f"{name}: {kind}", f"{number:,}")
    table.add_section()
    table.add_row("time to recover, median", f"{1000 * told['seconds']['median']:.1f} ms")
    table.add_row("time to recover, 99th percentile", f"{1000 * told['seconds']['p99']:.1f} ms")
    table.add_section()
    table.add_row("episodes not recovered", f"{len(told['truncated']):,}")
    if told["strayed"]:
        table.add_row("went another way after 'replayed'", f"{len(told['strayed']):,}", style="yellow")
    table.add_row("mismatches", f"{len(told['mismatches']):,}", style="red" if told["mismatches"] else "green")
    return table
