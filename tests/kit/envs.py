"""Environments that misbehave, each in one way, for tests of whatever runs environments.

All of them are `CounterEnv`, so that a lost, doubled or spliced step shows in the observation. All constructors are
keyword-only, and all classes can be pickled by reference: ``functools.partial(SlowEnv, step_seconds=1.0)`` is an
``env_fn`` for any start method.
"""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kit.counter import CounterEnv
from kit.faults import Fault, Moment, UnpickleBomb

Observation = NDArray[np.float32]
Reset = tuple[Observation, dict[str, Any]]
Step = tuple[Observation, float, bool, bool, dict[str, Any]]

# A bound on what a failing test leaves behind.
CHILD_SECONDS = 60
PER_EPISODE_MOMENTS = frozenset({"step", "call", "unpickle"})


class SlowEnv(CounterEnv):
    """Sleeps in each reset, step, rendering and close, for as long as told."""

    def __init__(
        self,
        *,
        reset_seconds: float = 0.0,
        step_seconds: float = 0.0,
        render_seconds: float = 0.0,
        close_seconds: float = 0.0,
        **counter: Any,
    ) -> None:
        super().__init__(**counter)
        self.reset_seconds = reset_seconds
        self.step_seconds = step_seconds
        self.render_seconds = render_seconds
        self.close_seconds = close_seconds

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        time.sleep(self.reset_seconds)
        return super().reset(seed=seed, options=options)

    def step(self, action: np.int64) -> Step:
        time.sleep(self.step_seconds)
        return super().step(action)

    def render(self) -> Any:
        time.sleep(self.render_seconds)
        return super().render()

    def close(self) -> None:
        time.sleep(self.close_seconds)
        super().close()


class FarewellEnv(SlowEnv):
    """Leaves a file when its close() is done, and one with the suffix ``.begun`` when that begins."""

    def __init__(self, *, left: str | os.PathLike[str], **slow: Any) -> None:
        super().__init__(**slow)
        self.left = Path(left)

    def close(self) -> None:
        self.left.with_suffix(".begun").touch()
        super().close()
        self.left.touch()


