"""Note what envs ask of the world outside while they step or reset: a fork does not take that back.

A connection, a program or a file that is opened and closed within one step is gone when the census looks for it. Python
tells of each by an audit event (PEP 578), before it happens. What C code does by itself is not told.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from multienv._engine.native import native
from multienv._engine.wire.segment import ASKED, BUSY, PID, SLOT
from multienv._engine.worker.census import CHILDREN, FILES, SOCKETS

_EVENTS = {
    **dict.fromkeys(("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"), SOCKETS),
    **dict.fromkeys(
        ("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec"),
        CHILDREN,
    ),
    **dict.fromkeys(
        ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "sqlite3.connect"),
        FILES,
    ),
    "open": FILES,
}
_HARMLESS = (os.devnull, ":memory:")
_CACHE = "__pycache__"  # of a module that is imported for the first time


class AskedOutside:
    """Notes in the control word ``ASKED`` in which request the envs of this process asked outside last.

    Args:
        words: The control words.
    """

    def __init__(self, words: Any) -> None:
        self._words = words
        self._number = 0
        self._obstacle = 0
        (sys.addaudithook if native is None else native.watch_audit_events)(self._hear)

    def move(self, words: Any) -> None:
        """Go on with other control words: this process is a snapshot that was woken."""
        self._words = words
        words[ASKED] = self._number

    def take(self) -> int:
        """Return the index in OBSTACLES of what was asked since the last call, or 0."""
        obstacle, self._obstacle = self._obstacle, 0
        return obstacle

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _EVENTS:
            return
        words = self._words
        number = words[BUSY]  # a request of multienv's own, such as the construction of the envs, has a negative one
        if number > 0 and words[SLOT] and words[PID] == os.getpid():
            obstacle = obstacle_of(event, arguments)
            if obstacle:
                words[ASKED], self._number, self._obstacle = number, number, obstacle


def obstacle_of(event: str, arguments: tuple[Any, ...]) -> int:
    """Return the index in OBSTACLES of what an audit event tells; 0: nothing is asked outside."""
    obstacle = _EVENTS.get(event, 0)
    if not obstacle or not arguments:
        return obstacle
    what = arguments[0]
    if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
        return 0
    is_harmless = what in _HARMLESS or (obstacle == FILES and _CACHE in str(what))
    return 0 if is_harmless else obstacle
