"""``multienv doctor``: find out whether an env survives the death of its process, and why not."""

from __future__ import annotations

from textwrap import indent
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from multienv.cli.checks import Conclusion, Patient, Row, Verdict, examine, options_for
from multienv.cli.env_functions import named
from multienv.cli.options import (
    EnvArgument,
    JsonOption,
    KwargsOption,
    VerboseOption,
    arguments_of,
    at_work,
    plain_console,
    vector_env_code,
)

_MARKS: dict[Verdict, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "note": ("!", "yellow"),
    "truncates": ("✗", "yellow"),
    "broken": ("✗", "red"),
}
_NAME_WIDTH = 11


def doctor(
    env: EnvArgument,
    env_kwargs: KwargsOption = "{}",
    step_deadline: Annotated[float, typer.Option(min=0.01, help="Seconds after which a step counts as hung.")] = 10.0,
    reset_deadline: Annotated[float, typer.Option(min=0.01, help="The same for a reset, and for a build.")] = 60.0,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Examine an env: does it survive the death of its process, and what does a loss cost?

    The env runs in worker processes. The doctor really kills them.

    Exit code 0: a lost worker is recovered.
    1: a lost worker's episode is truncated, or it is not known whether it goes on as it was.
    2: multienv cannot run the env, or the env does not exist.

    For example:

    multienv doctor CartPole-v1

    multienv doctor my_envs.py:MyEnv --env-kwargs '{"size": 4}'
    """
    with at_work(f"examining {env} ...", as_json=as_json, verbose=verbose) as work:
        found = named(env, **arguments_of(env_kwargs))
        patient = Patient(env, found.env_fn, step_deadline, reset_deadline, is_busy=work.is_busy)
        rows = examine(patient, lambda row: None if as_json else _show(work.console, row))
    is_broken = rows[-1].verdict == "broken"
    verdict: Conclusion = "broken" if is_broken else patient.conclusion
    code = "" if is_broken else vector_env_code(found, 8, options_for(patient), lists=patient.batch == "none")
    if not is_broken:
        work.warn_if_busy()
    if as_json:
        checks = [row._asdict() for row in rows]
        told = {"env": env, "verdict": verdict, "checks": checks, "code": code, "own_faults": patient.faults}
        work.print_document(told)
    else:
        work.show_printed(plain_console())
        frames = patient.stack.rpartition("(most recent call first):")[2]
        is_shown = any(frames in row.detail for row in rows)
        _conclude(plain_console(), verdict, code, patient, "" if is_shown else patient.stack)
    raise typer.Exit({"recoverable": 0, "truncates": 1, "unknown": 1, "broken": 2}[verdict])


def _show(console: Console, row: Row) -> None:
    mark, style = _MARKS[row.verdict]
    head = Text.assemble((mark, style), f" {row.name:{_NAME_WIDTH}} ")
    width = max(_NAME_WIDTH, console.width - len(head))
    for text in filter(None, (Text(row.meaning), Text(row.advice and f"→ {row.advice}", "dim"))):
        for line in text.wrap(console, width, overflow="fold"):
            line.rstrip()
            console.print(head + line, soft_wrap=True)
            head = Text(" " * len(head))
    _show_detail(console, row.detail)


def _show_detail(console: Console, detail: str) -> None:
    if detail:
        console.print(Text(indent(detail, "    "), "dim"), soft_wrap=True)


def _conclude(console: Console, verdict: Conclusion, code: str, patient: Patient, stack: str) -> None:
    console.print()
    if verdict == "broken":
        console.print("Broken: multienv cannot run this env as it is.", style="red")
        return
    if patient.own_faults:
        cost = "is recovered, and costs time" if verdict == "recoverable" else "costs time, and may end an episode"
        console.print(f"The env itself {patient.own_faults} during the examination; each loss {cost}.", style="yellow")
        _show_detail(console, stack)
    if verdict == "recoverable":
        provided = ", if the env begins anew at each reset, which is not known" if patient.remembers is None else ""
        conclusion = f"Recoverable{provided}: your training loop does not notice a lost worker. Use"
        console.print(conclusion, style="yellow" if provided else "green", soft_wrap=True)
    elif verdict == "unknown":
        console.print("Not known to be recoverable: expect that a lost worker ends its episode.", style="yellow")
    elif patient.exact_steps and not patient.is_doomed:
        conclusion = f"Truncates, but not early: the first {patient.exact_steps:,} steps or so of a worker are "
        conclusion += "recovered exactly. Later, a lost worker may end its episode, with truncated=True and a reason."
        console.print(conclusion, style="yellow", soft_wrap=True)
    else:
        console.print("Truncates: a lost worker ends its episode, with truncated=True and a reason.", style="yellow")
    console.print(indent(code, "    "), soft_wrap=True)
