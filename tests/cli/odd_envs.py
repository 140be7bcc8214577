"""Envs that the commands have something to say of. No test imports this: the commands find it as a file."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from kit import CounterEnv, Fault, FaultyEnv


class FromLock(CounterEnv):
    """Takes something that cannot be pickled."""

    def __init__(self, lock: Any) -> None:
        super().__init__()


class Chance(CounterEnv):
    """Draws from the operating system."""

    def _next_draw(self) -> float:
        return int.from_bytes(os.urandom(3), "little") / 2**24


class LeakyWithThread(CounterEnv):
    """Keeps a descriptor open for each episode, and has a thread from its construction on."""

    def __init__(self, horizon: int = 10) -> None:
        super().__init__(horizon=horizon)
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    def reset(self, **options: Any) -> Any:
        os.dup(2)
        return super().reset(**options)


class Hoarder(CounterEnv):
    """Keeps a mebibyte for each episode."""

    def __init__(self) -> None:
        super().__init__()
        self.hoard: list[bytes] = []

    def reset(self, **options: Any) -> Any:
        self.hoard.append(os.urandom(2**20))
        return super().reset(**options)


class Doomed(CounterEnv):
    """Crashes or hangs in steps of the env that is built as number *first*, and of those built later.

    Args:
        directory: Where builds and faults are counted; each is a file there.
        first: The number of the first env with faults.
        times: How many faults there are.
        hangs: Hang instead of a crash.
    """

    def __init__(self, directory: str, first: int, times: int = 1000, hangs: bool = False) -> None:
        super().__init__()
        self.directory, self.times, self.hangs = Path(directory), times, hangs
        self.is_doomed = self._count("build") >= first
        self.taken = 0

    def _count(self, what: str) -> int:
        number = len(list(self.directory.glob(f"{what}-*"))) + 1
        (self.directory / f"{what}-{number}").touch()
        return number

    def step(self, action: Any) -> Any:
        self.taken += 1
        if self.is_doomed and self.taken > 50 and self._count("fault") <= self.times:
            if self.hangs:
                time.sleep(60)
            os.abort()
        return super().step(action)


class Ferry(CounterEnv):
    """Has the name of an emoji."""


class Loud(CounterEnv):
    """Prints at each step, and ends its process in its 20th."""

    def step(self, action: Any) -> Any:
        print(f"out {self.episode_step}", flush=True)
        print(f"err {self.episode_step}", file=sys.stderr, flush=True)
        if self.episode_step == 19:
            os._exit(7)
        return super().step(action)


class Frames(CounterEnv):
    """Draws frames, or fails to."""

    def __init__(self, kind: str = "good", render_mode: str = "rgb_array") -> None:
        super().__init__(render_mode=render_mode)
        self.kind = kind

    def render(self) -> Any:
        if self.kind == "raises":
            raise RuntimeError("no OpenGL context")
        if self.kind == "aborts":
            os.abort()
        if self.kind == "none":
            return None
        frame = np.zeros((4, 6, 3), np.uint8)
        frame[0] = 255 * (self.kind != "black")
        return [frame] if self.kind == "list" else frame


class Forked(CounterEnv):
    """Shows whether it has been copied by a fork."""

    def __init__(self) -> None:
        super().__init__()
        self.born = os.getpid()

    def _next_draw(self) -> float:
        return float(os.getpid() != self.born)


class ForkedLate(Forked):
    """Shows it too late for the replay that follows a fork."""

    def __init__(self) -> None:
        super().__init__()
        self.horizon = None

    def _next_draw(self) -> float:
        return super()._next_draw() if self.episode_step > 180 else 0.0


unpicklable = functools.partial(FromLock, threading.Lock())
hanging = functools.partial(FaultyEnv, fault=Fault("hang_c", "step", at=3))
segfaulting = functools.partial(FaultyEnv, fault=Fault("segv", "step", at=3))
# After the longest walk of a check, and before the end of the 13 episodes of 20 steps that even a slow machine takes.
crashes_late = functools.partial(FaultyEnv, fault=Fault("segv", "step", at=250), horizon=30)
raising = functools.partial(FaultyEnv, fault=Fault("raise", "reset"))
no_env = functools.partial(dict, a=1)


def long_with_thread() -> Any:
    """Build an env whose spec allows an episode of a million steps, and that cannot be forked."""
    env = gymnasium.make("CartPole-v1", max_episode_steps=1_000_000)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return env
