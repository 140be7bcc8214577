"""Envs that leak, in every face, under ``RestartPolicy(max_rss=…)``: peak memory, time, and equal trajectories.

Each env leaks 256 KiB a step, in C or in a global of a module. Envs that share a worker leak together, and their
episodes end at different steps: no reset is one of all of them. The columns:

peak      the largest resident memory that the kernel has noted of a worker, against the limit
first     seconds of the first 1,000 steps; last: of the last 1,000; ratio: last against first
replaced  processes that have taken the place of another: exact, reset; put off: it could not be replaced yet
replay    the longest replay against two episodes of each of the worker's envs, in requests
equal     observations, rewards and flags are, to the bit, those of the envs without workers and leaks

A bar that is missed is marked, and then the exit status is 1. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from leaky import LEAKS, LeakyWalk, policy

from multienv import (
    AsyncSubprocessEnvManager,
    MultiEnv,
    RestartPolicy,
    StackedSubprocessEnvManager,
    SubprocessVectorEnv,
    SyncSubprocessEnvManager,
    create_subprocess_envs,
)
from multienv.events import Event, Recycled, Statistics

EnvFns = list[Callable[[], gymnasium.Env[Any, Any]]]
Tick = Callable[[int], None]  # is told how many steps each env has taken
Columns = list[np.ndarray[Any, Any]]
Play = Callable[[Any, int, Tick], Columns]

SHORTEST, LONGEST = 80, 120  # steps of an episode, of the first env and of the last
WINDOW = 1_000  # steps
FRAGMENT = 50  # steps of a rollout
LOOK_EVERY = 10  # steps
BARS = {"peak": 1.4, "ratio": 1.5, "replay": 1.0}


class Watch:
    """Notes the workers' memory, what hooks are told, and the time.

    Attributes:
        envs: Whose workers; ``None`` while they are being made.
        peak: The largest resident memory of any worker at any moment, bytes.
        replacements: What was told of them.
    """

    def __init__(self) -> None:
        self.envs: Any = None
        self.peak = 0
        self.replacements: list[Recycled] = []
        self._marks = [(0, 0.0)]
        self._looked = 0

    def hook(self, event: Event) -> None:
        """Note a replacement."""
        if isinstance(event, Recycled):
            self.replacements.append(event)
            self._look()

    def tick(self, steps: int) -> None:
        """Note the time at the beginning and after so many steps, and now and then look at the workers."""
        self._marks.append((steps, time.perf_counter()))
        if steps - self._looked >= LOOK_EVERY:
            self._looked = steps
            self._look()

    def _look(self) -> None:
        """Look at the kernel's own maximum: a process that is replaced before the next look has grown little since."""
        if self.envs is None:
            return
        told = self.envs.statistics()
        for one in [told] if isinstance(told, Statistics) else told:
            with contextlib.suppress(OSError, IndexError):  # it has just ended
                status = Path(f"/proc/{one.pid}/status").read_text()
                self.peak = max(self.peak, 1024 * int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]))

    def seconds(self, begin: int, end: int) -> float:
        """Return the time between two numbers of steps."""
        times = [next(when for steps, when in self._marks[1:] if steps >= number) for number in (begin, end)]
        return times[1] - times[0]


# --- many steps of each face ----------------------------------------------------------------------


def columns(steps: Sequence[tuple[Any, ...]]) -> Columns:
    """Return one array for each value of a step."""
    return [np.array(values) for values in zip(*steps, strict=True)]


def play_one(env: Any, steps: int, tick: Tick, seed: int = 0) -> Columns:
    """Step one env, and begin its episodes."""
    env.reset(seed=seed)
    before, _ = env.reset()
    record = []
    tick(0)
    for step in range(steps):
        observation, reward, terminated, truncated, _ = env.step(policy(before))
        record.append((before, observation, reward, terminated, truncated))
        before = env.reset()[0] if terminated or truncated else observation
        tick(step + 1)
    return columns(record)


def play_each(envs: Sequence[Any], steps: int, tick: Tick) -> Columns:
    """Step one env after the other."""
    return [values for index, env in enumerate(envs) for values in play_one(env, steps, tick, index)]


def play_batch(envs: Any, steps: int, tick: Tick) -> Columns:
    """Step a batch; where nobody else begins the next episodes, reset those envs that have ended theirs."""
    resets = envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    observations, _ = envs.reset(seed=0)
    record = []
    tick(0)
    for step in range(steps):
        observations = np.asarray(observations)
        after, *outcome, _ = envs.step(policy(observations))
        record.append((observations, *outcome))
        ended = np.logical_or(*outcome[1:])
        if resets and ended.any():
            record.append((after, *outcome))  # these observations are not seen again
            after, _ = envs.reset(options={"reset_mask": ended})
        observations = after
        tick(step + 1)
    return columns(record)


