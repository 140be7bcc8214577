"""Check what envs are built from, and make the supervised workers that build them."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import cloudpickle
import gymnasium
from gymnasium.vector import AutoresetMode

from multienv.config import Deadlines, RestartPolicy, integer
from multienv.envs.pickling import pickled
from multienv.errors import UsageError
from multienv.events import Hook, checked_hooks
from multienv.processes.channel import Channel
from multienv.processes.environment import module_path, worker_environment, working_directory
from multienv.processes.launcher import Launch, method_of
from multienv.processes.serial import SerialChannel
from multienv.recovery.recoverer import Launcher
from multienv.recovery.supervisor import Supervisor
from multienv.reports.store import directory_for
from multienv.threads import Pool, side_by_side
from multienv.wire.messages import Build, Setting, drawn_seeds
from multienv.worker.host import Host
from multienv.worker.registrations import registrations

EnvFn = Callable[[], gymnasium.Env[Any, Any]]


class Backend(Protocol):
    """Says where workers live: in processes beside the trainer, or on the nodes of a cluster."""

    def launcher(self, title: str) -> Launcher:
        """Return what launches the processes of the next worker; ``title`` is what ``ps`` shows."""
        ...

    def setting(self) -> Setting:
        """Return what each of its processes must have in common with the trainer."""
        ...


class Processes:
    """Has workers live in processes beside the trainer.

    Args:
        context: Start method; see :class:`~multienv.SubprocessEnv`.
        native_threads: Threads of native libraries.
    """

    def __init__(self, context: Any, native_threads: int | None) -> None:
        self._method, self._native_threads = method_of(context), checked_threads(native_threads)

    def launcher(self, title: str) -> Launcher:
        """Return what launches the processes of a worker."""
        return Launch(self._method, self._native_threads, title)

    def setting(self) -> Setting:
        """Return the trainer's import path, arguments and so on."""
        return Setting(
            path=tuple(module_path()),
            arguments=arguments(),
            directory=working_directory(),
            environment=worker_environment(self._native_threads),
            registrations=registrations(),
            authkey=bytes(multiprocessing.current_process().authkey),
        )


def checked_threads(native_threads: int | None) -> int | None:
    """Return the number of threads of native libraries; raise UsageError for anything but a positive one or None."""
    if native_threads is not None and (integer(native_threads) or 0) < 1:
        raise UsageError(f"native_threads is {native_threads!r}; give an integer of at least 1, or None.")
    return native_threads


def arguments() -> tuple[str, ...]:
    """Return ``sys.argv``; an embedded interpreter has none."""
    return tuple(getattr(sys, "argv", None) or ())


