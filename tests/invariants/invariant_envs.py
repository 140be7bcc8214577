"""Envs of the tests of the invariants, in a module of their own: workers import it, and no test with it."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import shutil
import signal
import tempfile
import termios
import threading
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, Literal

import gymnasium

from kit import CounterEnv, Fault, FaultyEnv, ForkingEnv, MemoryEnv, own_name


class DrawingEnv(CounterEnv):
    """Draws in its infos and in calls too; a short one and one of milliseconds, in which a kill can fall."""

    def _info(self) -> dict[str, Any]:
        return {"luck": float(self.np_random.normal())}

    def draw(self, count: int = 1) -> float:
        return float(self.np_random.random(count).sum())


def pong() -> Any:
    import ale_py

    gymnasium.register_envs(ale_py)
    return gymnasium.make("ALE/Pong-v5")


def with_thread(shows_after: float) -> MemoryEnv:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return MemoryEnv(shows_after)


class CountsResets(CounterEnv):
    """Counts its resets, those that raise too, and gives that number as a reward in the end."""

    def __init__(self) -> None:
        super().__init__(horizon=15, count_episodes=False)
        self.resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.resets += 1
        if options:
            raise ValueError("there is no such map")
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        observation, reward, ended, *rest = super().step(action)
        return (observation, float(self.resets) if ended else reward, ended, *rest)


class EchoEnv(CounterEnv):
    """Gives back what it is called with: at once, late, or not at all."""

    def echo(self, number: int, how: str = "") -> int:
        if how == "raise":
            raise KeyError(number)
        time.sleep({"late": 0.05, "never": 3600}.get(how, 0))
        return number


def hangs_in_its_second_life(path: str, moment: Literal["reset", "step"], at: int, **slow: float) -> FaultyEnv:
    """Hang in the second process, in a reset or step that is one of its replay; slow is that process alone."""
    with Path(path).open("a") as file:
        file.write("b")
    is_second = Path(path).stat().st_size == 2
    if not is_second:
        return FaultyEnv(fault=())
    return FaultyEnv(fault=Fault("hang_c", moment, at=at, ignore_sigterm=True), **slow)


class MarksTheSecondLife(CounterEnv):
    """Leaves a file when it is built for the second time; dies in its second step of the first life, if told so."""

    def __init__(self, directory: Path, *, dies: bool) -> None:
        super().__init__()
        self.directory, self.dies = directory, dies and not (directory / "built").exists()
        (directory / ("rebuilt" if (directory / "built").exists() else "built")).touch()

    def step(self, action: Any) -> Any:
        if self.dies and self.episode_step == 1:
            while not (self.directory / "waits").exists():
                time.sleep(0.002)
            time.sleep(0.1)  # until the trainer sleeps, too
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class WaitsForTheSecondLife(CounterEnv):
    """Returns from its second step when the other env has been built for the second time."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def step(self, action: Any) -> Any:
        if self.episode_step == 1:
            (self.directory / "waits").touch()
            while not (self.directory / "rebuilt").exists():
                time.sleep(0.002)
        return super().step(action)


