"""Write a report of each loss: ``NAME.json`` to read, and ``NAME.pickle`` to run it again.

The document says what happened, what was asked, what became of it, and how the envs were built. The pickle is a
:class:`Report`; one larger than ``store.REPORT_BYTES`` is not written, and the document says so.
"""

from __future__ import annotations

import contextlib
import json
import platform
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space

from multienv._engine.reports import store
from multienv._engine.reports.texts import how_lost, replay_command, signal_name, what_happened
from multienv._engine.version import __version__
from multienv._engine.wire.actions import action_decoder, shown
from multienv._engine.wire.banks import SKIPPED, BankLayout, Entry, split_entries
from multienv._engine.wire.messages import Build, Description, Replay, message_of
from multienv._engine.wire.segment import Segment
from multienv.events import Loss, Recovery

FORMAT = "multienv-report"
VERSION = 12
# Bytes of pickled functions that a report has room for.
_MOST_ENV_FNS = store.REPORT_BYTES // 2
# Elements of an array that are shown.
_SHOWN = 1000
# Characters of what is shown of one value.
_LONGEST = 2**20
_NO_JOURNAL = (
    "its journal has outgrown the RestartPolicy's journal_limit or replay_limit, and begins where no replay can begin; "
    "or too many workers were lost at once for their journals to be kept"
)


@dataclass(frozen=True, slots=True)
class Report:
    """Holds what it takes to run a loss again.

    Attributes:
        path: Of the document.
        loss: What happened.
        deadline: Seconds that the pending request was allowed.
        layout: Of the banks that the entries were copied from; ``None``: the envs were never built.
        replays: What came before the loss: all that is known, then, if that begins much later, what begins at a reset.
            ``()``: it is not known, and no request was pending.
        pending: The journal entry of the request that the process was lost in; ``b""``: none was pending, or the envs
            were being built.
        build: How the envs were built, without the trainer's environment variables: secrets are kept there. Its
            ``env_fns`` are bytes.
    """

    path: str
    loss: Loss
    deadline: float | None
    layout: BankLayout | None
    replays: tuple[Replay, ...]
    pending: bytes
    build: Build

    @property
    def end(self) -> int:
        """Return where the entries of the journal end in their banks."""
        return 0 if self.layout is None else self.layout.end

    def steps(self) -> list[bool]:
        """Return for each request of the journal whether it is a step."""
        return [entry.is_step for entry in split_entries(self.replays[0].entries if self.replays else b"", self.end)]


@dataclass(frozen=True, slots=True)
class Case:
    """Holds the facts about a worker when it is lost.

    Attributes:
        replays: Returns the replays that the report holds; called in the thread that writes it.
        size: Bytes of the journal that ``replays`` holds.
        pending: The journal entry of the request that it was lost in; ``b""``: none was pending, or the envs were being
            built.
        build: How its envs are built.
        description: What they are, once they have been built.
        deadline: Seconds that the request was allowed.
        layout: Of the banks that the entries were copied from.
        path: What had happened to the worker, and the states that it was in after that; the newest last.
    """

    replays: Callable[[], tuple[Replay, ...]]
    size: int
    pending: bytes
    build: Build
    description: Description | None
    deadline: float | None
    layout: BankLayout | None
    path: tuple[str, ...] = ()


class CrashReports:
    """Writes the reports of one worker: each is opened by a loss and closed by what becomes of it.

    Args:
        directory: Where they are written; ``None``: there are none.
        index: Index of the worker's first env in its batch.

    Attributes:
        path: Of the report that is open; ``""``: none is.
        last: Of the report that was closed last; ``""``: there is none.
    """

    def __init__(self, directory: Path | None, index: int | None) -> None:
        self.path = self.last = ""
        self._directory, self._index = directory, index
        self._case: Case | None = None

    def open(self, loss: Loss, make_case: Callable[[], Case]) -> None:
        """Open a report for a loss, if reports are wanted."""
        if self._directory is not None:
            # The env's own index where the loss has one: with several envs, the env that the worker was executing.
            index = self._index if loss.env_index is None else loss.env_index
            self.path = str(store.new_path(self._directory, index))
            self._case = make_case()

    def drop(self) -> None:
        """Forget the report that is open: its worker is closed, and nothing will become of the loss."""
        self.path, self._case = "", None

    def close(self, recovery: Recovery) -> None:
        """Give the report to be written: at once if an error or a truncation names it, else soon, by another thread."""
        self.last, case, self.path, self._case = self.path, self._case, "", None
        if case is None:
            return
        if store.is_full(case.size):
            case = replace(case, replays=tuple, size=0)
        when = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        compose = partial(_compose, case, recovery, self.last, self._index, when)
        store.submit(Path(self.last), compose, case.size, wait=recovery.outcome in ("raised", "truncated"))


