"""Read a crash report. Nothing in it is unpickled, unless it is trusted."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from multienv.errors import ReportError
from multienv.reports.crash import FORMAT, VERSION
from multienv.reports.plain import reset_from_json
from multienv.wire.banks import BankLayout, Entry, split_entries
from multienv.wire.messages import Build, Reset

# What data that is not a report, or only half of one, brings about.
_DAMAGE = (
    ValueError, KeyError, IndexError, TypeError, AttributeError, StopIteration, RuntimeError, OverflowError,
    MemoryError, EOFError, NotImplementedError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
# The fields that are looked at later, and as what.
_FIELDS: dict[str, tuple[type, ...]] = {
    "what": (str,),
    "loss": (dict,),
    "request": (dict,),
    "env": (dict, type(None)),
    "build": (dict,),
    "layout": (dict, type(None)),
    "journal": (dict, type(None)),
}
_OF_BUILD: dict[str, tuple[type, ...]] = {
    "exact": (bool,),
    "slots": (int,),
    "autoreset": (str,),
    "seeds": (list, type(None)),
    "draws": (list,),
    "truncates_errors": (bool,),
    "own_space": (bool,),
    "path": (list,),
    "arguments": (list,),
    "directory": (str,),
}


@dataclass(frozen=True)
class Report:
    """Holds what a crash report says.

    Attributes:
        path: Of its document.
        document: What the document holds.
        journal: What ``Journal.load()`` takes; ``None`` if the report holds no journal.
        pending: The entry of the request that the process was lost in; ``None``: none was asked, or the envs were
            being built.
        resets: Those resets that need not be unpickled, by their index among all entries, ``pending`` last.
        build: How the envs were built; only if the report is trusted.
    """

    path: Path
    document: dict[str, Any]
    layout: BankLayout | None = None
    journal: dict[str, Any] | None = None
    pending: Entry | None = None
    resets: Mapping[int, Reset] = field(default_factory=dict)
    build: Build | None = None


def load(path: str | Path, *, trust: bool = False) -> Report:
    """Read a report.

    Args:
        path: Of its ``.json``, or of the ``.npz`` beside that.
        trust: What it holds pickled may be loaded: the author of the report can run any code here.

    Raises:
        ReportError: It is not there, is damaged, or is something else.
    """
    path = Path(path)
    if path.suffix == ".npz":
        path = path.with_suffix(".json")
    document = _document(path)
    beside = path.with_suffix(".npz")
    arrays = _arrays(beside)
    try:
        layout = None
        if document["layout"] is not None:
            layout = BankLayout(**{**document["layout"], "leaf_bytes": tuple(document["layout"]["leaf_bytes"])})
        journal = None if document["journal"] is None or layout is None else _journal(document["journal"], arrays)
        pending, resets = None, {}
        if "pending" in arrays and layout is not None:
            (pending,) = split_entries(arrays["pending"].tobytes(), layout.end)
        if journal is not None and layout is not None:
            count = sum(1 for _ in split_entries(journal["entries"], layout.end))
            if count != document["journal"]["requests"] or journal["stride"] != layout.end:
                raise ValueError(f"it holds {count} requests, not {document['journal']['requests']}")
            told = json.loads(arrays["resets"].tobytes())
            resets = {int(index): reset_from_json(fields) for index, fields in told}
        pickled = arrays["build"].tobytes()
    except _DAMAGE as error:
        raise ReportError(f"{beside} is damaged: {type(error).__name__}: {error}.") from error
    return Report(path, document, layout, journal, pending, resets, _build(path, pickled) if trust else None)


def _journal(summary: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    anchors = []
    for index, (place, steps) in enumerate(arrays["anchors"].tolist()):
        pickled = (arrays[f"generators_{index}"].tobytes(), arrays[f"state_{index}"].tobytes())
        anchors.append((place, steps, *pickled))
    return {
        "entries": arrays["entries"].tobytes(),
        "stride": int(summary["stride"]),
        "lasting": arrays["lasting"].tobytes(),
        "complete": bool(summary["from_construction"]),
        "usable": bool(summary["usable"]),
        "steps": int(summary["steps_before"]),
        "marks": tuple(
            (number, place, stop, bool(begins), bool(lasts))
            for number, place, stop, begins, lasts in arrays["marks"].tolist()
        ),
        "anchors": tuple(anchors),
    }


def _build(path: Path, pickled: bytes) -> Build:
    try:
        build = pickle.loads(pickled)
    except Exception as error:  # unpickling runs foreign code
        raise ReportError(f"How {path} builds the env cannot be loaded: {type(error).__name__}: {error}.") from error
    if not isinstance(build, Build):
        raise ReportError(f"{path.with_suffix('.npz')} is damaged: its array 'build' is of another kind.")
    return build


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
    wrong = _wrong(document, _FIELDS)
    if not wrong:
        build = document["build"]
        wrong = [f"build.{name}" for name in _wrong(build, _OF_BUILD)]
        if not wrong and not all(type(one) is int and one >= 0 for one in [*build["draws"], *(build["seeds"] or ())]):
            wrong.append("build.draws or build.seeds")
    if wrong:
        raise ReportError(f"{path} is damaged: nothing sensible is found under {', '.join(map(repr, wrong))}.")
    return document


def _wrong(found: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]]) -> list[str]:
    return [name for name, kind in kinds.items() if not isinstance(found.get(name, ...), kind)]


def _arrays(path: Path) -> dict[str, Any]:
    try:
        # Opened here: np.load leaves what is no archive open.
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise ReportError(f"{path} is missing: it lies beside the .json and holds the journal.") from error
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}.") from error
    except _DAMAGE as error:
        raise ReportError(f"{path} is damaged, or is not of a report: {type(error).__name__}: {error}.") from error
