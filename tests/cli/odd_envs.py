"""Envs that the commands have something to say of. No test imports this: the commands find it as a file."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from kit import CounterEnv, Fault, FaultyEnv, GlobalRandomEnv, MemoryEnv, NondeterministicEnv, OnlyEnv, SlowEnv


class FromLock(CounterEnv):
    """Takes something that cannot be pickled."""

    def __init__(self, lock: Any) -> None:
        super().__init__()


class Biased(CounterEnv):
    """Is another one in each process, and else deterministic."""

    def __init__(self) -> None:
        super().__init__(count_episodes=False)
        self.offset = int.from_bytes(os.urandom(3), "little") / 2**24


class Counted(CounterEnv):
    """Counts how often it is built."""

    def __init__(self, directory: str, **counter: Any) -> None:
        super().__init__(count_episodes=False, **counter)
        self.directory = Path(directory)
        self.number = self._count("build")

    def _count(self, what: str) -> int:
        number = len(list(self.directory.glob(f"{what}-*"))) + 1
        (self.directory / f"{what}-{number}").touch()
        return number


class Wavering(Counted):
    """Draws from the operating system at one step, in the env that is built as number *first* and in later ones."""

    def __init__(self, directory: str, first: int, at: int = 11) -> None:
        super().__init__(directory, horizon=None)
        self.first, self.at = first, at

    def _next_draw(self) -> float:
        draw = super()._next_draw()
        return draw + os.urandom(1)[0] + 1 if self.number >= self.first and self.episode_step == self.at else draw


class Moody(Counted):
    """Shows another draw in its step 11, if it is built as number *first* or later: not by chance, but a replay repeats it."""

    def __init__(self, directory: str, first: int) -> None:
        super().__init__(directory, horizon=None)
        self.first = first

    def _next_draw(self) -> float:
        return super()._next_draw() + (self.number >= self.first and self.episode_step == 11)


class Token:
    """Pickles otherwise each time."""

    pickled = 0

    def __reduce__(self) -> Any:
        Token.pickled += 1
        return Token, (), {"pickled": Token.pickled}


class Incomparable(CounterEnv):
    """Shows a token in each observation."""

    def __init__(self) -> None:
        super().__init__(count_episodes=False)

    def _observe(self) -> Any:
        return {"token": Token(), "numbers": super()._observe()}


class LeakyWithThread(CounterEnv):
    """Keeps a descriptor open for each episode, and has a thread from its construction on."""

    def __init__(self, horizon: int = 10) -> None:
        super().__init__(horizon=horizon, count_episodes=False)
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


class Doomed(Counted):
    """Crashes or hangs in steps of the env that is built as number *first*, and of those built later.

    Args:
        directory: Where builds and faults are counted.
        first: The number of the first env with faults.
        times: How many faults there are.
        hangs: Hang instead of a crash.
        fork_seconds: How long a fork takes longer, as that of a large process does.
        step_seconds: How long a step takes.
    """

    def __init__(
        self,
        directory: str,
        first: int,
        times: int = 1000,
        hangs: bool = False,
        fork_seconds: float = 0.0,
        step_seconds: float = 0.0,
        **counter: Any,
    ) -> None:
        super().__init__(directory, **counter)
        if fork_seconds:
            os.register_at_fork(before=functools.partial(time.sleep, fork_seconds))
        self.times, self.hangs, self.step_seconds = times, hangs, step_seconds
        self.faults = (self.directory / "faults").open("ab", buffering=0)  # opened in a step, it would forbid snapshots
        self.is_doomed = self.number >= first
        self.taken = 0

    def step(self, action: Any) -> Any:
        self.taken += 1
        time.sleep(self.step_seconds)
        if self.is_doomed and self.taken > 50 and self._faults() <= self.times:
            if self.hangs:
                time.sleep(60)
            os.abort()
        return super().step(action)

    def _faults(self) -> int:
        self.faults.write(b".")
        return os.fstat(self.faults.fileno()).st_size


class Misfit(CounterEnv):
    """Observes in its step 4 what its space does not contain."""

    def __init__(self, kind: str) -> None:
        super().__init__(count_episodes=False)
        self.kind = kind

    def _observe(self) -> Any:
        seen = super()._observe()
        if self.episode_step == 4:
            seen[0] = {"large": 1e9, "NaN": np.nan}.get(self.kind, seen[0])
            return {"dtype": seen.astype(np.float64), "shape": seen[:3]}.get(self.kind, seen)
        return seen


def crashes_once(directory: str) -> Any:
    """Build an env that crashes in its first step, and never again."""
    return FaultyEnv(fault=Fault("segv", "step", once=Path(directory, "once")), count_episodes=False)


def needs(size: int, color: str) -> Any:
    """Build an env with these arguments."""
    return CounterEnv(horizon=size)


class Ferry(CounterEnv):
    """Has the name of an emoji."""


class Loud(CounterEnv):
    """Prints at each step, and ends its process in its tenth."""

    def step(self, action: Any) -> Any:
        print(f"out {self.episode_step}", flush=True)
        print(f"err {self.episode_step}", file=sys.stderr, flush=True)
        if self.episode_step == 9:
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


class Curriculum(CounterEnv):
    """Shows how many episodes of 150 steps have ended."""

    def __init__(self) -> None:
        super().__init__(horizon=150, count_episodes=False)
        self.level = 0

    def step(self, action: Any) -> Any:
        result = super().step(action)
        self.level += bool(result[2] or result[3])
        return result

    def _next_draw(self) -> float:
        return super()._next_draw() + self.level


class Forked(CounterEnv):
    """Shows whether it has been copied by a fork. Its episode has no end: no reset is there to be replayed from.

    Its steps take so long that forks cost little, even on a busy machine.
    """

    def __init__(self) -> None:
        super().__init__(horizon=None, count_episodes=False)
        self.born = os.getpid()

    def _next_draw(self) -> float:
        time.sleep(0.002)
        return float(os.getpid() != self.born)


class ForkedLate(Forked):
    """Shows it too late for the replay that follows a fork."""

    def _next_draw(self) -> float:
        return super()._next_draw() if self.episode_step > 180 else 0.0


Chance = NondeterministicEnv
Remembering = MemoryEnv
OnlyOne = OnlyEnv
unpicklable = functools.partial(FromLock, threading.Lock())
hanging = functools.partial(FaultyEnv, fault=Fault("hang_c", "step", at=3))
segfaulting = functools.partial(FaultyEnv, fault=Fault("segv", "step", at=3))
doomed_in_step_20 = functools.partial(FaultyEnv, fault=Fault("segv", "step", at=20), count_episodes=False)
slow = functools.partial(SlowEnv, step_seconds=0.002, count_episodes=False)
# After the longest walk of a check, and before the end of the 13 episodes of 20 steps that even a slow machine takes.
crashes_late = functools.partial(FaultyEnv, fault=Fault("segv", "step", at=230), horizon=30)
raising = functools.partial(FaultyEnv, fault=Fault("raise", "reset"))
endless = functools.partial(CounterEnv, horizon=None, count_episodes=False)
from_process = functools.partial(GlobalRandomEnv, count_episodes=False)
no_env = functools.partial(dict, a=1)


def normalized() -> Any:
    """Build an env whose wrapper remembers all that it has seen."""
    return gymnasium.wrappers.NormalizeObservation(gymnasium.make("CartPole-v1"))


def long_with_thread() -> Any:
    """Build an env whose spec allows an episode of ten million steps, and that cannot be forked."""
    env = gymnasium.make("CartPole-v1", max_episode_steps=10_000_000)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return env


class TwoRewards(CounterEnv):
    """Gives a vector as reward, as mo-gymnasium does."""

    def __init__(self) -> None:
        super().__init__(count_episodes=False)

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return (observation, np.array([reward, 1.0]), *rest)


class Chancy(CounterEnv):
    """Kills its own process in one of *every* steps, by chance, as a simulator with a race does; its files are its own.

    Args:
        every: About how many steps there are between two crashes; 0: it never crashes.
        directory: Where it keeps a file from its construction to its close(); empty: nowhere.
        hangs: Hang instead of a crash.
    """

    def __init__(self, every: int = 100, directory: str = "", hangs: bool = False, **counter: Any) -> None:
        super().__init__(count_episodes=False, **counter)
        self.every, self.hangs = every, hangs
        self.file = Path(directory, f"{os.getpid()}-{id(self)}") if directory else None
        if self.file is not None:
            self.file.touch()

    def step(self, action: Any) -> Any:
        if self.every and int.from_bytes(os.urandom(4), "little") % self.every == 0:
            if self.hangs:
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().step(action)

    def close(self) -> None:
        if self.file is not None:
            self.file.unlink()
        super().close()
