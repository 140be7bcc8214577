"""Read a crash report. It is a pickle, which can run any code: one that others may have written is refused."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import stat
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from multienv._engine.reports.crash import FORMAT, VERSION, Report
from multienv._engine.reports.store import KEPT, KEPT_BYTES, KEPT_DAYS, VARIABLE
from multienv.errors import UsageError


def summary_of(path: Path) -> dict[str, Any] | None:
    """Return what a list says of a report, as JSON values; ``None`` if it is damaged, or has been removed.

    Its keys are ``when`` the recovery was over, index of the ``env``, ``what`` happened, ``outcome``, and ``report``,
    the path.
    """
    try:
        document = _document(path)
        loss, build = document["loss"], document["build"]
        return {
            "when": str(document["when"]),
            "env": loss["env_index"] if loss["env_index"] is not None else build["first_env"],
            "what": str(document["what"]),
            "outcome": str(document["recovery"]["outcome"]),
            "report": str(path),
        }
    except (UsageError, LookupError, TypeError):
        return None


def load(path: str | Path) -> Report:
    """Read a report. Directories that the trainer imported from are added to ``sys.path``.

    Args:
        path: Of its ``.json``, or of the ``.pickle`` beside that.

    Raises:
        UsageError: The file is not there, is damaged, is no report, cannot be replayed, or others may have written it.
    """
    path = Path(path).with_suffix(".json")
    beside = path.with_suffix(".pickle")
    document = _document(path, must_be_own=True)
    if document.get("obstacle"):
        raise UsageError(f"{path} cannot be replayed: {document['obstacle']}.")
    data = _read(beside, must_be_own=True)
    if zlib.crc32(data) != document.get("checksum"):
        raise UsageError(f"{path} or {beside.name} is damaged: they do not belong together.")
    try:
        # Classes of the trainer's own modules may be in what is pickled.
        sys.path += [entry for entry in document["build"]["path"] or () if entry not in sys.path]
        return replace(pickle.loads(data), path=str(path))  # type: ignore[no-any-return]
    except Exception as error:  # a class that cannot be imported here; unpickling runs code of the user
        raise UsageError(
            f"{beside} cannot be loaded: {type(error).__name__}: {error}. It was made with {document.get('made_with')}."
        ) from error


def _read(path: Path, *, must_be_own: bool) -> bytes:
    """Read a file of a report.

    Raises:
        UsageError: That fails, or it is no regular file (to open a FIFO would block, and a device may have no end), or
            it must be this user's alone and is not.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{path} is not a regular file, so it is not read.")
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read()
    except FileNotFoundError as error:
        raise UsageError(
            f"{path} is not there. The newest {KEPT} reports of each trainer are kept, for {KEPT_DAYS} days, and at "
            f"most {KEPT_BYTES >> 20} MiB of a directory: give a run its own directory, by reports or {VARIABLE}."
        ) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error
    why = advice = ""
    if status.st_uid != os.geteuid():
        why = f"belongs to another user (uid {status.st_uid})"
        advice = "If you trust that user, copy the .json and the .pickle, and replay the copy."
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"can be written by others than you (mode {stat.S_IMODE(status.st_mode):04o})"
        advice = f"If nobody else did: chmod go-w {shlex.quote(str(path))}"
    if why and must_be_own:
        raise UsageError(f"{path} {why}: a report is a pickle, and runs what its author put there. {advice}")
    return data


def _document(path: Path, *, must_be_own: bool = False) -> dict[str, Any]:
    data = _read(path, must_be_own=must_be_own)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a report, or not all of it: {error}.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f'{path} is not a report of multienv: it does not say "format": "{FORMAT}".')
    if document.get("version") != VERSION:
        raise UsageError(
            f"{path} is a report of version {document.get('version')}, and this multienv reads version {VERSION}. "
            f"It was made with {document.get('made_with')}."
        )
    return document
