"""Register the trainer's envs in a worker, if ``gymnasium.make`` does not find an id there."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.envs.registration import EnvSpec

from multienv._engine.wire.reducers import pickled
from multienv._engine.worker.main_module import import_script


def registrations() -> bytes:
    """Return the specs registered in this process, pickled; of those that cannot be, the ids."""
    specs = list(gymnasium.registry.values())
    try:
        return pickled(specs)  # gymnasium's own take 0.3 ms
    except Exception:  # some entry point or argument cannot be pickled
        return pickled([spec if _is_picklable(spec) else spec.id for spec in specs])


def register(specs: bytes) -> str:
    """Register the specs of the trainer whose ids are not known here; return the ids of those that could not be sent.

    The packages of their entry points are imported first: as a rule they register their envs themselves.
    """
    sent: list[EnvSpec | str] = cloudpickle.loads(specs)
    unknown = [spec for spec in sent if not isinstance(spec, str) and spec.id not in gymnasium.registry]
    modules = [spec.entry_point.partition(":")[0] for spec in unknown if isinstance(spec.entry_point, str)]
    for package in {module.partition(".")[0] for module in modules}:
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    for spec in unknown:
        gymnasium.registry.setdefault(spec.id, spec)
    return ", ".join(one for one in sent if isinstance(one, str) and one not in gymnasium.registry)


def built(env_fn: Any, specs: bytes, others: Sequence[gymnasium.Env[Any, Any]] = ()) -> gymnasium.Env[Any, Any]:
    """Call ``env_fn``; if an id is unknown, register the trainer's specs, then import its main script, and call again.

    Args:
        env_fn: Builds the env.
        specs: Of the trainer, pickled.
        others: The envs that were built before in this process.

    Raises:
        TypeError: What it returns is not an env.
        ValueError: It is one of the others, which would be stepped in two slots.
        UsageError: An id is unknown that the script may have registered, and the script cannot be imported.
        Exception: What it raises.
    """
    try:
        env = env_fn()
    except gymnasium.error.UnregisteredEnv:
        if not specs:
            raise
        unsent = register(specs)
        try:
            env = env_fn()
        except gymnasium.error.UnregisteredEnv:
            if not unsent:
                raise
            import_script(f"An id is unknown, and what was registered as {unsent} cannot be pickled.")
            env = env_fn()
    if not isinstance(env, gymnasium.Env):
        raise TypeError(f"env_fn returned {env!r:.200}, which is not a gymnasium.Env. Return an env, already built.")
    if any(env.unwrapped is other.unwrapped for other in others):
        raise ValueError(
            f"env_fn returned {env!r:.200}, which an env_fn before it had returned already. Build a new env at each "
            "call: lambda: gymnasium.make(...), not lambda: env."
        )
    return env


def _is_picklable(spec: EnvSpec) -> bool:
    try:
        pickled(spec)
    except Exception:  # pickling runs code of the user
        return False
    return True
