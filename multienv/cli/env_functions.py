"""Find what builds the env of a crash report: its registered id, what ``--env`` names, or its pickled ``env_fn``."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.envs.registration import EnvSpec, WrapperSpec, load_env_creator

from multienv.errors import ReportError
from multienv.reports.read import Report

EnvFn = Callable[[], "gymnasium.Env[Any, Any]"]
_HOW_TO_BUILD = (
    "Give --env ID, --env module:ID or --env module:function with what builds it; or --trust, which runs the report's "
    "own env_fn, if you know who wrote the report."
)


def env_functions(report: Report, env: str | None, *, trust: bool) -> tuple[EnvFn, ...]:
    """Return what builds the env of each slot.

    Args:
        report: Read with the same ``trust``.
        env: An id, ``module:id``, or ``module:function``. Of the report's own id its arguments and wrappers are taken.
        trust: Without ``env``: the report's own ``env_fn``.

    Raises:
        ReportError: There is no way to the env; the message says what to give.
    """
    if env is None and report.build is not None:
        return _trusted(report, report.build.env_fns)
    spec = (report.document["env"] or {}).get("spec")
    slots: int = max(1, report.document["build"]["slots"])
    if env is not None:
        return (_named(env, spec, trust=trust),) * slots
    if spec is None:
        raise ReportError(f"{report.path} does not say how to build the env: it has no spec. {_HOW_TO_BUILD}")
    return (_from_spec(spec, trust=trust),) * slots


def _named(name: str, spec: Any, *, trust: bool) -> EnvFn:
    module_name, _, rest = name.rpartition(":")
    module: Any = None
    if module_name:
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` has it
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise ReportError(f"--env {name}: {module_name} cannot be imported: {error}.") from error
    if rest in gymnasium.registry:
        same = isinstance(spec, dict) and spec.get("id") == rest
        return _from_spec(spec, trust=trust) if same else partial(gymnasium.make, rest)
    function = getattr(module, rest, None)
    if not callable(function):
        where = f"{module_name} has no such function, nor" if module_name else "there is no ':' in it, nor"
        raise ReportError(f"--env {name}: {where} is an env of that id registered. {_HOW_TO_BUILD}")
    return function  # type: ignore[no-any-return]


def _trusted(report: Report, pickled: bytes) -> tuple[EnvFn, ...]:
    """Load the report's own functions, in surroundings like the trainer's."""
    build = report.document["build"]
    sys.path += [entry for entry in build["path"] if entry not in sys.path]
    if build["arguments"]:
        sys.argv[:] = build["arguments"]
    with contextlib.suppress(OSError):
        os.chdir(build["directory"])
    try:
        return tuple(cloudpickle.loads(pickled))
    except Exception as error:  # unpickling runs foreign code
        raise ReportError(
            f"The env_fn in {report.path} cannot be loaded: {type(error).__name__}: {error}. {_HOW_TO_BUILD}"
        ) from error


def _from_spec(fields: Any, *, trust: bool) -> EnvFn:
    """Build by a spec. It names functions to call: without trust only those registered here under the same id."""
    try:
        fields = dict(fields)
        wrappers = tuple(WrapperSpec(**wrapper) for wrapper in fields.pop("additional_wrappers"))
        registered = gymnasium.registry.get(fields["id"])
        if registered is not None:
            fields |= {"entry_point": registered.entry_point, "vector_entry_point": registered.vector_entry_point}
        elif not trust:
            raise ReportError(
                f"The env {fields['id']!r} is not registered here; its module does that when it is imported. "
                f"{_HOW_TO_BUILD}"
            )
        for wrapper in wrappers:
            if not (trust or _is_of_gymnasium(wrapper.entry_point)):
                raise ReportError(
                    f"The env has a wrapper {wrapper.entry_point}, which is not gymnasium's own. {_HOW_TO_BUILD}"
                )
        spec = EnvSpec(**fields)
        spec.additional_wrappers = wrappers
    except (TypeError, KeyError, ValueError, AttributeError, gymnasium.error.Error) as error:
        if isinstance(error, ReportError):
            raise
        raise ReportError(f"The env's spec is damaged: {type(error).__name__}: {error}. {_HOW_TO_BUILD}") from error
    return partial(gymnasium.make, spec)


def _is_of_gymnasium(entry_point: str) -> bool:
    if not entry_point.startswith("gymnasium.wrappers."):
        return False
    with contextlib.suppress(Exception):  # it is nothing that can be imported
        wrapper: Any = load_env_creator(entry_point)
        return isinstance(wrapper, type) and issubclass(wrapper, gymnasium.Wrapper)
    return False
