"""Measure how fast a batch of an env steps in this process, and in workers with one, some or all of the envs each."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from gymnasium.vector import SyncVectorEnv

from multienv import SubprocessVectorEnv
from multienv.cli.env_functions import EnvFn

# Steps before the clock starts.
_WARM_UP = 20


def measure(env_fn: EnvFn, num_envs: int, seconds: float) -> dict[str, float]:
    """Step ``num_envs`` envs for so many seconds in each way; return the env steps a second of each way."""
    env_fns = [env_fn] * num_envs
    ways: dict[str, Callable[[], Any]] = {"SyncVectorEnv(env_fns)": partial(SyncVectorEnv, env_fns)}
    for each in ("auto", *(few for few in (1, 2, 4, 8, 16, 32) if few < num_envs), num_envs):
        shown = f'"{each}"' if each == "auto" else each
        make = partial(SubprocessVectorEnv, env_fns, envs_per_worker=each, reports="")
        ways[f"SubprocessVectorEnv(env_fns, envs_per_worker={shown})"] = make
    return {way: _rate(make(), seconds) for way, make in ways.items()}


def _rate(batch: Any, seconds: float) -> float:
    try:
        batch.reset(seed=0)
        batch.action_space.seed(0)
        # Drawn before: to sample takes longer than many a step.
        actions = [batch.action_space.sample() for _ in range(64)]
        for step in range(_WARM_UP):
            batch.step(actions[step])
        began, steps = time.perf_counter(), 0
        while (taken := time.perf_counter() - began) < seconds:
            batch.step(actions[steps % 64])
            steps += 1
        return float(steps * batch.num_envs / taken)
    finally:
        batch.close()
