"""Check what envs are built from and put it into the message that has a worker build them."""

from __future__ import annotations

import multiprocessing
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.vector import AutoresetMode

from multienv.config import Deadlines, RestartPolicy, integer
from multienv.errors import EnvFnError, UsageError
from multienv.processes.channel import Channel
from multienv.processes.environment import module_path, worker_environment, working_directory
from multienv.processes.serial import SerialChannel
from multienv.wire.messages import Build, Setting, drawn_seeds
from multienv.worker.host import Host
from multienv.worker.registrations import registrations
from multienv.worker.state_hooks import registered_hooks

EnvFn = Callable[[], gymnasium.Env[Any, Any]]


def build_message(
    env_fns: Sequence[EnvFn],
    *,
    exact: bool,
    restart: RestartPolicy,
    native_threads: int | None,
    autoreset: str = "",
    space: Any = None,
    title: str = "multienv",
    setting: Setting | None = None,
) -> Build:
    """Return the message that has a process of its own build these envs.

    Args:
        env_fns: What builds the env of each slot, checked before: see :func:`check_env_fn`.
        exact: One env whose values travel exactly; else rows of a batch.
        restart: Whether snapshots are taken, and whether an env that raises ends its episode.
        native_threads: See :class:`~multienv.SubprocessEnv`.
        autoreset: Name of the ``AutoresetMode`` that the worker carries out; ``""``: none.
        space: Observation space whose rows the batch has; ``None``: that of the first env.
        title: What ``ps`` shows.
        setting: What :func:`setting_here` returned, to be used for several workers; ``None``: it is called.

    Raises:
        EnvFnError: A function cannot be pickled.
    """
    return Build(
        env_fns=_pickled(tuple(env_fns)),
        exact=exact,
        autoreset=autoreset,
        seeds=drawn_seeds(),
        draws=_draws(len(env_fns)),
        setting=setting or setting_here(native_threads),
        space=space,
        truncates_errors=restart.on_error == "truncate",
        snapshots=(restart.snapshot_every or 0) if restart.snapshots and restart.replays else -1,
        state_hooks=registered_hooks(),
        title=title,
    )


def local_build_message(slots: int, *, exact: bool, autoreset: str = "", space: Any = None) -> Build:
    """Return the message that has envs built in this very process, by the functions given to :class:`SerialLaunch`."""
    return Build(b"", exact, autoreset, None, _draws(slots), None, space)


def setting_here(native_threads: int | None) -> Setting:
    """Return what a fresh process needs to see the world as this one does."""
    return Setting(
        path=tuple(module_path()),
        arguments=tuple(getattr(sys, "argv", None) or ()),  # an embedded interpreter has none
        directory=working_directory(),
        environment=worker_environment(native_threads),
        registrations=registrations(),
        authkey=bytes(multiprocessing.current_process().authkey),
    )


def _draws(slots: int) -> tuple[int, ...]:
    generator = random.SystemRandom()
    return tuple(generator.getrandbits(64) for _ in range(slots))


def _pickled(env_fns: tuple[EnvFn, ...]) -> bytes:
    # The main script in a multiprocessing child: __main__ by another name, and not importable elsewhere.
    main = sys.modules.get("__mp_main__")
    if main is not None and main.__name__ == "__mp_main__":
        cloudpickle.register_pickle_by_value(main)
    try:
        data: bytes = cloudpickle.dumps(env_fns)
    except Exception as error:  # pickling runs foreign code
        culprit = next((env_fn for env_fn in env_fns if not _is_picklable(env_fn)), env_fns)
        raise EnvFnError(
            f"env_fn {culprit!r:.100} cannot be sent to a process: {type(error).__name__}: {error}. "
            "Build what it needs inside the function."
        ) from error
    return data


def _is_picklable(env_fn: EnvFn) -> bool:
    try:
        cloudpickle.dumps(env_fn)
    except Exception:  # pickling runs foreign code
        return False
    return True


# --- checks -----------------------------------------------------------------------------------