class FaultyEnv(SlowEnv):
    """A `SlowEnv` that fails as told.

    What the manner ``"unpicklable"`` yields goes into ``info["unpicklable"]`` of a step, and has no effect elsewhere. The
    bomb of the moment ``"unpickle"`` lies in ``info["bomb"]`` of a step.

    Args:
        fault: one `Fault`, or several.
        slow: the arguments of `SlowEnv`.
    """

    def __init__(self, *, fault: Fault | Iterable[Fault], **slow: Any) -> None:
        self.faults = (fault,) if isinstance(fault, Fault) else tuple(fault)
        self.events = [0] * len(self.faults)
        super().__init__(**slow)
        self._pass("construct")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        for index, fault in enumerate(self.faults):
            if fault.per == "episode" and fault.moment in PER_EPISODE_MOMENTS:
                self.events[index] = 0
        self._pass("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: np.int64) -> Step:
        unpicklable = self._pass("step", action)
        unpickle_fault = self._due("unpickle", action)
        observation, reward, terminated, truncated, info = super().step(action)
        if unpicklable is not None:
            info = {**info, "unpicklable": unpicklable}
        if unpickle_fault is not None:
            info = {**info, "bomb": UnpickleBomb(unpickle_fault)}
        return observation, reward, terminated, truncated, info

    def poke(self, amount: float = 0.0) -> Any:
        self._pass("call")
        return super().poke(amount)

    def close(self) -> None:
        self._pass("close")
        super().close()

    def _pass(self, moment: Moment, action: object = None) -> object:
        fault = self._due(moment, action)
        return None if fault is None else fault.strike()

    def _due(self, moment: Moment, action: object) -> Fault | None:
        due = None
        for index, fault in enumerate(self.faults):
            if fault.moment != moment or (fault.action is not None and action != fault.action):
                continue
            self.events[index] += 1
            if self.events[index] == fault.at and due is None and fault.claim():
                due = fault
        return due


class NondeterministicEnv(CounterEnv):
    """Draws from ``os.urandom`` instead of its RNG from step *since* of each episode on: no replay can match.

    With ``since=0`` the reset observation is random too. *shown_in* says what the draw goes into; the other, if any,
    stays deterministic.
    """

    def __init__(
        self, *, since: int = 0, shown_in: Literal["observation", "reward", "both"] = "both", **counter: Any
    ) -> None:
        super().__init__(**counter)
        self.since = since
        self.shown_in = shown_in

    def _chance(self) -> float:
        return int.from_bytes(os.urandom(2), "little") / 2**16 + 1.0 if self.episode_step >= self.since else 0.0

    def _observe(self) -> Observation:
        observation = super()._observe()
        if self.shown_in != "reward":
            observation[2] += self._chance()
        return observation

    def _reward(self) -> float:
        return super()._reward() + (0.0 if self.shown_in == "observation" else self._chance())


class MemoryEnv(CounterEnv):
    """Counts all its steps, which a reset does not end; from some step on what it draws depends on the count.

    Until then nothing tells an env with a past from a new one (BipedalWalker and ALE are like this).
    """

    def __init__(self, shows_after: float = math.inf, horizon: int | None = 5) -> None:
        super().__init__(horizon=horizon, count_episodes=False)
        self.shows_after, self.steps_ever = shows_after, 0

    def step(self, action: Any) -> Any:
        self.steps_ever += 1
        return super().step(action)

    def _next_draw(self) -> float:
        shown = 0.001 * self.steps_ever if self.steps_ever >= self.shows_after else 0.0
        return super()._next_draw() + shown


class GlobalRandomEnv(CounterEnv):
    """Draws from the global generators: ``random`` shows in place 2 of the observation, ``numpy.random`` in place 3.

    The reward is their sum. The env's own ``np_random`` is left alone.
    """

    def __init__(self, **counter: Any) -> None:
        super().__init__(**counter)
        self._numpy_draw = 0.0

    def draws(self) -> tuple[float, float]:
        """One draw of each global generator, in full precision."""
        return random.random(), float(np.random.random())

    def _next_draw(self) -> float:
        draw, self._numpy_draw = self.draws()
        return draw

    def _observe(self) -> Observation:
        observation = super()._observe()
        observation[3] = self._numpy_draw
        return observation

    def _reward(self) -> float:
        return self._draw + self.offset + self._numpy_draw


class SameArrayEnv(CounterEnv):
    """Returns the same array object every time, overwritten by the next step."""

    def __init__(self, **counter: Any) -> None:
        super().__init__(**counter)
        self._array = np.zeros(4, dtype=np.float32)

    def _observe(self) -> Observation:
        self._array[...] = super()._observe()
        return self._array


class ForkingEnv(CounterEnv):
    """Starts processes at construction and forgets about them; ``info["children"]`` of each reset names their pids.

    Args:
        children: How many.
        how: ``"exec"`` starts a program; ``"fork"`` makes a bare copy of this process, which also holds every
            descriptor that this process has, so that nobody sees their end.
        stubborn: The children ignore SIGTERM and lead sessions of their own.
        counter: The arguments of `CounterEnv`.
    """

    def __init__(
        self, *, children: int = 1, how: Literal["exec", "fork"] = "exec", stubborn: bool = False, **counter: Any
    ) -> None:
        super().__init__(**counter)
        start = _exec_child if how == "exec" else _fork_child
        self.children = tuple(start(stubborn) for _ in range(children))

    def _info(self) -> dict[str, Any]:
        return {"children": self.children}


def _exec_child(stubborn: bool) -> int:
    command = ["/bin/sh", "-c", ("trap '' TERM; " if stubborn else "") + f"exec sleep {CHILD_SECONDS}"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=stubborn)
    process.returncode = 0  # forget about it: no warning, and no reaping, when the object goes
    return process.pid


def _fork_child(stubborn: bool) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else signal.SIG_DFL)
            if stubborn:
                os.setsid()
            time.sleep(CHILD_SECONDS)
        finally:
            os._exit(0)
    return pid


class OnlyEnv(CounterEnv):
    """Can be built once in a process."""

    built = 0

    def __init__(self, *, segfaults: bool = False, **counter: Any) -> None:
        super().__init__(**counter)
        type(self).built += 1
        if self.built > 1:
            if segfaults:
                os.kill(os.getpid(), signal.SIGSEGV)
            raise RuntimeError("only one emulator instance per process")


class PidEnv(CounterEnv):
    """Puts the pid of the process it runs in into every info, and into the attribute `pid`."""

    @property
    def pid(self) -> int:
        """The process that the env runs in."""
        return os.getpid()

    def _info(self) -> dict[str, Any]:
        return {"pid": os.getpid()}
