"""Envs that the contract tests run, in a module of their own: workers import them by name."""

from __future__ import annotations

import fcntl
import math
import os
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces, wrappers

from kit import CounterEnv, MemoryEnv, SpaceEnv, TokenSpace, example_spaces
from multienv import ResetWith
from multienv._engine.wire.shared_pickle import DATA_NAME

SLOW, HANGS, HANGS_ONCE = 1, 2, 3  # actions of an UnevenEnv


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


class OldEnv(CounterEnv):
    """Of the old gym API: four from step, an observation from reset when asked for by options."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = super().reset(seed=seed)
        return options["observation"] if options else result

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


class Port(MemoryEnv):
    """Holds a port while it lives; leaks, or remembers its steps."""

    def __init__(self, port: int, horizon: int, *, leaks: bool = True) -> None:
        super().__init__(math.inf if leaks else 0, horizon)
        self.socket = socket.create_server(("127.0.0.1", port))
        self.leaks, self.leak = leaks, list[bytearray]()

    def step(self, action: Any) -> Any:
        self.leak += [bytearray(2**20)] * self.leaks
        return super().step(action)

    def close(self) -> None:
        self.socket.close()


class LikeDict:
    """Has items, and nothing else."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items = items

    def __getitem__(self, key: str) -> Any:
        return self.items[key]


class LockedEnv(CounterEnv):
    """Waits in its constructor, as long as it takes, for a lock that it holds while it lives."""

    def __init__(self, file: Path, **counter: Any) -> None:
        super().__init__(**counter)
        self.held = file.open("w")
        fcntl.flock(self.held, fcntl.LOCK_EX)


class SeesSeedEnv(CounterEnv):
    """Shows in each info what seed its reset was given: 0 for none."""

    given = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.given = 0 if seed is None else seed
        return super().reset(seed=seed, options=options)

    def _info(self) -> dict[str, Any]:
        return {"given": self.given}


class OwnGeneratorEnv(CounterEnv):
    """Draws from a generator of its own, made by its constructor without a seed."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.luck = np.random.default_rng()

    def _next_draw(self) -> float:
        return float(self.luck.random())


def seeded_by_its_maker(seed: int) -> gymnasium.Env[Any, Any]:
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=seed)
    return env


class TaskEnv(gymnasium.Env[Any, Any]):
    """Shows what its episodes begin with; they end after four steps, or five."""

    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._task, self._left = (options or {}).get("task", -1), 4 + int(self.np_random.integers(2))
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        return self._shown(), float(action), self._left == 0, False, {}

    def _shown(self) -> Any:
        return np.array([self._task, self._left, self.np_random.random()])


def task_arguments(index: int, episode: int) -> dict[str, Any]:
    """Seeds in every other episode alone: in the others the env's generator goes on."""
    seed = {"seed": 1000 * index + episode} if episode % 2 else {}
    return {**seed, "options": {"task": 100 * index + episode}}


def task_env(index: int) -> Any:
    return gymnasium.wrappers.RecordEpisodeStatistics(ResetWith(TaskEnv(), partial(task_arguments, index)))


class MeetingEnv(CounterEnv):
    """In its second reset it waits for another one to do the same."""

    def __init__(self, *, pipe: Path, reads: bool, **counter: Any) -> None:
        super().__init__(**counter)
        self.pipe, self.reads, self.resets = pipe, reads, 0

    def reset(self, **given: Any) -> Any:
        self.resets += 1
        if self.resets == 2:
            with self.pipe.open("rb" if self.reads else "wb"):  # which blocks until the other end is opened
                pass
        return super().reset(**given)


class Levels(gymnasium.Env[Any, Any]):
    """Each episode is larger than the last one."""

    def __init__(self, grows: bool = True) -> None:
        self.size, self.grows, self.steps = 1, grows, 0
        self._set_spaces()

    def _set_spaces(self) -> None:
        self.observation_space = spaces.Box(-9.0, 9.0, (self.size,), np.float32)
        self.action_space: Any = spaces.Box(-1.0, 1.0, (self.size,), np.float32)
        if not self.grows:
            self.observation_space, self.action_space = spaces.Box(-9.0, self.size, (2,)), spaces.Discrete(self.size)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.size, self.steps = self.size + 1, 0
        self._set_spaces()
        return self._observe(), {}

    def _observe(self) -> Any:
        shape = self.observation_space.shape
        return self.np_random.random(shape, np.float32) + self.steps

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), f"{action} is not in {self.action_space}"
        self.steps += 1
        return self._observe(), float(np.sum(action)), self.steps == 3, False, {}


