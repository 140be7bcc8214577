"""Find what builds an env: an id, a function or class of a module or file, or the ``env_fn`` of a crash report."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import cloudpickle
import gymnasium
from gymnasium.envs.registration import EnvSpec

from multienv.errors import ReportError, UsageError
from multienv.reports.read import Report

EnvFn = Callable[[], "gymnasium.Env[Any, Any]"]
# Of gymnasium's wrappers, those that write files where their arguments say, or open windows.
_TRUSTED_WRAPPERS = ("RecordVideo", "HumanRendering")
_FORMS = "ID, module:ID, module:function, module:Class, file.py:function or file.py:Class"
_HOW_TO_BUILD = (
    "Give --env ID, --env module:ID or --env module:function with what builds it; or --trust, which runs the report's "
    "own env_fn, if you know who wrote the report."
)


class Named(NamedTuple):
    """Holds an env that was named: what builds it, and how a program says so.

    Attributes:
        env_fn: Builds the env. It is pickled by its name: modules, and the directories of files, are on the import path
            of workers too.
        imports: A line of Python.
        code: An expression for ``env_fn``.
    """

    env_fn: EnvFn
    imports: str
    code: str


def named(name: str, **arguments: Any) -> Named:
    """Find what builds an env.

    Args:
        name: An id, ``module:id``, ``module:function``, ``module:Class``, ``file.py:function`` or ``file.py:Class``.
            Modules are looked for in the current directory too.
        arguments: For the function or the env.

    Raises:
        UsageError: There is no such module, file, function or id.
    """
    where, _, rest = name.rpartition(":")
    if rest.endswith(".py"):
        raise UsageError(f"{name} is a file: say what builds the env in it: {name}:make_env or {name}:MyEnv.")
    module = _module(where, name) if where else None
    function = getattr(module, rest, None)
    told = "".join(f", {key}={value!r}" for key, value in arguments.items())
    if module is not None and callable(function):
        code = f"lambda: {rest}({told[2:]})" if arguments else rest
        env_fn = partial(function, **arguments) if arguments else function
        return Named(env_fn, f"from {module.__name__} import {rest}", code)
    if rest in gymnasium.registry:
        full = rest if module is None else f"{module.__name__}:{rest}"  # imports the module in workers too
        env_fn = partial(gymnasium.make, full, **arguments)
        return Named(env_fn, "import gymnasium", f'lambda: gymnasium.make("{full}"{told})')
    known = list(gymnasium.registry) if module is None else [*vars(module), *gymnasium.registry]
    similar = difflib.get_close_matches(rest, known, 1)
    guess = f" Did you mean {where + ':' if where else ''}{similar[0]}?" if similar else f" Give {_FORMS}."
    nothing = "no" if module is None else f"{where} has no such function or class, and no"
    raise UsageError(f"{name}: {nothing} env of that id is registered.{guess}")


def _module(where: str, name: str) -> ModuleType:
    """Import a module, or a file as a module by its name, as ``python file.py`` would find it.

    Raises:
        UsageError: It cannot be imported.
    """
    path = Path(where)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise UsageError(f"{name}: there is no file {where}.")
    directory = str(path.resolve().parent) if is_file else os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        module = importlib.import_module(path.stem if is_file else where)
    except (Exception, SystemExit) as error:  # an import runs foreign code
        frames = reversed(traceback.extract_tb(error.__traceback__))  # the innermost first; some are of the machinery
        own = (frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__)
        place = next((f" ({frame.filename}, line {frame.lineno})" for frame in own), "")
        raise UsageError(f"{name}: {where} cannot be imported: {type(error).__name__}: {error}{place}.") from error
    if is_file and not (module.__file__ and path.samefile(module.__file__)):
        raise UsageError(f"{name}: another module has the name {path.stem}; rename the file.")
    return module


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
    env_fn = None if env is None else named(env, **arguments).env_fn
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
    if not report.is_trusted and spec.kwargs.get("render_mode") != "rgb_array":  # others may open windows
        spec.kwargs.pop("render_mode", None)
    spec.kwargs = {**spec.kwargs, **arguments}
    for wrapper, (module, _, name) in wrappers:
        if not module.startswith("gymnasium.wrappers.") or name not in gymnasium.wrappers.__all__:
            raise ReportError(
                f"The env has a wrapper {wrapper.entry_point}, which is not gymnasium's own. {_HOW_TO_BUILD}"
            )
        if name in _TRUSTED_WRAPPERS and not report.is_trusted:
            raise ReportError(
                f"The env has a wrapper {wrapper.entry_point}, which writes files or opens windows. {_HOW_TO_BUILD}"
            )
    return partial(gymnasium.make, spec)
