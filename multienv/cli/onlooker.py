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
import signal
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from multienv.cli.proc import (
    PROC,
    age_of,
    all_processes,
    children_of,
    command_of,
    is_open_to_us,
    name_of,
    parent_of,
    start_of,
    state_of,
    status_of,
    user_of,
)
from multienv.errors import UsageError
from multienv.recovery.record import resident_bytes
from multienv.reports import store
from multienv.reports.read import Summary, summary_of
from multienv.wire.banks import BEGIN, STEP
from multienv.wire.segment import (
    BUSY,
    PID,
    REPLAYING,
    REPLY,
    REQUEST,
    RESTARTS,
    SHARED_NAME,
    SLOT,
    STEP_SECONDS,
    TRAINER_SLEEPS,
    WORKER_SLEEPS,
    Segment,
)
from multienv.worker.main import LOOK_SIGNAL

_MONITOR = "multienv monitor"[:15]
_TITLE = re.compile(r"multienv envs? (\d+)(?:-(\d+))?")
# The class of a pickled message, the first thing in it: nothing is unpickled here.
_MESSAGE = re.compile(rb"multienv\.wire\.messages\x94\x8c.(\w+)", re.DOTALL)
_MESSAGE_NAMES = {
    "GetAttribute": "get_attr",
    "SetAttribute": "set_attr",
    "IsWrapped": "env_is_wrapped",
    "KeepSnapshot": "snapshot",
    "CaptureState": "state",
}
_CONDITIONS = {"T": "stopped", "t": "traced", "D": "in the kernel", "Z": "dead", "X": "dead"}
# Seconds given to faulthandler; without new output for so long, a stack counts as whole.
_STACK_PATIENCE = 1.0
_QUIET = 0.05


class State(Enum):
    """Says what a worker is doing."""

    STARTING = "starting"  # the process has been launched, and has not mapped its segment
    BUILDING = "building"  # it builds its envs
    ASKED = "asked"  # there is a request that it has not taken up
    BUSY = "busy"  # it executes a request
    REPLAYING = "replaying"  # it executes the journal of a lost process
    WAITING = "waiting"  # it looks for the next request
    SLEEPING = "sleeping"  # it blocks until there is one


