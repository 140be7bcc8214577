"""Look at the process table of Linux; on other systems it is empty."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """Return the children of a process, their children, and so on, as far as they are alive."""
    children: dict[int, list[int]] = {}
    dead = set()
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            if name.isdigit():
                # pid (name) state parent …; the name may hold spaces and brackets.
                state, parent = Path("/proc", name, "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append(int(name))
                if state in "ZX":
                    dead.add(int(name))
    found: set[int] = set()
    pending = [pid]
    while pending:
        new = [child for child in children.get(pending.pop(), ()) if child not in found]
        found.update(new)
        pending += new
    return found - dead