class TableEnv(gymnasium.Env[Any, Any]):
    """Shows items of tables, and writes to the first: what it has written shows in the next episode."""

    observation_space = gymnasium.spaces.Box(-1e6, 1e6, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(1000)

    def __init__(self, *tables: Any) -> None:
        self.tables = tables

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.array([self.tables[0][0], len(self.tables)]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.tables[0].flags.writeable:
            self.tables[0][0] += action
        return np.array([table[int(action)] for table in self.tables][:1] * 2), 0.0, False, False, {}

    def mappings(self) -> set[int]:
        """Return the inodes of the shared files that this process has mapped."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {int(line.split()[4]) for line in lines if f"/memfd:{DATA_NAME} " in line}

    def sums(self) -> list[float]:
        return [float(np.sum(table)) for table in self.tables]


class Reading:
    """What the envs observe; some cannot be unpickled, in the process ``where`` or, if that is 0, in any."""

    def __init__(self, count: int, *, legible: bool, where: int = 0) -> None:
        self.count, self.legible, self.where = count, legible, where

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not state["legible"] and state["where"] in (0, os.getpid()):
            raise RuntimeError("smudged")
        self.__dict__.update(state)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reading) and self.count == other.count

    def __hash__(self) -> int:
        return self.count


class Readings(spaces.Space[Any]):
    """A space of a user's own."""

    def sample(self, mask: Any = None, probability: Any = None) -> Reading:
        return Reading(0, legible=True)

    def contains(self, x: Any) -> bool:
        return isinstance(x, Reading)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Readings)

    def __hash__(self) -> int:
        return 0


class ReadingEnv(gymnasium.Env[Any, Any]):
    """Counts its steps; that of step ``at`` cannot be read."""

    action_space = spaces.Discrete(2)

    def __init__(self, at: int = 0, where: int = 0) -> None:
        self.observation_space = Readings()
        self.at, self.where = at, where
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.count = 0
        return Reading(0, legible=True), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        reading = Reading(self.count, legible=self.count != self.at, where=self.where)
        return reading, float(self.count), False, False, {}


class SpecialInfoEnv(CounterEnv):
    """Tells what it is given in the info of each reset, and when it is asked."""

    def __init__(self, special: Any = str) -> None:
        super().__init__()
        self.special = special

    def _info(self) -> dict[str, Any]:
        return {} if self.episode_step else {"special": self.special()}

    def ask(self) -> Any:
        return self.special()


class MadeInTheWorker(ReadingEnv):
    """Has a space of a class that it makes when it is built, as grid2op does: no other process knows it."""

    def __init__(self) -> None:
        super().__init__()
        kind = type("MadeAtRunTime", (spaces.Discrete,), {"__module__": __name__})
        globals()["MadeAtRunTime"] = kind
        self.action_space = kind(2)


def space_env(kind: str, *, actions: str = "discrete", horizon: int = 3) -> SpaceEnv:
    found = example_spaces()
    return SpaceEnv(observation_space=found[kind], action_space=found[actions], horizon=horizon, seed=1)


class BrokenFirstEnv(SpaceEnv):
    """Its first resets raise; so it has no observation yet."""

    def __init__(self, *, broken: int) -> None:
        super().__init__(observation_space=TokenSpace(size=8), seed=1)
        self.broken = broken

    def reset(self, **options: Any) -> Any:
        self.broken -= 1
        if self.broken >= 0:
            raise OSError("not yet")
        return super().reset(**options)


def bounded(high: float, *, width: int = 2) -> SpaceEnv:
    return SpaceEnv(observation_space=spaces.Box(0.0, high, (width,), np.float32), horizon=4, seed=1)


class WideEnv(gymnasium.Env[Any, Any]):
    """Shows whatever integer it was given; a multiple of 3 ends the episode."""

    observation_space = spaces.Box(-1e20, 1e20, (1,), np.float64)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1), {"reset": True}

    def step(self, action: Any) -> Any:
        return np.array([float(action)]), 0.0, action % 3 == 0, False, {"action": action}


