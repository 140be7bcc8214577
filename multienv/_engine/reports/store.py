"""Keep crash reports in a directory: which one, how many are kept, and the threads that write them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

logger = logging.getLogger("multienv")

VARIABLE = "MULTIENV_REPORTS"
# Reports of each trainer that are kept, bytes of those of all trainers, and for how many days.
KEPT = 100
KEPT_BYTES = 256 * 2**20
KEPT_DAYS = 14
# No report is larger than this.
REPORT_BYTES = 32 * 2**20
# A report of an exact recovery is written a moment after it: the other workers' recoveries are more urgent.
DELAY = 0.02
# How long a call that tells of a report waits for it, seconds: a disk may hang, a call must not.
PATIENCE = 5.0
# Journals that wait to be written take no more memory than this.
WAITING_BYTES = 64 * 2**20
_TIME = "%Y%m%d-%H%M%S-%f"
_NAME = re.compile(r"(\d{8}-\d{6}-\d{6}-\d+-\d+)(?:-env\d+)?\.(?:json|pickle|part)")

Compose = Callable[[], tuple[Any, bytes]]

_numbers = count(1)
_complained: dict[Path, object] = {}


def directory_for(reports: Any) -> Path | None:
    """Return the directory that an option names.

    Args:
        reports: A directory; ``""``: no reports; ``None``: as MULTIENV_REPORTS says, else in the user's cache.
    """
    if reports is None:
        reports = os.environ.get(VARIABLE)
    if reports is None:
        return _default_directory()
    named = os.fspath(reports)
    return Path(os.path.expanduser(named)).absolute() if named else None  # noqa: PTH111 - as above


def _default_directory() -> Path | None:
    """Return the directory in the user's cache; ``None``: there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111 - may have none
    return cache / "multienv" / "reports" if cache.is_absolute() else None


def new_path(directory: Path, index: int | None) -> Path:
    """Return the path of the next report; names sort by time."""
    now = f"{datetime.now(timezone.utc):{_TIME}}"
    env = "" if index is None else f"-env{index}"
    return directory / f"{now}-{os.getpid()}-{next(_numbers)}{env}.json"


def listed(directory: Path | None, pid: int | None = None) -> list[Path]:
    """Return the reports in a directory, the newest first: all of them, or those that process ``pid`` has written."""
    found = []
    with contextlib.suppress(OSError):  # there is no such directory
        for name in os.listdir(directory or os.devnull):
            named = _NAME.fullmatch(name)
            if named is not None and name.endswith(".json") and pid in (None, int(named[1].split("-")[3])):
                found.append(name)
    return [Path(directory or "") / name for name in sorted(found, reverse=True)]


def time_of(path: Path) -> float:
    """Return when a report was opened, as its name says: seconds since 1970."""
    return datetime.strptime(f"{path.name[:22]}+0000", f"{_TIME}%z").timestamp()


def write(path: Path, document: Any, pickled: bytes) -> None:
    """Write a report, readable by its owner alone: the pickle first, if there is one, and all of it or nothing.

    The document has its name from the moment when it is whole: other programs look for reports at any time.
    """
    directory = path.parent
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory == _default_directory() and directory.stat().st_uid == os.geteuid():
        directory.chmod(0o700)  # it was there before, perhaps with another mode, and is for reports alone
    beside, part = path.with_suffix(".pickle"), path.with_suffix(".part")
    try:
        for target, data in ((beside, pickled), (part, json.dumps(document, indent=2).encode())):
            if data:
                with open(target, "xb", opener=partial(os.open, mode=0o600)) as file:
                    file.write(data)
        part.rename(path)
    except BaseException:
        for half in (part, path, beside):
            half.unlink(missing_ok=True)
        raise
    prune(directory)


def prune(directory: Path) -> None:
    """Remove reports that are too old, or too many of one trainer, or too large together; spare all other files."""
    reports: dict[str, list[os.DirEntry[str]]] = {}
    with os.scandir(directory) as files:
        for file in files:
            named = _NAME.fullmatch(file.name)
            if named is not None:
                reports.setdefault(named[1], []).append(file)
    total, kept = 0, Counter[str]()
    oldest = f"{datetime.now(timezone.utc) - timedelta(days=KEPT_DAYS):{_TIME}}"
    for name in sorted(reports, reverse=True):
        trainer = name.split("-")[3]
        kept[trainer] += 1
        with contextlib.suppress(FileNotFoundError):  # another trainer prunes too
            total += sum(file.stat().st_size for file in reports[name])
            if kept[trainer] > KEPT or total > KEPT_BYTES or name < oldest:
                for file in reports[name]:
                    Path(file).unlink()


class Writing(threading.Thread):
    """Writes one report, a moment later. No daemon: the interpreter waits for it at its end.

    Args:
        path: Of the document.
        compose: Returns document and pickle.
        size: Bytes of memory held until the report is written.
        delay: Seconds to wait first.
    """

    def __init__(self, path: Path, compose: Compose, size: int, delay: float) -> None:
        super().__init__(name="multienv-report")
        self.size = size
        self._path, self._compose, self._delay = path, compose, delay

    def run(self) -> None:
        """Write the report; what prevents that is logged, once for each directory."""
        time.sleep(self._delay)  # the recovery, which the caller waits for, has the cores first
        directory = self._path.parent
        try:
            write(self._path, *self._compose())
        except Exception as error:  # a full disk, no permission, code of the user: nothing that may break a recovery
            mine = object()
            if _complained.setdefault(directory, mine) is not mine:  # one call: two threads may fail at one instant
                return
            logger.warning(
                "Crash reports cannot be written to %s: %s: %s. Recoveries do not need them. Give another directory "
                "by SubprocessEnv(reports=...) or %s, or '' for none.",
                directory,
                type(error).__name__,
                error,
                VARIABLE,
            )


def being_written() -> list[Writing]:
    """Return the reports that are not written yet; after a fork the child has none."""
    return [thread for thread in threading.enumerate() if isinstance(thread, Writing)]


def is_full(size: int) -> bool:
    """Tell whether ``size`` bytes more would be too much memory."""
    waiting = being_written()
    return bool(waiting) and sum(report.size for report in waiting) + size > WAITING_BYTES


def submit(path: Path, compose: Compose, size: int, *, wait: bool) -> None:
    """Give a report to be written: now, waiting for it, or soon."""
    writing = Writing(path, compose, size, 0.0 if wait else DELAY)
    try:
        writing.start()
    except RuntimeError:  # no more threads, or the interpreter is about to end
        writing.run()
        return
    if wait:
        writing.join(PATIENCE)
