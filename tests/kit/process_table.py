"""The process table, as far as tests need it, read from /proc of Linux."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

MARK_VARIABLE = "MULTIENV_TESTING_MARKS"


class ProcessRecord(NamedTuple):
    """One line of the process table. `pid` and `started` (clock ticks since boot) together identify a process."""

    pid: int
    parent: int
    state: str
    started: int
    name: str

    @property
    def is_zombie(self) -> bool:
        """Whether it has ended and waits to be reaped."""
        return self.state in ("Z", "X")

    @property
    def command(self) -> str:
        """Its command line, read when it is asked for."""
        return _bytes_of(self.pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip() or f"[{self.name}]"

    def __str__(self) -> str:
        return f"{self.pid} (parent {self.parent}, state {self.state}): {self.command}"


class Mark(NamedTuple):
    """A process, and the token in its environment by which its descendants are known when their parent is gone."""

    pid: int
    token: str


_mark: Mark | None = None


def mark_descendants() -> Mark:
    """Put a token of this process into its environment, once; a forked child that asks gets a token of its own."""
    global _mark
    if _mark is None or _mark.pid != os.getpid():
        _mark = Mark(os.getpid(), uuid.uuid4().hex)
    if _mark.token not in tokens():
        os.environ[MARK_VARIABLE] = " ".join([*tokens(), _mark.token])
    return _mark


def tokens() -> list[str]:
    """The tokens in the environment: of this process if it is marked, and of those that it descends from."""
    return os.environ.get(MARK_VARIABLE, "").split()


def is_alive(pid: int) -> bool:
    """Whether a process of this pid exists and is not a zombie."""
    found = record(pid)
    return found is not None and not found.is_zombie


def record(pid: int) -> ProcessRecord | None:
    """The line of a process, zombie or not; None if there is none."""
    text = _bytes_of(pid, "stat").decode(errors="replace")
    if not text:
        return None
    # pid (name) state ppid … starttime …; the name may hold spaces and brackets.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split(maxsplit=20)
    return ProcessRecord(pid, int(fields[1]), fields[0], int(fields[19]), name)


def alive() -> set[int]:
    """The descendants of this process that are no zombies."""
    return {pid for pid, one in descendants(os.getpid()).items() if not one.is_zombie}


def descendants(pid: int) -> dict[int, ProcessRecord]:
    """The children of a process, their children, and so on, zombies included."""
    return _below(pid, _table())


def family(mark: Mark) -> dict[int, ProcessRecord]:
    """The descendants of the marked process, with those whose parent is gone, as far as they carry its token."""
    table = _table()
    found = _below(mark.pid, table)
    since = next((one.started for one in table if one.pid == mark.pid), 0)
    for one in table:
        # Whoever has been there for longer is spared the look at its environment: this is done before and after tests.
        is_young = one.pid not in found and one.started >= since and one.pid != mark.pid
        if is_young and mark.token.encode() in _bytes_of(one.pid, "environ"):
            found[one.pid] = one
    return found


def _table() -> list[ProcessRecord]:
    found = (record(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [one for one in found if one is not None]


def _below(pid: int, table: Iterable[ProcessRecord]) -> dict[int, ProcessRecord]:
    children: dict[int, list[ProcessRecord]] = {}
    for one in table:
        children.setdefault(one.parent, []).append(one)
    found: dict[int, ProcessRecord] = {}
    pending = [pid]
    while pending:
        for one in children.get(pending.pop(), ()):
            if one.pid not in found:
                found[one.pid] = one
                pending.append(one.pid)
    return found


def _bytes_of(pid: int, name: str) -> bytes:
    """All of a file of a process; nothing if it is gone, or not for us."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        # A Path takes twice as long, and hundreds are read for each test.
        file = os.open(f"/proc/{pid}/{name}", os.O_RDONLY)
        try:
            return b"".join(iter(lambda: os.read(file, 65_536), b""))
        finally:
            os.close(file)
    return b""
