"""Work out what a worker gets of the trainer's surroundings: variables, import path, directory."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from multienv._engine.native import native
from multienv.errors import UsageError

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
)
MPI_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "MPI_")


def worker_environment(native_threads: int | None = 1) -> dict[str, str]:
    """Return the trainer's environment variables without those of its MPI job, with threads limited.

    Many workers with many threads each fight for the cores. What the user has set stays.

    Args:
        native_threads: Threads of native libraries (BLAS, OpenMP, OpenCV); ``None``: as the user has set them.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(MPI_PREFIXES)}
    if native is not None:  # whatever was set since: both sides are to order their stores in the same way
        environment.pop("MULTIENV_PUREPYTHON", None)
    if native_threads is not None:
        for name in THREAD_VARIABLES:
            environment.setdefault(name, str(native_threads))
    return environment


def working_directory() -> str:
    """Return the trainer's working directory; empty if it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def refuse_other_namespace() -> None:
    """Raise UsageError if children would be born into another PID namespace: their numbers mean nothing here."""
    namespaces = Path("/proc/thread-self/ns")
    children = namespaces / "pid_for_children"
    try:
        are_here = children.readlink() == (namespaces / "pid").readlink()
    except OSError:  # the link dangles until the first child is there; or this system has no namespaces
        are_here = not children.is_symlink()
    if not are_here:
        raise UsageError(
            "The trainer's children are in another PID namespace than itself, and their numbers there are those of "
            "other processes here. Fork after unshare(CLONE_NEWPID), or use `unshare --pid --fork`."
        )


def import_path() -> list[str]:
    """Return :func:`module_path` with the standard library first.

    The monitor imports by it before any env is built: no file of the user may stand in for one of the library there.
    """
    library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    library |= {str(Path(directory) / "lib-dynload") for directory in library}
    return sorted(module_path(), key=lambda entry: entry not in library)


def module_path() -> list[str]:
    """Return ``sys.path`` as it reads from another working directory; path objects are left out, as imports do."""
    directory = working_directory()
    return [entry or directory for entry in sys.path if isinstance(entry, str) and (entry or directory)]