IDLE = (State.WAITING, State.SLEEPING)


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds what the words of a segment said at one moment.

    Attributes:
        state: What the worker was doing.
        number: Of the request it was executing, or else of the newest one.
        place: Index of the request inside a replay; -1: none runs.
        slot: The slot whose env was being called; -1: none.
        is_awaited: The trainer slept until this worker would answer.
    """

    state: State
    number: int
    place: int
    slot: int
    is_awaited: bool

    @property
    def work(self) -> tuple[bool, int, int]:
        """What stays equal as long as the worker is at the same thing."""
        return self.state in IDLE, self.number, self.place


class Worker:
    """Looks at one worker.

    Args:
        pid: The process.
        segment: Its segment, to be read only; becomes this object's to close.

    Attributes:
        pid: The process.
    """

    def __init__(self, pid: int, segment: Segment) -> None:
        self.pid = pid
        self._segment, self._started = segment, start_of(pid)
        self._title: re.Match[str] | None = None

    @classmethod
    def at(cls, pid: int) -> Worker | None:
        """Return the worker with this pid; ``None`` if the process is none: a snapshot, or what an env has started.

        A snapshot has the segment of the worker that it was taken from, where another pid stands.
        """
        # Where the trainer is in a PID namespace of its own, it knows the process by the last of these numbers.
        known_as = int(status_of(pid).get("NSpid", str(pid)).split()[-1])
        for path in _segments_of(pid):
            segment = _opened(path)
            if segment is not None:
                if segment.words[PID] in (0, known_as):
                    return cls(pid, segment)
                segment.unmap()
        return None

    @property
    def first(self) -> int | None:
        """Index of its first env in the batch, by the title of the process; ``None``: one env without an index."""
        if self._title is None:  # again: a new process has no title yet
            self._title = _TITLE.search(command_of(self.pid))
        return None if self._title is None else int(self._title[1])

    @property
    def restarts(self) -> int:
        """Processes that were started in place of lost ones, up to this one."""
        return int(self._segment.words[RESTARTS])

    @property
    def step_seconds(self) -> float | None:
        """Env time of a step, as the worker smooths it; ``None``: not known yet."""
        return self._segment.times[STEP_SECONDS] or None

    @property
    def rss(self) -> int | None:
        """Bytes of memory; ``None``: the process has ended."""
        return resident_bytes(self.pid)

    @property
    def condition(self) -> str:
        """What the kernel says of the process, if that is out of the ordinary: ``"stopped"``, …; else ``""``."""
        return _CONDITIONS.get(state_of(self.pid), "")

    @property
    def name(self) -> str:
        """The worker, named by its envs."""
        several = self.first is not None and self._title is not None and self._title[2]
        return f"envs {self.first}-{several}" if several else self.env(0)

    def env(self, slot: int) -> str:
        """Return the name of a slot's env."""
        return "env" if self.first is None else f"env {self.first + slot}"

    def is_there(self) -> bool:
        """Tell whether the process still runs."""
        return start_of(self.pid) == self._started != 0

    def sample(self) -> Sample:
        """Read what the worker is doing."""
        words = self._segment.words
        # The reply before the request: read the other way round, an answer in between would look like none.
        reply, busy, number = words[REPLY], words[BUSY], words[REQUEST]
        place = words[REPLAYING] - 1
        if not words[PID]:
            state = State.STARTING
        elif not reply:
            state = State.BUILDING
        elif busy:
            state = State.REPLAYING if place >= 0 else State.BUSY
        elif reply != number:
            state = State.ASKED
        else:
            state = State.SLEEPING if words[WORKER_SLEEPS] else State.WAITING
        is_awaited = bool(words[TRAINER_SLEEPS]) and reply != number
        return Sample(state, number, place, words[SLOT] - 1, is_awaited)

    def request(self, number: int) -> str:
        """Return what request ``number`` asks for, in a word such as ``"step"``, ``"reset"`` or ``"call"``."""
        with contextlib.suppress(OSError, EOFError):
            kind = self._segment.kind_of(number)
            if kind in (STEP, BEGIN):
                return "step" if kind == STEP else "reset"
            found = _MESSAGE.search(self._segment.read_request_mail(number)[:200])
            if found is not None:
                name = found[1].decode(errors="replace")
                return _MESSAGE_NAMES.get(name, name.lower())
        return "request"

    def kill(self) -> bool:
        """Send SIGKILL, which the trainer takes for any other loss; false if the process has ended by itself."""
        if self.is_there():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
                return True
        return False

    def stack(self) -> str:
        """Return the stacks of all threads as faulthandler writes them; where they cannot be had, why.

        The worker answers a signal of its own for this. It writes at the offset of the segment's file, which lies
        behind all that trainer and worker use; nothing else reads there.
        """
        try:
            caught = int(status_of(self.pid).get("SigCgt", "0"), 16)
            if LOOK_SIGNAL is None or not caught >> (LOOK_SIGNAL - 1) & 1:  # the signal would kill it
                return self._kernel("It does not take the signal that asks for its stack: not yet, or not any more.")
            begin = self._offset()
            os.kill(self.pid, LOOK_SIGNAL)
            data, until = b"", time.monotonic() + _STACK_PATIENCE
            while time.monotonic() < until:
                time.sleep(0.005)
                more = os.pread(self._segment.descriptor, 2**16, begin + len(data))
                if more:
                    data, until = data + more, time.monotonic() + _QUIET
        except OSError:
            return "The process has ended."
        text = data.decode(errors="replace").rstrip()
        return text or self._kernel(f"It has not shown its stack within {_STACK_PATIENCE:g} s.")

    def _offset(self) -> int:
        """Return the offset in the segment's file at which the worker writes."""
        ours, directory = os.fstat(self._segment.descriptor), PROC / str(self.pid)
        for path in _segments_of(self.pid):
            if os.path.samestat(path.stat(), ours):
                return int((directory / "fdinfo" / path.name).read_text().split()[1])
        raise ProcessLookupError(self.pid)

    def _kernel(self, why: str) -> str:
        """Return what the kernel tells of a process that does not show its stack."""
        lines = [why, f"state: {status_of(self.pid).get('State', 'ended')}"]
        for name in ("wchan", "syscall"):
            with contextlib.suppress(OSError):
                lines.append(f"{name}: {(PROC / str(self.pid) / name).read_text().strip()}")
        return "\n".join(lines)

    def close(self) -> None:
        """Let go of the memory."""
        self._segment.unmap()


