"""What a worker leaves behind: processes that it started, whatever session they lead."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from multienv.worker.ends import WARD_VARIABLE


def processes() -> set[int]:
    """All but this one."""
    with contextlib.suppress(OSError):
        return {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}
    return set()


def kill(mark: str, spared: int = 0, pipes: frozenset[str] = frozenset()) -> None:
    """Kill what the worker with this mark, which is dead, had started."""
    for pid in processes() - {spared}:
        if belongs_to(pid, mark, pipes):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def belongs_to(pid: int, mark: str, pipes: frozenset[str]) -> bool:
    """Whether a worker started this process: an exec carries its variable, a bare fork holds its pipes."""
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        if f"{WARD_VARIABLE}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
            return True
        for descriptor in (process / "fd").iterdir() if pipes else ():
            with contextlib.suppress(OSError):
                if str(descriptor.readlink()) in pipes and _writes(process, descriptor.name):
                    return True
    return False


def _writes(process: Path, descriptor: str) -> bool:
    """Whether it is the worker's end of a pipe: the reading end may be the trainer's for a moment."""
    for line in (process / "fdinfo" / descriptor).read_text().splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8) & os.O_ACCMODE == os.O_WRONLY
    return False
