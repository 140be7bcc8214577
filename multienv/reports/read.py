"""A report read again. Nothing is unpickled, unless it is trusted."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from multienv.errors import ReportError
from multienv.reports.crash import FORMAT, VERSION
from multienv.reports.plain import NeedsTrust
from multienv.reports.table import Arrays, Row, to_rows
from multienv.wire.messages import Group

# What data that is not a report, or only half of one, brings about.
_DAMAGE = (
    ValueError, KeyError, IndexError, TypeError, AttributeError, StopIteration, RuntimeError, OverflowError,
    MemoryError, EOFError, NotImplementedError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What a crash report holds.

    Attributes:
        path: Its document.
        document: As it is in there.
        rows: The requests to run again, the fatal one last; ``None`` if it holds no journal.
        env_fn: The function that built the env, pickled; only if the report is trusted.
        group: Which envs it holds, if there are several in the process.
        registrations: Envs that the trainer had registered, pickled; as ``env_fn``.
    """

    path: Path
    document: dict[str, Any]
    rows: list[Row] | None
    group: Group | None = None
    env_fn: bytes | None = None
    registrations: tuple[bytes, ...] = ()


def load(path: str | Path, *, trust: bool = False) -> Report:
    """Read a report.

    Args:
        path: Of its ``.json``, or of the ``.npz`` beside that.
        trust: What it holds pickled may be loaded: whoever wrote the report can run any code here.

    Raises:
        ReportError: It is not there, is damaged, is something else, or cannot be replayed without being trusted.
    """
    path = Path(path)
    if path.suffix == ".npz":
        path = path.with_suffix(".json")
    document = _document(path)
    beside = path.with_suffix(".npz")
    arrays = _arrays(beside)
    try:
        rows = None if document["journal"] is None else to_rows(arrays, trust=trust) if "kind" in arrays else []
        if rows is not None and len(rows) != document["journal"]["requests"]:
            raise ValueError(f"it holds {len(rows)} requests of {document['journal']['requests']}")
        group = _group(document.get("group"), arrays, trust=trust)
        pickled = {name: arrays[name].tobytes() for name in ("env_fn", "registrations", "overrides") if name in arrays}
    except NeedsTrust as needs:
        raise ReportError(
            f"{path}: {needs} is known as a pickle only. To load a pickle is to run whatever code it asks for: if you "
            "know who wrote this report, give --trust."
        ) from None
    except _DAMAGE as error:
        raise ReportError(f"{beside} is damaged: {type(error).__name__}: {error}.") from error
    if not trust:
        return Report(path, document, rows, group)
    registrations = tuple(pickled[name] for name in ("registrations", "overrides") if pickled.get(name))
    return Report(path, document, rows, group, pickled.get("env_fn"), registrations)


def _group(fields: Any, arrays: Arrays, *, trust: bool) -> Group | None:
    if fields is None:
        return None
    group = Group(**fields)
    if not 0 <= group.first < group.first + group.size <= group.num_envs:
        raise ValueError(f"no envs {group.first} to {group.first + group.size} of {group.num_envs}")
    if "group_space" not in arrays:
        return group
    if not trust:
        raise NeedsTrust("the observation space of the batch")
    return replace(group, space=pickle.loads(arrays["group_space"].tobytes()))


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
    _check(path, document)
    return document


# What is looked at later, and as what.
_FIELDS: dict[str, tuple[type, ...]] = {
    "what": (str,),
    "loss": (dict,),
    "request": (dict,),
    "recovery": (dict,),
    "env": (dict, type(None)),
    "process_seeds": (list, type(None)),
    "inline_limit": (int,),
    "journal": (dict, type(None)),
    "path": (list,),
    "arguments": (list,),
    "directory": (str,),
}


def _check(path: Path, document: dict[str, Any]) -> None:
    wrong = [name for name, kinds in _FIELDS.items() if not isinstance(document.get(name, ...), kinds)]
    seeds, journal = document.get("process_seeds"), document.get("journal")
    if isinstance(seeds, list) and not (len(seeds) == 3 and all(type(seed) is int and seed >= 0 for seed in seeds)):
        wrong.append("process_seeds")
    if isinstance(journal, dict) and type(journal.get("requests")) is not int:
        wrong.append("journal")
    if wrong:
        raise ReportError(f"{path} is damaged: nothing sensible is found under {', '.join(map(repr, wrong))}.")


def _arrays(path: Path) -> Arrays:
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