class Workers:
    """Makes supervised workers that have these options in common; see :class:`~multienv.SubprocessEnv` for them.

    Raises:
        UsageError: An option has another type, or makes no sense.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        restart: RestartPolicy,
        deadlines: Deadlines,
        hooks: Sequence[Hook],
        reports: str | os.PathLike[str] | None,
    ) -> None:
        if not isinstance(restart, RestartPolicy):
            example = f"on_crash={restart!r}" if restart in ("replay", "truncate", "raise") else ""
            raise UsageError(f"restart is {restart!r:.100}; give a RestartPolicy: restart=RestartPolicy({example}).")
        if not isinstance(deadlines, Deadlines):
            seconds = deadlines if isinstance(deadlines, int | float) and not isinstance(deadlines, bool) else 60.0
            raise UsageError(f"deadlines is {deadlines!r:.100}; give Deadlines: deadlines=Deadlines(step={seconds}).")
        self._backend = backend
        self._restart = restart
        self._supervisor = partial(
            Supervisor,
            policy=restart,
            deadlines=deadlines,
            hooks=checked_hooks(hooks),
            reports=directory_for(reports),
        )
        self._setting = backend.setting()

    def make(
        self,
        env_fns: Sequence[EnvFn],
        index: int | None,
        *,
        exact: bool = False,
        autoreset: str = "",
        space: Any = None,
    ) -> Supervisor:
        """Return a worker that is yet to be started.

        Args:
            env_fns: What builds the env of each slot, checked before: see :func:`check_env_fn`.
            index: Env index of the first one in its batch, or ``None``.
            exact: One env whose values travel exactly; else rows of a batch.
            autoreset: Name of the ``AutoresetMode`` that the worker carries out; ``""``: none.
            space: Observation space whose rows the batch has; ``None``: that of the first env.

        Raises:
            UsageError: A function cannot be pickled.
        """
        title = "multienv env" if index is None else f"multienv env {index}"
        if index is not None and len(env_fns) > 1:
            title = f"multienv envs {index}-{index + len(env_fns) - 1}"
        restart = self._restart
        build = Build(
            env_fns=_pickled(tuple(env_fns)),
            exact=exact,
            autoreset=autoreset,
            seeds=drawn_seeds(),
            draws=_draws(len(env_fns)),
            setting=self._setting,
            space=space,
            truncates_errors=restart.on_error == "truncate",
            snapshots=(restart.snapshot_every or 0) if restart.snapshots and restart.replays else -1,
            title=title,
        )
        return self._supervisor(self._backend.launcher(title), build, index=index)


def serial_worker(
    hooks: Sequence[Hook],
    env_fns: Sequence[EnvFn],
    index: int | None,
    *,
    exact: bool = False,
    autoreset: str = "",
    space: Any = None,
) -> Supervisor:
    """Return a worker that builds the envs in this very process; see :meth:`Workers.make` for the arguments."""
    return Supervisor(
        _SerialLaunch(tuple(env_fns)),
        Build(b"", exact, autoreset, None, _draws(len(env_fns)), None, space),
        policy=RestartPolicy(on_crash="raise", on_timeout="raise"),
        deadlines=Deadlines(),
        index=index,
        hooks=checked_hooks(hooks),
    )


@dataclass(frozen=True, slots=True)
class _SerialLaunch:
    """Takes the place of ``Launch``: the functions, which need not be pickled, are called in this very process."""

    env_fns: tuple[EnvFn, ...]

    def start(self) -> Channel:
        return SerialChannel(partial(Host, env_fns=self.env_fns))

    def wake_kept(self, token: int) -> None:
        """Return ``None``: there are no snapshots."""

    def free(self, token: int) -> None:
        """Do nothing: there are no snapshots."""

    def close(self) -> None:
        """Do nothing: the channel closes the envs."""


def build_all(workers: Sequence[Supervisor]) -> dict[int, BaseException]:
    """Start workers, which build their envs at the same time; return their errors by index in ``workers``."""
    for worker in workers:
        worker.start()
    pool = Pool(max(1, len(workers)), "multienv-build")
    tasks = side_by_side(pool, [worker.initialize for worker in workers])
    for worker in workers:
        worker.record.call_hooks()
    return {place: task.error for place, task in enumerate(tasks) if task.error is not None}


def _draws(slots: int) -> tuple[int, ...]:
    generator = random.SystemRandom()
    return tuple(generator.getrandbits(64) for _ in range(slots))


def _pickled(env_fns: tuple[EnvFn, ...]) -> bytes:
    # The main script in a multiprocessing child: __main__ by another name, and not importable elsewhere.
    main = sys.modules.get("__mp_main__")
    if main is not None and main.__name__ == "__mp_main__":
        cloudpickle.register_pickle_by_value(main)
    try:
        return pickled(env_fns)
    except Exception as error:  # pickling runs foreign code
        raise UsageError(
            f"env_fn {_culprit(env_fns)!r:.100} cannot be sent to a process: {type(error).__name__}: {error}. "
            "Build what it needs inside the function."
        ) from error


def _culprit(env_fns: tuple[EnvFn, ...]) -> Any:
    """Return the first of these functions that cannot be pickled."""
    for env_fn in env_fns:
        try:
            pickled(env_fn)
        except Exception:  # as above
            return env_fn
    return env_fns


# --- checks -----------------------------------------------------------------------------------


def check_env_fn(env_fn: Any, name: str = "env_fn") -> None:
    """Raise UsageError unless ``env_fn`` is callable and no env; ``name`` is its name in the message."""
    if isinstance(env_fn, gymnasium.Env) or not callable(env_fn):
        made = f"gymnasium.make({env_fn!r})" if isinstance(env_fn, str) else "MyEnv()"
        raise UsageError(
            f"{name} is {env_fn!r:.100}; give a function that takes no arguments and returns an env: lambda: {made}."
        )


def listed_env_fns(owner: str, env_fns: Any) -> list[EnvFn]:
    """Return a list of functions, one for each env.

    Raises:
        UsageError: ``env_fns`` is something else; the message says what to write.
        UsageError: ``env_fns`` is empty.
    """
    if callable(env_fns):
        raise UsageError(f"{owner}: env_fns is a single function; give a list of them, one for each env.")
    if isinstance(env_fns, str) or not isinstance(env_fns, Iterable):
        raise UsageError(
            f"{owner}: env_fns is {env_fns!r:.100}; give a list of functions, one for each env. "
            "make_vec(id, num_envs) makes a batch of an id."
        )
    found = list(env_fns)
    if not found:
        raise UsageError(f"{owner}: env_fns is empty; give one function for each env.")
    for place, env_fn in enumerate(found):
        check_env_fn(env_fn, f"env_fns[{place}]")
    return found


def mode_of(mode: Any) -> AutoresetMode:
    """Return the mode that is given as a member, its name or its value; raise UsageError if there is none."""
    if isinstance(mode, AutoresetMode):
        return mode
    for known in AutoresetMode:
        if mode in (known.name, known.value):
            return known
    names = ", ".join(f"AutoresetMode.{known.name}" for known in AutoresetMode)
    raise UsageError(f"autoreset_mode is {mode!r}; choose one of {names}.")
