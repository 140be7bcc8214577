"""The process table, as far as tests need it, read from /proc (Linux; elsewhere it is empty)."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mark", "ProcessRecord", "descendants", "family", "is_alive", "mark_descendants", "processes"]

MARK_VARIABLE = "MULTIENV_TESTING_MARKS"
GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True)
class ProcessRecord:
    """One line of the process table. `pid` and `started` (clock ticks since boot) together identify a process."""

    pid: int
    parent: int
    state: str
    started: int
    command: str

    @property
    def is_zombie(self) -> bool:
        """Whether it has ended and waits to be reaped."""
        return self.state in ("Z", "X")

    def __str__(self) -> str:
        return f"{self.pid} (parent {self.parent}, state {self.state}): {self.command}"


@dataclass(frozen=True)
class Mark:
    """A process, and the token in its environment by which its descendants are known when their parent is gone."""

    pid: int
    token: str


_mark: Mark | None = None


def mark_descendants() -> Mark:
    """Put a token of this process into its environment, once; a forked child that asks gets a token of its own."""
    global _mark
    if _mark is None or _mark.pid != os.getpid():
        _mark = Mark(os.getpid(), uuid.uuid4().hex)
    tokens = os.environ.get(MARK_VARIABLE, "").split()
    if _mark.token not in tokens:
        os.environ[MARK_VARIABLE] = " ".join([*tokens, _mark.token])
    return _mark


def processes() -> Iterator[ProcessRecord]:
    """All processes that can be seen."""
    if sys.platform != "linux":
        return
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            record = _read(int(path.name))
            if record is not None:
                yield record


def is_alive(pid: int) -> bool:
    """Whether a process of this pid exists and is not a zombie (off Linux a zombie counts as alive)."""
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    record = _read(pid)
    return record is not None and not record.is_zombie


def descendants(pid: int) -> dict[int, ProcessRecord]:
    """The children of a process, their children, and so on, zombies included."""
    return _descendants(pid, list(processes()))


def family(mark: Mark) -> dict[int, ProcessRecord]:
    """The descendants of the marked process, with those whose parent is gone, as far as they carry its token."""
    table = list(processes())
    found = _descendants(mark.pid, table)
    for record in table:
        if record.pid not in found and record.pid != mark.pid and _carries(record.pid, mark.token):
            found[record.pid] = record
    return found


def _descendants(pid: int, table: list[ProcessRecord]) -> dict[int, ProcessRecord]:
    children: dict[int, list[ProcessRecord]] = {}
    for record in table:
        children.setdefault(record.parent, []).append(record)
    found: dict[int, ProcessRecord] = {}
    pending = [pid]
    while pending:
        for record in children.get(pending.pop(), ()):
            if record.pid not in found:
                found[record.pid] = record
                pending.append(record.pid)
    return found


def _read(pid: int) -> ProcessRecord | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except GONE:
        return None
    # pid (name) state ppid … starttime …; the name may hold spaces and brackets.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return ProcessRecord(pid, int(fields[1]), fields[0], int(fields[19]), command or f"[{name}]")


def _carries(pid: int, token: str) -> bool:
    try:
        return token.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except GONE:
        return False
