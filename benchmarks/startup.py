"""Time until 8 envs of packages that are slow to import are ready to step, and from SIGKILL to the next step's return.

Without ``preload``, with names, and with ``"auto"``, in turn; each in a new trainer, with one env per process. Recovery
is by a replay, without snapshots: a worker that is recovered from a snapshot imports nothing. Packages that are not
installed are left out.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from multienv import RestartPolicy, SubprocessVectorEnv

NUM_ENVS = 8
KILLS = 3


class ModelEnv(gymnasium.Env[Any, Any]):
    """The least env that computes with a library: it multiplies a vector by a matrix."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (8,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, library: str) -> None:
        self._numpy = importlib.import_module(library)
        self._state = self._numpy.ones(8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._state = self._numpy.ones(8)
        return np.asarray(self._state, np.float32), {}

    def step(self, action: Any) -> Any:
        self._state = 0.5 * self._numpy.eye(8) @ self._state + int(action)
        return np.asarray(self._state, np.float32), 0.0, False, False, {}


class BulletEnv(gymnasium.Env[Any, Any]):
    """A plane and a robot that falls on it."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        import pybullet
        import pybullet_data

        self._bullet, self._data = pybullet, pybullet_data.getDataPath()
        pybullet.connect(pybullet.DIRECT)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._bullet.resetSimulation()
        self._bullet.setAdditionalSearchPath(self._data)
        self._bullet.setGravity(0, 0, -10)
        self._bullet.loadURDF("plane.urdf")
        self._robot = self._bullet.loadURDF("r2d2.urdf", [0, 0, 1])
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self._bullet.stepSimulation()
        return self._observation(), 0.0, False, False, {}

    def _observation(self) -> Any:
        return np.asarray(self._bullet.getBasePositionAndOrientation(self._robot)[0], np.float32)


def torch_env() -> gymnasium.Env[Any, Any]:
    """Make an env that computes with torch."""
    return ModelEnv("torch")


def jax_env() -> gymnasium.Env[Any, Any]:
    """Make an env that computes with jax."""
    return ModelEnv("jax.numpy")


def robosuite_env() -> gymnasium.Env[Any, Any]:
    """Make the Lift task without cameras."""
    import robosuite
    from robosuite.wrappers import GymWrapper

    return GymWrapper(
        robosuite.make("Lift", "Panda", has_renderer=False, has_offscreen_renderer=False, use_camera_obs=False)
    )


def highway_env() -> gymnasium.Env[Any, Any]:
    """Make highway-v0."""
    import highway_env

    gymnasium.register_envs(highway_env)
    return gymnasium.make("highway-v0")


def dm_control_env() -> gymnasium.Env[Any, Any]:
    """Make the cart pole of the control suite."""
    import shimmy

    gymnasium.register_envs(shimmy)
    return gymnasium.make("dm_control/cartpole-swingup-v0")


class Package(NamedTuple):
    """What is measured: how an env is made, and the modules that it imports."""

    make: Callable[[], gymnasium.Env[Any, Any]]
    preload: tuple[str, ...]


PACKAGES = {
    "torch": Package(torch_env, ("torch",)),
    "robosuite": Package(robosuite_env, ("startup_robosuite",)),
    "dm_control": Package(dm_control_env, ("shimmy", "dm_control.suite")),
    "highway_env": Package(highway_env, ("highway_env",)),
    "jax": Package(jax_env, ("jax.numpy",)),
    "pybullet": Package(BulletEnv, ("pybullet",)),
}


def measure(name: str, preload: str) -> tuple[float, float]:
    """Return the seconds until the envs are ready, and the median from a kill to the next step's return."""
    package = PACKAGES[name]
    restart = RestartPolicy(snapshots=False, backoff=0.0)
    began = time.perf_counter()
    envs = SubprocessVectorEnv(
        [package.make] * NUM_ENVS,
        envs_per_worker=1,
        preload={"": (), "names": package.preload, "auto": "auto"}[preload],
        restart=restart,
        reports="",
    )
    envs.reset(seed=0)
    ready, times = time.perf_counter() - began, []
    envs.step(envs.action_space.sample())  # the first step of a process compiles
    for kill in range(KILLS):
        os.kill(envs.statistics()[kill].pid or 0, signal.SIGKILL)
        began = time.perf_counter()
        envs.step(envs.action_space.sample())
        times.append(time.perf_counter() - began)
    envs.close()
    return ready, statistics.median(times)


def measure_apart(name: str, preload: str) -> tuple[float, float, float]:
    """Do so in a new process; add the CPU time that it and its workers took: a busy machine does not change it."""
    before = cpu_seconds()
    command = [sys.executable, __file__, "--measure", name, "--preload", preload]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    if told.returncode or "preload is not used" in told.stderr:
        raise RuntimeError(told.stderr)
    ready, recovery = json.loads(told.stdout.splitlines()[-1])
    return ready, recovery, cpu_seconds() - before


def cpu_seconds() -> float:
    """Return the CPU time of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--packages", nargs="*", default=list(PACKAGES))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--preload", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure, given.preload)))
        return
    print(f"{os.cpu_count()} cores; {NUM_ENVS} envs; seconds, medians of {given.rounds}: without / names / auto")
    for name in given.packages:
        if importlib.util.find_spec(name) is None:
            print(f"{name}: not installed")
            continue
        rounds = [[measure_apart(name, preload) for preload in ("", "names", "auto")] for _ in range(given.rounds)]
        line = name.ljust(12)
        for index, what in enumerate(("start", "recovery", "CPU in all")):
            before, names, auto = (statistics.median(one[which][index] for one in rounds) for which in range(3))
            ratios = f"{names / before:.2f}, {auto / before:.2f} x"
            line += f"  {what} {before:6.2f} / {names:5.2f} / {auto:5.2f} = {ratios}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
