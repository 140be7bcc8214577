"""Many envs in a few processes, which may die at any moment; and the same thing in this process."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from multienv.autoreset import mode_of
from multienv.backends.arena import Arena
from multienv.backends.process import ProcessBackend
from multienv.backends.serial import SerialBackend
from multienv.config import Deadlines, RestartPolicy
from multienv.events import Hook
from multienv.hosted_env import EnvFn
from multienv.processes.launch import Launch, method_of
from multienv.processes.protocol import FORK
from multienv.recovery.group import GroupSupervisor
from multienv.recovery.preserver import CAPTURE_DEADLINE
from multienv.reports.store import directory_for
from multienv.subprocess_env import _abandon, _check_env_fn, _check_options, _pickled, _setting
from multienv.vector_arguments import check_arguments, deal
from multienv.vector_env import HostedVectorEnv
from multienv.wire.messages import Group, Initialize
from multienv.wire.observations import INLINE_LIMIT
from multienv.worker.state_hooks import registered_hooks


class SubprocessVectorEnv(HostedVectorEnv):
    """A ``gymnasium.vector.VectorEnv`` whose envs live in processes, several in each, and survive them."""

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        envs_per_worker: int | str = "auto",
        shared_memory: bool = True,
        copy: bool = True,
        context: Any = None,
        daemon: bool = True,
        worker: None = None,
        observation_mode: Any = "same",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        restart: RestartPolicy = RestartPolicy(),  # noqa: B008 - frozen
        deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
        native_threads: int | None = 1,
        bind_cores: bool = True,
        hooks: Sequence[Hook] = (),
        reports: str | os.PathLike[str] | None = None,
    ) -> None:
        """Launch the workers, and build all envs."""
        env_fns = list(env_fns)
        check_arguments(env_fns, observation_mode, max_concurrency, worker)
        for env_fn in env_fns:
            _check_env_fn(env_fn)
        _check_options(restart, deadlines, native_threads)
        mode, method = mode_of(autoreset_mode), method_of(context)
        limits = [getattr(deadlines, name) for name in ("start", "reset", "step", "call", "recovery")]
        limits.append(CAPTURE_DEADLINE if restart.state_anchors else None)
        shortest = min((limit for limit in limits if limit), default=0.0)
        cores = _cores()
        sizes = deal(len(env_fns), envs_per_worker, len(cores))
        directory = directory_for(reports)
        arena = Arena(shared=True)
        groups, first = [], 0
        for place, size in enumerate(sizes):
            mine = env_fns[first : first + size]
            launch = Launch(method, mine, shortest, native_threads, arena.descriptor)  # type: ignore[arg-type]
            initialize = Initialize(
                env_fn=None if method == FORK else _pickled(mine),  # type: ignore[arg-type]
                seeds=(secrets.randbits(64), secrets.randbits(32)),
                setting=None if method == FORK else _setting(native_threads),
                inline_limit=INLINE_LIMIT,
                snapshots=(restart.snapshot_every or 0) if restart.snapshots else -1,
                group=_group(first, size, len(env_fns), mode, observation_mode, restart),
                state_hooks=b"" if method == FORK else registered_hooks(),
            )
            groups.append(
                GroupSupervisor(
                    _Processes(launch, deadlines.start),
                    initialize,
                    arena,
                    policy=restart,
                    deadlines=deadlines,
                    hooks=tuple(hooks),
                    reports=directory,
                )
            )
            if bind_cores and 1 < len(cores) <= len(sizes):
                groups[-1].prefer(cores[place % len(cores)])
            first += size
        # Without close(): the processes end by themselves once their pipes do.
        for group in groups:
            weakref.finalize(self, _abandon, group, os.getpid()).atexit = False
        super().__init__(
            env_fns,
            groups,
            arena,
            copy=copy,
            observation_mode=observation_mode,
            autoreset_mode=mode,
            max_concurrency=max_concurrency,
        )


class SerialVectorEnv(HostedVectorEnv):
    """The same host, wire and supervisor with all envs in this very process: for debugging."""

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        copy: bool = True,
        observation_mode: Any = "same",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        hooks: Sequence[Hook] = (),
    ) -> None:
        """Build all envs."""
        env_fns = list(env_fns)
        check_arguments(env_fns, observation_mode, None, None)
        for env_fn in env_fns:
            _check_env_fn(env_fn)
        mode, policy = mode_of(autoreset_mode), RestartPolicy(on_crash="raise", on_timeout="raise", journal_limit=0)
        arena = Arena(shared=False)
        group = _group(0, len(env_fns), len(env_fns), mode, observation_mode, policy)
        supervisor = GroupSupervisor(
            _Serially(env_fns, arena),
            Initialize(None, None, None, INLINE_LIMIT, group=group),
            arena,
            policy=policy,
            deadlines=Deadlines(),
            hooks=tuple(hooks),
        )
        super().__init__(
            env_fns,
            [supervisor],
            arena,
            copy=copy,
            observation_mode=observation_mode,
            autoreset_mode=mode,
            max_concurrency=None,
        )


@dataclass(frozen=True, slots=True)
class _Processes:
    launch: Launch
    start_deadline: float | None

    def __call__(self) -> ProcessBackend:
        return ProcessBackend(self.launch, self.start_deadline)

    def branch(self, token: int, deadline: float | None) -> None:
        return None

    def free(self, token: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Serially:
    env_fns: list[EnvFn]
    arena: Arena

    def __call__(self) -> SerialBackend:
        return SerialBackend(self.env_fns, self.arena.block)

    def branch(self, token: int, deadline: float | None) -> None:
        return None

    def free(self, token: int) -> None:
        pass


def _group(
    first: int, size: int, num_envs: int, mode: AutoresetMode, observation_mode: Any, policy: RestartPolicy
) -> Group:
    return Group(
        first=first,
        size=size,
        num_envs=num_envs,
        autoreset=mode.name,
        space=observation_mode[1] if isinstance(observation_mode, tuple) else None,
        truncates_errors=policy.on_error == "truncate",
        salt=secrets.randbits(32),
    )


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def make_vec(
    env: str | Callable[[], gymnasium.Env[Any, Any]],
    num_envs: int = 1,
    *,
    vectorization: str = "subprocess",
    wrappers: Sequence[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]] = (),
    vector_options: dict[str, Any] | None = None,
    **make_kwargs: Any,
) -> HostedVectorEnv:
    """Not yet."""
    raise NotImplementedError
