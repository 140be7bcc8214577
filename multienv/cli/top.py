"""``multienv top``: show a live table of a running trainer's workers. The trainer does nothing for it.

A trainer shares a segment, an anonymous file, with each of its workers. The kernel lets the same user (and root) open
the file in ``/proc/PID/fd``. It is mapped read-only here. Linux only.

The values are samples: the words change while they are read. A file published by the trainer would be easier to read.
But a trainer whose call hangs writes nothing, and only the worker's own words say which env it is in.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Group
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from multienv._engine.reports import store
from multienv._engine.reports.read import summary_of
from multienv._engine.wire.banks import RESET, STEP
from multienv._engine.wire.segment import (
    PID,
    REPLAYING,
    REPLY,
    REQUEST,
    RESTARTS,
    SHARED_NAME,
    SLOT,
    STEP_SECONDS,
    TRAINER_SLEEPS,
    Segment,
)
from multienv.cli.options import JsonOption, ReportsOption, plain_console
from multienv.cli.texts import duration, report_line
from multienv.errors import UsageError

_STYLES = {"building": "cyan", "replaying": "yellow", "busy": "green", "idle": ""}
_COLUMNS = ("worker", "pid", "state", "for", "busy", "waited", "per step", "in env", "steps/s", "RSS", "restarts")
_LOSSES_SHOWN = 5
_KINDS = {STEP: "step", RESET: "reset"}
_TITLE = re.compile(r"multienv (envs? (\d+)(?:-(\d+))?)")
# Seconds between two samples of a worker's words.
_SAMPLING = 0.02


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


class WorkerView:
    """Looks at one worker.

    Args:
        process: The worker.
        segment: The segment that the worker shares with its trainer, mapped read-only.

    Attributes:
        first: Index of its first env in the batch; ``None``: one env without an index.
        number: How many envs it has.
        name: The worker's name, from the title of its process: its envs.
    """

    def __init__(self, process: psutil.Process, segment: Segment) -> None:
        self._process, self._segment = process, segment
        title = _TITLE.match(" ".join(process.cmdline()))
        self.name = "env" if title is None else title[1]
        self.first = None if title is None else int(title[2])
        self.number = 1 if title is None else int(title[3] or title[2]) - int(title[2]) + 1
        self._since, self._is_older = time.monotonic(), True
        self._doing = self._work()
        self._restart_counts()

    def _work(self) -> tuple[bool, int, int]:
        """Return idle, number of the request, and number in a replay: they are equal as long as the work is the same.

        Read the reply before the request. In the other order, an answer in between would look like no answer.
        """
        words = self._segment.words
        reply, number = words[REPLY], words[REQUEST]
        return reply == number != 0, number, words[REPLAYING] - 1

    def _restart_counts(self) -> None:
        self._began, self._first_request = time.monotonic(), self._doing[1]
        self._samples = self._busy = self._awaited = 0

    def sample(self) -> None:
        """Note what the worker is doing now."""
        work = self._work()
        if work != self._doing:
            self._doing, self._since, self._is_older = work, time.monotonic(), False
        is_idle = work[0]
        self._samples += 1
        self._busy += not is_idle
        self._awaited += not is_idle and bool(self._segment.words[TRAINER_SLEEPS])

    def row(self) -> dict[str, Any]:
        """Take one more sample. Return the row since the last one, as JSON values: see ``docs/monitoring.md``.

        Raises psutil.Error if the worker has ended.
        """
        self.sample()
        now, words, (is_idle, number, _) = time.monotonic(), self._segment.words, self._doing
        # Requests that the caller did not make, such as building the envs, have negative numbers.
        asked = max(0, number - self._first_request) if self._first_request > 0 else 0
        slot, step_seconds = words[SLOT] - 1, self._segment.times[STEP_SECONDS]
        row = {
            "name": self.name,
            "pid": self._process.pid,
            "state": self._state(),
            "request": "" if is_idle or number < 0 else _KINDS.get(self._segment.kind_of(number), "call"),
            "env": "" if slot < 0 else "env" if self.first is None else f"env {self.first + slot}",
            "seconds": now - self._since,
            "at_least": self._is_older,
            "busy": self._busy / self._samples,
            "awaited": self._awaited / self._samples,
            "step_seconds": (now - self._began) / asked if asked else None,
            "steps_per_second": self.number * asked / (now - self._began),
            "env_seconds": step_seconds or None,
            "rss": self._process.memory_info().rss,
            "restarts": words[RESTARTS],
        }
        self._restart_counts()
        return row

    def _state(self) -> str:
        status, (is_idle, _, replayed) = self._process.status(), self._doing
        if status not in (psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING):
            return str(status)
        if is_idle:
            return "idle"
        if not self._segment.words[REPLY]:
            return "building"
        return "replaying" if replayed >= 0 else "busy"

    def close(self) -> None:
        """Release the memory."""
        self._segment.unmap()


class TrainerView:
    """Looks at a trainer and its workers.

    Args:
        pid: PID of the trainer; ``None``: the only trainer that runs.

    Attributes:
        pid: PID of the trainer.
        command: Its command line, in one line.
        started: When it was started, in seconds since 1970.
        rows: The workers' rows, sorted by the indices of their envs.

    Raises:
        UsageError: The process does not exist, has no workers, or belongs to another user.
    """

    def __init__(self, pid: int | None) -> None:
        if not psutil.LINUX:
            raise UsageError("multienv top works only on Linux: it reads /proc.")
        self.pid = _the_trainer() if pid is None else pid
        try:
            self._process = psutil.Process(self.pid)
            self.command = " ".join(" ".join(self._process.cmdline()).split())  # of ``python -c``: several lines
            self.started: float = self._process.create_time()
            self.rows: list[dict[str, Any]] = []
            self._workers: dict[int, WorkerView] = {}  # keys: the inodes of their segments
            self._find_workers()
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):  # the process may end at any moment
            raise UsageError(f"There is no process {self.pid}.") from None
        except PermissionError:
            raise UsageError(
                f"Process {self.pid} belongs to another user. Only that user and root may look at it."
            ) from None
        if not self._workers:
            raise UsageError(f"Process {self.pid} has no workers of multienv: {self.command:.100}")

    @property
    def is_there(self) -> bool:
        """Tell whether the trainer still runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return bool(self._process.status() != psutil.STATUS_ZOMBIE)
        return False

    def watch(self, seconds: float) -> None:
        """Sample all workers for this time, and make a row of each, also of those that have started meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for worker in self._workers.values():
                worker.sample()
            time.sleep(_SAMPLING)  # workers are asked nothing, and tell nothing: their memory is looked at
        with contextlib.suppress(psutil.Error, OSError):  # the trainer has ended
            self._find_workers()
        self.rows = []
        for worker in sorted(self._workers.values(), key=lambda one: -1 if one.first is None else one.first):
            with contextlib.suppress(psutil.Error):
                self.rows.append(worker.row())

    def _find_workers(self) -> None:
        """Find new workers, and drop those whose segment the trainer has closed."""
        segments: dict[int, Path] = {}  # the open ones of the trainer, by inode
        for path in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if path.readlink().name.startswith(f"memfd:{SHARED_NAME} "):
                    segments[path.stat().st_ino] = path
        for inode in self._workers.keys() - segments.keys():
            self._workers.pop(inode).close()
        new = segments.keys() - self._workers.keys()
        family = {one.pid: one for one in self._process.children(recursive=True)} if new else {}
        for inode in new:
            worker = _worker_of(family, segments[inode])
            if worker is not None:
                self._workers[inode] = worker

    def close(self) -> None:
        """Release all memory."""
        while self._workers:
            self._workers.popitem()[1].close()


def _worker_of(family: dict[int, psutil.Process], path: Path) -> WorkerView | None:
    """Return the worker that a trainer's segment belongs to; ``None``: the worker is not up yet, or has ended.

    The segment has the PID of its worker. It counts only if that process is a descendant of the trainer: a trainer in a
    PID namespace (a container) knows its workers by other PIDs. In that case, look from inside the container.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            segment = Segment(descriptor, read_only=True)
        except ValueError:  # the segment has no size yet
            os.close(descriptor)
            return None
        process = family.get(segment.words[PID])
        with contextlib.suppress(OSError, psutil.Error):
            if process is not None:
                return WorkerView(process, segment)
        segment.unmap()
    return None


def _the_trainer() -> int:
    """Return the only trainer that this user may look at. Raises UsageError if there is none or more than one."""
    found: dict[int, str] = {}
    for pid in psutil.pids():
        with contextlib.suppress(UsageError, psutil.Error), contextlib.closing(TrainerView(pid)) as trainer:
            found[pid] = trainer.command
    if not found:
        raise UsageError("Found no running trainer with multienv workers that you may look at.")
    if len(found) > 1:
        lines = [f"  {pid}  {command:.100}" for pid, command in found.items()]
        raise UsageError("\n".join(["Several trainers run here; give the PID of one:", *lines]))
    return next(iter(found))
