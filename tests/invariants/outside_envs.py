"""Envs whose state is not all in their memory. Workers import them by name; each shows a number that tells."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import sqlite3
import struct
import urllib.request
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class OutsideEnv(gymnasium.Env[Any, Any]):
    """Shows one number in each step: what `look()` returns. Nothing ends an episode but `ends()`."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
        self.action_space = spaces.Discrete(4)
        self.taken = 0

    def begin(self) -> None:
        """Begin an episode."""

    def look(self) -> float:
        """Take a step, and return what it shows."""
        raise NotImplementedError

    def ends(self) -> bool:
        """Tell whether the step has ended the episode."""
        return False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.taken = 0
        self.begin()
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        self.taken += 1
        return np.array([self.look()]), 0.0, self.ends(), False, {}


class DataSetEnv(OutsideEnv):
    """Reads a data set line by line, from a file that stays open.

    Args:
        path: Of a file with a number in each line.
        how: ``"buffered"``; ``"raw"``: four bytes at a time; ``"duplicate"``: in turns by two descriptors of one open
            file; ``"unlinked"``: the file has no name any more; ``"input"``: it is put in the place of standard input.
    """

    def __init__(self, path: str, how: str = "buffered") -> None:
        super().__init__()
        self.how = how
        if how == "unlinked":
            other = f"{path}.{os.getpid()}.{id(self)}"
            os.link(path, other)
            path = other
        self.file = Path(path).open("rb", buffering=-1 if how == "buffered" else 0)  # noqa: SIM115
        self.other = os.dup(self.file.fileno()) if how == "duplicate" else self.file.fileno()
        if how == "unlinked":
            Path(path).unlink()
        if how == "input":
            self.other = os.dup2(self.file.fileno(), 0)

    def look(self) -> float:
        if self.how == "buffered":
            return float(self.file.readline())
        return float(os.read(self.other if self.taken % 2 else self.file.fileno(), 6))


class LogEnv(OutsideEnv):
    """Writes each step to a file that stays open, as a CSV log does; shows nothing of it."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.file = Path(path).open("wb", buffering=0)  # noqa: SIM115

    def look(self) -> float:
        self.file.write(f"{self.taken:5}\n".encode())
        return float(self.taken)


class OutputEnv(OutsideEnv):
    """Keeps a duplicate of standard output, as code does that silences a simulator; writes a line to it in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.output = os.dup(1)

    def look(self) -> float:
        os.write(self.output, f"env {self.taken}\n".encode())
        return float(self.taken)


class TransactionEnv(OutsideEnv):
    """Adds a row in each step, in transactions of twenty steps; shows how many rows this connection has added."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.database = sqlite3.connect(path, isolation_level=None, timeout=10)
        self.database.execute("PRAGMA cache_size=5")
        self.database.execute("CREATE TABLE IF NOT EXISTS rows (episode, step, filler)")

    def begin(self) -> None:
        with contextlib.suppress(sqlite3.OperationalError):
            self.database.execute("COMMIT")
        self.database.execute("DELETE FROM rows")

    def look(self) -> float:
        if self.taken % 20 == 1:
            self.database.execute("BEGIN IMMEDIATE")
        for _ in range(3):
            self.database.execute("INSERT INTO rows VALUES (0, ?, ?)", (self.taken, "x" * 900))
        shown = self.database.execute("SELECT count(*) FROM rows").fetchone()[0]
        if self.taken % 20 == 0:
            self.database.execute("COMMIT")
        return float(shown)


class ServerEnv(OutsideEnv):
    """Asks a server for each step, with a connection for each: the server counts the steps of an episode."""

    def __init__(self, url: str, goal: int) -> None:
        super().__init__()
        self.url, self.goal, self.count = url, goal, 0

    def ask(self, what: str) -> int:
        with urllib.request.urlopen(f"{self.url}/{what}", timeout=10) as reply:
            return int(reply.read())

    def begin(self) -> None:
        self.count = self.ask("reset")

    def look(self) -> float:
        self.count = self.ask("step")
        return 0.0  # only the end of the episode tells

    def ends(self) -> bool:
        return self.count >= self.goal


class LateServerEnv(ServerEnv):
    """Does not ask the server in the first steps of an episode."""

    def look(self) -> float:
        return super().look() if self.taken > 20 else 0.0


class ConfiguredEnv(OutsideEnv):
    """Asks outside only while it is built."""

    def __init__(self, url: str, path: str) -> None:
        super().__init__()
        with urllib.request.urlopen(f"{url}/constructor", timeout=10) as reply:
            Path(path).write_bytes(reply.read())

    def look(self) -> float:
        return float(self.taken)


class HiddenServerEnv(OutsideEnv):
    """Asks a server behind Python's back, as C code does, with a connection that it keeps from its twelfth step on.

    Args:
        path: Of a server that counts bytes; a zero is not counted, and begins anew.
    """

    goal = 40

    def __init__(self, path: str) -> None:
        super().__init__()
        self.address = struct.pack("H108s", socket.AF_UNIX, path.encode())
        self.connection: socket.socket | None = None
        self.count = 0

    def connected(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        assert ctypes.CDLL(None).connect(made.fileno(), self.address, len(self.address)) == 0
        return made

    def begin(self) -> None:
        with self.connected() as connection:
            connection.sendall(b"\0")
            self.count = connection.recv(1)[0]

    def look(self) -> float:
        if self.taken >= 12:
            self.connection = self.connection or self.connected()
            self.connection.sendall(b".")
            self.count = self.connection.recv(1)[0]
        return 0.0

    def ends(self) -> bool:
        return 11 + self.count >= self.goal


class StreamEnv(OutsideEnv):
    """Reads numbers that another process writes to a named pipe or a terminal."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.file = os.open(path, os.O_RDONLY | os.O_NOCTTY)

    def look(self) -> float:
        return float(os.read(self.file, 6))


