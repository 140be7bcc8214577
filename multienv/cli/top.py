"""``multienv top``: a live table of a running trainer's workers. The trainer needs no line of code for it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from multienv.cli.onlooker import Row, Trainer, Worker
from multienv.cli.options import JsonOption, refuse
from multienv.cli.texts import age_of, duration
from multienv.errors import UsageError
from multienv.reports.store import directory_for

# Seconds between two samples of a worker's words.
_SAMPLING = 0.02
_STYLES = {"building": "cyan", "replaying": "yellow", "busy": "green", "idle": ""}
_COLUMNS = ("worker", "pid", "state", "for", "busy", "waited", "ms/step", "in env", "RSS", "lost")
# An arrow sends three characters; this is the last of them.
_ARROWS = {"A": -1, "B": 1}
_KEYS = "↑ ↓ select   s stack   k kill (the trainer brings it back)   q quit"
# Workers above the selected one that stay on the screen, however many there are.
_ABOVE = 8


def top(
    pid: Annotated[int | None, typer.Argument(help="The trainer; not needed where only one runs.")] = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two tables.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look for so long, print one table, and end.")] = False,
    reports: Annotated[
        Path | None, typer.Option(help="Where its reports lie; else $MULTIENV_REPORTS, else the user's cache.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what the workers of a running trainer are doing, for how long, and who is waited for.

    The trainer needs no line of code for it, and does not notice. You must be its user, or root.

    Exit code 2: there is no such trainer, or it is not yours.
    """
    try:
        trainer = Trainer(pid, directory_for(reports))
    except UsageError as error:
        refuse(str(error))
    with contextlib.closing(trainer):
        if not (once or as_json) and sys.stdin.isatty() and sys.stdout.isatty():
            Screen(trainer, every).run()
            return
        until = time.monotonic() + every
        while time.monotonic() < until:
            trainer.sample()
            time.sleep(_SAMPLING)
        trainer.look()
        if as_json:
            print(json.dumps(trainer.as_json(), indent=1))
        else:
            Console().print(Group(_headline(trainer), _losses(trainer), _table(trainer.rows, -1)))


class Screen:
    """Shows the table until ``q``, Ctrl-C, or the end of the trainer.

    Args:
        trainer: What is shown.
        every: Seconds between two tables.
    """

    def __init__(self, trainer: Trainer, every: float) -> None:
        self._trainer, self._every = trainer, every
        self._place = 0  # of the selected worker
        self._text = ""
        self._victim: Worker | None = None  # to be killed if the next key says so

    def run(self) -> None:
        """Show it."""
        console, trainer, due = Console(), self._trainer, 0.0
        key: str | None = None
        live = Live(console=console, screen=True, auto_refresh=False)
        with contextlib.suppress(KeyboardInterrupt), _single_keys(), live:
            while trainer.is_there() and (key is None or self._press(key)):
                if time.monotonic() >= due:
                    trainer.look()
                    due = time.monotonic() + self._every
                live.update(self._drawn(), refresh=True)
                key = self._next_key(due)
        if not trainer.is_there():
            console.print(f"The trainer {trainer.pid} has ended.")

    def _next_key(self, due: float) -> str | None:
        """Sample until a key is pressed, and return it, ``""`` if the terminal is gone; ``None``: a table is due."""
        while time.monotonic() < due:
            self._trainer.sample()
            if select.select([sys.stdin], [], [], _SAMPLING)[0]:
                return os.read(sys.stdin.fileno(), 64).decode(errors="replace")[-1:]
        return None

    def _press(self, key: str) -> bool:
        """Carry out a key; false if it ends all."""
        rows, victim = self._trainer.rows, self._victim
        self._place = max(0, min(self._place + _ARROWS.get(key, 0), len(rows) - 1))
        worker = self._trainer.workers.get(rows[self._place].pid) if rows else None
        self._text, self._victim = "", None
        if victim is not None and key == "y":
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)
            self._text = f"Process {victim.pid} was killed."
        elif worker is not None and key == "s":
            self._text = f"Stack of {worker.name}, process {worker.pid}:\n{worker.stack()}"
        elif worker is not None and key == "k":
            self._text, self._victim = f"Kill process {worker.pid} ({worker.name})? y: yes; any other key: no", worker
        return key not in ("q", "")

    def _drawn(self) -> Group:
        """Return all that is shown. What does not fit is cut off at the end, so the table is last."""
        parts = [_headline(self._trainer), Text(_KEYS, style="dim"), _losses(self._trainer)]
        if self._text:
            parts.append(Text(f"{self._text}\n", no_wrap=True, overflow="ellipsis"))
        return Group(*parts, _table(self._trainer.rows, self._place))


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Have the terminal hand over each key at once, without showing it."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _headline(trainer: Trainer) -> Text:
    waited_for = trainer.waited_for
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"trainer {trainer.pid}, for {duration(trainer.seconds)}: ", style="bold")
    line.append(f"{trainer.command}\n")
    if waited_for is not None:
        at = f", at it for {_seconds(waited_for)}" if waited_for.seconds >= 1.0 else ""
        line.append(f"It waits for {waited_for.name} ({waited_for.awaited:.0%} of the time){at}.", style="yellow")
    elif all(row.busy < 0.1 for row in trainer.rows):
        line.append("The workers wait for it.")
    else:
        line.append("It waits for no worker in particular.")
    return line


def _losses(trainer: Trainer) -> Text:
    """Draw the newest losses, one line each."""
    text = Text(no_wrap=True, overflow="ellipsis")
    if not trainer.losses:
        where = (
            f" in {trainer.directory}; --reports DIR looks elsewhere" if any(r.restarts for r in trainer.rows) else ""
        )
        return text.append(f"No reports of losses{where}.\n", style="dim")
    text.append(f"Losses: {trainer.reports}; the newest, in {trainer.directory}:\n", style="bold")
    for one in trainer.losses:
        text.append(f"{age_of(one.path):>11}  {one.outcome:9}  {one.what}\n")
    return text


def _table(rows: list[Row], selected: int) -> Table:
    """Draw the workers, the one at this place as selected; -1: none."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in _COLUMNS[:3] else "right", no_wrap=True)
    for place, row in list(enumerate(rows))[max(0, selected - _ABOVE) :]:
        table.add_row(
            row.name,
            str(row.pid),
            _doing(row),
            _seconds(row),
            f"{row.busy:.0%}",
            Text(f"{row.awaited:.0%}", style="yellow" if row.awaited >= 0.5 else ""),
            _milliseconds(row.step_ms),
            _milliseconds(row.env_ms),
            "" if row.rss is None else f"{row.rss / 2**20:,.0f}M",
            str(row.restarts),
            style="reverse" if place == selected else "",
        )
    return table


def _doing(row: Row) -> Text:
    what = " of ".join(filter(None, (row.request, row.env)))
    text = Text(row.state, style=_STYLES.get(row.state, "red"))
    return text.append(f": {what}" if what else "", style="")


def _seconds(row: Row) -> str:
    return f"{'> ' if row.at_least else ''}{duration(row.seconds)}"


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
