"""Write a report of each loss: a JSON document to read, and beside it the journal's raw banks as arrays.

``NAME.json`` says what happened, what was asked, what became of it, and how the envs were built. ``NAME.npz`` holds::

    entries, marks, anchors, lasting, …   what Journal.dump() returned
    resets      the resets among the entries as JSON: a replay of them unpickles nothing
    pending     the journal entry of the request that the process was lost in
    build       the pickled Build, without the trainer's environment variables: secrets are kept there

Nothing that is pickled in a report is loaded unless ``multienv replay --trust`` says so.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cache, partial
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space

from multienv.events import Loss, Recovery
from multienv.reports import store
from multienv.reports.plain import readable, reset_as_json
from multienv.reports.texts import how_lost, replay_command, signal_name, what_happened
from multienv.wire.actions import action_decoder
from multienv.wire.banks import ABSENT, BankLayout, Entry, split_entries
from multienv.wire.messages import Build, Description, Reset
from multienv.wire.segment import Segment

FORMAT = "multienv-report"
VERSION = 2
# Earlier losses of the same recovery that a report mentions.
_BEFORE = 20


@dataclass(frozen=True, slots=True)
class Case:
    """What is known of a worker when it is lost.

    Attributes:
        journal: What ``Journal.dump()`` returned; ``None``: there is no journal.
        pending: The journal entry of the request that it was lost in; ``b""``: none was pending, or the envs were being
            built.
        build: How its envs are built.
        description: What they are, once they have been built.
        deadline: Seconds that the request was allowed.
        layout: Of the banks that the entries were copied from.
        exact: The entries are of the exact codec.
    """

    journal: Mapping[str, Any] | None
    pending: bytes
    build: Build
    description: Description | None
    deadline: float | None
    layout: BankLayout | None
    exact: bool

    @property
    def size(self) -> int:
        """Bytes that the journal takes."""
        return 0 if self.journal is None else len(self.journal["entries"]) + len(self.journal["lasting"])


@dataclass(frozen=True, slots=True)
class _Opened:
    """A loss that nothing has become of yet."""

    case: Case
    first: int | None  # index of the worker's first env in its batch
    what: str
    when: str
    traceback: str


class CrashReports:
    """Writes the reports of one worker: each is opened by a loss and closed by what becomes of it.

    Args:
        directory: Where they are written; ``None``: there are none.
        index: Index of the env in its batch, for the name of the file.

    Attributes:
        wanted: Whether there are reports.
        path: Of the report that is open; ``""``: none is.
        last: Of the report that was closed last; ``""``: there is none.
    """

    def __init__(self, directory: Path | None, index: int | None) -> None:
        self.wanted = directory is not None
        self.path = self.last = ""
        self._directory, self._index = directory, index
        self._opened: _Opened | None = None
        self._before: list[str] = []

    def open(self, loss: Loss, case: Case | None, traceback: str = "") -> None:
        """Note a loss; the report mentions one that was opened before it and not closed."""
        if self._directory is None or case is None:
            return
        if self._opened is not None:
            self._before = [*self._before, self._opened.what][-_BEFORE:]
        when = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        self._opened = _Opened(case, self._index, what_happened(loss), when, traceback)
        # The env's own index where the loss has one: a worker with several envs names that which it was executing.
        index = self._index if loss.env_index is None else loss.env_index
        self.path = str(store.new_path(self._directory, index))

    def close(self, recovery: Recovery) -> None:
        """Have the report written: at once if an error or a truncation tells of it, else soon, by another thread."""
        self.last, opened, before = self.path, self._opened, self._before
        self.path, self._opened, self._before = "", None, []
        if opened is None:
            return
        if store.writer.is_full(opened.case.size):
            opened = replace(opened, case=replace(opened.case, journal=None))
        recovery = replace(recovery, report=self.last)
        job = store.Job(Path(self.last), partial(_compose, opened, recovery, before), opened.case.size)
        store.writer.submit(job)
        if recovery.outcome in ("raised", "truncated"):
            store.writer.finish(job)


# --- the document -------------------------------------------------------------------------------


def _compose(opened: _Opened, recovery: Recovery, before: list[str]) -> tuple[dict[str, Any], store.Arrays]:
    case, loss = opened.case, recovery.loss
    build, setting = case.build, case.build.setting
    arrays = _arrays(case)
    document = {
        "format": FORMAT,
        "version": VERSION,
        "what": opened.what,
        "when": opened.when,
        "replay": replay_command(recovery.report),
        "loss": _loss(loss, opened.traceback),
        "request": {"command": loss.command, "deadline": case.deadline, **_request(case)},
        "recovery": {
            name: getattr(recovery, name) for name in ("outcome", "reason", "rung", "attempts", "replayed", "seconds")
        },
        "before": before,
        "env": _env(case.description),
        "build": {
            "exact": build.exact,
            "slots": 0 if case.layout is None else case.layout.slots,
            "first_env": opened.first,
            "autoreset": build.autoreset,
            "seeds": None if build.seeds is None else list(build.seeds),
            "draws": list(build.draws),
            "truncates_errors": build.truncates_errors,
            "own_space": build.space is not None,
            "path": [] if setting is None else list(setting.path),
            "arguments": [] if setting is None else list(setting.arguments),
            "directory": "" if setting is None else setting.directory,
        },
        "layout": None
        if case.layout is None
        else {name: getattr(case.layout, name) for name in ("slots", "action_bytes", "leaf_bytes")},
        "journal": _summary(case),
        "made_with": _versions(),
    }
    return document, arrays


def _loss(loss: Loss, traceback: str) -> dict[str, Any]:
    return {
        "cause": loss.cause,
        "how": how_lost(loss),
        "exit_code": loss.exit_code,
        "signal": signal_name(loss.exit_code) if loss.exit_code is not None and loss.exit_code < 0 else None,
        "env_index": loss.env_index,
        "command": loss.command,
        "step": loss.step,
        "seed": loss.seed,
        "pid": loss.pid,
        "stack": loss.stack.splitlines(),
        "traceback": traceback.splitlines(),
        "stderr": loss.stderr.splitlines(),
    }


def _request(case: Case) -> dict[str, Any]:
    """Return what was asked, readable."""
    if not case.pending or case.layout is None or case.description is None:
        return {}
    (entry,) = split_entries(case.pending, case.layout.end)
    try:
        if entry.is_step:
            return {"action": readable(action_of(entry, case.layout, case.description, exact=case.exact))}
        message = pickle.loads(entry.request_mail)
    except Exception as error:  # foreign code
        return {"message": f"cannot be shown: {type(error).__name__}: {error}"}
    return {"message": {type(message).__name__: readable(message)}}


def action_of(entry: Entry, layout: BankLayout, description: Description, *, exact: bool) -> Any:
    """Return the action, or the batch of actions, of a step's journal entry."""
    segment = Segment(-1)
    segment.lay_out(layout)
    segment.banks[0].stretch[:] = entry.stretch
    segment.write_request_mail(0, entry.request_mail)
    space = description.spaces[0][1]
    return action_decoder(space if exact else batch_space(space, layout.slots), segment)(0, entry.stretch[1] & ~ABSENT)


