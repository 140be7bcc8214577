"""Steps a second against the peers and against the limit, in turns in one run; ratios, because machines are noisy.

The limit is what the cores can do: one process on each, stepping the env itself, autoreset included, all at the same
time. "Bare doorbells" is what a batch in processes takes at the least, see ``bare.py``. All contenders of a row are
built and warmed up first; then they take short turns, and the processes of all others are stopped meanwhile.
``--json`` and ``--plot`` keep the figures. Run it with ``pip install -e ".[bench]"`` on an idle Linux machine;
Tianshou and TorchRL are left out where they are not installed. With 128 envs, and one env in each process of most
contenders, it takes some 16 GiB; ``--only`` picks some.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from bare import BareDoorbells
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from multienv import MultiEnv, RestartPolicy, SerialVectorEnv, SubprocessVectorEnv, create_subprocess_envs

EnvFn = Callable[[], gymnasium.Env[Any, Any]]
Bench = Callable[[float], float]  # seconds to spend → env steps a second
OURS, BASE, BARE, LIMIT = "multienv.SubprocessVectorEnv", "gymnasium.AsyncVectorEnv", "bare doorbells", "limit"
# Ratios that are printed: to these.
AGAINST = {BASE: "AsyncVectorEnv", BARE: BARE, LIMIT: LIMIT}
# Helpers that several contenders share are not stopped.
SHARED = (b"monitor", b"forkserver", b"resource_tracker")
OFF = RestartPolicy(on_crash="raise", on_timeout="raise", snapshots=False, journal_limit=0)


def atari(env_id: str) -> gymnasium.Env[Any, Any]:
    """84×84×4, as agents see it."""
    import ale_py
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TransformObservation

    gymnasium.register_envs(ale_py)
    env = AtariPreprocessing(gymnasium.make(env_id, frameskip=1))
    stacked = FrameStackObservation(env, 4)
    space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    return TransformObservation(stacked, partial(np.moveaxis, source=0, destination=-1), space)


def env_fn_of(env_id: str) -> EnvFn:
    """What builds it."""
    return partial(atari, env_id) if env_id.startswith("ALE/") else partial(gymnasium.make, env_id)


# --- contenders -----------------------------------------------------------------------------------


def stepping(step: Callable[[Any], object], actions: list[Any], num_envs: int) -> Bench:
    """Steps a batch again and again."""

    def bench(seconds: float) -> float:
        rounds, begin = 0, time.perf_counter()
        while (spent := time.perf_counter() - begin) < seconds:
            for each in actions:
                step(each)
            rounds += len(actions)
        return num_envs * rounds / spent

    return bench


def go_round(env_fn: EnvFn, orders: Connection) -> None:
    """One core's part of the limit: step the env for as long as is asked, and tell how fast."""
    env = env_fn()
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(64)]
    while (seconds := orders.recv()) is not None:
        steps, begin = 0, time.perf_counter()
        while (spent := time.perf_counter() - begin) < seconds:
            for action in actions:
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
            steps += len(actions)
        orders.send(steps / spent)


@contextlib.contextmanager
def limit(env_fn: EnvFn) -> Iterator[Bench]:
    """All cores at once."""
    context, lines = multiprocessing.get_context("spawn"), []
    for _ in range(len(os.sched_getaffinity(0))):
        ours, theirs = context.Pipe()
        context.Process(target=go_round, args=(env_fn, theirs), daemon=True).start()
        lines.append(ours)

    def bench(seconds: float) -> float:
        for line in lines:
            line.send(seconds)
        return float(sum(line.recv() for line in lines))

    yield bench
    for line in lines:
        line.send(None)


def descendants() -> set[int]:
    """Return all processes that this one and its children have started, but for shared helpers."""
    found: set[int] = set()
    new = {os.getpid()}
    while new:
        lists = [path.read_text() for pid in new for path in Path(f"/proc/{pid}/task").glob("*/children")]
        new = {int(pid) for text in lists for pid in text.split()}
        found |= new
    return {pid for pid in found if not any(word in Path(f"/proc/{pid}/cmdline").read_bytes() for word in SHARED)}


