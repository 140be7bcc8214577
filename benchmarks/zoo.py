"""Envs that nobody here wrote, while their workers are killed: what is recovered with snapshots, and what without.

    pip install rich typer psutil                     # and the packages of the envs, for example:
    pip install minigrid highway-env flappy-bird-gymnasium mo-gymnasium "gymnasium[box2d]"
    python benchmarks/zoo.py                          # all envs whose packages are installed here
    python benchmarks/zoo.py minigrid nle --json zoo.json

The packages ask for different versions of their dependencies: run the script in an environment for each. It is not
part of multienv; if multienv is not installed in that environment, put the checkout on PYTHONPATH.

Each env takes random steps undisturbed. Then it takes the same steps while its worker gets SIGKILL again and again:
alone and as two envs in one worker; with snapshots, and without (where only replays recover it). A cell counts the
outcomes. "differ" counts steps that are not as in the undisturbed run, to the bit, though every recovery so far was
called exact. It must be 0; else the exit code is 1. "does not repeat": undisturbed runs differ, too.
"after replays" counts differences after a recovery that was called replayed, which promises less. The last column is
the verdict of ``multienv doctor``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import TimeLimit
from rich.console import Console
from rich.table import Table

from multienv import Deadlines, RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv._engine.recovery.verification import same
from multienv.events import Event, Recovery

Env = gymnasium.Env[Any, Any]

KILLS = 20
STEPS, SECONDS = 1000, 4.0  # limits of the first run; all others take as many steps
SEED = 1  # not 0: some envs take that for no seed
EPISODE = 50  # steps: short, so that many replays begin at a reset and not with the construction
MOST_TRIES = 10  # undisturbed runs, to find out whether a difference is the env's own
DOCTOR_SECONDS = 120.0
PATIENT: dict[str, Any] = {"reports": "", "deadlines": Deadlines(step=60.0, reset=60.0)}
UNDISTURBED = RestartPolicy(on_crash="raise", on_timeout="raise", snapshots=False)
POLICIES = {"snapshots": RestartPolicy(backoff=0.0), "replays": RestartPolicy(backoff=0.0, snapshots=False)}


# --- the envs -------------------------------------------------------------------------------------


class Crafter(gymnasium.Env[Any, Any]):
    """Makes Crafter, which has the old interface, one of gymnasium's; its worlds are numbered from reset(seed) on."""

    observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(17)

    def __init__(self) -> None:
        import crafter

        self.sim = crafter.Env(seed=0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in the next world."""
        if seed is not None:
            self.sim._seed, self.sim._episode = seed, 0
        return self.sim.reset(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        observation, reward, done, info = self.sim.step(action)
        return observation, float(reward), done, False, info


class OpenSpiel(gymnasium.Env[Any, Any]):
    """Plays a game of OpenSpiel's with one agent: chance and the other players move at random."""

    def __init__(self, name: str) -> None:
        import pyspiel

        self.game = pyspiel.load_game(name)
        size = self.game.observation_tensor_size()
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(self.game.num_distinct_actions())

    def _until_ours(self) -> Any:
        while not self.state.is_terminal() and self.state.current_player() != 0:
            self.state.apply_action(int(self.np_random.choice(self.state.legal_actions())))
        return np.array(self.state.observation_tensor(0), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin a game."""
        super().reset(seed=seed)
        self.state = self.game.new_initial_state()
        return self._until_ours(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Make a move: one of the legal ones."""
        legal = self.state.legal_actions()
        self.state.apply_action(legal[int(action) % len(legal)])
        seen, is_over = self._until_ours(), self.state.is_terminal()
        return seen, float(self.state.returns()[0]) if is_over else 0.0, is_over, False, {}


class SeedEachEpisode(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Hands each reset a seed, as docs/writing_envs.md advises."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        inner: Any = self.env.unwrapped
        seed = int(inner.np_random.integers(1, 2**31)) if seed is None else seed
        if hasattr(inner, "nethack"):  # NLE's reset() drops its seed
            inner.seed(core=seed, disp=seed, reseed=False)
        return self.env.reset(seed=seed, options=options)


class PlainSpaces(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Describes the spaces of Grid2Op in gymnasium's classes: its own exist only in the process that built the env."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        seen: Any = env.observation_space
        self.observation_space = gymnasium.spaces.Box(seen.low, seen.high, seen.shape, seen.dtype)
        self.action_space = gymnasium.spaces.Discrete(int(env.action_space.n))  # type: ignore[attr-defined]


class OneRobot(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes the only robot of a warehouse out of its tuples and lists."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self.observation_space, self.action_space = env.observation_space[0], env.action_space[0]  # type: ignore[index]

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        observations, info = self.env.reset(**options)
        return observations[0], info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step."""
        observations, rewards, *flags, info = self.env.step([action])
        return observations[0], rewards[0], *flags, info


def registered(name: str, module: str = "", **options: Any) -> Env:
    """Build an env of gymnasium's registry, after its module has been imported."""
    if module:
        gymnasium.register_envs(importlib.import_module(module))
    return gymnasium.make(name, **options)


def retro() -> Env:
    import stable_retro

    return stable_retro.make("Airstriker-Genesis-v0", render_mode="rgb_array")


def grid2op() -> Env:
    import grid2op
    from grid2op.gym_compat import BoxGymnasiumObsSpace, DiscreteActSpace, GymEnv

    env = GymEnv(grid2op.make("l2rpn_case14_sandbox", test=True))
    env.observation_space = BoxGymnasiumObsSpace(env.init_env.observation_space, attr_to_keep=["rho", "gen_p"])
    env.action_space = DiscreteActSpace(env.init_env.action_space, attr_to_keep=["set_line_status"])
    return PlainSpaces(env)


# What is asked for on the command line → the package, and what builds an env of it.
ENVS: dict[str, tuple[str, Callable[[], Env]]] = {
    "cartpole": ("gymnasium", partial(registered, "CartPole-v1")),
    "lunarlander": ("box2d", partial(registered, "LunarLander-v3")),
    "bipedalwalker": ("box2d", partial(registered, "BipedalWalker-v3")),
    "minigrid": ("minigrid", partial(registered, "MiniGrid-DoorKey-5x5-v0", "minigrid")),
    "highway-env": ("highway-env", partial(registered, "highway-fast-v0", "highway_env")),
    "flappy-bird": ("flappy-bird-gymnasium", partial(registered, "FlappyBird-v0", "flappy_bird_gymnasium")),
    "mo-gymnasium": ("mo-gymnasium", partial(registered, "minecart-v0", "mo_gymnasium")),
    "crafter": ("crafter", Crafter),
    "vizdoom": ("vizdoom", partial(registered, "VizdoomBasic-v1", "vizdoom.gymnasium_wrapper")),
    "stable-retro": ("stable-retro", retro),
    "nle": ("nle", partial(registered, "NetHackScore-v0", "nle")),
    "nle-seeded": ("nle", lambda: SeedEachEpisode(registered("NetHackScore-v0", "nle"))),
    "panda-gym": ("panda-gym", partial(registered, "PandaPush-v3", "panda_gym")),
    "panda-gym-seeded": ("panda-gym", lambda: SeedEachEpisode(registered("PandaPush-v3", "panda_gym"))),
    "pyflyt": ("PyFlyt", partial(registered, "PyFlyt/QuadX-Hover-v4", "PyFlyt.gym_envs")),
    "open-spiel": ("open-spiel", partial(OpenSpiel, "leduc_poker")),
    "rware": ("rware", lambda: OneRobot(registered("rware-tiny-1ag-v2", "rware"))),
    "gym-pusht": ("gym-pusht", partial(registered, "gym_pusht/PushT-v0", "gym_pusht")),
    "tetris": ("tetris-gymnasium", partial(registered, "tetris_gymnasium/Tetris", "tetris_gymnasium.envs")),
    "tetris-seeded": (
        "tetris-gymnasium",
        lambda: SeedEachEpisode(registered("tetris_gymnasium/Tetris", "tetris_gymnasium.envs")),
    ),
    "grid2op": ("grid2op", grid2op),
}


def build(name: str) -> Env:
    """Build an env with short episodes."""
    return TimeLimit(ENVS[name][1](), EPISODE)


# --- the runs -------------------------------------------------------------------------------------


@dataclass
class Run:
    """What was seen of an env, and what came of its losses.

    Attributes:
        kills: How many workers are killed.
        most: How many steps are taken, unless ``seconds`` end the run.
        seconds: The run ends after this time.
        seen: What resets and steps returned, until a loss ended an episode.
        exact: How much of it came before the first recovery that was not exact.
        outcomes: How often a loss had an outcome.
        reasons: Why episodes were ended; numbers are left out.
    """

    kills: int = 0
    most: int = STEPS
    seconds: float = float("inf")
    steps: int = 0
    seen: list[Any] = field(default_factory=list)
    exact: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def note(self, event: Event) -> None:
        """Count the outcome of a loss; this is a hook."""
        if isinstance(event, Recovery):
            self.outcomes[event.outcome] += 1
            if event.reason and event.outcome != "replayed":
                reason = event.reason.partition("It cannot be recovered: ")[2] or event.reason
                self.reasons[re.sub(r"\d+", "N", reason)] += 1

    def see(self, returned: Any) -> None:
        """Keep what was returned, as long as the same episodes go on."""
        if not set(self.outcomes) - {"exact", "replayed"}:
            self.seen.append(copy.deepcopy(returned))
        if not set(self.outcomes) - {"exact"}:
            self.exact = len(self.seen)

    def each_step(self) -> Iterator[bool]:
        """Begin each step, and tell whether the worker is to be killed in it."""
        victims = {(1 + place) * self.most // (1 + self.kills) for place in range(self.kills)}
        until = time.monotonic() + self.seconds
        while self.steps < self.most and time.monotonic() < until:
            self.steps += 1
            yield self.steps in victims

    def differences(self, calm: Run) -> list[int]:
        """Return which resets and steps returned something else than in the undisturbed run."""
        pairs = zip(self.seen, calm.seen, strict=False)
        return [place for place, (one, other) in enumerate(pairs) if not same(one, other)]


def alone(env_fn: Callable[[], Env], run: Run, restart: RestartPolicy) -> Run:
    """Take random steps in an env, and kill its worker between two steps."""
    seed_generators()
    with SubprocessEnv(env_fn, **PATIENT, hooks=[run.note], restart=restart) as env:
        env.action_space.seed(SEED)
        run.see(env.reset(seed=SEED)[0])
        for is_struck in run.each_step():
            if is_struck:
                strike(env.statistics().pid)
            *transition, _ = env.step(env.action_space.sample())
            run.see(transition)
            if transition[2] or transition[3]:
                run.see(env.reset()[0])
    return run


def batch(env_fn: Callable[[], Env], run: Run, restart: RestartPolicy) -> Run:
    """Take random steps in two envs of one worker, and kill the worker during a step."""
    seed_generators()
    envs = SubprocessVectorEnv([env_fn] * 2, envs_per_worker=2, **PATIENT, hooks=[run.note], restart=restart)
    with contextlib.closing(envs):
        envs.action_space.seed(SEED)
        run.see(envs.reset(seed=SEED)[0])
        for is_struck in run.each_step():
            envs.step_async(envs.action_space.sample())
            if is_struck:
                strike(envs.statistics()[0].pid)
            run.see(envs.step_wait()[:4])
    return run


def seed_generators() -> None:
    """Seed the generators from which the workers derive the seeds of theirs, so that each run has the same."""
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - many envs draw from it


def strike(pid: int | None) -> None:
    """Send SIGKILL to a worker."""
    assert pid is not None, "no worker runs"
    os.kill(pid, signal.SIGKILL)


# --- the table ------------------------------------------------------------------------------------


@dataclass
class Row:
    """What was measured of an env. The cells count exact / replayed / truncated / differ."""

    env: str
    version: str
    kills: int = 0
    alone_snapshots: str = ""
    alone_replays: str = ""
    batch_snapshots: str = ""
    batch_replays: str = ""
    reason: str = ""
    doctor: str = ""
    differs: int = 0


def cell(run: Run, calm: Run, row: Row, place: str, *, repeats: bool) -> str:
    """Count the outcomes of a run; add them to the row."""
    row.kills += run.outcomes.total()
    found = run.differences(calm)
    silent = sum(at < run.exact for at in found)
    if found and repeats:
        row.differs += silent
        print(f"{row.env}, {place}: differs at {found[0]} of {len(run.seen)}, exact to {run.exact}", file=sys.stderr)
    known = ("exact", "replayed", "truncated")
    differ = str(silent) if repeats else "does not repeat"
    others = [f" + {count} {name}" for name, count in run.outcomes.items() if name not in known]
    others += [f" ({len(found) - silent} after replays)"] if repeats and len(found) > silent else []
    return "/".join([*(str(run.outcomes[name]) for name in known), differ, *others])


def measured(row: Row, kills: int) -> Row:
    """Fill in a row."""
    env_fn, reasons = partial(build, row.env), Counter[str]()
    for kind in (alone, batch):
        places = [f"{kind.__name__}_{name}" for name in POLICIES]
        try:
            calm = kind(env_fn, Run(seconds=SECONDS), UNDISTURBED)
            runs = [kind(env_fn, Run(kills, calm.steps), restart) for restart in POLICIES.values()]
            tries = MOST_TRIES if any(run.differences(calm) for run in runs) else 1
            again = (kind(env_fn, Run(most=calm.steps), UNDISTURBED) for _ in range(tries))
            repeats = not any(other.differences(calm) for other in again)
            for place, run in zip(places, runs, strict=True):
                setattr(row, place, cell(run, calm, row, place, repeats=repeats))
                reasons += run.reasons
        except Exception as error:  # such a row says so
            print(f"{row.env}, {kind.__name__}: {error}", file=sys.stderr)
            first = next(iter(getattr(error, "failures", {}).values()), error)
            reasons[f"{kind.__name__}: {str(first).splitlines()[0]}"] += 1
            for place in places:
                setattr(row, place, "fails")
    row.reason = "; ".join(f"{reason:.120} ({count})" for reason, count in reasons.most_common(1))
    row.doctor = doctor(row.env)
    return row


def doctor(name: str) -> str:
    """Return the verdict of ``multienv doctor``."""
    command = [sys.executable, "-m", "multienv", "doctor", f"{Path(__file__).resolve()}:build", "--json"]
    command += ["--env-kwargs", json.dumps({"name": name})]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOCTOR_SECONDS, check=False)
        return str(json.loads(done.stdout)["verdict"])
    except subprocess.TimeoutExpired:
        return f"takes more than {DOCTOR_SECONDS:.0f} s"
    except ValueError:
        return (done.stderr.strip().splitlines() or ["no answer"])[-1][:80]


def table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    shown = Table(caption="exact / replayed / truncated / differ")
    for title in ("env", "version", "kills", "alone", "without snapshots", "two", "without snapshots"):
        shown.add_column(title)
    shown.add_column("most frequent reason", overflow="fold")
    shown.add_column("doctor")
    for row in rows:
        shown.add_row(*(str(value) for name, value in asdict(row).items() if name != "differs"))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("envs", nargs="*", metavar="ENV", help=", ".join(ENVS))
    parser.add_argument("--kills", type=int, default=KILLS, help="of each run")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    given = parser.parse_args()
    if unknown := set(given.envs) - set(ENVS):
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(ENVS)}")
    logging.getLogger("multienv").setLevel(logging.CRITICAL)  # losses are what is measured
    rows = []
    for name in given.envs or ENVS:
        package, _ = ENVS[name]
        try:
            row = Row(name, version(package))
        except PackageNotFoundError:
            print(f"{name}: skipped, {package} is not installed", file=sys.stderr)
            continue
        began = time.monotonic()
        rows.append(measured(row, given.kills))
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    Console(width=None if sys.stdout.isatty() else 200).print(table(rows))
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    sys.exit(any(row.differs for row in rows))


if __name__ == "__main__":
    main()
