"""Many envs in a few processes, which may die at any moment; and the same thing in this process."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gymnasium.vector import AutoresetMode

from multienv.autoreset import mode_of
from multienv.backends.arena import Arena
from multienv.backends.process import ProcessBackend
from multienv.backends.serial import SerialBackend
from multienv.config import Deadlines, RestartPolicy
from multienv.cores import busy_cores
from multienv.errors import UsageError
from multienv.events import Hook, checked_hooks
from multienv.hosted_env import EnvFn
from multienv.processes.launch import Launch, method_of
from multienv.processes.protocol import FORK
from multienv.recovery.group import GroupSupervisor
from multienv.reports.store import directory_for
from multienv.subprocess_env import _abandon, _check_env_fn, _check_options, _pickled, _setting, _shortest_limit, listed
from multienv.turns import spread
from multienv.vector_arguments import check_arguments, deal
from multienv.vector_dealing import Trial
from multienv.vector_env import Batch, HostedVectorEnv
from multienv.vector_parts import VectorPart, split
from multienv.vector_rounds import Parted
from multienv.wire.messages import Group, Initialize, drawn_seeds
from multienv.wire.observations import INLINE_LIMIT
from multienv.worker.state_hooks import registered_hooks


class SubprocessVectorEnv(HostedVectorEnv):
    """A ``gymnasium.vector.VectorEnv`` whose envs live in processes, several in each, and survive them.

    ::

        envs = SubprocessVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 32)
        observations, infos = envs.reset(seed=0)
        observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())

    It takes the place of ``gymnasium.vector.AsyncVectorEnv``, and equals ``SyncVectorEnv`` to the bit; the design page
    says what of the former is not here, and why. When a process
    dies, by whatever cause, its envs are brought back as :class:`SubprocessEnv` brings back one, and the step returns
    what it would have returned. An env that is itself to blame and cannot be brought back ends its episode with
    ``truncated`` and the reason in ``infos["multienv"]`` (with SAME_STEP in ``infos["final_info"]["multienv"]``, as all
    that is told of the end of an episode); the others of its process go on exactly.

    A step returns observations, batched as ``observation_space`` says, rewards (float64, ``(num_envs,)``), terminations
    and truncations (bool, ``(num_envs,)``), and the envs' infos merged: a key has a value for each env, and ``_key``
    says of which env it is. What happens at the end of an episode is ``autoreset_mode``'s to say:

    - ``NEXT_STEP``: the step that ends it returns its last observation; the next one ignores the env's action and
      returns the first observation of the new episode, reward 0.0 and both flags False.
    - ``SAME_STEP``: the step that ends it returns the first observation of the new one, with the old one's last in
      ``infos["final_obs"]`` and its info in ``infos["final_info"]``.
    - ``DISABLED``: the caller resets the envs that have ended, ``reset(options={"reset_mask": mask})``.

    Args:
        env_fns: Each builds one env, in its process; they travel by cloudpickle. All envs have the same action space.
        envs_per_worker: How many envs share a process; the last one has what is left. ``"auto"``: as many processes as
            there are cores, with the envs dealt out evenly; and more, if the first eight steps show that a worker waits
            for its envs for a millisecond or two in each, or computes for ten times as long. Before the ninth, the envs
            are then built again there, brought to the same state, and held against what was seen. Give a number to envs
            of which there must never be two.
        shared_memory: Observations lie in shared memory where their space has a fixed layout, and travel pickled where
            not (``None``); must be shareable (``True``); or travel pickled (``False``).
        copy: Give out copies of the observations. If False, they are views into the shared memory: the step or
            reset after the next one overwrites them; they may be written to, and outlive :meth:`close`. While a lost
            worker is brought back in a step that is waited for with a timeout, they may show other steps.
        context: ``"forkserver"`` (the default on Linux), ``"spawn"`` (elsewhere) or ``"fork"``.
        daemon: Ignored: the processes end with the trainer, whatever it is, and may start processes of their own.
        worker: Refused: the envs are hosted by multienv's own worker.
        observation_mode: ``"same"``: all envs have the same observation space. ``"different"``: they share shape and
            dtype. Or a pair, the batched and the single space.
        autoreset_mode: A mode of gymnasium's, or its name or value.
        max_concurrency: How many processes may step or reset at a time.
        restart: What happens when a process is lost. ``on_crash`` and its likes concern the env that is to blame.
        deadlines: When a process counts as hung; those of a step and a reset are for all its envs together.
        native_threads: Threads that BLAS, OpenMP and the like may use in each process, unless the environment says
            otherwise; ``None`` leaves them alone.
        bind_cores: A process whose steps are short keeps to a core, and yields it to others; one on each core looks out
            for its next request for 0.2 ms before it sleeps, if that has been enough before.
        hooks: Called with each :class:`~multienv.events.Loss` and :class:`~multienv.events.Recovery`.
        reports: As for :class:`SubprocessEnv`.

    Raises:
        EnvsFailedError: Some envs could not be built; all have been closed.
        SpaceMismatchError: Their spaces differ; also a RuntimeError, as gymnasium has it.
        NotShareableError: ``shared_memory=True``, and the observations cannot lie in shared memory.
        EnvFnError: An ``env_fn`` is not callable or cannot be pickled.
        UsageError: Another argument makes no sense.
    """

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        envs_per_worker: int | str = "auto",
        shared_memory: bool | None = None,
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
        _entropy: int | None = None,  # for the same envs, dealt anew
    ) -> None:
        """Launch the workers, and build all envs."""
        env_fns = listed(type(self).__name__, env_fns)
        entropy = secrets.randbits(64) if _entropy is None else _entropy
        check_arguments(env_fns, observation_mode, max_concurrency, worker)
        for env_fn in env_fns:
            _check_env_fn(env_fn)
        _check_options(restart, deadlines, native_threads)
        if restart.recycle_after_episodes is not None:
            raise UsageError(
                "RestartPolicy.recycle_after_episodes: the episodes of the envs that share a process end one by one; "
                "give recycle_after_steps, recycle_after or max_rss."
            )
        mode, method = mode_of(autoreset_mode), method_of(context)
        sizes, directory = deal(len(env_fns), envs_per_worker, busy_cores()), directory_for(reports)
        arena = Arena(shared=True)
        weakref.finalize(self, arena.close).atexit = False
        workers = _Workers(method, restart, deadlines, native_threads, checked_hooks(hooks), directory, entropy, arena)
        groups, first = [], 0
        for size in sizes:
            seats = _group(first, size, len(env_fns), mode, observation_mode, shared_memory, restart)
            groups.append(workers.supervisor(env_fns[first : first + size], seats))
            first += size
        if bind_cores:
            spread(groups)
        # Without close(): the processes end by themselves once their pipes do.
        for group in groups:
            weakref.finalize(self, _abandon, group, os.getpid()).atexit = False
        batched: dict[str, Any] = {
            "shared_memory": shared_memory,
            "copy": copy,
            "observation_mode": observation_mode,
            "autoreset_mode": mode,
            "max_concurrency": max_concurrency,
        }
        self._trial: Trial | None = None
        super().__init__(env_fns, groups, arena, **batched)
        if envs_per_worker == "auto" and max(sizes) > 1:
            build = partial(
                SubprocessVectorEnv,  # not a subclass, which may take other arguments
                env_fns,
                **batched,
                context=context,
                restart=restart,
                deadlines=deadlines,
                native_threads=native_threads,
                bind_cores=bind_cores,
                hooks=hooks,
                reports=reports,
                _entropy=entropy,
            )
            self._trial = Trial(self, lambda size: build(envs_per_worker=size))

    def step(self, actions: Any) -> Batch:
        """See :class:`HostedVectorEnv`."""
        if self._trial is not None and not self._trial.goes_on(self, actions):
            self._trial = None
        return super().step(actions)

    def split(self, parts: int = 2) -> tuple[VectorPart, ...]:
        """Divide the envs into parts that step on their own, each a vector env with ``send`` and ``recv``.

        For double buffering: the policy computes for one part while the workers of the other step, see
        ``examples/pipelined.py``. From then on the parts are reset, stepped and asked, and the whole is closed.
        ``max_concurrency`` holds for each part by itself.

        Args:
            parts: How many; each gets whole workers, so there must be as many of them. Two for each core, one in each
                of two parts, keep all cores busy: ``envs_per_worker = num_envs // (2 * cores)``.

        Raises:
            UsageError: There are fewer workers than parts, or a call is pending.
        """
        if isinstance(self._rounds.current, Parted) and not self.closed:
            raise UsageError("split(): these envs have been split. Step their parts, and close() the whole.")
        self._refuse_pending("split")
        divided = split(self, parts)
        self._rounds.current = Parted()
        return divided


class SerialVectorEnv(HostedVectorEnv):
    """The same host, wire and supervisor with all envs in this very process: for debugging.

    What a :class:`SubprocessVectorEnv` must be equal to, to the bit, infos and errors included. A breakpoint in an env
    stops here. Deadlines are not enforced, and a crash of an env is a crash of this process.

    Attributes:
        envs: The envs themselves, as ``gymnasium.vector.SyncVectorEnv`` has them. To look at: what is done to them
            here is not done through this class.

    Args:
        env_fns: Each builds one env.
        shared_memory, copy, observation_mode, autoreset_mode, hooks: As for :class:`SubprocessVectorEnv`.

    Raises:
        EnvsFailedError: Some envs could not be built; all have been closed.
        SpaceMismatchError: Their spaces differ.
        UsageError: An argument makes no sense.
    """

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        shared_memory: bool | None = None,
        copy: bool = True,
        observation_mode: Any = "same",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        hooks: Sequence[Hook] = (),
    ) -> None:
        """Build all envs."""
        env_fns = listed(type(self).__name__, env_fns)
        self.envs: list[Any] = [None] * len(env_fns)
        check_arguments(env_fns, observation_mode, None, None)
        for env_fn in env_fns:
            _check_env_fn(env_fn)
        mode, policy = mode_of(autoreset_mode), RestartPolicy(on_crash="raise", on_timeout="raise", journal_limit=0)
        arena = Arena(shared=False)
        group = _group(0, len(env_fns), len(env_fns), mode, observation_mode, shared_memory, policy)
        supervisor = GroupSupervisor(
            _Serially([_Noted(env_fn, self.envs, index) for index, env_fn in enumerate(env_fns)], arena),
            Initialize(None, None, None, INLINE_LIMIT, group=group),
            arena,
            policy=policy,
            deadlines=Deadlines(),
            hooks=checked_hooks(hooks),
        )
        super().__init__(
            env_fns,
            [supervisor],
            arena,
            shared_memory=shared_memory,
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
class _Workers:
    """What the workers of a batch have in common."""

    method: int
    restart: RestartPolicy
    deadlines: Deadlines
    native_threads: int | None
    hooks: tuple[Hook, ...]
    reports: Path | None
    entropy: int
    arena: Arena

    def supervisor(self, env_fns: list[EnvFn], group: Group) -> GroupSupervisor:
        """Of one more, which holds these envs; nothing is launched yet."""
        deadlines, forks = self.deadlines, self.method == FORK
        shortest = _shortest_limit(self.restart, deadlines)
        launch = Launch(
            self.method,
            env_fns,  # type: ignore[arg-type]
            shortest,
            self.native_threads,
            self.arena.descriptor,
            guarded=deadlines.any_given,
        )
        initialize = Initialize(
            env_fn=None if forks else _pickled(env_fns),  # type: ignore[arg-type]
            seeds=drawn_seeds(self.entropy),
            setting=None if forks else _setting(self.native_threads),
            inline_limit=INLINE_LIMIT,
            snapshots=(self.restart.snapshot_every or 0) if self.restart.snapshots else -1,
            group=group,
            state_hooks=b"" if forks else registered_hooks(),
        )
        return GroupSupervisor(
            _Processes(launch, deadlines.start),
            initialize,
            self.arena,
            policy=self.restart,
            deadlines=deadlines,
            hooks=self.hooks,
            reports=self.reports,
        )


@dataclass(frozen=True, slots=True)
class _Noted:
    """Builds an env, and notes it in its place."""

    env_fn: EnvFn
    envs: list[Any]
    index: int

    def __call__(self) -> Any:
        env = self.envs[self.index] = self.env_fn()
        return env


@dataclass(frozen=True, slots=True)
class _Serially:
    env_fns: Sequence[EnvFn]
    arena: Arena

    def __call__(self) -> SerialBackend:
        return SerialBackend(self.env_fns, self.arena.block)

    def branch(self, token: int, deadline: float | None) -> None:
        return None

    def free(self, token: int) -> None:
        pass


def _group(
    first: int,
    size: int,
    num_envs: int,
    mode: AutoresetMode,
    observation_mode: Any,
    shared_memory: bool | None,
    policy: RestartPolicy,
) -> Group:
    return Group(
        first=first,
        size=size,
        num_envs=num_envs,
        autoreset=mode.name,
        space=deepcopy(observation_mode[1]) if isinstance(observation_mode, tuple) else None,
        truncates_errors=policy.on_error == "truncate",
        with_observations=shared_memory is not False,
    )