class TimerEnv(OutsideEnv):
    """Has a timer of timer_create(2), and shows whether it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.libc, self.timer = ctypes.CDLL(None), ctypes.c_void_p()
        assert self.libc.timer_create(1, None, ctypes.byref(self.timer)) == 0
        hour = (ctypes.c_long * 4)(0, 0, 3600, 0)
        assert self.libc.timer_settime(self.timer, 0, hour, None) == 0

    def look(self) -> float:
        left = (ctypes.c_long * 4)()
        found = self.libc.timer_gettime(self.timer, left)
        return self.taken if found == 0 and left[2] > 0 else -1.0


class TurnsEnv(OutsideEnv):
    """Takes a lock in each step, and lets go of it by closing the file, which it then opens again for the next step."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.file = os.open(path, os.O_RDONLY)

    def look(self) -> float:
        fcntl.flock(self.file, fcntl.LOCK_EX)
        os.close(self.file)
        self.file = os.open(self.path, os.O_RDONLY)
        return float(self.taken)


class HoldsLockEnv(OutsideEnv):
    """Holds a lock that no other env wants from the tenth step on."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.file = os.open(path, os.O_RDONLY)

    def begin(self) -> None:
        fcntl.flock(self.file, fcntl.LOCK_UN)

    def look(self) -> float:
        if self.taken == 10:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return float(self.taken)


class StateFileEnv(OutsideEnv):
    """Keeps its state in a file, which is open only within a step."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def begin(self) -> None:
        self.path.write_text("0")

    def look(self) -> float:
        count = int(self.path.read_text()) + 1
        self.path.write_text(str(count))
        return float(count)


class BlurEnv(OutsideEnv):
    """Draws with OpenCV, which would start threads for it."""

    def look(self) -> float:
        import cv2

        return float(cv2.GaussianBlur(np.full((50, 50, 3), self.taken % 200, np.uint8), (3, 3), 0).max())


class HeadlessEnv(OutsideEnv):
    """Draws with pygame, without a display: SDL opens a socket that tells of keyboards being plugged in."""

    def __init__(self) -> None:
        super().__init__()
        import pygame

        os.environ["SDL_VIDEODRIVER"] = "dummy"
        pygame.display.init()
        self.screen = pygame.display.set_mode((20, 20))

    def look(self) -> float:
        self.screen.fill((self.taken % 200, 0, 0))
        return float(self.screen.get_at((3, 3))[0])


class PlainEnv(OutsideEnv):
    """Has nothing outside but what is harmless."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [os.open(path, os.O_RDWR) for path in ("/dev/null", "/dev/zero")]
        self.held.append(os.open("/dev/urandom", os.O_RDONLY))
        self.folder = os.open("/", os.O_PATH)

    def look(self) -> float:
        with Path(os.devnull).open("wb") as nothing, contextlib.closing(sqlite3.connect(":memory:")):
            nothing.write(b".")
        return float(self.taken)
