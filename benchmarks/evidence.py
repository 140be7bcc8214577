"""What it costs that all bytes of an observation are evidence: steps a second with digests and without, in turns.

A worker computes a digest of each observation of more than 1 KiB. The envs without digests are the same, but for the
function that computes them. Frames of MuJoCo's camera are drawn by the CPU here; "frames for nothing" are copied from a
list, and show the most that a digest can cost.

::

    pip install -e ".[test]"
    python benchmarks/evidence.py                # on an idle machine; about two minutes
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from rich.console import Console
from rich.table import Table

from multienv import SubprocessVectorEnv
from multienv._engine.worker import stepper

SIZE = (512, 640, 3)  # bytes: 983,040


class Frames(gymnasium.Env[Any, Any]):
    """Returns frames that cost nothing."""

    observation_space = gymnasium.spaces.Box(0, 255, SIZE, np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.frames = [generator.integers(0, 256, SIZE, np.uint8) for _ in range(4)]
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.frames[0], {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.frames[self.steps % 4], 0.0, False, False, {}


class Camera(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Returns what the camera sees."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(0, 255, SIZE, np.uint8)

    def observation(self, observation: Any) -> Any:
        return self.env.render()


def pong(**options: Any) -> gymnasium.Env[Any, Any]:
    """Build Pong."""
    import ale_py

    gymnasium.register_envs(ale_py)
    return gymnasium.make("ALE/Pong-v5", **options)


def stacked() -> gymnasium.Env[Any, Any]:
    """Build Pong as agents see it: four frames of 84×84."""
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    return FrameStackObservation(AtariPreprocessing(pong(frameskip=1)), 4)


def camera() -> gymnasium.Env[Any, Any]:
    """Build an env whose observations are frames of a camera."""
    height, width, _ = SIZE
    return Camera(gymnasium.make("HalfCheetah-v5", render_mode="rgb_array", width=width, height=height))


ENVS = {"Pong, 84×84×4": stacked, "Pong, 210×160×3": pong, "camera, 1 MB": camera, "frames for nothing, 1 MB": Frames}


def make(build: Any, digests: bool) -> gymnasium.Env[Any, Any]:
    """Build an env; if so, have its worker compute no digests."""
    if not digests:
        stepper.digester = lambda shown, leaves: lambda: None  # type: ignore[attr-defined]
    return build()


def turn(envs: Any, actions: Any, seconds: float) -> float:
    """Return steps of envs a second."""
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        envs.step(actions)
        steps += envs.num_envs
    return steps / (time.perf_counter() - began)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each turn")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--num-envs", type=int, default=2)
    given = parser.parse_args()
    os.environ.setdefault("MUJOCO_GL", "egl")
    table = Table("observations", "steps a second without", "with", "cost, median of pairs", "quarter to quarter")
    for name, build in ENVS.items():
        both = [SubprocessVectorEnv([partial(make, build, digests)] * given.num_envs) for digests in (False, True)]
        actions = both[0].action_space.sample()
        for envs in both:
            envs.reset(seed=0)
            turn(envs, actions, 1.0)
        pairs = []
        for repeat in range(given.repeats):
            order = (0, 1) if repeat % 2 else (1, 0)
            found = {which: turn(both[which], actions, given.seconds) for which in order}
            pairs.append((found[0], found[1]))
        costs = [100 * (without / with_ - 1) for without, with_ in pairs]
        low, middle, high = statistics.quantiles(costs, n=4)
        rates = [f"{statistics.median(one):,.0f}" for one in zip(*pairs, strict=True)]
        table.add_row(name, *rates, f"{middle:.1f} %", f"{low:.1f} to {high:.1f} %")
        for envs in both:
            envs.close()
    Console().print(table)


if __name__ == "__main__":
    main()
