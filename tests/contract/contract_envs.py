"""Envs that the contract tests run, in a module of their own: workers import them by name."""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from kit import CounterEnv, SlowEnv


class DictEnv(CounterEnv):
    """Observes a Dict: what a robot with a camera does."""

    def __init__(self, **counter: Any) -> None:
        super().__init__(**counter)
        image = spaces.Box(0, 255, (16, 16, 3), np.uint8)
        counts = spaces.Tuple((spaces.Discrete(100_000), spaces.Box(-1e9, 1e9, (4,), np.float32)))
        self.observation_space = spaces.Dict({"image": image, "counts": counts})

    def _observe(self) -> Any:
        image = np.full((16, 16, 3), self.episode_step % 256, np.uint8)
        return {"image": image, "counts": (np.int64(self.episode_step), super()._observe())}


class EchoEnv(gymnasium.Env[Any, Any]):
    """Returns from step and reset whatever it was given to return."""

    observation_space = spaces.Box(-1e9, 1e9, (2,), np.float32)
    action_space = spaces.Discrete(100)

    def __init__(self, *results: Any, first: Any = None) -> None:
        self.results = results
        self.first = (np.zeros(2, np.float32), {}) if first is None else first

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.first

    def step(self, action: Any) -> Any:
        result = self.results[int(action)]
        if isinstance(result, BaseException):
            raise result
        return result


class LockInfoEnv(CounterEnv):
    """At the step with action 1 the info holds a lock; with action 2 the observation; options ask the reset for one."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = super().reset(seed=seed)
        return observation, info | ({"lock": threading.Lock()} if options else {})

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if action == 1:
            info = {"lock": threading.Lock()}
        if action == 2:
            observation = {"lock": threading.Lock()}
        return observation, reward, terminated, truncated, info

    def lock(self) -> Any:
        return threading.Lock()


class FarewellEnv(SlowEnv):
    """Leaves a file when it is closed."""

    def __init__(self, *, left: Path, **slow: Any) -> None:
        super().__init__(**slow)
        self.left = left

    def close(self) -> None:
        self.left.touch()


class OldEnv(CounterEnv):
    """Of the old gym API: four from step, one from reset when asked for by options."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = super().reset(seed=seed)
        return result[0] if options else result

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, info


class SurroundingsEnv(CounterEnv):
    """Tells where it runs."""

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def directory(self) -> str:
        return os.getcwd()

    def process_attributes(self) -> tuple[Any, ...]:
        umask = os.umask(0)
        os.umask(umask)
        core = resource.getrlimit(resource.RLIMIT_CORE)
        return umask, core, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)

    def say(self, text: str) -> None:
        for descriptor in (1, 2):
            os.write(descriptor, text.encode())

    def input(self) -> tuple[str, bytes]:
        return sys.stdin.read(), os.read(0, 100)

    def hash_of(self, text: str) -> int:
        return hash(text)


class CallableAttributes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper with an attribute and a method of its own."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.gain = 2.0

    def amplify(self, value: float, *, by: float = 1.0) -> float:
        return self.gain * value * by


class EndlessFailure(Exception):
    """Wants two arguments, one by keyword: cannot be rebuilt by calling it."""

    def __init__(self, code: int, *, joint: str) -> None:
        super().__init__(f"{joint} broke")
        self.code = code
        self.joint = joint


def failures() -> list[Exception]:
    """What the env of `raising_env` raises, by action."""
    return [
        EndlessFailure(7, joint="knee"),
        KeyError("missing"),
        FileNotFoundError(2, "No such file", "mesh.stl"),
        StopIteration(3),
        MemoryError("16 GiB"),
        gymnasium.error.InvalidAction("no"),
    ]


def raising_env() -> gymnasium.Env[Any, Any]:
    return EchoEnv(*failures())


def raise_at_build() -> gymnasium.Env[Any, Any]:
    raise EndlessFailure(7, joint="knee")


def exit_at_build() -> gymnasium.Env[Any, Any]:
    os._exit(5)


def return_none() -> Any:
    return None


def return_a_lock_as_metadata() -> gymnasium.Env[Any, Any]:
    env = CounterEnv()
    env.metadata = {"lock": threading.Lock()}
    return env


def numbered(index: int) -> CounterEnv:
    return CounterEnv(horizon=10 + index)


class Port(CounterEnv):
    """Holds a port while it lives, and leaks."""

    def __init__(self, port: int, horizon: int) -> None:
        super().__init__(horizon=horizon, count_episodes=False)
        self.socket = socket.create_server(("127.0.0.1", port))
        self.leak: list[bytearray] = []

    def step(self, action: Any) -> Any:
        self.leak.append(bytearray(2**20))
        return super().step(action)

    def close(self) -> None:
        self.socket.close()


class RememberingPort(Port):
    """Shows how many steps it has taken since it was built."""

    def __init__(self, port: int, horizon: int) -> None:
        super().__init__(port, horizon)
        self.steps_ever = 0

    def step(self, action: Any) -> Any:
        self.steps_ever += 1
        return CounterEnv.step(self, action)

    def _next_draw(self) -> float:
        return super()._next_draw() + self.steps_ever
