"""Where reports lie, and the thread that writes them while the env goes on."""

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
from collections.abc import Callable
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from multienv.errors import UsageError
from multienv.reports.table import Arrays

logger = logging.getLogger("multienv")

VARIABLE = "MULTIENV_REPORTS"
KEPT = 100
KEPT_BYTES = 2**30
# A report can wait a moment, an env that has just been brought back cannot.
_DELAY = 0.02
# How long whoever is told of a report waits for it: a disk may hang, a call must not.
_PATIENCE = 5.0
# Journals that wait to be written take no more memory than this.
_WAITING_BYTES = 64 * 2**20
_STALE_SECONDS = 3600.0
_THOROUGH_EVERY = 16
_NAME = re.compile(r"\.?(\d{8}-\d{6}-\d{6}-\d+-\d+)(?:-env\d+)?\.(?:json|npz)")

Compose = Callable[[], tuple[Any, Arrays]]

_THREAD = "multienv-reports"
_numbers, _prunings = count(1), count()


def directory_for(reports: Any) -> Path | None:
    """The directory an option names: ``None`` is the user's own, an empty string none at all."""
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


def new_path(directory: Path, env_index: int | None) -> Path:
    """Of the next report: names sort by time."""
    now = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-%f")
    env = "" if env_index is None else f"-env{env_index}"
    return directory / f"{now}-{os.getpid()}-{next(_numbers)}{env}.json"


# --- one report ---------------------------------------------------------------------------------


def write(path: Path, document: Any, arrays: Arrays) -> None:
    """The document, and the arrays beside it: whole or not at all, the document last."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_suffix(".npz")
    _appear(beside, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]
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
    """Keep the newest reports, and of those what fits :data:`KEPT_BYTES`, if thorough; touch nothing else there."""
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
    """A report to be written."""

    def __init__(self, path: Path, compose: Compose, size: int) -> None:
        """``size`` bytes of memory are held until then."""
        self.path = path
        self.compose = compose
        self.size = size
        self._written = threading.Lock()
        self._written.acquire()

    def run(self) -> None:
        """Write it; what is in the way is logged."""
        try:
            write(self.path, *self.compose())
        except Exception as error:  # a full disk, no permission, foreign code: nothing that may break a recovery
            _complain(self.path.parent, error)
        finally:
            self._written.release()

    def wait(self) -> None:
        """Until it is there, or cannot be had; not for ever."""
        if self._written.acquire(timeout=_PATIENCE):
            self._written.release()


class Writer:
    """Writes what it is given in a thread that lives as long as there is something to write.

    Not a daemon: the interpreter waits for it at its end. Whoever asks may be interrupted between any two lines, so
    that nothing but atomic operations and locks written in C is shared.
    """

    def __init__(self) -> None:
        """Nothing to do yet."""
        self._jobs: deque[Job] = deque()
        self._hurry = threading.Lock()
        self._hurry.acquire()
        self._changing = threading.Lock()
        self._threads = 0

    def is_full(self, size: int) -> bool:
        """Whether as much more would be too much to hold."""
        return bool(self._jobs) and sum(job.size for job in list(self._jobs)) + size > _WAITING_BYTES

    def submit(self, job: Job) -> None:
        """To be written soon."""
        with self._changing:
            self._jobs.append(job)
            alone = not self._threads
        if alone:  # or one more is on its way: the two share the work
            try:
                threading.Thread(target=self._run, name=_THREAD).start()
            except RuntimeError:  # no more threads, or the interpreter is about to end
                self.write_all()

    def finish(self, job: Job) -> None:
        """Now."""
        with contextlib.suppress(RuntimeError):
            self._hurry.release()
        job.wait()

    def _run(self) -> None:
        with self._changing:
            self._threads += 1
        while True:
            self._hurry.acquire(timeout=_DELAY)
            self.write_all()
            with self._changing:
                if not self._jobs:
                    self._threads -= 1
                    return

    def write_all(self) -> None:
        """What is there, here and now."""
        while self._jobs:
            try:
                job = self._jobs.popleft()
            except IndexError:  # another thread was faster
                return
            job.run()


writer = Writer()


def settle() -> None:
    """Wait until what is being written is."""
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join()


# What a thread was not started for, because an interruption came first.
atexit.register(lambda: writer.write_all())


def _forget() -> None:
    """In a forked child of the trainer's: its reports are not the child's to write."""
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