def _env(description: Description | None) -> dict[str, Any] | None:
    if description is None:
        return None
    spec: Any = None
    with contextlib.suppress(Exception):  # foreign code; and not all there is to a spec has a plain form
        spec = json.loads(description.spec.to_json())
    observation_space, action_space = description.spaces[0]
    return {
        "id": getattr(description.spec, "id", None),
        "spec": spec,
        "observation_space": readable(observation_space),
        "action_space": readable(action_space),
        "render_mode": description.render_mode,
    }


def _summary(case: Case) -> dict[str, Any] | None:
    journal = case.journal
    if journal is None or case.layout is None:
        return None
    steps = requests = 0
    for entry in split_entries(journal["entries"], case.layout.end):
        requests += 1
        steps += entry.is_step
    return {
        "requests": requests,
        "steps": steps,
        "from_construction": journal["complete"],
        "usable": journal["usable"],
        "stride": journal["stride"],
        "steps_before": journal["steps"],
    }


# --- the arrays -----------------------------------------------------------------------------------


def _arrays(case: Case) -> store.Arrays:
    build = case.build
    if build.setting is not None:
        build = replace(build, setting=replace(build.setting, environment={}, authkey=b""))
    arrays = {"build": _octets(cloudpickle.dumps(build))}
    if case.pending:
        arrays["pending"] = _octets(case.pending)
    if case.journal is None or case.layout is None:
        return arrays
    journal, anchors = case.journal, case.journal["anchors"]
    arrays |= {
        "entries": _octets(journal["entries"]),
        "lasting": _octets(journal["lasting"]),
        "marks": np.array(journal["marks"], np.int64).reshape(-1, 5),
        "anchors": np.array([anchor[:2] for anchor in anchors], np.int64).reshape(-1, 2),
        "resets": _octets(json.dumps(_resets(case)).encode()),
    }
    for index, (_, _, generators, state) in enumerate(anchors):
        arrays[f"generators_{index}"], arrays[f"state_{index}"] = _octets(generators), _octets(state)
    return arrays


def _octets(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, np.uint8)


def _resets(case: Case) -> list[list[Any]]:
    """Return, for each reset that has an exact form in JSON, its index among the entries (the pending one last)."""
    assert case.journal is not None
    assert case.layout is not None
    found = []
    for index, entry in enumerate(split_entries(case.journal["entries"] + case.pending, case.layout.end)):
        if not entry.is_step:
            with contextlib.suppress(Exception):  # foreign code
                message = pickle.loads(entry.request_mail)
                fields = reset_as_json(message) if isinstance(message, Reset) else None
                if fields is not None:
                    found.append([index, fields])
    return found


@cache
def _versions() -> dict[str, str]:
    system = platform.uname()
    return {
        "multienv": getattr(sys.modules.get("multienv"), "__version__", ""),
        "python": sys.version.split()[0],
        "gymnasium": gymnasium.__version__,
        "numpy": np.__version__,
        "platform": f"{system.system} {system.release} {system.machine}",
    }