class Trainer:
    """Looks at a trainer and its workers.

    Args:
        pid: The trainer; ``None``: the only one there is.

    Attributes:
        pid: The trainer.
        workers: By their pids, as :meth:`look` found them.

    Raises:
        UsageError: There is no such process, it has no workers, or it is another user's.
    """

    def __init__(self, pid: int | None = None) -> None:
        if not (PROC / "self" / "fd").exists():
            raise UsageError("multienv top reads /proc as Linux has it, which is not here.")
        self.pid = the_trainer() if pid is None else pid
        self._started = start_of(self.pid)
        if not self._started:
            raise UsageError(f"There is no process {self.pid}.")
        if not is_open_to_us(self.pid):
            raise UsageError(f"Process {self.pid} belongs to {user_of(self.pid)}: only that user, and root, may look.")
        self.workers: dict[int, Worker] = {}
        if not self._monitors():
            raise UsageError(f"Process {self.pid} has no workers of multienv: {command_of(self.pid):.100}")
        self.look()

    @property
    def command(self) -> str:
        """Its command line."""
        return command_of(self.pid)

    @property
    def seconds(self) -> float:
        """Seconds since it was started."""
        return age_of(self.pid)

    def _monitors(self) -> list[int]:
        """Return the monitors: one, and for a moment the one before it."""
        return [child for child in children_of(self.pid) if name_of(child) == _MONITOR]

    def is_there(self) -> bool:
        """Tell whether the trainer still runs."""
        return start_of(self.pid) == self._started

    def look(self) -> None:
        """Find workers that are new, and drop those that have ended."""
        children = {child for monitor in self._monitors() for child in children_of(monitor)}
        for pid, worker in list(self.workers.items()):
            if pid not in children or not worker.is_there():
                self.workers.pop(pid).close()
        for pid in children - set(self.workers):
            found = Worker.at(pid)
            if found is not None:
                self.workers[pid] = found

    def in_order(self) -> list[Worker]:
        """Return the workers by the indices of their envs."""
        return sorted(self.workers.values(), key=lambda one: (-1 if one.first is None else one.first, one.pid))

    def reports_directory(self) -> Path | None:
        """Return where its reports lie, as its environment says; an env may have been given another directory."""
        for monitor in self._monitors():  # it was given the trainer's variables when it was launched
            with contextlib.suppress(OSError):
                pairs = (PROC / str(monitor) / "environ").read_bytes().split(b"\0")
                variables = dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)
                return store.directory_for(None, variables)
        return None

    def losses(self, directory: Path | None, newest: int) -> tuple[list[Summary], int]:
        """Return summaries of its newest reports, the newest first; and how many it has written."""
        since = time.time() - age_of(self.pid) - 1.0  # a process before it may have had its pid
        paths = [path for path in store.listed(directory, self.pid) if store.time_of(path) >= since]
        return [summary for summary in map(summary_of, paths[:newest]) if summary is not None], len(paths)

    def close(self) -> None:
        """Let go of all memory."""
        for pid in list(self.workers):
            self.workers.pop(pid).close()


def _segments_of(pid: int) -> list[Path]:
    """Return the paths by which the segments that a process has open can be opened."""
    directory = PROC / str(pid) / "fd"
    found = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(directory), key=int):
            with contextlib.suppress(OSError):
                if (directory / name).readlink().name.startswith(f"memfd:{SHARED_NAME} "):
                    found.append(directory / name)
    return found


def _opened(path: Path) -> Segment | None:
    """Return the segment at this path, to be read only; ``None``: its process has ended, or it has no size yet."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return Segment(descriptor, read_only=True)
    except (OSError, ValueError):
        os.close(descriptor)
        return None


def the_trainer() -> int:
    """Return the only trainer that this user may look at. Raises UsageError if there is none, or more than one."""
    monitors = [pid for pid in all_processes() if name_of(pid) == _MONITOR]
    found = {parent_of(monitor): monitor for monitor in monitors}
    # A worker has its monitor's name until it gives itself its own.
    seen = [pid for pid in sorted(found) if pid and name_of(pid) != _MONITOR and is_open_to_us(pid)]
    if not seen:
        others = f", but {len(found)} of other users" if any(found) else ""
        raise UsageError(f"No trainer with workers of multienv runs here{others}.")
    if len(seen) > 1:
        lines = [f"  {pid}  {age_of(pid):.0f} s  {command_of(pid):.100}" for pid in seen]
        raise UsageError("\n".join(["Several trainers run here; give the PID of one:", *lines]))
    return seen[0]
