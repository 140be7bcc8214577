"""Read a crash report. Nothing foreign in it is unpickled, unless it is trusted."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multienv.errors import ReportError
from multienv.reports.crash import FORMAT, REPLAY, VERSION, without_pickles
from multienv.reports.plain import made_anew, plain_value
from multienv.wire.banks import BankLayout, Entry, split_entries
from multienv.wire.messages import Build, Replay


@dataclass(frozen=True)
class Report:
    """Holds what a crash report says.

    Attributes:
        path: Of its document.
        what: What happened, in a sentence.
        loss: The loss, as the document has it.
        deadline: Seconds that the fatal request was allowed.
        env: What is said of the env, by name; empty: it was never built.
        layout: Of the banks; ``None``: the envs were never built.
        replay: What came before the loss; ``None``: it is not known.
        pending: The entry of the request that the process was lost in; ``None``: none was asked, or the envs were
            being built.
        build: How the envs were built; with ``env_fns`` and whatever else is foreign only if the report is trusted.
        is_trusted: What it holds pickled may be loaded.
    """

    path: Path
    what: str
    loss: dict[str, Any]
    deadline: float | None
    env: dict[str, Any]
    layout: BankLayout | None
    replay: Replay | None
    pending: Entry | None
    build: Build
    is_trusted: bool


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


def load(path: str | Path, *, trust: bool = False) -> Report:
    """Read a report.

    Args:
        path: Of its ``.json``, or of the ``.npz`` beside that.
        trust: What it holds pickled may be loaded: the author of the report can run any code here.

    Raises:
        ReportError: The file is not there, is damaged, or is no report.
    """
    path = Path(path).with_suffix(".json")
    beside = path.with_suffix(".npz")
    document = _document(path)
    try:
        with beside.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name].tobytes() for name in file.files}
        build = pickle.loads(arrays["trusted"]) if trust else without_pickles(plain_value(made_anew(arrays["build"])))
        return _report(path, document, arrays, build, trust=trust)
    except FileNotFoundError as error:
        raise ReportError(f"{beside} is missing: it lies beside the .json and holds the journal.") from error
    except Exception as error:  # damage shows in many ways; and unpickling a trusted report runs foreign code
        raise ReportError(f"{path} or {beside.name} is damaged: {type(error).__name__}: {error}.") from error


def _report(path: Path, document: dict[str, Any], arrays: dict[str, bytes], build: Any, *, trust: bool) -> Report:
    """Build a `Report` from its parts; raises an exception of any kind if one is damaged."""
    if type(build) is not Build:
        raise TypeError(f"it was built by {build!r:.100}")
    layout, journal, replay, pending = document["layout"], document["journal"], None, None
    if layout is not None:
        layout = BankLayout(layout["slots"], layout["action_bytes"], tuple(layout["leaf_bytes"]))
        if arrays["pending"]:
            (pending,) = split_entries(arrays["pending"], layout.end)
        if journal is not None:
            replay = Replay(**{name: arrays[name] for name in REPLAY})
            requests = sum(1 for _ in split_entries(replay.entries, layout.end))
            if requests != journal["requests"]:
                raise ValueError(f"it holds {requests} requests, not {journal['requests']}")
    loss, deadline, env = dict(document["loss"]), document["request"]["deadline"], dict(document["env"] or {})
    spec = env.get("spec")
    if spec is not None:
        env["spec"] = {**spec, "kwargs": {**spec["kwargs"]}}
    return Report(path, str(document["what"]), loss, deadline, env, layout, replay, pending, build, trust)


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path} is not a report, or not all of it: {error}.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ReportError(f'{path} is not a report of multienv: it does not say "format": "{FORMAT}".')
    if document.get("version") != VERSION:
        raise ReportError(
            f"{path} is a report of version {document.get('version')}, and this multienv reads version {VERSION}. "
            f"It was made with {document.get('made_with')}."
        )
    return document
