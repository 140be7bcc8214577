"""``send``/``recv``: what a transition costs, however many envs there are; beside ``step()`` and other libraries.

    python benchmarks/own_pace.py               # all three, interleaved
    python benchmarks/own_pace.py dispatch      # 8 envs that take no time, whatever is ready, 1,024 transitions
    python benchmarks/own_pace.py supply        # 32 envs with steps of 1 ms and a reset of 200 ms each 200 steps
    python benchmarks/own_pace.py trainer       # the trainer's own CPU time for 16, 64, 256 and 1,024 envs

``dispatch`` follows TorchRL's own benchmark of its ``AsyncEnvPool``. All libraries have a process for each env.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from typing_extensions import Self

from multienv import MultiEnv, SubprocessVectorEnv, create_subprocess_envs


class QuickEnv(gymnasium.Env[Any, Any]):
    """Sleeps as told: by default not at all."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, step: float = 0.0, reset: float = 0.0, horizon: int = 200) -> None:
        self.seconds, self.horizon, self.steps = (step, reset), horizon, 0
        self.observation = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        if self.seconds[1]:
            time.sleep(self.seconds[1])
        return self.observation, {}

    def step(self, action: Any) -> Any:
        if self.seconds[0]:
            time.sleep(self.seconds[0])
        self.steps += 1
        return self.observation, 1.0, self.steps == self.horizon, False, {}


class Ours:
    """Receives and sends; a call takes at least so many transitions and returns how many it took."""

    def __init__(self, envs: Any, k: int, at_most: int | None) -> None:
        self.envs, self.k, self.at_most = envs, k, at_most
        self.actions: Any = [1] * envs.num_envs if isinstance(envs, MultiEnv) else np.ones(envs.num_envs, np.int64)

    def __enter__(self) -> Self:
        self.envs.send(self.actions)
        return self

    def __exit__(self, *error: object) -> None:
        self.envs.recv()

    def __call__(self, transitions: int) -> int:
        done = 0
        while done < transitions:
            indices = self.envs.recv(self.k, self.at_most)[-1]
            done += len(indices)
            self.envs.send(self.actions[: len(indices)], indices)
        return done


class InStep:
    """Steps all envs."""

    def __init__(self, envs: Any) -> None:
        self.envs = envs
        self.actions: Any = [1] * envs.num_envs if isinstance(envs, MultiEnv) else np.ones(envs.num_envs, int)

    def __call__(self, transitions: int) -> int:
        done = 0
        while done < transitions:
            self.envs.step(self.actions)
            done += self.envs.num_envs
        return done


class Tianshou:
    """Steps the envs of a Tianshou vector env that are ready."""

    def __init__(self, fns: Sequence[Callable[[], Any]]) -> None:
        from tianshou.env import SubprocVectorEnv

        self.envs = SubprocVectorEnv([*fns], wait_num=1)
        self.envs.reset()
        self.ready, self.close = np.arange(len(fns)), self.envs.close

    def __call__(self, transitions: int) -> int:
        done = 0
        while done < transitions:
            *_, ended, _truncated, infos = self.envs.step(np.ones(len(self.ready), np.int64), self.ready)
            self.ready = np.array([info["env_id"] for info in infos])
            if ended.any():
                self.envs.reset(self.ready[ended])
            done += len(self.ready)
        return done


class TorchRL:
    """Sends and receives with TorchRL's pool of processes."""

    def __init__(self, fns: Sequence[Callable[[], Any]], **options: Any) -> None:
        import torch
        from torchrl.envs import AsyncEnvPool, GymWrapper

        self.pool = AsyncEnvPool(
            [partial(_wrapped, GymWrapper, fn) for fn in fns], backend="multiprocessing", **options
        )
        self.close = self.pool.close
        self.actions = torch.nn.functional.one_hot(torch.ones(len(fns), dtype=torch.int64), 2)

    def _send(self, found: Any) -> None:
        found["action"] = self.actions[: len(found)]
        self.pool.async_step_and_maybe_reset_send(found)

    def __enter__(self) -> Self:
        self._send(self.pool.reset())
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.async_step_and_maybe_reset_recv(min_get=len(self.actions))

    def __call__(self, transitions: int) -> int:
        done = 0
        while done < transitions:
            _, found = self.pool.async_step_and_maybe_reset_recv(min_get=1)
            done += len(found)
            self._send(found)
        return done