def play_rollout(envs: Any, steps: int, tick: Tick) -> Columns:
    """Take fragments, of a batch or of one env."""
    envs.reset(seed=0)
    record = []
    tick(0)
    for step in range(FRAGMENT, steps + 1, FRAGMENT):
        one = envs.rollout(policy, FRAGMENT)
        record.append((one.observations, one.rewards, one.terminations, one.truncations))
        tick(step)
    return [np.concatenate(parts) for parts in zip(*record, strict=True)]


def play_sb3(envs: Any, steps: int, tick: Tick) -> Columns:
    """Step as Stable-Baselines3 does."""
    envs.seed(0)
    observations = envs.reset()
    record = []
    tick(0)
    for step in range(steps):
        after, rewards, dones, infos = envs.step(policy(observations))
        ends = [info.get("terminal_observation", np.zeros(4)) for info in infos]
        cut = [info["TimeLimit.truncated"] for info in infos]
        record.append((observations, rewards, dones, ends, cut))
        observations = after
        tick(step + 1)
    return columns(record)


def play_manager(manager: Any, steps: int, tick: Tick) -> Columns:
    """Step whatever is ready; some envs may be ahead of others."""
    count = manager.env_num
    manager.launch({index: {"seed": index} for index in range(count)})
    manager.reset(dict.fromkeys(range(count)))  # later episodes have no seed
    records: list[list[tuple[Any, ...]]] = [[] for _ in range(count)]
    before: dict[int, Any] = {}
    tick(0)
    while (done := min(map(len, records))) < steps:
        tick(done)
        ready = manager.ready_obs
        if isinstance(ready, dict):
            before |= ready
            timesteps = manager.step({index: policy(one) for index, one in ready.items()}).values()
        else:
            before |= zip(manager.ready_obs_id, ready, strict=True)
            timesteps = manager.step(policy(ready))
        for timestep in timesteps:
            records[timestep.env_id].append((before[timestep.env_id], *timestep[:4]))
    tick(steps)
    return [values for record in records for values in columns(record[:steps])]


# --- rows -----------------------------------------------------------------------------------------


class Row(NamedTuple):
    """Says how a face is made and played, and what it should be equal to.

    Attributes:
        make: Makes it, of functions that build the envs and the options of all faces.
        play: Takes the steps.
        peer: Makes what it is compared with.
        play_peer: Takes the same steps there.
        num_envs: How many envs.
        shared: How many of them are in a worker.
        needs: A module without which it is left out.
    """

    make: Callable[..., Any]
    play: Play
    peer: Callable[[EnvFns], Any]
    play_peer: Play
    num_envs: int = 4
    shared: int = 1
    needs: str = "gymnasium"