class TellingEnv(gymnasium.Env[Any, Any]):
    """Counts its steps; its infos are what it is told to tell."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, tell: Callable[[int, int], dict[Any, Any]], index: int = 0, horizon: int = 5) -> None:
        self.tell, self.index, self.horizon, self.steps = tell, index, horizon, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), self.tell(self.index, 0)

    def step(self, action: Any) -> Any:
        self.steps += 1
        info = self.tell(self.index, self.steps)
        return np.full(1, self.steps, np.float32), 1.0, self.steps == self.horizon, False, info


INFOS = [{"x": 1, "y": None}, {"x": None, "y": 1}]


class UnmergeableEnv(CounterEnv):
    """Tells, in the step ``at`` of an episode, None where the other env tells a number: whichever is merged first."""

    def __init__(self, index: int, at: int) -> None:
        super().__init__(horizon=None)
        self.index, self.at = index, at

    def _info(self) -> dict[str, Any]:
        return INFOS[self.index] if self.episode_step == self.at else {}


def wrapped_inside() -> gymnasium.Env[Any, Any]:
    env = wrappers.FlattenObservation(DictEnv(horizon=20))
    return wrappers.TimeLimit(wrappers.TransformReward(env, lambda reward: reward * 2), 7)


class Poked(CounterEnv):
    def __init__(self):
        super().__init__()
        self.poke_later = partial(self.poke)
        self.engine = threading.Lock()  # as little to be pickled as a simulator

    def named(self, name):
        return len(name)


class MisshapenEnv(CounterEnv):
    """With action 3 its observation is of another shape."""

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return (observation[:2] if action == 3 else observation, *rest)


class NestedEnv(gymnasium.Env[Any, Any]):
    """Observes nested Dicts and Tuples, as ``option["as"]`` of a reset says; ``text``: one part has no rows."""

    action_space = spaces.Discrete(2)

    def __init__(self, *, text: bool = False) -> None:
        pair = spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Text(5) if text else spaces.Discrete(2)))
        self.observation_space = spaces.Dict({"state": spaces.Box(-1, 1, (3,)), "in": spaces.Dict({"pair": pair})})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        whole: Any = self.observation_space.sample()
        pair = whole["in"]["pair"]
        made: dict[str, Any] = {
            "whole": whole,
            "no key": {"in": whole["in"]},
            "an array": np.zeros(3),
            "one more": {**whole, "x": 1},
            "inner no key": {**whole, "in": {}},
            "inner array": {**whole, "in": np.zeros(3)},
            "inner one more": {**whole, "in": {"pair": pair, "y": 1}},
            "no dict": LikeDict(whole),
            "short": {**whole, "in": {"pair": pair[:1]}},
            "long": {**whole, "in": {"pair": (*pair, 1)}},
            "no tuple": {**whole, "in": {"pair": 3}},
            "inner shape": {**whole, "in": {"pair": (np.zeros(5, np.float32), pair[1])}},
        }
        return made[(options or {}).get("as", "whole")], {}


class LicensedEnv(CounterEnv):
    """Holds a licence while it is built: a file in a directory; shows how many were held at the most."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        with tempfile.NamedTemporaryFile(dir=directory):
            self.held = 0
            for _ in range(5):
                self.held = max(self.held, len(list(directory.iterdir())))
                time.sleep(0.01)


class UnevenEnv(CounterEnv):
    """Is fast, but takes 0.6 s for an action, hangs for another, and once for another."""

    def __init__(self, directory: Path, **counter: Any) -> None:
        super().__init__(**{"horizon": None, **counter})
        self.directory = directory
        self.pause = 0.0

    def step(self, action: Any) -> Any:
        time.sleep(self.pause)
        if action == SLOW:
            time.sleep(0.6)
        if action == HANGS:
            time.sleep(60.0)
        if action == HANGS_ONCE and not (self.directory / "hung").exists():
            (self.directory / "hung").touch()
            time.sleep(60.0)
        return super().step(action)


def hang_once(observations: Any) -> Any:
    """Act for three envs, of which the second one hangs, once; here, so that a worker needs no import to choose."""
    return np.array([0, HANGS_ONCE, 0])
