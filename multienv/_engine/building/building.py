"""Check what envs are built from, and make the supervised workers that build them."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Protocol, TypedDict

import cloudpickle
import gymnasium
from gymnasium.vector import AutoresetMode

from multienv._engine import interrupts
from multienv._engine.building.module_state import module_values
from multienv._engine.building.pickling import pickled_env_fns
from multienv._engine.building.process_seeds import ProcessSeeds, seeds_of_trainer
from multienv._engine.cores import busy_cores
from multienv._engine.processes.channel import Channel
from multienv._engine.processes.environment import module_path, worker_environment, working_directory
from multienv._engine.processes.launcher import Launch, Preload, method_of, preload_of
from multienv._engine.processes.limits import limit_error, limits_of_workers
from multienv._engine.processes.serial import SerialChannel
from multienv._engine.processes.worker_process import run_uninterrupted
from multienv._engine.recovery.recoverer import BuildTurns, Launcher
from multienv._engine.recovery.supervisor import Supervisor
from multienv._engine.recovery.way_back import ForkingPolicy
from multienv._engine.reports.store import directory_for
from multienv._engine.threads import Pool, Task, side_by_side
from multienv._engine.wire.messages import Build, Setting, seeds_from
from multienv._engine.wire.shared_pickle import LARGE, SharedPickle, share
from multienv._engine.worker.host import Host
from multienv._engine.worker.main_module import main_script, refuse_while_importing
from multienv._engine.worker.registrations import registrations
from multienv.config import Deadlines, RestartPolicy, checked_count
from multienv.errors import UsageError
from multienv.events import Hook

# Called without arguments, or with the env's index.
EnvFn = Callable[..., gymnasium.Env[Any, Any]]
_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
WorkerEnv = Mapping[str, str] | Callable[[int], Mapping[str, str]] | None


class Backend(Protocol):
    """Says where workers live: in processes beside the trainer, or on the nodes of a cluster.

    Attributes:
        shares: Its processes can be handed a file that several of them share.
        preloads: They can be forked with modules imported.
    """

    shares: bool
    preloads: bool

    def launcher(self, title: str, shared: SharedPickle | None, preload: Preload | None) -> Launcher:
        """Return what launches the processes of the next worker.

        Args:
            title: What ``ps`` shows.
            shared: What its envs are built from, if that lies in a shared file.
            preload: What the processes have imported when they are forked, if they can be.
        """

    def setting(self) -> Setting:
        """Return what each of its processes must have in common with the trainer."""


class Processes:
    """Places workers in processes beside the trainer: a backend.

    Args:
        method: Start method, ``"forkserver"`` or ``"spawn"``.
        native_threads: See :class:`WorkerOptions`.
    """

    def __init__(self, method: str, native_threads: int | None) -> None:
        self._method, self._native_threads = method, native_threads
        self.shares = sys.platform == "linux"  # by memfd_create
        self.preloads = sys.platform == "linux" and self._method == "forkserver"  # by a subreaper

    def launcher(self, title: str, shared: SharedPickle | None, preload: Preload | None) -> Launcher:
        """Return what launches the processes of a worker."""
        return Launch(self._method, self._native_threads, title, shared, preload)

    def setting(self) -> Setting:
        """Return the trainer's import path, arguments and so on."""
        return replace(
            setting_elsewhere(),
            path=tuple(module_path()),
            directory=working_directory(),
            environment=worker_environment(self._native_threads),
            limits=limits_of_workers(),
        )


def setting_elsewhere() -> Setting:
    """Return what a worker takes from the trainer on another machine: no path, directory, environment and limits."""
    arguments = tuple(getattr(sys, "argv", None) or ())  # an embedded interpreter has none
    authkey = bytes(multiprocessing.current_process().authkey)
    return Setting((), arguments, "", None, registrations(), authkey, main=main_script(), values=module_values())


def checked_variables(worker_env: WorkerEnv, worker: int) -> dict[str, str]:
    """Return the variables of a worker.

    Args:
        worker_env: See :class:`WorkerOptions`.
        worker: The worker's index.

    Raises:
        UsageError: A name or a value is no string, or none that the operating system knows.
    """
    given = dict((worker_env(worker) if callable(worker_env) else worker_env) or {})
    for name, value in given.items():
        known = isinstance(name, str) and isinstance(value, str)
        if not known or not name or "=" in name or "\0" in name + value:
            raise UsageError(
                f"worker_env: {name!r:.50}: {value!r:.50} of worker {worker} is no variable; give name and value as "
                "strings, such as {'MUJOCO_GL': 'egl'}, the name without '='."
            )
    return given