def _compose(case: Case, recovery: Recovery, path: str, index: int | None, when: str) -> tuple[dict[str, Any], bytes]:
    """Return the document and the pickle."""
    loss, build = recovery.loss, case.build
    setting = build.setting and replace(build.setting, environment={}, authkey=b"")
    build = replace(build, setting=setting)
    if not isinstance(build.env_fns, bytes):  # a SharedPickle
        build = replace(build, env_fns=build.env_fns.without_file(_MOST_ENV_FNS))
    if len(build.env_fns) > _MOST_ENV_FNS:
        build = replace(build, env_fns=b"")  # a replay asks for --env
    report = Report(path, loss, case.deadline, case.layout, case.replays(), case.pending, build)
    data, obstacle, steps = cloudpickle.dumps(report), None, report.steps()
    if not report.replays and case.pending:
        data, obstacle = b"", _NO_JOURNAL
    elif len(data) > store.REPORT_BYTES:
        size, most = len(data) >> 20, store.REPORT_BYTES >> 20
        data, obstacle = b"", f"a report takes {most} MiB at most, and the record of its {len(steps)} requests {size}"
    return {
        "format": FORMAT,
        "version": VERSION,
        "what": what_happened(loss),
        "when": when,
        "replay": replay_command(path),
        "obstacle": obstacle,
        "checksum": zlib.crc32(data),
        "loss": {
            **asdict(loss),
            "how": how_lost(loss),
            "signal": signal_name(loss.exit_code) if loss.exit_code is not None and loss.exit_code < 0 else None,
            "stack": loss.stack.splitlines(),
            "stderr": loss.stderr.splitlines(),
        },
        "request": {"command": loss.command, "deadline": case.deadline, **_request(case)},
        "recovery": {
            name: getattr(recovery, name) for name in ("outcome", "reason", "method", "attempts", "replayed", "seconds")
        },
        "env": _env(case.description),
        "build": {
            "first_env": index,
            "autoreset": build.autoreset,
            "seeds": readable(build.seeds),
            "path": setting and setting.path,
            "arguments": setting and setting.arguments,
            "directory": setting and setting.directory,
            "variables": setting and dict(setting.variables),
        },
        "states": case.path,
        "journal": {"requests": len(steps), "steps": sum(steps)},
        "made_with": {
            "multienv": __version__,
            "python": sys.version.split()[0],
            "gymnasium": gymnasium.__version__,
            "numpy": np.__version__,
            "platform": platform.platform(),
        },
    }, data


def _request(case: Case) -> dict[str, Any]:
    """Return the pending request as JSON values."""
    if not case.pending or case.layout is None or case.description is None:
        return {}
    (entry,) = split_entries(case.pending, case.layout.end)
    try:
        if entry.is_step:
            return {"action": readable(action_of(entry, case.layout, case.description, verbatim=case.build.verbatim))}
        message = message_of(entry.record[0], entry.request_payload)
    except Exception as error:  # code of the user
        return {"message": f"cannot be shown: {type(error).__name__}: {error}"}
    return {"message": {type(message).__name__: readable(message)}}


def action_of(entry: Entry, layout: BankLayout, description: Description, *, verbatim: bool) -> Any:
    """Return the action, or the batch of actions, of a step's journal entry."""
    segment = Segment(-1)
    segment.lay_out(layout)
    segment.banks[0].record[:] = entry.record
    segment.write_request_payload(0, entry.request_payload)
    space = description.spaces[0][1]
    return action_decoder(space if verbatim else batch_space(space, layout.slots), segment)(
        0, entry.record[1] & ~SKIPPED
    )


def _env(description: Description | None) -> dict[str, Any] | None:
    if description is None:
        return None
    observation_space, action_space = description.spaces[0]
    return {
        "spec": readable(description.spec),
        "observation_space": readable(observation_space),
        "action_space": readable(action_space),
        "render_mode": description.render_mode,
    }


def readable(value: Any) -> Any:
    """Return a JSON value that shows ``value``; arrays with their dtype, what JSON has no form for as text."""
    with contextlib.suppress(Exception):  # a circle, a key that JSON has no form for, code of the user
        data = json.dumps(value, default=_for_json)
        if len(data) <= _LONGEST:
            return json.loads(data, parse_constant=str)  # "NaN" and "Infinity"
    return shown(value, 1000)


def _for_json(value: Any) -> Any:
    """Return what stands for a value of a type that JSON does not know."""
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject and value.size <= _SHOWN:
        return {"dtype": value.dtype.name, "shape": list(value.shape), "values": value.tolist()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(value) if isinstance(value, Mapping) else shown(value, 1000)