def _wrapped(wrapper: Any, fn: Callable[[], Any]) -> Any:
    return wrapper(fn())


def measured(
    rows: dict[str, Any], transitions: int, repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return seconds a transition for each turn of each row; the rows take turns."""
    found: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(repeats + 1):
        for name, row in rows.items():
            time.sleep(0.2)  # the threads of some libraries have something left to do
            with row if hasattr(row, "__enter__") else nullcontext():
                row(transitions // 2)
                begin = clock()
                done = row(transitions)
                if turn:  # the first one warms up
                    found[name].append((clock() - begin) / done)
    return found


def tell(found: dict[str, list[float]], unit: str = "µs a transition") -> None:
    first = next(iter(found.values()))
    for name, times in found.items():
        ratio = statistics.median(one / base for one, base in zip(times, first, strict=True))
        print(f"  {name:42} {statistics.median(times) * 1e6:9.1f} {unit}   {ratio:6.2f} x the first row")


def make(stack: ExitStack, fns: Sequence[Callable[[], Any]], **options: Any) -> SubprocessVectorEnv:
    envs = stack.enter_context(SubprocessVectorEnv([*fns], reports="", **options))
    envs.reset(seed=0)
    return envs


def dispatch(repeats: int) -> None:
    fns: list[Callable[[], Any]] = [partial(QuickEnv, horizon=10**9)] * 8
    with ExitStack() as stack:
        envs = make(stack, fns, envs_per_worker=1)
        lists = stack.enter_context(MultiEnv(create_subprocess_envs(fns, reports="")))
        lists.reset(seed=0)
        rows: dict[str, Any] = {
            "step()": InStep(envs),
            "recv(1, at_most=8)": Ours(envs, 1, 8),
            "recv(1)": Ours(envs, 1, None),
            "recv(8)": Ours(envs, 8, None),
            "MultiEnv.step()": InStep(lists),
            "MultiEnv.recv(1, at_most=8)": Ours(lists, 1, 8),
            "recv(1, at_most=8), 4 envs a worker": Ours(make(stack, fns, envs_per_worker=4), 1, 8),
        }
        peers: dict[str, Callable[..., Any]] = {
            "Tianshou": Tianshou,
            "TorchRL AsyncEnvPool, shm": partial(TorchRL, exchange="shm"),
            "TorchRL AsyncEnvPool, queue": partial(TorchRL, exchange="queue"),
        }
        for name, peer in peers.items():
            try:
                rows[name] = peer(fns)
            except ImportError:
                print(f"  {name} is not installed.")
            else:
                stack.callback(rows[name].close)
        tell(measured(rows, 1024, repeats, time.perf_counter))


def supply(repeats: int) -> None:
    fns: list[Callable[[], Any]] = [partial(QuickEnv, step=0.001, reset=0.2)] * 32
    of_envs = (200 * 0.001 + 0.2) / 201 / 32
    with ExitStack() as stack:
        envs = make(stack, fns, envs_per_worker=1)
        rows: dict[str, Any] = {"recv(1, at_most=32)": Ours(envs, 1, 32), "step()": InStep(envs)}
        for name, times in measured(rows, 32 * 402, repeats, time.perf_counter).items():
            print(f"  {name:42} {of_envs / statistics.median(times):9.2f} of the supply of the envs")


def trainer(repeats: int) -> None:
    for count in (16, 64, 256, 1024):
        with ExitStack() as stack:
            envs = make(stack, [partial(QuickEnv, horizon=10**9)] * count, envs_per_worker=1)
            rows: dict[str, Any] = {
                "step()": InStep(envs),
                "recv(1, at_most=…)": Ours(envs, 1, count),
                "recv(1)": Ours(envs, 1, None),
            }
            print(f"  {count} envs:")
            tell(measured(rows, max(2048, 4 * count), repeats, time.thread_time), "µs of CPU a transition")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="*", default=["dispatch", "supply", "trainer"])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for what in options.what:
        print(f"{what}:")
        {"dispatch": dispatch, "supply": supply, "trainer": trainer}[what](options.repeats)


if __name__ == "__main__":
    main()
