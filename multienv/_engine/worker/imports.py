"""Note what a process imports: modules of packages for ``preload="auto"``, and the files that its code came from.

The files of two processes tell whether their envs are the same. The code of ``__main__`` travels by value, and is the
same in each. A file is noted once, right after its module was imported; a forked process has the modules of its parent,
and what was noted of them.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from multienv._engine.wire.messages import Imports

_STANDARD = f"{Path(os.__file__).parent}/"
# Folders that hold installed packages. A module elsewhere is the user's, or Python's own.
_INSTALLED = ("/site-packages/", "/dist-packages/")
# In the place of a size: the file was written while its module may have been imported. Which version that was is not
# known, so it equals no other.
_UNKNOWN = -1
# Path → time of the last change in ns, and size.
_noted: dict[str, tuple[int, int]] = {}


def file_of(module: object) -> str:
    """Return the file of a module; ``""``: it has none.

    Its attributes are not looked up: that may run code of the user, or import a lazy module. An object of cffi in
    ``sys.modules`` only says that it is a module.
    """
    is_module = issubclass(type(module), ModuleType)
    path = object.__getattribute__(module, "__dict__").get("__file__") if is_module else None
    return path if isinstance(path, str) else ""


def is_own(module: object) -> bool:
    """Tell whether a module is the user's: neither of an installed package nor of Python's own."""
    return bool(file_of(module)) and not is_installed(module) and not file_of(module).startswith(_STANDARD)


def is_installed(module: object) -> bool:
    """Tell whether a module belongs to an installed package."""
    return any(folder in file_of(module) for folder in _INSTALLED)


def watched_imports() -> Callable[[], Imports]:
    """Return a function that returns what was imported since, and variables that were set: imports may need them."""
    modules, variables = set(sys.modules), dict(os.environ)

    def since() -> Imports:
        new = [name for name, module in list(sys.modules.items()) if name not in modules and is_installed(module)]
        return Imports(tuple(new), {name: one for name, one in os.environ.items() if variables.get(name) != one})

    return since


def note_files(began: int) -> None:
    """Note the files of the modules that were imported since the last time.

    Args:
        began: When the first of these imports began, ``time.time_ns()``.
    """
    for module in list(sys.modules.values()):
        path = file_of(module)
        if path and path not in _noted and (not path.startswith(_STANDARD) or is_installed(module)):
            _noted[path] = _version_of(path, began)


def noted_files(began: int) -> bytes:
    """Note as :func:`note_files` does, and return all that is noted, for :func:`changed_file`."""
    note_files(began)
    return pickle.dumps((os.uname().nodename, dict(sorted(_noted.items()))), protocol=5)


def _version_of(path: str, began: int) -> tuple[int, int]:
    try:
        status = os.stat(path)  # noqa: PTH116 - a string
    except OSError:  # in an archive, or deleted since
        return 0, 0
    return status.st_mtime_ns, _UNKNOWN if status.st_mtime_ns > began else status.st_size


def changed_file(before: bytes, after: bytes) -> str:
    """Return a file of which two processes have imported different versions; ``""``: there is none, as far as is known.

    Another machine may have the same files with other times: then sizes alone are compared.

    Args:
        before: What :func:`noted_files` returned in one of them; ``b""``: it is not known.
        after: The same of the other.
    """
    if before == after or not before or not after:
        return ""
    (host, files), (other_host, others) = pickle.loads(before), pickle.loads(after)
    first = 0 if host == other_host else 1
    return next((path for path, one in files.items() if path in others and one[first:] != others[path][first:]), "")
