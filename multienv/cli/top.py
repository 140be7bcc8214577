"""``multienv top``: a live table of a running trainer's workers. The trainer needs no line of code for it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from multienv.cli.onlooker import IDLE, Sample, State, Trainer, Worker
from multienv.cli.texts import duration
from multienv.errors import UsageError
from multienv.reports.read import Summary
from multienv.reports.store import time_of

# Seconds between two samples of a worker's words.
SAMPLING = 0.02
_LOSSES_SHOWN = 5
# Lines of the screen that are neither workers nor losses nor a stack: two at the top, names of columns, keys.
_OTHER_LINES = 5
# Workers that are shown at the least, beside a long stack.
_LEAST_ROWS = 3
_STYLES = {State.BUILDING: "cyan", State.STARTING: "cyan", State.REPLAYING: "yellow", State.BUSY: "green"}
# What one key sends: arrows send three characters, of two kinds.
_KEY = re.compile(r"\x1b[\[O].|.", re.DOTALL)
_UP, _DOWN = "\x1b[A", "\x1b[B"
_COLUMNS = ("worker", "pid", "state", "for", "busy", "waited", "steps/s", "ms/step", "in env", "RSS", "restarts")
# Columns that are left out on a screen with fewer columns than the number.
_OPTIONAL = ("busy", "steps/s", "in env")
_WIDE = 105
_UNLIMITED = 150  # where there is no terminal
_HELP = "↑ ↓ select   s stack   k kill (the trainer brings it back)   q quit"


@dataclass(slots=True)
class Watched:
    """Adds up the samples of one worker.

    Attributes:
        last: The newest sample.
        since: When the worker was first seen at what it is doing, by ``time.monotonic()``.
        is_older: It was at that already when it was seen first.
        samples, busy, awaited: Since the last look: how many, and in how many it was not idle, and was waited for.
        number, looked: Number of the newest request at the last look, and when that was.
    """

    last: Sample
    since: float
    number: int
    looked: float
    is_older: bool = True
    samples: int = 0
    busy: int = 0
    awaited: int = 0

    def add(self, sample: Sample, now: float) -> None:
        """Add a sample."""
        if sample.work != self.last.work:
            self.since, self.is_older = now, False
        self.last = sample
        self.samples += 1
        self.busy += sample.state not in IDLE
        self.awaited += sample.is_awaited


@dataclass(frozen=True, slots=True)
class Row:
    """Holds what is shown of a worker, all of it plain values.

    Attributes:
        name: Its envs.
        pid: The process.
        state: A value of `State`, or what the kernel says: ``"stopped"``, ``"dead"``.
        request: What it executes: ``"step"``, …; ``""``: nothing.
        env: The env that is being called; ``""``: none.
        seconds: For how long it has been seen at this request, or without one.
        at_least: It may have been at it for longer.
        busy, awaited: Shares of the time: it was not idle; the trainer slept until it would answer.
        requests_per_second: Of the trainer's requests.
        step_ms: Milliseconds from one request to the next; ``None``: there was none.
        env_ms: Of them in the envs, smoothed; ``None``: not known yet.
        rss: Bytes of memory.
        restarts: Processes started in place of lost ones.
    """

    name: str
    pid: int
    state: str
    request: str
    env: str
    seconds: float
    at_least: bool
    busy: float
    awaited: float
    requests_per_second: float
    step_ms: float | None
    env_ms: float | None
    rss: int | None
    restarts: int


@dataclass(slots=True)
class Watch:
    """Samples the workers of a trainer, and makes rows of the samples.

    Attributes:
        trainer: The trainer.
        directory: Where its reports lie.
        rows: Of the workers at the last look.
        losses, reports: The newest losses; how many reports there are.
    """

    trainer: Trainer
    directory: Path | None
    rows: list[Row] = field(default_factory=list)
    losses: list[Summary] = field(default_factory=list)
    reports: int = 0
    _watched: dict[int, Watched] = field(default_factory=dict)

    def sample(self) -> None:
        """Sample each worker once."""
        now = time.monotonic()
        for pid, worker in self.trainer.workers.items():
            sample, watched = worker.sample(), self._watched.get(pid)
            if watched is None:
                watched = self._watched[pid] = Watched(sample, now, sample.number, now)
            watched.add(sample, now)

    def look(self) -> None:
        """Make rows of the samples since the last look, and find the workers and losses that are new."""
        self.sample()
        self.rows = [self._row(worker) for worker in self.trainer.in_order()]
        self.trainer.look()
        self._watched = {pid: one for pid, one in self._watched.items() if pid in self.trainer.workers}
        self.losses, self.reports = self.trainer.losses(self.directory, _LOSSES_SHOWN)

    def _row(self, worker: Worker) -> Row:
        now, watched = time.monotonic(), self._watched[worker.pid]
        sample, samples = watched.last, max(1, watched.samples)
        # Requests that are not the caller's, such as the one that builds the envs, have negative numbers.
        asked = max(0, sample.number - watched.number) if watched.number > 0 else 0
        rate = asked / max(1e-9, now - watched.looked)
        step_seconds = worker.step_seconds
        row = Row(
            name=worker.name,
            pid=worker.pid,
            state=worker.condition or sample.state.value,
            request="" if sample.state in IDLE else worker.request(sample.number),
            env=worker.env(sample.slot) if sample.slot >= 0 else "",
            seconds=now - watched.since,
            at_least=watched.is_older,
            busy=watched.busy / samples,
            awaited=watched.awaited / samples,
            requests_per_second=rate,
            step_ms=1000 / rate if rate else None,
            env_ms=None if step_seconds is None else 1000 * step_seconds,
            rss=worker.rss,
            restarts=worker.restarts,
        )
        watched.samples = watched.busy = watched.awaited = 0
        watched.number, watched.looked = sample.number, now
        return row

    @property
    def waited_for(self) -> Row | None:
        """The worker that the trainer slept for most of the time; ``None``: it waited for none worth mentioning."""
        row = max(self.rows, key=lambda row: (row.awaited, row.seconds), default=None)
        return row if row is not None and row.awaited >= 0.5 else None

    def as_json(self) -> dict[str, Any]:
        """Return all that is shown, as JSON values."""
        waited_for = self.waited_for
        return {
            "trainer": {
                "pid": self.trainer.pid,
                "command": self.trainer.command,
                "seconds": round(self.trainer.seconds, 1),
            },
            "waited_for": waited_for and waited_for.pid,
            "workers": [{name: _rounded(getattr(row, name)) for name in Row.__slots__} for row in self.rows],
            "reports": {"directory": self.directory and str(self.directory), "number": self.reports},
            "losses": [one.as_json() for one in self.losses],
        }


def top(
    pid: Annotated[int | None, typer.Argument(help="The trainer; not needed where only one runs.")] = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two tables.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look for so long, print one table, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
    reports: Annotated[
        Path | None, typer.Option(help="Where its reports lie, if its envs were given reports=... of their own.")
    ] = None,
) -> None:
    """Show what the workers of a running trainer are doing, for how long, and who is waited for.

    The trainer needs no line of code for it, and does not notice. You must be its user, or root.

    Exit code 2: there is no such trainer, or it is not yours.
    """
    try:
        trainer = Trainer(pid)
    except UsageError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    try:
        watch = Watch(trainer, reports or trainer.reports_directory())
        if once or as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
            _sample(watch, every)
            if as_json:
                typer.echo(json.dumps(watch.as_json(), indent=2))
            else:
                is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
                console = Console(width=None if is_sized else _UNLIMITED)
                console.print(_screen(watch, Selection(), console.width, limit=None))
        else:
            Screen(watch, every).run()
    finally:
        trainer.close()


def _sample(watch: Watch, seconds: float) -> None:
    until = time.monotonic() + seconds
    watch.sample()
    while time.monotonic() < until:
        time.sleep(SAMPLING)
        watch.sample()
    watch.look()


# --- the live screen ------------------------------------------------------------------------------


@dataclass(slots=True)
class Selection:
    """Says which worker is selected and what is shown below the table.

    Attributes:
        name: The worker's name: it stays when the process is replaced.
        pid: Its process; of two workers of one name this one is meant.
        text: What is shown.
    """

    name: str = ""
    pid: int = 0
    text: str = ""

    def place_in(self, rows: list[Row]) -> int:
        """Return the place of the selected worker; 0 if it is not there."""
        found = [place for place, row in enumerate(rows) if row.pid == self.pid]
        found += [place for place, row in enumerate(rows) if row.name == self.name]
        return next(iter(found), 0)

    def move(self, rows: list[Row], by: int) -> None:
        """Select another worker."""
        if rows:
            row = rows[min(max(0, self.place_in(rows) + by), len(rows) - 1)]
            self.name, self.pid = row.name, row.pid


class Screen:
    """Shows the table until ``q``, Ctrl-C, or the end of the trainer.

    Args:
        watch: What is shown.
        every: Seconds between two looks.
    """

    def __init__(self, watch: Watch, every: float) -> None:
        self._watch, self._every = watch, every
        self._selected = Selection()
        self._confirming = 0  # the process to be killed with the next key
        self._actions: dict[str, Callable[[], None]] = {
            _UP: lambda: self._selected.move(watch.rows, -1),
            _DOWN: lambda: self._selected.move(watch.rows, 1),
            "s": self._show_stack,
            "k": self._ask_to_kill,
        }

    def run(self) -> None:
        """Show it."""
        console, watch, selected = Console(), self._watch, self._selected
        with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
            _sample(watch, min(0.3, self._every))
            selected.move(watch.rows, 0)
            due = time.monotonic() + self._every
            with contextlib.suppress(KeyboardInterrupt):
                while watch.trainer.is_there():
                    live.update(_screen(watch, selected, console.width, console.height), refresh=True)
                    if not self._until(due):
                        return
                    if time.monotonic() >= due:
                        watch.look()
                        due = time.monotonic() + self._every
        if not watch.trainer.is_there():
            console.print(f"The trainer {watch.trainer.pid} has ended.")

    def _until(self, due: float) -> bool:
        """Sample until the next look is due, or a key has been pressed; false if that key ends all."""
        while time.monotonic() < due:
            self._watch.sample()
            if select.select([sys.stdin], [], [], SAMPLING)[0]:
                typed = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
                keys = [key.replace("\x1bO", "\x1b[") for key in _KEY.findall(typed)]
                return bool(keys) and all(self._press(key) for key in keys)  # no keys: the terminal is gone
        return True

    def _press(self, key: str) -> bool:
        """Carry out a key; false if it ends all."""
        if key == "q":
            return False
        confirming, self._confirming = self._confirming, 0
        if confirming:
            self._kill(confirming, is_sure=key in ("y", "k"))
        elif key in self._actions:
            self._actions[key]()
        else:
            self._selected.text = ""
        return True

    def _worker(self) -> Worker | None:
        rows, selected = self._watch.rows, self._selected
        return self._watch.trainer.workers.get(rows[selected.place_in(rows)].pid) if rows else None

    def _show_stack(self) -> None:
        worker = self._worker()
        if worker is not None:
            self._selected.text = f"Stack of {worker.name}, process {worker.pid}:\n{worker.stack()}"

    def _ask_to_kill(self) -> None:
        worker = self._worker()
        if worker is not None:
            self._confirming = worker.pid
            self._selected.text = f"Kill process {worker.pid} ({worker.name})? y or k: yes; any other key: no"

    def _kill(self, pid: int, *, is_sure: bool) -> None:
        worker = self._watch.trainer.workers.get(pid)
        is_killed = is_sure and worker is not None and worker.kill()
        done = f"Process {pid} was killed." if is_killed else f"Process {pid} has ended by itself."
        self._selected.text = done if is_sure else ""


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


# --- what is drawn --------------------------------------------------------------------------------


def _screen(watch: Watch, selected: Selection, width: int, limit: int | None) -> Group:
    """Draw everything, in so many lines if there is a limit; without one, nothing is selected and no keys are told."""
    losses, room, text = _losses(watch), len(watch.rows), ""
    if limit is not None:
        free = limit - _OTHER_LINES - len(losses)
        lines = selected.text.splitlines()[: max(1, free - 1 - min(room, _LEAST_ROWS))]
        text = "\n".join(lines)
        room = max(_LEAST_ROWS, free - len(lines) - bool(lines))
    parts: list[Any] = [_headline(watch), _table(watch, None if limit is None else selected, width, room), *losses]
    if text:
        parts += [Text(""), Text(text, no_wrap=True, overflow="ellipsis")]
    if limit is not None:
        parts += [Text(""), Text(_HELP, style="dim")]
    return Group(*parts)


def _headline(watch: Watch) -> Text:
    trainer, waited_for = watch.trainer, watch.waited_for
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"trainer {trainer.pid}, for {duration(trainer.seconds)}: ", style="bold")
    line.append(trainer.command)
    line.append("\n")
    if waited_for is None and all(row.busy < 0.1 for row in watch.rows):
        line.append("The workers wait for it.")
    elif waited_for is None:
        line.append("It waits for no worker in particular.")
    else:
        at = f", at it for {_seconds(waited_for)}" if waited_for.seconds >= 1.0 else ""
        line.append(f"It waits for {waited_for.name} ({waited_for.awaited:.0%} of the time){at}.", style="yellow")
    return line


def _table(watch: Watch, selected: Selection | None, width: int, room: int) -> Table:
    """Draw the workers: so many of them, around the selected one."""
    left_out = _OPTIONAL if width < _WIDE else ()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2 if width >= _WIDE else 1, 0, 0))
    rows = watch.rows
    place = -1 if selected is None else selected.place_in(rows)
    first = min(max(0, place - room // 2), max(0, len(rows) - room))
    shown = [_cells(row, is_waited_for=row is watch.waited_for) for row in rows[first : first + room]]
    for name in _COLUMNS:
        if name not in left_out:
            table.add_column(name, justify="left" if name in _COLUMNS[:3] else "right", no_wrap=True)
    for number, cells in enumerate(shown, first):
        wanted = [cell for name, cell in zip(_COLUMNS, cells, strict=True) if name not in left_out]
        table.add_row(*wanted, style="reverse" if number == place else "")
    return table


def _cells(row: Row, *, is_waited_for: bool) -> list[str | Text]:
    rate = row.requests_per_second
    return [
        row.name,
        str(row.pid),
        _doing(row),
        _seconds(row),
        f"{row.busy:.0%}",
        Text(f"{row.awaited:.0%}", style="yellow" if is_waited_for else ""),
        f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}",
        _milliseconds(row.step_ms),
        _milliseconds(row.env_ms),
        "" if row.rss is None else f"{row.rss / 2**20:,.0f}M",
        str(row.restarts),
    ]


def _doing(row: Row) -> Text:
    what = " of ".join(filter(None, (row.request, row.env)))
    style = next((style for state, style in _STYLES.items() if state.value == row.state), "")
    known = {state.value for state in State}
    text = Text(row.state, style=style if row.state in known else "red")
    return text.append(f": {what}" if what else "", style="")


def _losses(watch: Watch) -> list[Text]:
    """Draw the newest losses, one line each."""
    restarts = sum(row.restarts for row in watch.rows)
    if not watch.losses:
        where = f" in {watch.directory}; give --reports DIR if its envs were given another" if restarts else ""
        return [Text(""), Text(f"No reports of losses{where}.", style="dim")]
    lines = [Text(""), Text(f"Losses: {watch.reports}; the newest, in {watch.directory}:", style="bold")]
    for one in watch.losses:
        ago = duration(max(0.0, time.time() - time_of(one.path)))
        line = f"{ago:>6} ago  {one.outcome:9}  {one.what}"
        lines.append(Text(line, no_wrap=True, overflow="ellipsis"))
    return lines


def _seconds(row: Row) -> str:
    return f"{'> ' if row.at_least else ''}{duration(row.seconds)}"


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
