"""Find the function that builds an env: by id, in a module or file, or the ``env_fn`` of a crash report."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import re
import sys
import traceback
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import cloudpickle
import gymnasium

from multienv._engine.building.building import EnvFn, checked_env_fn
from multienv._engine.reports.crash import Report
from multienv.errors import MultienvError, UsageError

_FORMS = "ID, module:ID, module:function, module:Class, file.py:function or file.py:Class"
_PACKAGE = str(Path(__file__).parents[1])
GIVE_ARGUMENTS = """Give arguments for the env by --env-kwargs, such as --env-kwargs '{"size": 4}'."""
_HOW_TO_BUILD = "Give --env ID, --env module:ID or --env module:function to build the env."


class NamedEnv(NamedTuple):
    """Holds a named env: the function that builds it, and the code for it.

    Attributes:
        env_fn: Builds the env. It is pickled by name: workers have the same import path, with the directories of files.
        imports: An import line, in Python.
        code: An expression for ``env_fn``, in Python.
    """

    env_fn: EnvFn
    imports: str
    code: str


def named(name: str, /, **arguments: Any) -> NamedEnv:
    """Find the function that builds an env.

    Args:
        name: An id, ``module:id``, ``module:function``, ``module:Class``, ``file.py:function`` or ``file.py:Class``.
            Modules in the current directory are found too.
        arguments: Arguments for the function or the env.

    Raises:
        UsageError: The module, file, function or id does not exist.
    """
    where, _, rest = name.rpartition(":")
    if rest.endswith(".py"):
        raise UsageError(
            f"{name} is a file: also name the function or class that builds the env: {name}:make_env or {name}:MyEnv."
        )
    module = _module(where, name) if where else None
    function = getattr(module, rest, None)
    told = "".join(f", {key}={value!r}" for key, value in arguments.items())
    if module is not None and callable(function):
        code = f"lambda: {rest}({told[2:]})" if arguments else rest
        function = partial(function, **arguments) if arguments else function
        try:
            env_fn = checked_env_fn(function, None, name)
        except UsageError as error:
            raise UsageError(f"{str(error).partition(';')[0]}. {GIVE_ARGUMENTS}") from error
        return NamedEnv(env_fn, f"from {module.__name__} import {rest}", code)
    if rest in gymnasium.registry:
        full = rest if module is None else f"{module.__name__}:{rest}"  # so that workers import the module too
        env_fn = partial(gymnasium.make, full, **arguments)
        return NamedEnv(env_fn, "import gymnasium", f'lambda: gymnasium.make("{full}"{told})')
    known = list(gymnasium.registry) if module is None else [*vars(module), *gymnasium.registry]
    similar = difflib.get_close_matches(rest, known, 1)
    guess = f" Did you mean {where + ':' if where else ''}{similar[0]}?" if similar else f" Give {_FORMS}."
    nothing = "no" if module is None else f"{where} has no such function or class, and no"
    raise UsageError(f"{name}: {nothing} env with this id is registered.{guess}")


def arguments_advice(env_fn: EnvFn, error: str) -> str:
    """Return how to give the arguments that the function lacks, if that may be why building the env failed; or ``""``.

    Args:
        env_fn: Of :func:`named`, which passes 0, an index, for one missing argument.
        error: The text of the error.
    """
    has_index = isinstance(env_fn, partial) and env_fn.args == (0,)
    if not has_index and not re.search(r"missing \d+ required (positional|keyword-only) argument", error):
        return ""
    return f"{'Its argument is 0, the index of the env. ' * has_index}{GIVE_ARGUMENTS}"


def _module(where: str, name: str) -> ModuleType:
    """Import a module, or a file as the module of that name. Find it as ``python file.py`` would.

    Raises:
        UsageError: The module cannot be imported.
    """
    path = Path(where)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise UsageError(f"{name}: the file {where} does not exist.")
    directory = str(path.resolve().parent) if is_file else os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        module = importlib.import_module(path.stem if is_file else where)
    except (Exception, SystemExit) as error:  # an import runs code of the user
        frames = reversed(traceback.extract_tb(error.__traceback__))  # the innermost first
        own = (frame for frame in frames if not any(one in frame.filename for one in ("importlib", _PACKAGE)))
        place = next((f" ({frame.filename}, line {frame.lineno})" for frame in own), "")
        why: BaseException = error
        while isinstance(why.__cause__, MultienvError):  # the file makes envs, and they fail
            why = why.__cause__
        raise UsageError(f"{name}: {where} cannot be imported: {type(why).__name__}: {why}{place}.") from error
    if is_file and not (module.__file__ and path.samefile(module.__file__)):
        raise UsageError(f"{name}: another module has the name {path.stem}; rename the file.")
    return module


def env_functions(report: Report, env: str | None, arguments: dict[str, Any] | None = None) -> tuple[EnvFn, ...]:
    """Return for each slot the function that builds its env. Set the variables that ``worker_env`` gave the worker.

    Args:
        report: The crash report. Its own ``env_fn`` are used, with the command line and working directory of the
            trainer, unless ``env`` names another one.
        env: See :func:`named`.
        arguments: Arguments for ``env``.

    Raises:
        UsageError: The env cannot be built. The message says which option to give.
    """
    setting = report.build.setting
    if setting is not None:
        os.environ.update(setting.variables)  # before an import may read them
    if env is not None:
        return (named(env, **arguments or {}).env_fn,) * len(report.build.draws)
    if arguments:
        raise UsageError("--env-kwargs needs --env: give both.")
    if setting is not None:  # the report's own functions find what they found in the trainer
        if setting.arguments:
            sys.argv[:] = setting.arguments
        with contextlib.suppress(OSError):
            os.chdir(setting.directory)
    if not report.build.env_fns:
        raise UsageError(f"{report.path} has no env_fn: it was too large for a report. {_HOW_TO_BUILD}")
    try:
        return tuple(cloudpickle.loads(report.build.env_fns))
    except Exception as error:  # unpickling runs code of the user
        raise UsageError(
            f"The env_fn in {report.path} cannot be loaded: {type(error).__name__}: {error}. {_HOW_TO_BUILD}"
        ) from error
