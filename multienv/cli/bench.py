"""Measure how fast a batch of an env steps in this process, and in workers with one, some or all of the envs each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium

EnvFn = Callable[[], "gymnasium.Env[Any, Any]"]

# Steps before the clock starts.
_WARM_UP = 20


@dataclass(frozen=True)
class Rate:
    """Tells how fast one way is.

    Attributes:
        name: The way.
        advice: How to have it.
        steps_per_second: Of all envs together.
    """

    name: str
    advice: str
    steps_per_second: float


def measure(env_fn: EnvFn, num_envs: int, seconds: float) -> list[Rate]:
    """Step ``num_envs`` envs for so many seconds in each way."""
    from multienv import SubprocessVectorEnv

    env_fns = [env_fn] * num_envs
    rates = [
        Rate(
            "in this process",
            f"SyncVectorEnv: {num_envs} envs of this kind gain nothing from processes but survival.",
            _rate(gymnasium.vector.SyncVectorEnv(env_fns), seconds),
        )
    ]
    for each in _each_worker(num_envs):
        shown = f'"{each}"' if isinstance(each, str) else each
        batch: Any = SubprocessVectorEnv(env_fns, envs_per_worker=each, reports="")
        advice = f"SubprocessVectorEnv(env_fns, envs_per_worker={shown})."
        rates.append(Rate(f"envs_per_worker={shown}", advice, _rate(batch, seconds)))
    return rates


def _each_worker(num_envs: int) -> list[Any]:
    """Return the values of ``envs_per_worker`` to try."""
    several = [each for each in (1, 2, 4, 8, 16, 32) if each < num_envs]
    return ["auto", *several, num_envs]


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
