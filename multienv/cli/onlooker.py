"""Look at the workers of a running trainer from outside; nothing in the trainer takes part.

Each worker and its trainer share one segment, an anonymous file. The kernel lets the same user (and root) open it by
``/proc/PID/fd``, and it is mapped read-only here. Which processes are workers is seen in ``/proc``: the trainer's child
is the monitor, and the monitor's children are the workers, and snapshots. Linux only.

What is seen is a sample: the words change while they are read.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from multienv.errors import UsageError
from multienv.recovery.record import resident_bytes
from multienv.reports import store
from multienv.reports.read import Summary, summary_of
from multienv.testing.processes import is_alive, name_of
from multienv.wire.banks import BEGIN, STEP
from multienv.wire.segment import (
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
from multienv.worker.main import LOOK_SIGNAL

_PROC = Path("/proc")
_MONITOR = "multienv monitor"[:15]
_TITLE = re.compile(r"multienv (envs? (\d+)\S*)")
_LOSSES_SHOWN = 5
# Seconds given to faulthandler; without new output for so long, a stack counts as whole.
_STACK_PATIENCE = 1.0
_QUIET = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """Holds what is shown of a worker, all of it plain values.

    Attributes:
        name: Its envs.
        pid: The process.
        state: ``"building"`` its envs, ``"busy"`` with a request, ``"replaying"`` the journal of a lost process,
            ``"idle"``; or what the kernel says of a process that does not run, such as ``"stopped"``.
        request: What it was asked for: ``"step"``, ``"reset"`` or ``"call"``; ``""``: nothing.
        env: The env that is being called; ``""``: none.
        seconds: For how long it has been seen at this request, or without one.
        at_least: It may have been at it for longer.
        busy, awaited: Shares of the time: it was not idle; the trainer slept until it would answer.
        step_ms: Milliseconds from one request of the trainer to the next; ``None``: there was none.
        env_ms: Of them in the envs, smoothed; ``None``: not known yet.
        rss: Bytes of memory; ``None``: the process has ended.
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
    step_ms: float | None
    env_ms: float | None
    rss: int | None
    restarts: int