def checked_preload(preload: Sequence[str], backend: Backend) -> tuple[str, ...] | None:
    """Return the names of modules; ``None``: they are to be learned.

    Raises:
        UsageError: They are no names, or ``backend`` cannot preload modules.
    """
    names = () if preload == "auto" else preload
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(one, str) for one in names):
        raise UsageError(
            f"preload is {preload!r:.100}; give the names of modules, such as ('robosuite', 'torch'), or 'auto'."
        )
    if preload and not backend.preloads:
        raise UsageError(
            f"preload={preload!r:.100} needs workers that are forked beside the trainer: use "
            "context='forkserver', on Linux, not on a cluster."
        )
    return None if preload == "auto" else tuple(names)


class WorkerOptions(TypedDict, total=False):
    """Lists the options of all classes whose envs run in processes.

    Args:
        restart: What happens when a process is lost. If several envs share the process, ``"truncate"`` and ``"raise"``
            end the episodes of all of them after a crash or a timeout; ``"replay"`` ends only the episodes that cannot
            be recovered. ``on_error`` ends only the episode of the env that raised.
        deadlines: When a process counts as hung. If several envs share a process, each env has the full time.
        context: ``"forkserver"`` or ``"spawn"``; ``None``: ``"forkserver"`` on Linux, ``"spawn"`` elsewhere.
        native_threads: Threads that BLAS, OpenMP and similar libraries may use in a process, unless an environment
            variable says otherwise; ``None`` changes nothing.
        worker_env: Environment variables of the processes, on top of those of the trainer or of the node: a dict, or a
            function that takes the index of a worker and returns a dict. The function is called in the trainer, once
            for each worker. The index counts the processes of a vector env; for a single env it is ``env_index``, or 0.
            A replacement process gets the same variables. They are set before ``env_fn`` and its imports run; gymnasium
            and numpy are loaded by then.
        preload: Names of modules that take long to import, such as ``("robosuite",)``. One process imports them, and
            the processes of the envs are forked from it, replacements too. If they cannot be (an import raised, or
            started a thread), a line on stderr says why, and each process imports for itself. Linux,
            ``"forkserver"``. ``"auto"``: that process imports what the envs that are built first have imported.
        worker_seed: Seed of ``random`` and ``numpy.random`` in the processes, a non-negative integer; each process gets
            its own, derived from this and its index. ``None``: they are derived from the trainer's ``random`` and
            ``numpy.random``, which are not advanced. So a script that seeds these two first gives the same run each
            time.
        starts_at_once: Workers of a vector env, a list or an env manager that may build their envs at the same time: at
            construction, and when processes are replaced. ``1``: one after the other. ``None``: all. A recovery that
            waits for its turn goes on counting against ``Deadlines.recovery``.
        hooks: Functions that are called with each :class:`~multienv.Loss`, :class:`~multienv.Recovery`
            and :class:`~multienv.Recycled`.
        reports: Directory for crash reports, one for each loss, for ``multienv replay``; the newest 100 of a trainer
            are kept. ``None``: ``$MULTIENV_REPORTS``, else ``multienv/reports`` in ``$XDG_CACHE_HOME`` or
            ``~/.cache``. An empty string, here or in the variable: no reports. With reports, a journal is kept under
            every RestartPolicy.
    """

    restart: RestartPolicy
    deadlines: Deadlines
    context: Any
    native_threads: int | None
    worker_env: WorkerEnv
    preload: Sequence[str]
    worker_seed: int | None
    starts_at_once: int | None
    hooks: Sequence[Hook]
    reports: str | os.PathLike[str] | None


