"""What a worker is to find of the trainer's surroundings."""

from __future__ import annotations

import os
import sys

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


def module_path() -> list[str]:
    """``sys.path`` as it is to be read in another directory."""
    directory = working_directory()
    # A path object is passed over by the import system, too.
    return [entry or directory for entry in sys.path if isinstance(entry, str) and (entry or directory)]
