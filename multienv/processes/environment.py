"""What a worker is to find of the trainer's surroundings."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from multienv.errors import UsageError

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
MPI_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "MPI_")


def worker_environment(native_threads: int | None = 1) -> dict[str, str]:
    """The trainer's environment as a worker gets it: without MPI's, thread pools limited.

    Many workers with many threads each fight for the cores. What the user has set stays.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(MPI_PREFIXES)}
    if native_threads is not None:
        for name in THREAD_VARIABLES:
            environment.setdefault(name, str(native_threads))
    return environment


def working_directory() -> str:
    """The trainer's, or nothing if it has been deleted: workers then do without."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def refuse_other_namespace() -> None:
    """Refuse to start children whose numbers are not those by which they would be killed from here."""
    if _children_are_elsewhere():
        raise UsageError(
            "The trainer's children are in another PID namespace than itself, and their numbers there are those of "
            "other processes here. Fork after unshare(CLONE_NEWPID), or use `unshare --pid --fork`."
        )


def _children_are_elsewhere() -> bool:
    namespaces = Path("/proc/thread-self/ns")
    children = namespaces / "pid_for_children"
    try:
        return children.readlink() != (namespaces / "pid").readlink()
    except OSError:  # it dangles until the first child is there; or this system has no namespaces
        return children.is_symlink()


def import_path() -> list[str]:
    """The same for what is imported before any env is built: no file stands in for the standard library's there."""
    library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    library |= {str(Path(directory) / "lib-dynload") for directory in library}
    return sorted(module_path(), key=lambda entry: entry not in library)


def module_path() -> list[str]:
    """``sys.path`` as it is to be read in another directory."""
    directory = working_directory()
    # A path object is passed over by the import system, too.
    return [entry or directory for entry in sys.path if isinstance(entry, str) and (entry or directory)]
