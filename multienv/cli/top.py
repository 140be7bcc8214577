"""``multienv top``: show a live table of a running trainer's workers. The trainer needs no code for it."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from multienv._engine.reports import store
from multienv._engine.reports.read import summary_of
from multienv.cli.onlooker import TrainerView
from multienv.cli.options import JsonOption, ReportsOption, plain_console
from multienv.cli.texts import duration, report_line

_STYLES = {"building": "cyan", "replaying": "yellow", "busy": "green", "idle": ""}
_COLUMNS = ("worker", "pid", "state", "for", "busy", "waited", "per step", "in env", "steps/s", "RSS", "restarts")
_LOSSES_SHOWN = 5


def top(
    pid: Annotated[int | None, typer.Argument(help="PID of the trainer. Not needed if only one runs.")] = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two tables.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Watch for --every seconds, print one table, and end.")] = False,
    reports: ReportsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what the workers of a running trainer are doing, how long, and which one it waits for. Ctrl-C ends it.

    The trainer needs no code for it, and does not notice. You must be the user of the trainer, or root.

    Exit code 2: the trainer does not exist, or belongs to another user.

    For example:

    multienv top

    multienv top 4711 --once
    """
    directory = store.directory_for(reports)
    with contextlib.closing(TrainerView(pid)) as trainer, contextlib.suppress(KeyboardInterrupt):
        if once or as_json or not sys.stdout.isatty():
            trainer.watch(every)
            document = _document(trainer, directory)
            if as_json:
                print(json.dumps(document, indent=1))
            else:
                plain_console().print(_drawn(document))
            return
        with Live(console=plain_console(), screen=True, auto_refresh=False) as live:
            while trainer.is_there:
                trainer.watch(every)
                live.update(_drawn(_document(trainer, directory)), refresh=True)
        print(f"The trainer {trainer.pid} has ended.")


def _document(trainer: TrainerView, directory: Path | None) -> dict[str, Any]:
    """Return everything that is shown, as JSON values."""
    started = trainer.started - 1.0  # an earlier process may have had the same pid
    paths = [path for path in store.listed(directory, trainer.pid) if store.time_of(path) >= started]
    row = max(trainer.rows, key=lambda row: (row["awaited"], row["seconds"]), default=None)
    return {
        "trainer": {"pid": trainer.pid, "command": trainer.command, "started": trainer.started},
        "waited_for": row if row is not None and row["awaited"] >= 0.5 else None,
        "workers": trainer.rows,
        "reports": {"directory": directory and str(directory), "number": len(paths)},
        "losses": [found for found in map(summary_of, paths[:_LOSSES_SHOWN]) if found is not None],
    }


def _drawn(document: dict[str, Any]) -> Group:
    """Draw everything that is shown. The end is cut off if it does not fit, so the table is the end."""
    waited_for, reports, rows = document["waited_for"], document["reports"], document["workers"]
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"trainer {document['trainer']['pid']}: ", "bold").append(f"{document['trainer']['command']}\n")
    if 2 * sum(row["awaited"] >= 0.5 for row in rows) > len(rows) > 1:
        text.append("The trainer waits for most of its workers.\n")
    elif waited_for is not None:
        long = f", same request for {_seconds(waited_for)}" if waited_for["seconds"] >= 1.0 else ""
        text.append(
            f"The trainer waits for {waited_for['name']} ({waited_for['awaited']:.0%} of the time){long}.\n", "yellow"
        )
    elif sum(row["busy"] for row in rows) < 0.5 * len(rows):
        text.append("The workers wait for the trainer.\n")
    else:
        text.append("The trainer does not wait for one worker more than for the others.\n")
    text.append(f"Crash reports in {reports['directory']}: {reports['number']}\n", "dim")
    for loss in document["losses"]:
        text.append(f"{report_line(loss)}\n")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in _COLUMNS[:3] else "right", no_wrap=name != "state")
    for row in rows:
        what = " of ".join(filter(None, (row["request"], row["env"])))
        table.add_row(
            row["name"],
            str(row["pid"]),
            Text(row["state"], _STYLES.get(row["state"], "red")).append(what and f": {what}", ""),
            _seconds(row),
            f"{row['busy']:.0%}",
            Text(f"{row['awaited']:.0%}", "yellow" if row["awaited"] >= 0.5 else ""),
            "" if row["step_seconds"] is None else duration(row["step_seconds"]),
            "" if row["env_seconds"] is None else duration(row["env_seconds"]),
            f"{row['steps_per_second']:,.0f}",
            decimal(row["rss"]),
            str(row["restarts"]),
        )
    return Group(text, table)


def _seconds(row: dict[str, Any]) -> str:
    return f"{'> ' if row['at_least'] else ''}{duration(row['seconds'])}"
