"""One env in one process, which may die at any moment."""

from __future__ import annotations

import multiprocessing
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import gymnasium

from multienv.backends.process import ProcessBackend
from multienv.backends.serial import SerialBackend
from multienv.config import Deadlines, RestartPolicy, integer
from multienv.errors import EnvFnError, EnvsFailedError, UsageError
from multienv.events import Hook, checked_hooks
from multienv.hosted_env import EnvFn, HostedEnv
from multienv.processes import descriptors
from multienv.processes.client import tell
from multienv.processes.environment import module_path, worker_environment, working_directory
from multienv.processes.launch import Launch, method_of
from multienv.processes.protocol import FORK, FREE, WAKE_TOKEN
from multienv.recovery.healer import UP_WITHIN
from multienv.recovery.preserver import CAPTURE_DEADLINE
from multienv.recovery.supervisor import Supervisor
from multienv.reports.store import directory_for
from multienv.threads import Pool, close_at_once, side_by_side
from multienv.wire.messages import Initialize, Setting, drawn_seeds
from multienv.wire.observations import INLINE_LIMIT
from multienv.worker.registrations import registrations
from multienv.worker.state_hooks import registered_hooks


class SubprocessEnv(HostedEnv):
    """A gymnasium.Env whose env runs in a process of its own, and survives that process.

    ::

        env = SubprocessEnv(lambda: gymnasium.make("CartPole-v1"))
        env.start()          # launches the process; does not block
        env.initialize()     # the env is built; its spaces are known
        observation, info = env.reset(seed=0)
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())

    When the process dies, by whatever cause, a new one replays the episode and the step returns what it
    would have returned; what cannot be shown to be the same episode is truncated, never spliced.

    Args:
        env_fn: Builds the env; called in the process. It travels by cloudpickle, so a lambda will do; under
            ``context="fork"`` it does not travel at all.
        restart: What happens when the process is lost.
        deadlines: When it counts as hung.
        context: ``"forkserver"`` (the default on Linux), ``"spawn"`` (elsewhere) or ``"fork"``.
        shared_memory: Large observations travel in anonymous shared memory; else in the reply.
        native_threads: Threads that BLAS, OpenMP and the like may use in the process, unless the
            environment says otherwise; ``None`` leaves them alone.
        env_index: The env's index in its batch, for messages.
        hooks: Called with each :class:`~multienv.events.Loss` and :class:`~multienv.events.Recovery`.
        reports: The directory that each loss writes a crash report to, for ``multienv replay``; the newest 100 are
            kept. ``None`` is ``$MULTIENV_REPORTS``, else ``multienv/reports`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
            An empty string, here or in the variable, for none. With them a journal is kept under every RestartPolicy.

    Raises:
        EnvFnError: ``env_fn`` is not callable or cannot be pickled.
    """

    def __init__(
        self,
        env_fn: EnvFn,
        *,
        restart: RestartPolicy = RestartPolicy(),  # noqa: B008 - frozen
        deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
        context: Any = None,
        shared_memory: bool = True,
        native_threads: int | None = 1,
        env_index: int | None = None,
        hooks: Sequence[Hook] = (),
        reports: str | os.PathLike[str] | None = None,
    ) -> None:
        """Start nothing yet."""
        _check_env_fn(env_fn)
        _check_options(restart, deadlines, native_threads)
        method = method_of(context)
        shortest = _shortest_limit(restart, deadlines)
        launch = Launch(method, env_fn, shortest, native_threads, guarded=deadlines.any_given)
        initialize = Initialize(
            env_fn=None if method == FORK else _pickled(env_fn),
            seeds=drawn_seeds(),
            setting=None if method == FORK else _setting(native_threads),
            inline_limit=INLINE_LIMIT if shared_memory else -1,
            state_hooks=b"" if method == FORK else registered_hooks(),
            snapshots=(restart.snapshot_every or 0) if restart.snapshots and restart.replays else -1,
        )
        super().__init__(
            Supervisor(
                _Processes(launch, deadlines.start),
                initialize,
                policy=restart,
                deadlines=deadlines,
                env_index=env_index,
                hooks=checked_hooks(hooks),
                reports=directory_for(reports),
            )
        )
        # Without close(): the process ends by itself once its pipe does.
        self._finalizer = weakref.finalize(self, _abandon, self._supervisor, os.getpid())
        self._finalizer.atexit = False  # the launcher's own exit handler lets go of all of them

    def __repr__(self) -> str:
        """As ``str``."""
        return str(self)