class Worker:
    """Looks at one worker.

    Args:
        pid: The process.
        path: By which its segment can be opened.

    Attributes:
        pid: The process.

    Raises:
        OSError, ValueError: The process has ended, or its segment has no size yet.
    """

    def __init__(self, pid: int, path: Path) -> None:
        self.pid = pid
        self._path = path
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._segment = Segment(descriptor, read_only=True)
        except BaseException:
            os.close(descriptor)
            raise
        self._since, self._is_older = time.monotonic(), True
        self._doing = self._work()
        self._begin_round()

    @classmethod
    def at(cls, pid: int) -> Worker | None:
        """Return the worker with this pid; ``None`` if the process is none: a snapshot, or what an env has started.

        A snapshot has the segment of the worker that it was taken from, where another pid stands.
        """
        # Where the trainer is in a PID namespace of its own, it knows the process by the last of these numbers.
        known_as = int(_status_of(pid).get("NSpid", str(pid)).split()[-1])
        with contextlib.suppress(OSError):
            for path in (_PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError, ValueError):
                    if path.readlink().name.startswith(f"memfd:{SHARED_NAME} "):
                        worker = cls(pid, path)
                        if worker._segment.words[PID] in (0, known_as):
                            return worker
                        worker.close()
        return None

    @property
    def name(self) -> str:
        """Return the worker's name, by its envs, as the title of the process has it."""
        title = self._title()
        return "env" if title is None else title[1]

    @property
    def first(self) -> int | None:
        """Index of its first env in the batch; ``None``: one env without an index."""
        title = self._title()
        return None if title is None else int(title[2])

    def _title(self) -> re.Match[str] | None:
        return _TITLE.match(_command_of(self.pid))

    def _work(self) -> tuple[bool, int, int]:
        """Return what stays equal as long as it is at the same thing: idle, number of the request, place in a replay.

        The reply is read before the request: read the other way round, an answer in between would look like none.
        """
        words = self._segment.words
        reply, number = words[REPLY], words[REQUEST]
        return reply == number != 0, number, words[REPLAYING] - 1

    def _begin_round(self) -> None:
        self._began, self._first_request = time.monotonic(), self._doing[1]
        self._samples = self._busy = self._awaited = 0

    def sample(self) -> None:
        """Note what it is doing now."""
        work = self._work()
        if work != self._doing:
            self._doing, self._since, self._is_older = work, time.monotonic(), False
        is_idle = work[0]
        self._samples += 1
        self._busy += not is_idle
        self._awaited += not is_idle and bool(self._segment.words[TRAINER_SLEEPS])

    def row(self) -> Row:
        """Sample it once more, and return what was seen since the last row."""
        self.sample()
        now, words, (is_idle, number, place) = time.monotonic(), self._segment.words, self._doing
        # Requests that are not the caller's, such as the one that builds the envs, have negative numbers.
        asked = max(0, number - self._first_request) if self._first_request > 0 else 0
        slot, step_seconds = words[SLOT] - 1, self._segment.times[STEP_SECONDS]
        row = Row(
            name=self.name,
            pid=self.pid,
            state=self._state(is_idle, place),
            request="" if is_idle or number < 0 else self._request(number),
            env="" if slot < 0 else "env" if self.first is None else f"env {self.first + slot}",
            seconds=now - self._since,
            at_least=self._is_older,
            busy=self._busy / self._samples,
            awaited=self._awaited / self._samples,
            step_ms=1000 * (now - self._began) / asked if asked else None,
            env_ms=1000 * step_seconds or None,
            rss=resident_bytes(self.pid),
            restarts=words[RESTARTS],
        )
        self._begin_round()
        return row

    def _state(self, is_idle: bool, place: int) -> str:
        letter, _, meaning = _status_of(self.pid).get("State", "X (dead)").partition(" ")
        if letter not in "RS":
            return meaning.strip("()")
        if is_idle:
            return "idle"
        if not self._segment.words[PID] or not self._segment.words[REPLY]:
            return "building"
        return "replaying" if place >= 0 else "busy"

    def _request(self, number: int) -> str:
        """Return what a request asks for, in a word. A message is pickled, its class first; it is not unpickled."""
        with contextlib.suppress(OSError, EOFError):
            kind = self._segment.kind_of(number)
            if kind == STEP:
                return "step"
            if kind == BEGIN or b"\x05Reset" in self._segment.read_request_mail(number)[:100]:
                return "reset"
        return "call"

    def stack(self) -> str:
        """Return the stacks of all threads as faulthandler writes them; where they cannot be had, why.

        The worker answers a signal of its own for this. It writes at the offset of the segment's file, which lies
        behind all that trainer and worker use; nothing else reads there.
        """
        status, data = _status_of(self.pid), b""
        caught = int(status.get("SigCgt", "0"), 16)
        if LOOK_SIGNAL is None or not caught >> (LOOK_SIGNAL - 1) & 1:  # the signal would kill it
            return "It does not take the signal that asks for its stack: not yet, or not any more."
        try:
            position = (_PROC / str(self.pid) / "fdinfo" / self._path.name).read_text().split()[1]
            os.kill(self.pid, LOOK_SIGNAL)
            until = time.monotonic() + _STACK_PATIENCE
            while time.monotonic() < until:
                time.sleep(0.005)
                more = os.pread(self._segment.descriptor, 2**16, int(position) + len(data))
                if more:
                    data, until = data + more, time.monotonic() + _QUIET
        except OSError:
            return "The process has ended."
        silent = f"It has not shown its stack within {_STACK_PATIENCE:g} s; its state is {status['State']}."
        return data.decode(errors="replace").rstrip() or silent

    def close(self) -> None:
        """Let go of the memory."""
        self._segment.unmap()


