"""Note which files the code of a process came from, and compare that of two processes: are their envs the same?

The code of ``__main__`` travels by value, and is the same in each. A file is noted once, right after its module was
imported; a forked process has the modules of its parent, and what was noted of them.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from types import ModuleType

_STANDARD = f"{Path(os.__file__).parent}/"
_PACKAGES = ("/site-packages/", "/dist-packages/")
# In the place of a size: the file was written while its module may have been imported. Which version that was is not
# known, so it equals no other.
_UNKNOWN = -1
# Path → time of the last change in ns, and size.
_noted: dict[str, tuple[int, int]] = {}


def note(began: int) -> None:
    """Note the files of the modules that were imported since the last time.

    Args:
        began: When the first of these imports began, ``time.time_ns()``.
    """
    for module in list(sys.modules.values()):
        # As an attribute of the module it could be code of the user that is run, or the import of a lazy one.
        # By its type: an object of cffi in sys.modules only says that it is a module.
        is_module = issubclass(type(module), ModuleType)
        path = object.__getattribute__(module, "__dict__").get("__file__") if is_module else None
        if isinstance(path, str) and path not in _noted and not _is_standard(path):
            _noted[path] = _version_of(path, began)


def noted(began: int) -> bytes:
    """Note as :func:`note` does, and return all that is noted, for :func:`changed_file`."""
    note(began)
    return pickle.dumps((os.uname().nodename, dict(sorted(_noted.items()))), protocol=5)


def _is_standard(path: str) -> bool:
    """Tell whether a file belongs to Python's standard library."""
    return path.startswith(_STANDARD) and not any(folder in path for folder in _PACKAGES)


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
        before: What :func:`noted` returned in one of them; ``b""``: it is not known.
        after: The same of the other.
    """
    if before == after or not before or not after:
        return ""
    (host, files), (other_host, others) = pickle.loads(before), pickle.loads(after)
    first = 0 if host == other_host else 1
    return next((path for path, one in files.items() if path in others and one[first:] != others[path][first:]), "")
