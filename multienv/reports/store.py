"""Keep crash reports in a directory: which one, how files appear in it, how many are kept, the thread that writes."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from multienv.errors import UsageError

logger = logging.getLogger("multienv")

VARIABLE = "MULTIENV_REPORTS"
KEPT = 100
KEPT_BYTES = 2**30
# A report is written a moment after the loss: the recovery is more urgent.
DELAY = 0.02
# How long a call that tells of a report waits for it, seconds: a disk may hang, a call must not.
PATIENCE = 5.0
# Journals that wait to be written take no more memory than this.
WAITING_BYTES = 64 * 2**20
_STALE_SECONDS = 3600.0
_THOROUGH_EVERY = 16
_NAME = re.compile(r"\.?(\d{8}-\d{6}-\d{6}-\d+-\d+)(?:-env\d+)?\.(?:json|npz)")

Arrays = Mapping[str, np.ndarray[Any, Any]]
Compose = Callable[[], tuple[Any, Arrays]]

_THREAD = "multienv-reports"
_numbers, _prunings = count(1), count()


def directory_for(reports: Any) -> Path | None:
    """Return the directory that an option names.

    Args:
        reports: A directory; ``""``: no reports; ``None``: as MULTIENV_REPORTS says, else in the user's cache.

    Raises:
        UsageError: It is neither a path nor a string.
    """
    if reports is None:
        reports = os.environ.get(VARIABLE)
    if reports is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111 - may have none
        return cache / "multienv" / "reports" if cache.is_absolute() else None
    try:
        named = os.fspath(reports)
    except TypeError:
        named = reports
    if not isinstance(named, str):
        raise UsageError(f"reports is {reports!r:.100}; give a directory, or '' for no reports.")
    return Path(os.path.expanduser(named)).absolute() if named else None  # noqa: PTH111 - as above


def new_path(directory: Path, index: int | None) -> Path:
    """Return the path of the next report; names sort by time."""
    now = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-%f")
    env = "" if index is None else f"-env{index}"
    return directory / f"{now}-{os.getpid()}-{next(_numbers)}{env}.json"


# --- one report ---------------------------------------------------------------------------------


def write(path: Path, document: Any, arrays: Arrays) -> None:
    """Write a report: whole or not at all, the arrays beside the document first."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _appear(path.with_suffix(".npz"), lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]
    text = json.dumps(document, indent=2).encode()
    _appear(path, lambda file: file.write(text))
    prune(path.parent, thorough=next(_prunings) % _THOROUGH_EVERY == 0)


def _appear(path: Path, fill: Callable[[Any], object]) -> None:
    hidden = path.with_name(f".{path.name}")
    try:
        with open(os.open(hidden, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123
            fill(file)
        hidden.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            hidden.unlink()
        raise


def prune(directory: Path, *, thorough: bool = True) -> None:
    """Remove all but the newest reports, and if thorough those beyond :data:`KEPT_BYTES`; spare all other files."""
    files: dict[str, list[Path]] = {}
    for name in os.listdir(directory):
        named = _NAME.fullmatch(name)
        if named is not None:
            files.setdefault(named[1], []).append(directory / name)
    kept, total = 0, 0
    for name in sorted(files, reverse=True):
        with contextlib.suppress(FileNotFoundError):  # another trainer prunes too
            hidden = all(path.name.startswith(".") for path in files[name])  # being written; or the writer was killed
            kept += not hidden
            total += sum(path.stat().st_size for path in files[name]) if thorough else 0
            if hidden and not (thorough and files[name][0].stat().st_mtime < time.time() - _STALE_SECONDS):
                continue
            if hidden or kept > KEPT or (total > KEPT_BYTES and kept > 1):
                for path in files[name]:
                    path.unlink()


# --- the thread -----------------------------------------------------------------------------------


class Job:
    """Holds a report to be written.

    Args:
        path: Of its document.
        compose: Returns document and arrays.
        size: Bytes of memory held until it is written.
    """

    def __init__(self, path: Path, compose: Compose, size: int) -> None:
        self.path = path
        self.compose = compose
        self.size = size
        self._written = threading.Lock()
        self._written.acquire()

    def run(self) -> None:
        """Write the report; what prevents that is logged."""
        try:
            write(self.path, *self.compose())
        except Exception as error:  # a full disk, no permission, foreign code: nothing that may break a recovery
            _complain(self.path.parent, error)
        finally:
            self._written.release()

    def wait(self) -> None:
        """Wait until the report is written, or cannot be; :data:`PATIENCE` seconds at most."""
        if self._written.acquire(timeout=PATIENCE):
            self._written.release()


class Writer:
    """Writes reports in a thread that lives as long as there is something to write.

    The thread is no daemon: the interpreter waits for it at its end. A call may be interrupted between any two lines of
    ``submit`` and ``finish``: they share nothing but atomic operations and locks written in C.
    """

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._hurry = threading.Lock()
        self._hurry.acquire()
        self._changing = threading.Lock()
        self._threads = 0

    def is_full(self, size: int) -> bool:
        """Tell whether ``size`` bytes more would be too much memory."""
        return bool(self._jobs) and sum(job.size for job in list(self._jobs)) + size > WAITING_BYTES

    def submit(self, job: Job) -> None:
        """Have a report written soon."""
        with self._changing:
            self._jobs.append(job)
            alone = not self._threads
        if alone:  # an interruption here may start two threads: they share the work
            self._hurry.acquire(blocking=False)  # the thread that an earlier hurry() was for may have been done
            try:
                threading.Thread(target=self._run, name=_THREAD).start()
            except RuntimeError:  # no more threads, or the interpreter is about to end
                self.write_all()

    def hurry(self) -> None:
        """Have what was submitted written without further delay."""
        with contextlib.suppress(RuntimeError):
            self._hurry.release()

    def finish(self, job: Job) -> None:
        """Have a submitted report written now, and wait for it."""
        self.hurry()
        job.wait()

    def _run(self) -> None:
        with self._changing:
            self._threads += 1
        while True:
            self._hurry.acquire(timeout=DELAY)
            self.write_all()
            with self._changing:
                if not self._jobs:
                    self._threads -= 1
                    return

    def write_all(self) -> None:
        """Write what was submitted in this thread."""
        while self._jobs:
            try:
                job = self._jobs.popleft()
            except IndexError:  # another thread was faster
                return
            job.run()


writer = Writer()


def settle() -> None:
    """Wait until all reports that were submitted are written."""
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join()


# Write what an interruption has left without a thread.
atexit.register(lambda: writer.write_all())


def _forget() -> None:
    """Drop the jobs in a forked child: its parent writes them."""
    global writer
    writer = Writer()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

_complained: set[Path] = set()


def _complain(directory: Path, error: Exception) -> None:
    if directory not in _complained:
        _complained.add(directory)
        logger.warning(
            "Crash reports cannot be written to %s: %s: %s. Recoveries do not need them. Give another directory by "
            "SubprocessEnv(reports=...) or %s, or '' for none.",
            directory,
            type(error).__name__,
            error,
            VARIABLE,
        )