class Trainer:
    """Looks at a trainer and its workers.

    Args:
        pid: The trainer; ``None``: the only one there is.
        directory: Where its reports lie.

    Attributes:
        pid: The trainer.
        command: Its command line.
        workers: By their pids, as :meth:`look` found them.
        rows: Of the workers, by the indices of their envs.
        losses, reports: Its newest losses, the newest first; how many reports it has written.

    Raises:
        UsageError: There is no such process, it has no workers, or it is another user's.
    """

    def __init__(self, pid: int | None, directory: Path | None) -> None:
        if not (_PROC / "self" / "fd").exists():
            raise UsageError("multienv top reads /proc as Linux has it, which is not here.")
        self.pid = _the_trainer() if pid is None else pid
        if not self.is_there():
            raise UsageError(f"There is no process {self.pid}.")
        if not _is_open_to_us(self.pid):
            raise UsageError(f"Process {self.pid} belongs to another user: only that user, and root, may look.")
        self.command = _command_of(self.pid)
        if not self._monitors():
            raise UsageError(f"Process {self.pid} has no workers of multienv: {self.command:.100}")
        self.directory = directory
        self.workers: dict[int, Worker] = {}
        self.rows: list[Row] = []
        self.losses: list[Summary] = []
        self.reports = 0
        self._find_workers()

    @property
    def seconds(self) -> float:
        """Seconds since it was started; 0 if it has ended."""
        with contextlib.suppress(OSError):
            stat = (_PROC / str(self.pid) / "stat").read_text(errors="replace")
            started = int(stat.rpartition(")")[2].split()[19])  # in ticks since boot; the name may hold brackets
            return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
        return 0.0

    @property
    def waited_for(self) -> Row | None:
        """Return whom the trainer slept for most of the time; ``None``: it waited for none worth mentioning."""
        row = max(self.rows, key=lambda row: (row.awaited, row.seconds), default=None)
        return row if row is not None and row.awaited >= 0.5 else None

    def is_there(self) -> bool:
        """Tell whether the trainer still runs."""
        return is_alive(self.pid)

    def sample(self) -> None:
        """Sample each worker once."""
        for worker in self.workers.values():
            worker.sample()

    def look(self) -> None:
        """Make rows of the samples since the last look, and find the workers and losses that are new."""
        ordered = sorted(self.workers.values(), key=lambda one: (-1 if one.first is None else one.first, one.pid))
        self.rows = [worker.row() for worker in ordered]
        self._find_workers()
        since = time.time() - self.seconds - 1.0  # a process before it may have had its pid
        paths = [path for path in store.listed(self.directory, self.pid) if store.time_of(path) >= since]
        self.losses = [summary for summary in map(summary_of, paths[:_LOSSES_SHOWN]) if summary is not None]
        self.reports = len(paths)

    def _monitors(self) -> list[int]:
        """Return the monitors: one, and for a moment the one before it."""
        return [child for child in _children_of(self.pid) if name_of(child) == _MONITOR]

    def _find_workers(self) -> None:
        """Find workers that are new, and drop those that have ended."""
        children = {child for monitor in self._monitors() for child in _children_of(monitor)}
        for pid in set(self.workers) - children:
            self.workers.pop(pid).close()
        found = {pid: Worker.at(pid) for pid in children - set(self.workers)}
        self.workers |= {pid: worker for pid, worker in found.items() if worker is not None}

    def as_json(self) -> dict[str, Any]:
        """Return all that is shown, as JSON values."""
        waited_for = self.waited_for
        return {
            "trainer": {"pid": self.pid, "command": self.command, "seconds": self.seconds},
            "waited_for": waited_for and waited_for.pid,
            "workers": [asdict(row) for row in self.rows],
            "reports": {"directory": self.directory and str(self.directory), "number": self.reports},
            "losses": [one.as_json() for one in self.losses],
        }

    def close(self) -> None:
        """Let go of all memory."""
        for pid in list(self.workers):
            self.workers.pop(pid).close()


def _the_trainer() -> int:
    """Return the only trainer that this user may look at. Raises UsageError if there is none, or more than one."""
    pids = [int(name) for name in os.listdir(_PROC) if name.isdigit()]
    found = {int(_status_of(pid).get("PPid", "0")) for pid in pids if name_of(pid) == _MONITOR}
    # A worker has its monitor's name until it gives itself its own.
    seen = [pid for pid in sorted(found) if name_of(pid) not in ("", _MONITOR) and _is_open_to_us(pid)]
    if not seen:
        raise UsageError("No trainer with workers of multienv runs here that you may look at.")
    if len(seen) > 1:
        lines = [f"  {pid}  {_command_of(pid):.100}" for pid in seen]
        raise UsageError("\n".join(["Several trainers run here; give the PID of one:", *lines]))
    return seen[0]


# --- the kernel's table of processes: what has ended meanwhile reads as empty -----------------------


def _command_of(pid: int) -> str:
    """Return the command line of a process, or the title that it has given itself."""
    with contextlib.suppress(OSError):
        command = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return " ".join(command.split())
    return ""


def _status_of(pid: int) -> dict[str, str]:
    """Return what the kernel says of a process, by name, such as State or SigCgt."""
    with contextlib.suppress(OSError):
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def _children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process, zombies included."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def _is_open_to_us(pid: int) -> bool:
    """Tell whether this user may look at the descriptors of a process: the same user and root may."""
    try:
        os.listdir(_PROC / str(pid) / "fd")
    except OSError:
        return False
    return True
