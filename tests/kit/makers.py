"""Envs of one function each, in a worker of their own, as each class of several makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from multienv import MultiEnv, SubprocessVectorEnv, SyncSubprocessEnvManager, create_subprocess_envs

EnvFns = Sequence[Callable[..., Any]]


def one_each(env_fns: EnvFns, **options: Any) -> SubprocessVectorEnv:
    return SubprocessVectorEnv(env_fns, envs_per_worker=1, **options)


def multi_env(env_fns: EnvFns, *, autoreset_mode: Any = "NextStep", **options: Any) -> MultiEnv:
    return MultiEnv(create_subprocess_envs(env_fns, **options), autoreset_mode=autoreset_mode)


def manager(env_fns: EnvFns, **options: Any) -> SyncSubprocessEnvManager:
    made = SyncSubprocessEnvManager(env_fns, **options)
    made.launch()
    return made