class Stopped:
    """Steps in its turn, and has its processes stopped at any other time.

    Args:
        bench: Steps.
        processes: What it has started; those that it has started since go on.
    """

    def __init__(self, bench: Bench, processes: set[int]) -> None:
        """Stop at once."""
        self._bench, self._processes = bench, processes
        self._tell(signal.SIGSTOP)

    def __call__(self, seconds: float) -> float:
        """Step for so many seconds; return env steps a second."""
        self._tell(signal.SIGCONT)
        try:
            self._bench(seconds / 5)  # caches are warm again
            return self._bench(seconds)
        finally:
            self._tell(signal.SIGSTOP)

    def go_on(self) -> None:
        """Have the processes go on, for they are to end."""
        self._tell(signal.SIGCONT)

    def _tell(self, number: signal.Signals) -> None:
        for pid in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def pinned(envs: BareDoorbells, bench: Bench) -> Bench:
    """Return the bench with the trainer pinned meanwhile."""

    def pinned_bench(seconds: float) -> float:
        envs.pin(on=True)
        try:
            return bench(seconds)
        finally:
            envs.pin(on=False)

    return pinned_bench


def contenders(
    env_fn: EnvFn, num_envs: int, warm_up: float, only: Sequence[str], stack: contextlib.ExitStack
) -> dict[str, Bench]:
    """Return name → what steps so many envs."""
    space = env_fn().action_space
    space.seed(0)
    lists = [[space.sample() for _ in range(num_envs)] for _ in range(8)]
    batches = [np.asarray(actions) for actions in lists]
    benches: dict[str, Bench] = {}

    def add(name: str, make: Callable[[], Any], actions: list[Any] = batches) -> None:
        if not any(part in name for part in [*only, *AGAINST]):
            return
        before = descendants()
        try:
            envs = make()
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            return
        stack.callback(envs.close)
        envs.reset()
        bench = stepping(envs.step, actions, num_envs)
        bench(warm_up)
        stopped = Stopped(pinned(envs, bench) if isinstance(envs, BareDoorbells) else bench, descendants() - before)
        stack.callback(stopped.go_on)
        benches[name] = stopped

    fns = [env_fn] * num_envs
    add(OURS, lambda: SubprocessVectorEnv(fns))
    add(f"{OURS}, recovery off", lambda: SubprocessVectorEnv(fns, restart=OFF))
    add("multienv.MultiEnv", lambda: MultiEnv(create_subprocess_envs(fns)), lists)
    add("multienv.MultiEnv, recovery off", lambda: MultiEnv(create_subprocess_envs(fns, restart=OFF)), lists)
    add("multienv.SerialVectorEnv", lambda: SerialVectorEnv(fns))
    add(BASE, lambda: AsyncVectorEnv(fns))
    add("gymnasium.SyncVectorEnv", lambda: SyncVectorEnv(fns))
    add("SB3.SubprocVecEnv", lambda: stable_baselines3("SubprocVecEnv", fns))
    add("SB3.DummyVecEnv", lambda: stable_baselines3("DummyVecEnv", fns))
    add("Tianshou.SubprocVectorEnv", lambda: Tianshou("SubprocVectorEnv", fns))
    add("Tianshou.ShmemVectorEnv", lambda: Tianshou("ShmemVectorEnv", fns))
    add("TorchRL.ParallelEnv", lambda: TorchRL(fns))
    add(BARE, lambda: BareDoorbells(fns))
    add(f"{BARE}, one env each", lambda: BareDoorbells(fns, one_each=True))
    benches[LIMIT] = stack.enter_context(limit(env_fn))
    return benches


def stable_baselines3(name: str, fns: list[EnvFn]) -> Any:
    """One of its batches."""
    from stable_baselines3.common import vec_env

    options = {"start_method": "forkserver"} if name == "SubprocVecEnv" else {}
    return getattr(vec_env, name)(fns, **options)


