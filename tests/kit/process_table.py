"""The process table, as far as tests need it, read from /proc of Linux."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Mark", "ProcessRecord", "descendants", "family", "is_alive", "mark_descendants", "record"]

MARK_VARIABLE = "MULTIENV_TESTING_MARKS"
GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
_ENDED = ("Z", "X")


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
        return self.state in _ENDED

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


def is_alive(pid: int) -> bool:
    """Whether a process of this pid exists and is not a zombie."""
    stat = _stat(pid)
    return stat is not None and stat.state not in _ENDED


def record(pid: int) -> ProcessRecord | None:
    """The line of a process, zombie or not; None if there is none."""
    stat = _stat(pid)
    return None if stat is None else _record(stat)


def descendants(pid: int) -> dict[int, ProcessRecord]:
    """The children of a process, their children, and so on, zombies included."""
    return _records(_descendants(pid, list(_stats())))


def family(mark: Mark) -> dict[int, ProcessRecord]:
    """The descendants of the marked process, with those whose parent is gone, as far as they carry its token."""
    table = list(_stats())
    found = _descendants(mark.pid, table)
    since = next((stat.started for stat in table if stat.pid == mark.pid), 0)
    for stat in table:
        # Whoever has been there for longer is spared the look at its environment: this is done before and after tests.
        if stat.pid not in found and stat.started >= since and stat.pid != mark.pid and _carries(stat.pid, mark.token):
            found[stat.pid] = stat
    return _records(found)


class _Stat(NamedTuple):
    pid: int
    parent: int
    state: str
    started: int
    name: str


def _stats() -> Iterator[_Stat]:
    for name in os.listdir("/proc"):
        stat = _stat(int(name)) if name.isdigit() else None
        if stat is not None:
            yield stat


def _stat(pid: int) -> _Stat | None:
    text = _bytes_of(f"/proc/{pid}/stat").decode(errors="replace")
    if not text:
        return None
    # pid (name) state ppid … starttime …; the name may hold spaces and brackets.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split(maxsplit=20)
    return _Stat(pid, int(fields[1]), fields[0], int(fields[19]), name)


def _records(stats: dict[int, _Stat]) -> dict[int, ProcessRecord]:
    records = ((pid, _record(stat)) for pid, stat in stats.items())
    return {pid: record for pid, record in records if record is not None}


def _record(stat: _Stat) -> ProcessRecord | None:
    command = _bytes_of(f"/proc/{stat.pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    return ProcessRecord(stat.pid, stat.parent, stat.state, stat.started, command or f"[{stat.name}]")


def _descendants(pid: int, table: list[_Stat]) -> dict[int, _Stat]:
    children: dict[int, list[_Stat]] = {}
    for stat in table:
        children.setdefault(stat.parent, []).append(stat)
    found: dict[int, _Stat] = {}
    pending = [pid]
    while pending:
        for stat in children.get(pending.pop(), ()):
            if stat.pid not in found:
                found[stat.pid] = stat
                pending.append(stat.pid)
    return found


def _carries(pid: int, token: str) -> bool:
    return token.encode() in _bytes_of(f"/proc/{pid}/environ")


def _bytes_of(path: str) -> bytes:
    """All of a file; nothing if it is gone, or not for us."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except GONE:
        return b""
    try:
        parts = []
        while part := os.read(descriptor, 2**12):
            parts.append(part)
        return b"".join(parts)
    except GONE:
        return b""
    finally:
        os.close(descriptor)
