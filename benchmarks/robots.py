"""Robot simulators that see pixels, while their workers are killed, hang and abort inside render().

    python benchmarks/robots.py                                   # what is installed here, by EGL and OSMesa
    python benchmarks/robots.py --only metaworld --renderer osmesa --kills 50 --json robots.json

The simulators ask for different versions of MuJoCo: run it in an environment for each. ``docs/robot_simulators.md`` has
the output, and how to install them. Each row is measured against the same env undisturbed, bit for bit:

- kills: SIGKILL at random moments, to the worker and at times to its newest snapshot as well;
- hang: the n-th frame takes for ever, once, until the deadline; abort: it ends in os.abort(), once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics as statistics_of
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import AddRenderObservation, TimeLimit

from multienv import Deadlines, RestartPolicy, Statistics, SubprocessEnv
from multienv.events import Event, Recovery
from multienv.testing import check_env_recovers

Env = gymnasium.Env[Any, Any]

SIZE = 84
EPISODE = 25  # steps: short, so that many replays begin at a reset and not with the construction
FAULTY_FRAME, STEPS = 40, 60
STEP_DEADLINE = 3.0  # seconds; the first frame of a process compiles shaders, and is drawn by env_fn
RENDERERS: dict[str, dict[str, str]] = {
    "egl": {"MUJOCO_GL": "egl"},
    "osmesa": {"MUJOCO_GL": "osmesa"},
    # Mesa's software renderer without threads and cache: then a worker can be forked.
    "egl, no threads": {"MUJOCO_GL": "egl", "LP_NUM_THREADS": "0", "MESA_SHADER_CACHE_DISABLE": "true"},
    "osmesa, no threads": {"MUJOCO_GL": "osmesa", "LP_NUM_THREADS": "0", "MESA_SHADER_CACHE_DISABLE": "true"},
}


class FaultyRender(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Has one frame hang or abort, in the first process that comes to it.

    Args:
        env: What is wrapped.
        fault: ``"hang"``, ``"abort"`` or ``""``.
        marker: A file that is there once the fault has struck.
    """

    def __init__(self, env: Env, fault: str, marker: str) -> None:
        super().__init__(env)
        self.fault, self.marker, self.frames = fault, Path(marker), 0

    def render(self) -> Any:
        """Draw the frame, or fail."""
        self.frames += 1
        if self.fault and self.frames == FAULTY_FRAME and not self.marker.exists():
            self.marker.touch()
            if self.fault == "abort":
                os.abort()
            time.sleep(1e6)
        return self.env.render()


