"""Read a crash report. It is a pickle, which can run any code: one that others may have written is refused."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from multienv.errors import ReportError
from multienv.reports.crash import FORMAT, VERSION
from multienv.wire.banks import BankLayout, Entry, split_entries
from multienv.wire.messages import Build, Replay

T = TypeVar("T")


@dataclass(frozen=True)
class Report:
    """Holds what a crash report says.

    Attributes:
        path: Of its document.
        what: What happened, in a sentence.
        loss: The loss, as the document has it.
        deadline: Seconds that the fatal request was allowed.
        layout: Of the banks; ``None``: the envs were never built.
        replay: What came before the loss; ``None``: it is not known, and no request was pending.
        pending: The entry of the request that the process was lost in; ``None``: none was asked, or the envs were
            being built.
        build: How the envs were built.
    """

    path: Path
    what: str
    loss: dict[str, Any]
    deadline: float | None
    layout: BankLayout | None
    replay: Replay | None
    pending: Entry | None
    build: Build


@dataclass(frozen=True)
class Summary:
    """Holds what a list says of a crash report.

    Attributes:
        path: Of its document.
        when: When the recovery was over, ISO 8601, UTC.
        env: Index of the env, or ``None``.
        what: What happened, in a sentence.
        outcome: What became of it: ``"exact"``, ``"truncated"``, ``"fresh"`` or ``"raised"``.
    """

    path: Path
    when: str
    env: int | None
    what: str
    outcome: str

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {
            "when": self.when,
            "env": self.env,
            "what": self.what,
            "outcome": self.outcome,
            "report": str(self.path),
        }


def summary_of(path: Path) -> Summary | None:
    """Return the summary of a report; ``None`` if it is damaged, or has been removed."""
    try:
        document = _document(path)
        loss, build = document["loss"], document["build"]
        env = loss["env_index"] if loss["env_index"] is not None else build["first_env"]
        return Summary(path, str(document["when"]), env, str(document["what"]), str(document["recovery"]["outcome"]))
    except (ReportError, LookupError, TypeError):
        return None


def load(path: str | Path) -> Report:
    """Read a report. Directories that the trainer imported from are added to ``sys.path``.

    Args:
        path: Of its ``.json``, or of the ``.npz`` beside that.

    Raises:
        ReportError: The file is not there, is damaged, is no report, cannot be replayed, or others may have written it.
    """
    path = Path(path).with_suffix(".json")
    beside = path.with_suffix(".npz")
    document = _document(path, must_be_own=True)
    if document.get("obstacle"):
        raise ReportError(f"{path} cannot be replayed: {document['obstacle']}.")
    with _opened(beside, must_be_own=True) as raw:
        try:
            # Classes of the trainer's own modules may be in what is pickled.
            sys.path += [entry for entry in document["build"]["path"] or () if entry not in sys.path]
            with np.load(raw, allow_pickle=False) as file:
                arrays = {name: file[name].tobytes() for name in file.files}
            return _report(path, document, arrays)
        except Exception as error:  # damage shows in many ways; and unpickling runs foreign code
            raise ReportError(f"{path} or {beside.name} is damaged: {type(error).__name__}: {error}.") from error


def _report(path: Path, document: dict[str, Any], arrays: dict[str, bytes]) -> Report:
    """Build a `Report` from its parts; raises an exception of any kind if one is damaged."""
    build, layout, journal = _unpickled(arrays["build"], Build), document["layout"], document["journal"]
    replay = pending = None
    if layout is not None:
        layout = BankLayout(layout["slots"], layout["action_bytes"], tuple(layout["leaf_bytes"]))
        if arrays["pending"]:
            (pending,) = split_entries(arrays["pending"], layout.end)
        if journal is not None:
            replay = _unpickled(arrays["replay"], Replay)
            requests = sum(1 for _ in split_entries(replay.entries, layout.end))
            if requests != journal["requests"]:
                raise ValueError(f"it holds {requests} requests, not {journal['requests']}")
    loss, deadline = dict(document["loss"]), document["request"]["deadline"]
    return Report(path, str(document["what"]), loss, deadline, layout, replay, pending, build)


def _unpickled(data: bytes, kind: type[T]) -> T:
    value = pickle.loads(data)
    if type(value) is not kind:
        raise TypeError(f"{value!r:.100} is no {kind.__name__}")
    return value


def _opened(path: Path, *, must_be_own: bool) -> BinaryIO:
    """Open a file of a report. Raises ReportError if it cannot be read, or must be this user's alone and is not."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}.") from error
    status = os.fstat(file.fileno())
    why = advice = ""
    if status.st_uid != os.geteuid():
        why = f"belongs to another user (uid {status.st_uid})"
        advice = "If you trust that user, copy the .json and the .npz, and replay the copy."
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"can be written by others than you (mode {stat.S_IMODE(status.st_mode):04o})"
        advice = f"If nobody else did: chmod go-w {shlex.quote(str(path))}"
    if why and must_be_own:
        file.close()
        raise ReportError(f"{path} {why}: a report is a pickle, and runs what its author put there. {advice}")
    return file


def _document(path: Path, *, must_be_own: bool = False) -> dict[str, Any]:
    with _opened(path, must_be_own=must_be_own) as file:
        try:
            document = json.loads(file.read())
        except (OSError, ValueError, RecursionError) as error:
            raise ReportError(f"{path} is not a report, or not all of it: {error}.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ReportError(f'{path} is not a report of multienv: it does not say "format": "{FORMAT}".')
    if document.get("version") != VERSION:
        raise ReportError(
            f"{path} is a report of version {document.get('version')}, and this multienv reads version {VERSION}. "
            f"It was made with {document.get('made_with')}."
        )
    return document
