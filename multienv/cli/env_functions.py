"""Find what builds an env: a registered id, a function of a module, or the ``env_fn`` pickled in a crash report."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.envs.registration import EnvSpec

from multienv.errors import ReportError, UsageError
from multienv.reports.read import Report

EnvFn = Callable[[], "gymnasium.Env[Any, Any]"]
_HOW_TO_BUILD = (
    "Give --env ID, --env module:ID or --env module:function with what builds it; or --trust, which runs the report's "
    "own env_fn, if you know who wrote the report."
)


def named(name: str, **arguments: Any) -> EnvFn:
    """Return a function that builds the env of an id, ``module:id`` or ``module:function``, with these arguments.

    Raises:
        UsageError: There is no such module, function or id.
    """
    module_name, _, rest = name.rpartition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        module = importlib.import_module(module_name) if module_name else None
    except ImportError as error:
        raise UsageError(f"{name}: {module_name} cannot be imported: {error}.") from error
    if rest in gymnasium.registry:
        return partial(gymnasium.make, rest, **arguments)
    function = getattr(module, rest, None)
    if not callable(function):
        where = f"{module_name} has no such function, nor" if module_name else "there is no ':' in it, nor"
        raise UsageError(f"{name}: {where} is an env of that id registered. Give ID, module:ID or module:function.")
    return partial(function, **arguments)


def env_functions(report: Report, env: str | None, arguments: dict[str, Any] | None = None) -> tuple[EnvFn, ...]:
    """Return the function that builds the env, for each slot.

    Args:
        report: If it is trusted and neither of the others is given, its own ``env_fn``.
        env: See :func:`named`. Of the report's own id its arguments and wrappers are taken.
        arguments: Of the env; they come before those of the report.

    Raises:
        UsageError: There is no way to the env; the message says what to give.
    """
    if env is None and arguments is None and report.is_trusted:
        return _trusted(report)
    arguments, spec = arguments or {}, report.env.get("spec")
    env_fn = None if env is None else named(env, **arguments)
    if env_fn is None or (spec is not None and env is not None and env.rpartition(":")[2] == spec.get("id")):
        if spec is None:
            raise ReportError(
                f"{report.path} does not say how to build the env: {_what_lacks(report)}. {_HOW_TO_BUILD}"
            )
        env_fn = _from_spec(report, spec, arguments)
    return (env_fn,) * (1 if report.layout is None else report.layout.slots)


def _what_lacks(report: Report) -> str:
    """Return why a report does not say how to build the env."""
    if report.env.get("id") is None:
        return "it has no spec"
    return (
        f"the spec of {report.env['id']} has arguments or wrappers without a plain form, {report.env.get('kwargs')}; "
        "with an id, --env-kwargs JSON gives arguments"
    )


def _trusted(report: Report) -> tuple[EnvFn, ...]:
    """Load the report's own functions, with the trainer's import path, arguments and working directory."""
    setting = report.build.setting
    if setting is not None:
        sys.path += [entry for entry in setting.path if entry not in sys.path]
        if setting.arguments:
            sys.argv[:] = setting.arguments
        with contextlib.suppress(OSError):
            os.chdir(setting.directory)
    try:
        return tuple(cloudpickle.loads(report.build.env_fns))
    except Exception as error:  # unpickling runs foreign code
        raise ReportError(
            f"The env_fn in {report.path} cannot be loaded: {type(error).__name__}: {error}. {_HOW_TO_BUILD}"
        ) from error


def _from_spec(report: Report, fields: dict[str, Any], arguments: dict[str, Any]) -> EnvFn:
    """Return a function that builds the env of a spec; it calls only registered functions and gymnasium's wrappers."""
    try:
        spec = EnvSpec.from_json(json.dumps(fields))
        wrappers = [(wrapper, wrapper.entry_point.partition(":")) for wrapper in spec.additional_wrappers]
    except Exception as error:  # damage has many faces
        raise ReportError(f"The env's spec is damaged: {type(error).__name__}: {error}. {_HOW_TO_BUILD}") from error
    registered = gymnasium.registry.get(spec.id)
    if registered is None:
        # The module of the env's class is probably the one that registers it.
        module = str(report.env.get("entry_point") or "__main__").partition(":")[0]
        hint = "" if module == "__main__" else f" Try --env {module}:{spec.id}."
        raise ReportError(
            f"The env {spec.id!r} is not registered here; its module does that when it is imported.{hint} "
            f"{_HOW_TO_BUILD}"
        )
    spec.entry_point, spec.vector_entry_point = registered.entry_point, registered.vector_entry_point
    spec.kwargs = {**spec.kwargs, **arguments}
    for wrapper, (module, _, name) in wrappers:
        if not module.startswith("gymnasium.wrappers.") or name not in gymnasium.wrappers.__all__:
            raise ReportError(
                f"The env has a wrapper {wrapper.entry_point}, which is not gymnasium's own. {_HOW_TO_BUILD}"
            )
    return partial(gymnasium.make, spec)