class Workers:
    """Makes supervised workers that have their options in common.

    Args:
        backend: Makes what says where they live, given the start method and ``native_threads``.
        restart, deadlines, context, native_threads, worker_env, preload, worker_seed, starts_at_once, hooks, reports:
            See :class:`WorkerOptions`.

    Attributes:
        recycles: Processes are replaced by plan.

    Raises:
        UsageError: An option makes no sense.
    """

    def __init__(
        self,
        backend: Callable[[str, int | None], Backend],
        *,
        restart: RestartPolicy = RestartPolicy(),  # noqa: B008 - frozen
        deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
        context: Any = None,
        native_threads: int | None = 1,
        worker_env: WorkerEnv = None,
        preload: Sequence[str] = (),
        worker_seed: int | None = None,
        starts_at_once: int | None = None,
        hooks: Sequence[Hook] = (),
        reports: str | os.PathLike[str] | None = None,
    ) -> None:
        refuse_while_importing()
        for name, value, kind in (("restart", restart, RestartPolicy), ("deadlines", deadlines, Deadlines)):
            if not isinstance(value, kind):
                raise UsageError(f"{name} is {value!r:.100}; give {name}={kind.__name__}(...).")
        self._backend = backend(method_of(context), checked_count("native_threads", native_threads, needed=False))
        self._preload = checked_preload(preload, self._backend)
        # Half, so that there is time to build the envs without it.
        self._preload_seconds = None if deadlines.start is None else deadlines.start / 2
        self._restart = restart
        self._supervisor = partial(
            Supervisor,
            policy=restart,
            deadlines=deadlines,
            hooks=tuple(hooks),
            reports=directory_for(reports),
        )
        self.recycles = restart.recycles
        self._setting = self._backend.setting()
        self._worker_env, self._numbers = worker_env, count()
        self._seed = checked_count("worker_seed", worker_seed, least=0, needed=False)
        most = checked_count("starts_at_once", starts_at_once, needed=False)
        self._turns = None if most is None else BuildTurns(most)
        self._first: Supervisor | None = None

    def make(
        self,
        env_fns: Sequence[EnvFn],
        index: int | None,
        *,
        verbatim: bool = False,
        autoreset: str = "",
        space: Any = None,
    ) -> Supervisor:
        """Return a worker that is yet to be started.

        Args:
            env_fns: What builds the env of each slot, as :func:`checked_env_fn` returns it.
            index: Env index of the first one in its batch, or ``None``.
            verbatim: One env whose values travel exactly; else rows of a batch.
            autoreset: Name of the ``AutoresetMode`` that the worker carries out; ``""``: none.
            space: Observation space whose rows the batch has; ``None``: that of the first env.

        Raises:
            UsageError: A function cannot be pickled; or several envs are to be recycled by episodes; or ``worker_env``
                makes no sense.
        """
        restart = self._restart
        if restart.recycle_after_episodes is not None and len(env_fns) > 1:
            raise UsageError(
                "RestartPolicy.recycle_after_episodes: the episodes of the envs that share a process end one by one; "
                "give envs_per_worker=1, or recycle_after_steps or max_rss."
            )
        title = "multienv env" if index is None else f"multienv env {index}"
        if index is not None and len(env_fns) > 1:
            title = f"multienv envs {index}-{index + len(env_fns) - 1}"
        variables = checked_variables(self._worker_env, (index or 0) if verbatim else next(self._numbers))
        setting = replace(self._setting, variables=variables)
        learns = self._preload is None
        preload = None if self._preload == () else preload_of(self._preload or (), setting, self._preload_seconds)
        seeds = ProcessSeeds(seeds_from(self._seed, index or 0)) if self._seed is not None else seeds_of_trainer()
        packed = _packed(tuple(env_fns), shares=self._backend.shares)
        every = restart.snapshot_every if isinstance(restart, ForkingPolicy) else 0
        build = Build(
            env_fns=packed,
            verbatim=verbatim,
            autoreset=autoreset,
            seeds=seeds.values,
            draws=_draws(len(env_fns)),
            setting=setting,
            space=space,
            truncates_errors=restart.on_error == "truncate",
            snapshots=every if restart.snapshots and restart.replays else -1,
            journal=restart.journal_limit * len(env_fns),
            tells_imports=learns,
        )
        shared = packed if isinstance(packed, SharedPickle) else None
        launcher = self._backend.launcher(title, shared, preload)
        worker = self._supervisor(launcher, build, index=index)
        if learns:
            assert isinstance(launcher, Launch)
            worker.recoverer.on_imports = launcher.learn
        self._first = self._first or worker
        worker.share_knowledge(self._first)
        worker.recoverer.turns = self._turns
        worker.seeds = seeds
        return worker


class SerialWorkers:
    """Makes workers that build their envs in this very process, as :class:`Workers` makes others.

    Args:
        hooks: See :class:`WorkerOptions`.
    """

    recycles = False

    def __init__(self, *, hooks: Sequence[Hook] = ()) -> None:
        self._hooks = tuple(hooks)

    def make(
        self,
        env_fns: Sequence[EnvFn],
        index: int | None,
        *,
        verbatim: bool = False,
        autoreset: str = "",
        space: Any = None,
    ) -> Supervisor:
        """Return a worker; see :meth:`Workers.make` for the arguments."""
        return Supervisor(
            _SerialLaunch(tuple(env_fns)),
            Build(b"", verbatim, autoreset, None, _draws(len(env_fns)), None, space),
            policy=RestartPolicy(on_crash="raise", on_timeout="raise"),
            deadlines=Deadlines(),
            index=index,
            hooks=self._hooks,
        )


@dataclass(frozen=True, slots=True)
class _SerialLaunch:
    """Takes the place of ``Launch``: the functions, which need not be pickled, are called in this very process."""

    env_fns: tuple[EnvFn, ...]

    def start(self) -> Channel:
        return SerialChannel(partial(Host, load=lambda _: self.env_fns))

    def wake_kept(self, token: int) -> None:
        """Return ``None``: there are no snapshots."""

    def free(self, token: int) -> None:
        """Do nothing: there are no snapshots."""

    def close(self) -> None:
        """Do nothing: the channel closes the envs."""