def check_env_fn(env_fn: Any, place: int | None = None) -> None:
    """Raise EnvFnError unless this can be called to build an env; ``place`` in a list of several is told."""
    name = "env_fn" if place is None else f"env_fns[{place}]"
    if isinstance(env_fn, gymnasium.Env):
        raise EnvFnError(f"{name} is an env, {env_fn!r:.100}; give a function that builds it: lambda: make_my_env().")
    if isinstance(env_fn, str):
        several = "" if place is None else f"; or make_vec({env_fn!r}, {place + 1}) for a batch"
        raise EnvFnError(f"{name} is a string; give a function: lambda: gymnasium.make({env_fn!r}){several}.")
    if isinstance(env_fn, list | tuple):
        raise EnvFnError(
            f"{name} is a {type(env_fn).__name__}; give one function. create_subprocess_envs() takes a list."
        )
    if not callable(env_fn):
        raise EnvFnError(f"{name} is {env_fn!r:.100}; give a function that takes no arguments and returns an env.")


def listed_env_fns(face: str, env_fns: Any) -> list[EnvFn]:
    """Return a list of functions, one for each env.

    Raises:
        EnvFnError: It is a single function, or something else; the message says what to write.
    """
    if isinstance(env_fns, str):
        raise EnvFnError(f"{face}: env_fns is a string; make_vec({env_fns!r}, num_envs=8) makes a batch of an id.")
    if isinstance(env_fns, gymnasium.Env):
        raise EnvFnError(f"{face}: env_fns is an env; give a list of functions that build one each.")
    if callable(env_fns):
        raise EnvFnError(f"{face}: env_fns is a single function; give a list of them, one for each env.")
    if not isinstance(env_fns, Iterable):
        raise EnvFnError(f"{face}: env_fns is {env_fns!r:.100}; give a list of functions, one for each env.")
    found = list(env_fns)
    if found and all(isinstance(one, str) for one in found):
        raise EnvFnError(
            f"{face}: env_fns is a list of ids; give a list of functions, or make_vec({found[0]!r}, {len(found)})."
        )
    for place, env_fn in enumerate(found):
        check_env_fn(env_fn, place)
    return found


def check_options(restart: Any, deadlines: Any, native_threads: Any) -> None:
    """Raise UsageError for options of another type; the message says what to write."""
    if native_threads is not None and (integer(native_threads) or 0) < 1:
        raise UsageError(f"native_threads is {native_threads!r}; give an integer of at least 1, or None.")
    if not isinstance(restart, RestartPolicy):
        example = f"on_crash={restart!r}" if restart in ("replay", "truncate", "raise") else ""
        raise UsageError(f"restart is {restart!r:.100}; give a RestartPolicy: restart=RestartPolicy({example}).")
    if not isinstance(deadlines, Deadlines):
        seconds = deadlines if isinstance(deadlines, int | float) and not isinstance(deadlines, bool) else 60.0
        raise UsageError(f"deadlines is {deadlines!r:.100}; give Deadlines: deadlines=Deadlines(step={seconds}).")


def mode_of(mode: Any) -> AutoresetMode:
    """Return the mode, from itself, its name or its value."""
    if isinstance(mode, AutoresetMode):
        return mode
    for known in AutoresetMode:
        if mode in (known.name, known.value):
            return known
    names = ", ".join(f"AutoresetMode.{known.name}" for known in AutoresetMode)
    raise UsageError(f"autoreset_mode is {mode!r}; choose one of {names}.")


class SerialLaunch:
    """Has envs built in this very process: what a supervisor takes in the place of a launcher.

    Args:
        env_fns: What builds the env of each slot.
    """

    def __init__(self, env_fns: Sequence[EnvFn]) -> None:
        self._make_host = partial(Host, env_fns=tuple(env_fns))

    def start(self) -> Channel:
        """Make a host in this process."""
        return SerialChannel(self._make_host)

    def branch(self, token: int) -> None:
        """Return nothing: there are no snapshots."""

    def free(self, token: int) -> None:
        """Do nothing."""