def named(path: str, fns: EnvFns, **options: Any) -> Any:
    """Make one of a class in a module that may be skipped."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)(fns, **options)


def batch(mode: str, **options: Any) -> Row:
    """Return the row of a batch with this autoreset mode."""
    make = partial(SubprocessVectorEnv, envs_per_worker=2, autoreset_mode=mode)
    peer = partial(SyncVectorEnv, autoreset_mode=AutoresetMode[mode])
    return Row(make, play_batch, peer, play_batch, shared=2)._replace(**options)


def manager(kind: Any) -> Row:
    """Return the row of an env manager."""
    return Row(kind, play_manager, lambda fns: [env_fn() for env_fn in fns], play_each)


def one_env(fns: EnvFns, **options: Any) -> Any:
    """Make a single env."""
    (env,) = create_subprocess_envs(fns, **options)
    env.initialize()
    return env


def lists(fns: EnvFns, **options: Any) -> MultiEnv:
    """Make a list of envs."""
    return MultiEnv(create_subprocess_envs(fns, **options))


SB3 = "multienv.adapters.stable_baselines3:SubprocessVecEnv"
DUMMY = "stable_baselines3.common.vec_env:DummyVecEnv"
RAY = "multienv:RayVectorEnv"
ROWS = {
    "SubprocessEnv": Row(one_env, play_one, lambda fns: fns[0](), play_one, num_envs=1),
    "SubprocessEnv.rollout": batch("SAME_STEP", make=one_env, play=play_rollout, num_envs=1, shared=1),
    "MultiEnv": batch("NEXT_STEP", make=lists, shared=1),
    "SubprocessVectorEnv, NEXT_STEP": batch("NEXT_STEP"),
    "SubprocessVectorEnv, SAME_STEP": batch("SAME_STEP"),
    "SubprocessVectorEnv, DISABLED": batch("DISABLED"),
    "SubprocessVectorEnv.rollout": batch("NEXT_STEP", play=play_rollout),
    "AsyncSubprocessEnvManager": manager(AsyncSubprocessEnvManager),
    "SyncSubprocessEnvManager": manager(SyncSubprocessEnvManager),
    "StackedSubprocessEnvManager": manager(StackedSubprocessEnvManager),
    "SubprocessVecEnv (SB3)": Row(
        partial(named, SB3, envs_per_worker=2),
        play_sb3,
        partial(named, DUMMY),
        play_sb3,
        shared=2,
        needs="stable_baselines3",
    ),
    "RayVectorEnv": batch("NEXT_STEP", make=partial(named, RAY, envs_per_worker=2), needs="ray"),
}


def two_episodes(lengths: Sequence[int]) -> int:
    """Return the requests in which every env of a worker runs two episodes; each reset may be one of its own."""
    steps = 2 * max(lengths)
    return steps + sum(steps // length + 1 for length in lengths)


def measure(row: Row, leak: str, steps: int, max_rss: int) -> dict[str, Any]:
    """Return the figures of a row."""
    lengths = np.linspace(SHORTEST, LONGEST, row.num_envs).astype(int).tolist() if row.num_envs > 1 else [100]
    peer = row.peer([partial(LeakyWalk, length) for length in lengths])
    expected = row.play_peer(peer, steps, lambda _: None)
    watch = Watch()
    policy_ = RestartPolicy(max_rss=max_rss, snapshots=True)
    fns = [partial(LeakyWalk, length, leak) for length in lengths]
    with contextlib.closing(row.make(fns, restart=policy_, hooks=[watch.hook])) as watch.envs:
        record = row.play(watch.envs, steps, watch.tick)
    replays = [
        event.replayed / two_episodes(lengths[event.env_index or 0 :][: row.shared]) for event in watch.replacements
    ]
    figures: dict[str, Any] = {"leak": leak, "peak": watch.peak / max_rss, "replaced": 0}
    if steps >= 2 * WINDOW:
        first, last = watch.seconds(0, WINDOW), watch.seconds(steps - WINDOW, steps)
        figures |= {"first": first, "last": last, "ratio": last / first}
    outcomes = Counter(event.outcome for event in watch.replacements)
    figures |= {outcome: outcomes[outcome] for outcome in ("exact", "replayed", "put off", "reset")}
    figures["replaced"] = outcomes["exact"] + outcomes["replayed"] + outcomes["reset"]
    figures["replay"] = max(replays, default=0.0)
    figures["equal"] = [(one.dtype, one.tobytes()) for one in record] == [
        (one.dtype, one.tobytes()) for one in expected
    ]
    return figures


def missed(figures: dict[str, Any]) -> list[str]:
    """Return the columns whose bar is missed."""
    return [name for name, bar in BARS.items() if figures.get(name, 0.0) > bar] + ["equal"] * (not figures["equal"])


COLUMNS = ("peak", "first", "last", "ratio", "replaced", "exact", "replayed", "put off", "reset", "replay", "equal")


def shown(figures: dict[str, Any], name: str) -> str:
    """Return a cell, marked if its bar is missed."""
    value = figures.get(name, "")
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{text}{'!' if name in missed(figures) else ' '}"


def main() -> int:
    """Print a table; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[""], metavar="NAME", help="parts of names of rows")
    parser.add_argument("--steps", type=int, default=5_000, help="of each env; the times want at least 2,000")
    parser.add_argument("--max-rss", type=int, default=250, help="the limit, MiB; a new worker has some 60")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.steps % FRAGMENT:
        parser.error(f"--steps {arguments.steps}: a multiple of {FRAGMENT} is wanted, for the rollouts.")
    print(f"{'':31} leak   " + "".join(f"{name:>9} " for name in COLUMNS))
    rows = {}
    for name, row in ROWS.items():
        if not any(part in name for part in arguments.rows):
            continue
        if importlib.util.find_spec(row.needs) is None:
            print(f"{name:31} left out: {row.needs} is not installed")
            continue
        for leak in filter(None, LEAKS):
            figures = measure(row, leak, arguments.steps, arguments.max_rss * 2**20)
            rows[f"{name}, {leak}"] = figures
            print(f"{name:31} {leak:6} " + "".join(f"{shown(figures, column):>10}" for column in COLUMNS), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    bars = ", ".join(f"{name} at most {bar:g}" for name, bar in BARS.items())
    failed = [name for name, figures in rows.items() if missed(figures)]
    print(f"Bars: {bars}, equal. Missed by {len(failed)} of {len(rows)} rows.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