class RobosuiteFrames(gymnasium.Env[Any, Any]):
    """Makes an env of robosuite's one of gymnasium's: seeded by reset(seed), its frame is that of a camera."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - gymnasium's
    render_mode = "rgb_array"

    def __init__(self, name: str, camera: str = "agentview") -> None:
        import robosuite

        self.camera = f"{camera}_image"
        self.sim = robosuite.make(
            name,
            robots="Panda",
            has_renderer=False,
            has_offscreen_renderer=True,
            use_camera_obs=True,
            camera_names=camera,
            camera_heights=SIZE,
            camera_widths=SIZE,
            hard_reset=False,  # or each reset compiles the model anew, and opens another context
            seed=0,
        )
        low, high = self.sim.action_spec
        self.action_space = gymnasium.spaces.Box(low, high, dtype=np.float64)
        self.observation_space = gymnasium.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)
        self.seen: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; its place of objects is drawn from ``np_random``."""
        super().reset(seed=seed)
        fresh = np.random.default_rng(int(self.np_random.integers(2**31)))
        self.sim.rng.bit_generator.state = fresh.bit_generator.state
        self.seen = self.sim.reset()
        return self.render(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        self.seen, reward, done, _ = self.sim.step(action)
        return self.render(), float(reward), False, bool(done), {}

    def render(self) -> Any:
        """Return the frame that came with the last observation."""
        return self.seen[self.camera][::-1].copy()

    def close(self) -> None:
        """Close the simulator."""
        self.sim.close()


def gymnasium_mujoco() -> Env:
    return gymnasium.make("HalfCheetah-v5", render_mode="rgb_array", width=SIZE, height=SIZE)


def gymnasium_robotics() -> Env:
    import gymnasium_robotics as robotics

    gymnasium.register_envs(robotics)
    return gymnasium.make("FetchReach-v4", render_mode="rgb_array", width=SIZE, height=SIZE)


def metaworld() -> Env:
    import metaworld as registers  # noqa: F401

    return gymnasium.make(
        "Meta-World/MT1", env_name="reach-v3", seed=0, render_mode="rgb_array", width=SIZE, height=SIZE
    )


def dm_control() -> Env:
    import shimmy

    gymnasium.register_envs(shimmy)
    size = {"width": SIZE, "height": SIZE}
    return gymnasium.make("dm_control/cartpole-swingup-v0", render_mode="rgb_array", render_kwargs=size)


def robosuite() -> Env:
    return RobosuiteFrames("Lift")


# What builds the env, and the packages whose versions are told; the first one must be there.
SIMULATORS: dict[str, tuple[Callable[[], Env], tuple[str, ...]]] = {
    "gymnasium": (gymnasium_mujoco, ("mujoco", "gymnasium")),
    "gymnasium-robotics": (gymnasium_robotics, ("gymnasium-robotics", "mujoco")),
    "metaworld": (metaworld, ("metaworld", "mujoco")),
    "dm_control": (dm_control, ("shimmy", "dm_control", "mujoco")),
    "robosuite": (robosuite, ("robosuite", "mujoco")),
}


def frames_of(build: Callable[[], Env], fault: str = "", marker: str = "") -> Env:
    """Build an env whose observations are frames.

    The reset with a seed is for AddRenderObservation, which resets the env without one and draws a frame: gymnasium's
    renderer keeps the camera where that frame had it.
    """
    env = FaultyRender(TimeLimit(build(), EPISODE), fault, marker)
    env.reset(seed=0)
    return AddRenderObservation(env, render_only=True)


@dataclass
class Row:
    """What was measured of a simulator and a renderer."""

    simulator: str
    versions: str
    renderer: str
    step: str = ""
    snapshots: str = ""
    kills: str = ""
    recovery: str = ""
    hang: str = ""
    abort: str = ""


def run(env_fn: Callable[[], Env], **options: Any) -> tuple[list[tuple[Any, ...]], Statistics]:
    """Take random steps; return what was seen."""
    seen: list[tuple[Any, ...]] = []
    with SubprocessEnv(env_fn, reports="", deadlines=Deadlines(step=STEP_DEADLINE), **options) as env:
        env.action_space.seed(0)
        seen.append(env.reset(seed=0)[:1])
        for _ in range(STEPS):
            *step, info = env.step(env.action_space.sample())
            seen.append((*step, info.get("multienv", {}).get("reason", "")))
            if step[2] or step[3]:
                seen.append(env.reset()[:1])
        return seen, env.statistics()


def equal(one: list[tuple[Any, ...]], other: list[tuple[Any, ...]]) -> bool:
    """Tell whether two runs saw the same, to the bit."""
    pairs = zip(chain(*one), chain(*other), strict=False)
    return list(map(len, one)) == list(map(len, other)) and all(np.array_equal(a, b) for a, b in pairs)


def fault_outcome(env_fn: Callable[..., Env], calm: list[tuple[Any, ...]], fault: str, **options: Any) -> str:
    """Tell what came of a run with one fault in render()."""
    with tempfile.TemporaryDirectory() as directory:
        marker = f"{directory}/marker"
        seen, statistics = run(partial(env_fn, fault=fault, marker=marker), **options)
        assert Path(marker).exists(), "the fault never struck"
    recovery = statistics.last_recovery
    assert recovery is not None, "nothing was lost"
    if statistics.truncated_recoveries:
        return f"truncated: {recovery.reason}"
    return f"{'exact' if equal(seen, calm) else 'DIFFERS SILENTLY'}, {recovery.seconds:.1f} s"


def measured(row: Row, build: Callable[[], Env], variables: Mapping[str, str], kills: int) -> Row:
    """Fill in a row."""
    env_fn: Callable[..., Env] = partial(frames_of, build)
    options: dict[str, Any] = {"worker_env": variables, "restart": RestartPolicy(backoff=0.0)}
    calm, statistics = run(env_fn, **options)
    again, _ = run(env_fn, **options)
    row.step = f"{1e3 * (statistics.step_seconds or 0):.0f} ms"
    row.snapshots = f"none: {statistics.no_snapshots}" if statistics.no_snapshots else f"{statistics.snapshots} taken"
    if not equal(calm, again):
        row.kills = "two undisturbed processes differ"
        return row
    limits = Deadlines(step=60.0, reset=60.0)
    pause = (0.3, 1.5)
    events: list[Event] = []
    check = check_env_recovers(env_fn, kills=kills, interval=pause, deadlines=limits, hooks=[events.append], **options)
    recoveries = [event for event in events if isinstance(event, Recovery)]
    methods = Counter(one.method for one in recoveries if one.method)
    ways = ", ".join(f"{count} by {method}" for method, count in sorted(methods.items()))
    differ = f"; {len(check.mismatches)} DIFFER" if check.mismatches else ""
    row.kills = f"{check.exact} of {check.losses} exact, {check.replayed} replayed ({ways}){differ}"
    if check.undisturbed:
        row.kills += f"; undisturbed too: {check.undisturbed:.200}"
    row.recovery = f"{statistics_of.median([one.seconds for one in recoveries] or [0.0]):.2f} s"
    for reason in [*check.truncated, *check.mismatches]:
        print(f"  {row.simulator}, {row.renderer}: {reason:.600}", file=sys.stderr)
    row.hang = fault_outcome(env_fn, calm, "hang", **options)
    row.abort = fault_outcome(env_fn, calm, "abort", **options)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="simulators, by commas")
    parser.add_argument("--renderer", action="append", choices=RENDERERS, help="may be given several times")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    given = parser.parse_args()
    logging.getLogger("multienv").setLevel(logging.CRITICAL)  # losses are what is measured
    rows = []
    for name in given.only.split(",") if given.only else SIMULATORS:
        build, packages = SIMULATORS[name]
        try:
            versions = ", ".join(f"{package} {version(package)}" for package in packages)
        except PackageNotFoundError as missing:
            print(f"{name}: skipped, {missing.name} is not installed", file=sys.stderr)
            continue
        for renderer in given.renderer or RENDERERS:
            row = Row(name, versions, renderer)
            try:
                rows.append(measured(row, build, RENDERERS[renderer], given.kills))
            except Exception as error:
                row.kills = f"{type(error).__name__}: {str(error).splitlines()[0]:.300}"
                rows.append(row)
            print(" | ".join(["", *asdict(rows[-1]).values(), ""]).strip(), flush=True)
            if given.json:
                given.json.write_text(json.dumps([asdict(one) for one in rows], indent=1))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
