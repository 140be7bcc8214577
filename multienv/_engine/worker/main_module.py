"""Make names of the trainer's main script available as ``__main__`` in a worker, where another script is running.

Such names are looked up by ``pickle.load`` of an instance of one of its classes, by entry points
``"__main__:MyEnv"`` and by Hydra's ``_target_``. A name is found in this order:

1. among the functions and classes that travelled with ``env_fn`` (:func:`offered`): the objects that ``env_fn`` uses;
2. in the script, if it is a file: it is imported under the name ``__mp_main__``, as multiprocessing's ``spawn`` does;
   once in a process, and only when a name is looked up that the trainer's ``__main__`` had, or when what builds the
   envs could not travel by value (:func:`import_script`).

Else an error names the remedy.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from collections.abc import Mapping
from multiprocessing import reduction
from traceback import walk_stack
from types import ModuleType
from typing import Any

import gymnasium

from multienv._engine.wire.messages import MainScript
from multienv.errors import UsageError

# How the script is called where it is imported: no code below `if __name__ == "__main__":` runs then.
IMPORTED = "__mp_main__"
_lock = threading.RLock()
_NO_FILE = (
    "The main script is no file that could be imported here (a notebook, python -c, standard input), or has no "
    "`if __name__ == '__main__':`."
)
# For what cannot be pickled.
REMEDY = (
    "build what it needs inside the function, or in the env's constructor; or move what uses it to a module, which the "
    "process imports."
)


# --- in the trainer -------------------------------------------------------------------------------


class UnguardedModule(ModuleType):
    """Is the ``__main__`` of a script for ``multienv run`` without a main guard: workers must not import it.

    The script makes its envs by the names of other libraries, so nothing would keep a worker from training, too.
    """


def main_script() -> MainScript:
    """Describe this process's main script: how to import it, and the names that it has defined so far."""
    main = sys.modules.get("__main__")
    if main is None or isinstance(main, MainModule):  # an env in a worker has a worker of its own
        return _script
    names = tuple(name for name in vars(main) if not name.startswith("__") or not name.endswith("__"))
    module = getattr(getattr(main, "__spec__", None), "name", None) or ""
    # That of a package or an archive has no guard, as a rule.
    if module.rpartition(".")[2] == "__main__" or isinstance(main, UnguardedModule):
        return MainScript(names=names)
    file = getattr(main, "__file__", None)
    return MainScript(os.path.abspath(file) if isinstance(file, str) else "", module, names)  # noqa: PTH100 - as it is


def can_be_imported(script: MainScript) -> bool:
    """Tell whether this process can import a main script."""
    return bool(script.module) or os.path.isfile(script.path)  # noqa: PTH113 - a string


def is_of_main(value: Any) -> bool:
    """Tell whether this is a function or class that is found in this process's main script under its own name."""
    if getattr(value, "__module__", None) not in ("__main__", IMPORTED):
        return False
    return names_here().get(value.__name__) is value


def registered_in_main() -> dict[str, Any]:
    """Return what registered envs of this process have as entry point ``"__main__:name"``, by name."""
    main = names_here()
    points = [spec.entry_point for spec in gymnasium.registry.values()]
    names = [point[9:] for point in points if isinstance(point, str) and point.startswith("__main__:")]
    return {name: main[name] for name in names if name in main}


def names_here() -> dict[str, Any]:
    """Return what this process's main script has by name; in a worker, what travelled of the trainer's."""
    main = sys.modules.get("__main__")
    return _travelled if main is None or isinstance(main, MainModule) else vars(main)


# --- in a worker ----------------------------------------------------------------------------------