class SerialEnv(HostedEnv):
    """The same host, wire and supervisor with the env in this very process: for debugging.

    What a :class:`SubprocessEnv` must be equal to, to the bit. Deadlines are not enforced and a crash of
    the env is a crash of this process.

    Args:
        env_fn: Builds the env.
        shared_memory: As for :class:`SubprocessEnv`.
        env_index: The env's index in its batch, for messages.
        hooks: As for :class:`SubprocessEnv`.
    """

    def __init__(
        self,
        env_fn: EnvFn,
        *,
        shared_memory: bool = True,
        env_index: int | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        """Start nothing yet."""
        _check_env_fn(env_fn)
        initialize = Initialize(None, None, None, INLINE_LIMIT if shared_memory else -1)
        policy = RestartPolicy(on_crash="raise", on_timeout="raise")
        super().__init__(
            Supervisor(
                _Serially(env_fn),
                initialize,
                policy=policy,
                deadlines=Deadlines(),
                env_index=env_index,
                hooks=checked_hooks(hooks),
            )
        )


@dataclass(frozen=True, slots=True)
class _Processes:
    """Where the processes of one env come from."""

    launch: Launch
    start_deadline: float | None

    def __call__(self) -> ProcessBackend:
        return ProcessBackend(self.launch, self.start_deadline)

    def branch(self, token: int, deadline: float | None) -> ProcessBackend | None:
        return ProcessBackend.woken(self.launch, deadline, (WAKE_TOKEN, token))

    def free(self, token: int) -> None:
        tell(FREE, pid=token)


@dataclass(frozen=True, slots=True)
class _Serially:
    env_fn: EnvFn

    def __call__(self) -> SerialBackend:
        return SerialBackend(self.env_fn)

    def branch(self, token: int, deadline: float | None) -> None:
        return None

    def free(self, token: int) -> None:
        pass


def create_subprocess_envs(env_fns: Iterable[EnvFn], **options: Any) -> list[SubprocessEnv]:
    """Envs in processes of their own, all started first, then built in parallel.

    Args:
        env_fns: One function for each env.
        **options: Of :class:`SubprocessEnv`, for all of them.

    Returns:
        The initialized envs, in order; each knows its index.

    Raises:
        EnvsFailedError: Some could not be built. The others are closed again; ``failures`` has every
            cause. With a single cause it is catchable by that cause's own type.
    """
    fns = listed("create_subprocess_envs", env_fns)
    if not fns:
        raise UsageError("create_subprocess_envs: env_fns is empty; give one function for each env.")
    envs = [SubprocessEnv(env_fn, env_index=index, **options) for index, env_fn in enumerate(fns)]
    initialize_all(envs)
    return envs


def listed(face: str, env_fns: Any) -> list[EnvFn]:
    """Of what is given for several envs, a function for each."""
    if callable(env_fns):
        raise EnvFnError(f"{face}: env_fns is a single function; give a list of them, one for each env.")
    if not isinstance(env_fns, Iterable):
        raise EnvFnError(f"{face}: env_fns is {env_fns!r:.100}; give a list of functions, one for each env.")
    return list(env_fns)


def initialize_all(envs: Sequence[SubprocessEnv]) -> None:
    """Start all, then build in parallel; closes all and raises as :func:`create_subprocess_envs` if some fail."""
    pool = Pool(len(envs), "multienv-build")
    try:
        for env in envs:
            env.start()
        tasks = side_by_side(pool, [env.initialize for env in envs])
        failures = {index: task.error for index, task in enumerate(tasks) if task.error is not None}
    except BaseException:
        close_all(envs)  # first: it ends what the threads wait for
        raise
    finally:
        pool.shutdown()
    if failures:
        close_all(envs)
        results = [None if index in failures else env for index, env in enumerate(envs)]
        raise EnvsFailedError.collect(
            "create_subprocess_envs()", failures, results, "All of them have been closed; mend the env_fns named below."
        )


def close_all(envs: Sequence[gymnasium.Env[Any, Any]]) -> None:
    """Close envs side by side, so that several stuck ones take no longer than one."""
    close_at_once([env.close for env in envs], here=descriptors.is_held_here())


def _abandon(supervisor: Supervisor, owner: int) -> None:
    if os.getpid() == owner:  # a forked child of the trainer's must leave the trainer's workers alone
        supervisor.abandon()


def _check_env_fn(env_fn: Any) -> None:
    if isinstance(env_fn, gymnasium.Env):
        raise EnvFnError(f"env_fn is an env, {env_fn!r:.100}; give a function that builds it: lambda: make_my_env().")
    if not callable(env_fn):
        raise EnvFnError(f"env_fn is {env_fn!r:.100}; give a function that takes no arguments and returns an env.")


def _check_options(restart: Any, deadlines: Any, native_threads: Any) -> None:
    if native_threads is not None and (integer(native_threads) or 0) < 1:
        raise UsageError(f"native_threads is {native_threads!r}; give an integer of at least 1, or None.")
    if not isinstance(restart, RestartPolicy):
        raise UsageError(f"restart is {restart!r:.100}; give a RestartPolicy.")
    if not isinstance(deadlines, Deadlines):
        raise UsageError(f"deadlines is {deadlines!r:.100}; give Deadlines.")


def _shortest_limit(restart: RestartPolicy, deadlines: Deadlines) -> float:
    """Of all that may be set for a process, seconds; 0 if it has none."""
    limits = [getattr(deadlines, name) for name in ("start", "reset", "step", "call", "recovery")]
    limits += [CAPTURE_DEADLINE if restart.state_anchors else None, UP_WITHIN if restart.snapshots else None]
    return min((limit for limit in limits if limit), default=0.0)


def _pickled(env_fn: EnvFn) -> bytes:
    # The main script in a multiprocessing child: __main__ by another name, and no more to be imported elsewhere.
    main = sys.modules.get("__mp_main__")
    if main is not None and main.__name__ == "__mp_main__":
        cloudpickle.register_pickle_by_value(main)
    try:
        data: bytes = cloudpickle.dumps(env_fn)
    except Exception as error:  # pickling runs foreign code
        raise EnvFnError(
            f"env_fn {env_fn!r:.100} cannot be sent to a process: {type(error).__name__}: {error}. "
            'Build what it needs inside the function, or use context="fork".'
        ) from error
    return data


def _setting(native_threads: int | None) -> Setting:
    return Setting(
        tuple(module_path()),
        tuple(getattr(sys, "argv", None) or ()),  # an embedded interpreter has none
        working_directory(),
        worker_environment(native_threads),
        *registrations(),
        authkey=bytes(multiprocessing.current_process().authkey),
    )