class Tianshou:
    """One of its batches, which leaves it to the caller to begin episodes."""

    def __init__(self, name: str, fns: list[EnvFn]) -> None:
        """Start the processes."""
        import tianshou.env

        self._envs = getattr(tianshou.env, name)(fns)
        self.reset, self.close = self._envs.reset, self._envs.close

    def step(self, actions: Any) -> None:
        """Step, and reset those that have ended."""
        _, _, terminations, truncations, _ = self._envs.step(actions)
        ended = np.flatnonzero(terminations | truncations)
        if ended.size:
            self._envs.reset(ended)


def in_torchrl(env_fn: EnvFn) -> Any:
    """One env, as its batch wants it."""
    from torchrl.envs import GymWrapper

    return GymWrapper(env_fn(), categorical_action_encoding=True)


class TorchRL:
    """Its batch, with one thread as all others have."""

    def __init__(self, fns: list[EnvFn]) -> None:
        """Start the processes."""
        import torch
        from torchrl.envs import ParallelEnv

        torch.set_num_threads(1)
        self._tensor = torch.as_tensor
        self._envs = ParallelEnv(len(fns), [partial(in_torchrl, env_fn) for env_fn in fns])

    def reset(self) -> None:
        """Begin the episodes."""
        self._data = self._envs.reset()

    def step(self, actions: Any) -> None:
        """Step, and reset those that have ended."""
        self._data["action"] = self._tensor(actions)
        _, self._data = self._envs.step_and_maybe_reset(self._data)

    def close(self) -> None:
        """End the processes."""
        self._envs.close()


# --- a run ----------------------------------------------------------------------------------------


def measure(
    env_id: str, num_envs: int, warm_up: float, seconds: float, repeats: int, only: Sequence[str]
) -> dict[str, list[float]]:
    """Rates of all contenders, in turns, in an order drawn for each."""
    with contextlib.ExitStack() as stack:
        benches = contenders(env_fn_of(env_id), num_envs, warm_up, only, stack)
        rates: dict[str, list[float]] = {name: [] for name in benches}
        gc.collect()
        gc.freeze()  # what one contender has made is no work for the collector in another's turn
        order, dice = list(benches), random.Random(0)
        for _ in range(repeats):
            # Anew each time: who comes after the limit, which leaves no core cold, pays for it on a virtual machine.
            dice.shuffle(order)
            for name in order:
                rates[name].append(benches[name](seconds))
    return rates


def ratio(rates: dict[str, list[float]], name: str, base: str) -> float:
    """Return the median of the ratios, turn by turn."""
    return statistics.median(one / other for one, other in zip(rates[name], rates[base], strict=True))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A group of bars for each row, as shares of the limit."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in dict.fromkeys(name for row in rows for name in row["share"]) if name != LIMIT]
    figure, axes = plt.subplots(figsize=(2 + 1.3 * len(rows), 5), layout="constrained")
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        values = [row["share"].get(name, 0.0) for row in rows]
        colour = plt.get_cmap("tab20")(place)
        axes.bar([index + place * width for index in range(len(rows))], values, width, label=name, color=colour)
    axes.set_xticks([index + 0.4 for index in range(len(rows))], [f"{row['num_envs']} × {row['env']}" for row in rows])
    axes.set_ylabel("share of the limit")
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    figure.legend(fontsize="small", loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Print, for each env and number of envs, medians, ratios to AsyncVectorEnv, and shares of the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", nargs="+", default=["CartPole-v1", "HalfCheetah-v5", "ALE/Pong-v5"])
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--seconds", type=float, default=0.25, help="of each turn")
    parser.add_argument("--warm-up", type=float, default=2.0, help="seconds, of each before the first turn")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="parts of names of contenders")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    settings = arguments.warm_up, arguments.seconds, arguments.repeats, arguments.only
    rows = []
    for env_id in arguments.env:
        for num_envs in arguments.num_envs:
            rates = measure(env_id, num_envs, *settings)
            print(f"{num_envs} × {env_id}")
            for name, values in rates.items():
                ratios = "".join(f"  {ratio(rates, name, base):6.2f} × {told}" for base, told in AGAINST.items())
                print(f"  {name:44} {statistics.median(values):10,.0f} steps/s{ratios}", flush=True)
            share = {name: ratio(rates, name, LIMIT) for name in rates}
            rows.append({"env": env_id, "num_envs": num_envs, "rates": rates, "share": share})
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
