"""What an env asks outside in a step is noted, by the audit hook of either way; each in a process of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.own_process import Forks
from multienv._engine.native import native
from multienv._engine.wire.segment import ASKED_OUTSIDE, BUSY, PID, SLOT, Segment
from multienv._engine.worker import census as module
from multienv._engine.worker.census import OBSTACLES, AskedOutside


def refused(call: Callable[..., Any], *arguments: Any) -> None:
    """Call what fails: it is told before it happens."""
    with contextlib.suppress(OSError):
        call(*arguments)


# What is noted of each, a word of OBSTACLES; each gets the path of a file that is there.
NOTED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a connection": (lambda path: refused(socket.socket().connect, ("127.0.0.1", 1)), "sockets"),
    "a server of its own": (lambda path: socket.socket().bind(("127.0.0.1", 0)), "sockets"),
    "a datagram": (
        lambda path: refused(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto, b".", ("127.0.0.1", 1)),
        "sockets",
    ),
    "a program": (lambda path: subprocess.run(["true"], check=True), "child processes"),
    "a command": (lambda path: os.system("true"), "child processes"),
    "a process": (lambda path: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0), "child processes"),
    "a fork": (lambda path: os.fork() or os._exit(0), "child processes"),
    "a database": (lambda path: sqlite3.connect(path.parent / "database").close(), "files"),
    "a file for writing": (lambda path: path.write_text("."), "files"),
    "a file for appending": (lambda path: path.open("a").close(), "files"),
    "a file for reading and writing": (lambda path: os.close(os.open(path, os.O_RDWR)), "files"),
    "a file removed": (lambda path: path.unlink(), "files"),
    "a file renamed": (lambda path: path.rename(path.parent / "other"), "files"),
    "a file cut": (lambda path: os.truncate(path, 0), "files"),
    "a link": (lambda path: (path.parent / "link").symlink_to(path), "files"),
    "a folder": (lambda path: (path.parent / "folder").mkdir(), "files"),
    "a folder removed": (lambda path: refused(path.parent.rmdir), "files"),
    "a file for reading": (lambda path: path.read_text(), ""),
    "a database in memory": (lambda path: sqlite3.connect(":memory:").close(), ""),
    "nothing at all": (lambda path: Path(os.devnull).open("wb").close(), ""),
    "a module that is compiled": (lambda path: path.with_name("__pycache__").mkdir(), ""),
    "a socket of its own": (lambda path: socket.socketpair(), ""),
}


def hear(do: str, path: str, way: str, busy: int = 7, slot: int = 1) -> tuple[int, str, int, int]:
    """Do something in a request; return what is noted, and what after a move to other control words."""
    if way == "pure":
        module.native = None
    words = Segment(-1).words
    words[PID] = os.getpid()
    asked = AskedOutside(words)
    words[BUSY], words[SLOT] = busy, slot
    NOTED[do][0](Path(path))
    words[BUSY] = words[SLOT] = 0
    number, obstacle = words[ASKED_OUTSIDE], OBSTACLES[asked.pop_obstacle()]
    others = Segment(-1).words
    asked.move(others)
    return number, obstacle, others[ASKED_OUTSIDE], asked.pop_obstacle()


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "file").touch()
    return str(tmp_path / "file")


WAYS = ["pure", pytest.param("native", marks=pytest.mark.skipif(native is None, reason="there is no extension"))]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", list(NOTED))
def test_what_is_asked_outside_is_noted_once(what: str, way: str, path: str, forks: Forks) -> None:
    noted = NOTED[what][1]
    number = 7 if noted else 0
    assert forks.call(hear, what, path, way) == (number, noted, number, 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("busy", "slot"), [(-7, 1), (0, 0), (7, 0)], ids=["constructor", "idle", "no env"])
def test_what_no_request_of_an_env_asks_is_not_noted(busy: int, slot: int, way: str, path: str, forks: Forks) -> None:
    assert forks.call(hear, "a file for writing", path, way, busy, slot) == (0, "", 0, 0)