def build_all(workers: Sequence[Supervisor]) -> dict[int, BaseException]:
    """Start workers, and wait until their envs are built; return their errors by index in ``workers``.

    They build at the same time, or as many at a time as the turns of the first one allow, which all share from then on.
    If it pays, the first one builds before the others, which are then forked with what it has imported.
    """
    turns = workers[0].recoverer.turns if workers else None
    # Else the cores would do all imports in no more time than two take, one after the other.
    learns = bool(workers) and workers[0].position.build.tells_imports and len(workers) > 2 * busy_cores()
    tasks: list[Task] = []
    for batch in (workers[:1], workers[1:]) if learns else (workers,):
        for worker in batch:
            worker.recoverer.turns = turns
            if turns is None:
                worker.start()
        interrupts.take_over()
        # Else each is started by the thread that waits for it.
        most = len(batch) if turns is None else min(len(batch), turns.most)
        pool = Pool(max(1, most), "multienv-build")
        tasks += side_by_side(pool, [worker.initialize for worker in batch])
    for worker in workers:
        worker.reporter.call_hooks()
    return {index: task.error for index, task in enumerate(tasks) if task.error is not None}


def _draws(slots: int) -> tuple[int, ...]:
    return tuple(secrets.randbits(64) for _ in range(slots))


def _packed(env_fns: tuple[EnvFn, ...], *, shares: bool) -> bytes | SharedPickle:
    """Pickle functions; what is large in them goes into a file that all workers share, if ``shares`` allows that."""
    # The main script in a multiprocessing child: __main__ by another name, and not importable elsewhere.
    main = sys.modules.get("__mp_main__")
    if main is not None and main.__name__ == "__mp_main__":
        cloudpickle.register_pickle_by_value(main)
    data, buffers = pickled_env_fns(env_fns, LARGE if shares else None)
    if not shares or (len(data) < LARGE and not buffers):
        return data
    try:  # uninterrupted, because a descriptor is made there
        return run_uninterrupted(partial(share, data, buffers))
    except OSError as error:
        raise limit_error(error) from None


# --- checks -----------------------------------------------------------------------------------


def checked_env_fn(env_fn: Any, index: int | None, name: str = "env_fn") -> EnvFn:
    """Return the function, to be called without arguments; one that needs an argument gets the index.

    Args:
        env_fn: Builds the env.
        index: Of the env; ``None`` counts as 0.
        name: Of the function, in messages.

    Raises:
        UsageError: It is not callable, or an env, or needs more than one argument.
    """
    if isinstance(env_fn, gymnasium.Env) or not callable(env_fn):
        made = f"gymnasium.make({env_fn!r})" if isinstance(env_fn, str) else "MyEnv()"
        raise UsageError(
            f"{name} is {env_fn!r:.100}; give a function that takes no arguments and returns an env: lambda: {made}."
        )
    needed = _needed(env_fn)
    if len(needed) > 1 or any(one.kind is one.KEYWORD_ONLY for one in needed):
        raise UsageError(
            f"{name} is {env_fn!r:.100}, which needs the arguments {', '.join(one.name for one in needed)}; give a "
            "function that needs none, or only the index of its env: lambda index: MyEnv(port=5000 + index)."
        )
    return partial(env_fn, index or 0) if needed else env_fn


def _needed(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some of those written in C
        return []
    return [one for one in parameters if one.default is one.empty and one.kind not in _STARRED]


def listed_env_fns(owner: str, env_fns: Iterable[EnvFn]) -> list[EnvFn]:
    """Return functions that need no argument, one for each env; see :func:`checked_env_fn`. Raises UsageError."""
    if isinstance(env_fns, str) or not isinstance(env_fns, Iterable):
        made = "[fn] or [fn] * n" if callable(env_fns) else "[lambda: gymnasium.make(...)] * n"
        if isinstance(env_fns, str):
            made += f". Or make a vector env by make_vec({env_fns!r}, n)"
        raise UsageError(f"{owner}: env_fns is {env_fns!r:.100}; give a list with one function for each env: {made}.")
    found = list(env_fns)
    if not found:
        raise UsageError(f"{owner}: env_fns is empty; give one function for each env.")
    return [checked_env_fn(env_fn, index, f"env_fns[{index}]") for index, env_fn in enumerate(found)]


def mode_of(mode: Any) -> AutoresetMode:
    """Return the mode that is given as a member, its name or its value; raise UsageError if there is none."""
    for known in AutoresetMode:
        if mode in (known, known.name, known.value):
            return known
    names = ", ".join(f"AutoresetMode.{known.name}" for known in AutoresetMode)
    raise UsageError(f"autoreset_mode is {mode!r}; choose one of {names}.")