def offered(env_fns: Any, registered: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    """Put what travelled with ``env_fns`` into ``__main__``, where it is missing there; return ``env_fns``.

    Args:
        env_fns: What is unpickled.
        registered: Entry points of registered envs, by name.
        names: Functions and classes of the trainer's main script, by name.
    """
    here = names_here()
    for name, value in {**registered, **names}.items():
        here.setdefault(name, value)
    return env_fns


class _Names(dict[str, Any]):
    """Is ``vars(__main__)`` in a worker, where ``typing.get_type_hints`` looks names up."""

    def __missing__(self, name: str) -> Any:
        try:
            return of_script(name)
        except AttributeError:
            raise KeyError(name) from None


class MainModule(ModuleType):
    """Is ``__main__`` in a worker: names that did not travel are looked up in the script itself."""

    __dict__ = property(lambda _: _Names(_travelled))

    def __getattr__(self, name: str) -> Any:
        """Return what the script defines by this name. Raises AttributeError, and UsageError if that cannot be had."""
        # A process that an env starts by multiprocessing has another __main__: what is sent to it by name is refused
        # here, with an error. There it would end the process, and a Pool would start processes for ever.
        is_sent = sys._getframe(1).f_code.co_filename == reduction.__file__
        if is_sent or name not in (_travelled.keys() | _script.names):
            raise AttributeError(f"module '__main__' has no attribute {name!r}")
        if name in _travelled:
            return _travelled[name]
        with _lock:
            if _importing:
                raise AttributeError(f"module '__main__' has no attribute {name!r}: it is being imported")
            found = vars(_imported(_why(name), _remedy(name))).get(name, _lock)
        if found is _lock:
            raise UsageError(
                f"{_why(name)} Importing {_script.path or _script.module} does not define it: it stands below "
                f"`if __name__ == '__main__':`, or was defined later. {_remedy(name)}"
            )
        return found


def import_script(why: str, script: MainScript | None = None) -> None:
    """Import the trainer's main script, if that was not done before; raise UsageError, which begins with ``why``.

    Args:
        why: Why it must be imported.
        script: What it is, if this may be no worker: a crash report is replayed.
    """
    if script is not None and not isinstance(sys.modules.get("__main__"), MainModule):
        stand_in(script)
    with _lock:
        _imported(f"{why} So the script is imported, as by multiprocessing's spawn.", f"Or {REMEDY}")


def of_script(name: str) -> Any:
    """Return what the main script defines by this name."""
    return getattr(sys.modules["__main__"], name)


def stand_in(script: MainScript) -> None:
    """Make ``__main__`` of this process that of a worker."""
    global _script
    _script = script
    sys.modules["__main__"] = sys.modules[IMPORTED] = MainModule("__main__")


def refuse_while_importing() -> None:
    """Raise UsageError if this worker is importing the code that makes envs: each would start workers of its own."""
    if not isinstance(sys.modules.get("__main__"), MainModule):
        return
    for frame, line in walk_stack(sys._getframe(1)):
        module = sys.modules.get(frame.f_globals.get("__name__", ""))
        if frame.f_code.co_name == "<module>" and getattr(module, "__dict__", None) is frame.f_globals:
            raise UsageError(
                "An env in a process of its own is made while a worker imports "
                f"{frame.f_code.co_filename}, line {line}. Put the code that makes envs below "
                "`if __name__ == '__main__':`, so that an import does not run it."
            )


_travelled: dict[str, Any] = {}
_script = MainScript()
_module: ModuleType | None = None
_importing = False
# The interpreter may refer to it without holding it.
_first = sys.modules.get("__main__")


def _imported(why: str, remedy: str) -> ModuleType:
    """Return the script as a module; import it if that was not done before. Raises UsageError."""
    global _module, _importing
    if not can_be_imported(_script):
        raise UsageError(f"{why} {_NO_FILE} {remedy}")
    if _module is None:
        _importing = True
        try:
            _module = _run_script()
        except (Exception, SystemExit) as error:  # code of the user
            told = f"Importing {_script.path or _script.module} raised {type(error).__name__}: {error}".rstrip(".")
            raise UsageError(f"{why} {told}. {remedy}") from error
        finally:
            _importing = False
    return _module


def _run_script() -> ModuleType:
    if _script.module:
        content = runpy.run_module(_script.module, run_name=IMPORTED, alter_sys=True)
    else:
        content = runpy.run_path(_script.path, run_name=IMPORTED)
    module = ModuleType(IMPORTED)
    vars(module).update(content)
    sys.modules[IMPORTED] = module
    return module


def _why(name: str) -> str:
    """Say what was looked up, and where."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or "<frozen " in frame.f_code.co_filename):
        frame = frame.f_back
    location = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return f"{location} looks up __main__.{name} in a worker, and it did not travel there with env_fn."


def _remedy(name: str) -> str:
    return f"Move {name} to a module and import it from there; or name it in the code of env_fn, so that it travels."