class HangsInLongReplays(CounterEnv):
    """In each process but the first one its 21st step hangs."""

    def __init__(self, marker: Path) -> None:
        super().__init__(horizon=5, count_episodes=False)
        self.left = 20 if marker.exists() else 1_000_000
        marker.touch()

    def step(self, action: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            time.sleep(3600)
        return super().step(action)


class FailsInNewProcesses(CounterEnv):
    """Ends, or hangs, in the first step in each process but the first one."""

    def __init__(self, directory: Path, *, hangs: bool) -> None:
        super().__init__(horizon=40, count_episodes=False)
        self.dies, self.hangs = (directory / "built").exists(), hangs
        (directory / "built").touch()

    def step(self, action: Any) -> Any:
        if self.dies and self.hangs:
            time.sleep(3600)
        elif self.dies:
            os._exit(3)
        return super().step(action)


class CrashesLater(CounterEnv):
    """Ends each process but the first one in another of its steps: the 25th, the 27th, the 29th, ..."""

    def __init__(self, builds: Path) -> None:
        super().__init__(horizon=5, count_episodes=False)
        with builds.open("ab") as file:
            file.write(b".")
            built = file.tell()
        self.left = 1_000_000 if built == 1 else 20 + 2 * built

    def step(self, action: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            os._exit(3)
        return super().step(action)


class Leaking(CounterEnv):
    """Keeps 1 MiB of each step for ever, in its process."""

    kept: list[bytearray] = []  # noqa: RUF012 - that is the leak

    def step(self, action: Any) -> Any:
        self.kept.append(bytearray(os.urandom(1024) * 1024))
        return super().step(action)


class SharedMemoryEnv(ForkingEnv):
    """Has shared memory with a name, which it never unlinks, and forked children that hold all that it has open."""

    def __init__(self, **forking: Any) -> None:
        self.shared = SharedMemory(own_name(), create=True, size=4096)
        self.shared_name = self.shared.name
        tracker: Any = resource_tracker._resource_tracker
        self.tracker = tracker._pid
        unread = ctypes.c_int(1)
        while unread.value:  # until the tracker is up, and has read the name
            ctypes.CDLL(None).ioctl(tracker._fd, termios.FIONREAD, ctypes.byref(unread))
        super().__init__(how="fork", **forking)

    def step(self, action: Any) -> Any:
        if action == 0:
            while True:
                ctypes.PyDLL(None).pause()  # hangs in C
        return super().step(action)


class UntidyEnv(CounterEnv):
    """Has shared memory with a name, which it never unlinks; does not wait for the resource tracker to start."""

    def __init__(self) -> None:
        self.shared_name = SharedMemory(own_name(), create=True, size=4096).name
        super().__init__()


class FileEnv(CounterEnv):
    """Adds to a file with each step, and shows how long it is: a replay writes again what has been written."""

    def __init__(self, path: str) -> None:
        super().__init__(horizon=None)
        self.path = path

    def step(self, action: Any) -> Any:
        self.write()
        return super().step(action)

    def write(self) -> None:
        with Path(self.path).open("ab") as file:
            file.write(b".")

    def _next_draw(self) -> float:
        return super()._next_draw() + (Path(self.path).stat().st_size if Path(self.path).exists() else 0)


class TemporaryFileEnv(FileEnv):
    """Has its file in a new folder below the temporary one, which it never removes; the file stays open."""

    def __init__(self) -> None:
        super().__init__(str(Path(tempfile.mkdtemp(), "steps")))
        self.file = Path(self.path).open("ab", buffering=0)  # noqa: SIM115

    def write(self) -> None:
        self.file.write(b".")


class LinkingEnv(CounterEnv):
    """Replaces its temporary folder, or the one in which those of all envs are, by a link to this one."""

    def __init__(self, target: str, *, of_all: bool) -> None:
        super().__init__()
        folder = Path(os.environ["TMPDIR"])
        self.link = str(folder.parent if of_all else folder)
        shutil.rmtree(self.link)
        Path(self.link).symlink_to(target)


class EngineEnv(ForkingEnv):
    """Maps shared memory with these names, made if it is not there, as does a process that the env has forked.

    As ViZDoom and its engine do. Nobody unlinks the names, and no resource tracker knows them.
    """

    def __init__(self, *names: str) -> None:
        self.maps = []
        for name in names:
            with Path("/dev/shm", name).open("a+b") as file:
                file.truncate(mmap.PAGESIZE)
                self.maps.append(mmap.mmap(file.fileno(), mmap.PAGESIZE))
        super().__init__(how="fork")


class HiddenGoalEnv(CounterEnv):
    """Draws in ``reset()``, from a generator that all envs of the process share, what its last reward alone shows."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            random.seed(seed)
        self.goal = random.random()
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, self.goal if terminated else 0.0, terminated, truncated, info
