"""One loss as a report: a JSON document to read, and the journal beside it as arrays."""

from __future__ import annotations

import contextlib
import json
import platform
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from multienv.events import Loss, Recovery
from multienv.reports.plain import encode
from multienv.reports.table import Arrays, Shape, to_arrays
from multienv.wire.messages import RESET, SEEDED, STEP, Description, Group, Initialize, dumps
from multienv.wire.observations import Placement

FORMAT = "multienv-report"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Case:
    """What is known of an env when its process is lost.

    Attributes:
        history: What drove it, as frames that lie end to end, and whether from its construction on; nothing if that
            is not known any more. It is asked for later, in another thread.
        size: Bytes of memory that holds until then.
        pending: The request it was lost in, ``b""`` if it was being built.
        initialize: How it is built.
        description: What it is, once it has been built.
        deadline: What the request was allowed, seconds.
    """

    history: Callable[[], tuple[bytes, bool] | None]
    size: int
    pending: bytes
    initialize: Initialize
    description: Description | None
    deadline: float | None


@dataclass(frozen=True, slots=True)
class Told:
    """The loss in words, and when it was."""

    what: str
    how: str
    when: str
    traceback: str = ""


def replay_command(report: str) -> str:
    """What to type to see it happen again."""
    return f"multienv replay {shlex.quote(report)}"


def compose(case: Case, told: Told, recovery: Recovery, before: list[str]) -> tuple[Any, Arrays]:
    """The document, all of it JSON, and the arrays."""
    loss, initialize = recovery.loss, case.initialize
    arrays, journal = _journal(case)
    document = {
        "format": FORMAT,
        "version": VERSION,
        "what": told.what,
        "when": told.when,
        "replay": replay_command(recovery.report),
        "loss": _loss(loss, told.how, told.traceback),
        "request": {
            "command": loss.command,
            "deadline": case.deadline,
            **_request(case),
        },
        "recovery": {
            name: getattr(recovery, name) for name in ("outcome", "reason", "rung", "attempts", "replayed", "seconds")
        },
        "before": before,
        "env": _env(case.description),
        "group": _group(initialize.group),
        "process_seeds": initialize.seeds and list(initialize.seeds),
        "inline_limit": initialize.inline_limit,
        "path": list(initialize.setting.path) if initialize.setting else [],
        "arguments": list(initialize.setting.arguments) if initialize.setting else [],
        "directory": initialize.setting.directory if initialize.setting else "",
        "journal": journal,
        "made_with": _versions(),
    }
    if initialize.group is not None and initialize.group.space is not None:
        arrays["group_space"] = np.frombuffer(dumps(initialize.group.space), np.uint8)
    if initialize.env_fn is not None:
        arrays["env_fn"] = np.frombuffer(initialize.env_fn, np.uint8)
    if initialize.setting is not None:
        # Not the environment: it is where people keep their secrets.
        arrays["registrations"] = np.frombuffer(initialize.setting.registrations, np.uint8)
        arrays["overrides"] = np.frombuffer(initialize.setting.overrides, np.uint8)
    return document, arrays


def _loss(loss: Loss, how: str, traceback: str) -> dict[str, Any]:
    signal_name = None
    if loss.exit_code is not None and loss.exit_code < 0:
        try:
            signal_name = signal.Signals(-loss.exit_code).name
        except ValueError:
            signal_name = f"signal {-loss.exit_code}"
    return {
        "cause": loss.cause,
        "how": how,
        "exit_code": loss.exit_code,
        "signal": signal_name,
        "env_index": loss.env_index,
        "command": loss.command,
        "step": loss.step,
        "seed": loss.seed,
        "pid": loss.pid,
        "stack": loss.stack.splitlines(),
        "traceback": traceback.splitlines(),
        "stderr": loss.stderr.splitlines(),
    }


def _journal(case: Case) -> tuple[Arrays, dict[str, Any] | None]:
    if not case.pending:  # it was being built: there is nothing to run again but that
        return {}, {"requests": 0, "steps": 0, "from_construction": True}
    known = case.history()
    if known is None or case.description is None:
        return {}, None
    history, from_construction = known
    arrays = to_arrays(history + case.pending, _shape(case.description, case.initialize))
    steps = int(np.count_nonzero(arrays["kind"] == STEP))
    return arrays, {"requests": len(arrays["kind"]), "steps": steps, "from_construction": from_construction}


def _shape(description: Description, initialize: Initialize) -> Shape:
    space = description.observation_space
    if initialize.group is not None:  # what is shown of all its envs together has a form of its own
        return Shape(description.action_space.shape)
    of_an_array = type(space) in (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)
    digests = Placement.of(space, initialize.inline_limit).block_size > 0
    return Shape(description.action_space.shape, (space.dtype, space.shape) if of_an_array else None, digests)


def _request(case: Case) -> dict[str, Any]:
    """What was asked, readable."""
    if not case.pending or case.description is None:
        return {}
    arrays = to_arrays(case.pending, _shape(case.description, case.initialize))
    if "plain" in arrays:
        form = json.loads(arrays["plain"].tobytes())
        return {"action": form} if arrays["kind"][0] == STEP else {"message": form}
    if arrays["kind"][0] == RESET:
        return {"message": {"reset": {"seed": int(arrays["seed"][0]) if arrays["tag"][0] & SEEDED else None}}}
    (values,) = (values for name, values in arrays.items() if name.startswith("actions_"))
    return {"action": encode(values[0] if "actions_python_int" not in arrays else int(values[0]))}


def _env(description: Description | None) -> dict[str, Any] | None:
    """What to make it by again, where it has a spec that says so; and its spaces, to read."""
    if description is None:
        return None
    spec: Any = None
    with contextlib.suppress(Exception):  # foreign code; and not all there is to a spec has a plain form
        spec = json.loads(description.spec.to_json())
    return {
        "id": getattr(description.spec, "id", None),
        "spec": spec,
        "observation_space": _shown(description.observation_space),
        "action_space": _shown(description.action_space),
        "render_mode": description.render_mode,
    }


def _group(group: Group | None) -> dict[str, Any] | None:
    """Of which envs of a batch that process was."""
    if group is None:
        return None
    names = ("first", "size", "num_envs", "autoreset", "truncates_errors", "with_observations")
    return {name: getattr(group, name) for name in names}


def _shown(space: Any) -> str:
    try:
        return f"{space!s:.1000}"
    except Exception as error:  # foreign code
        return f"<{type(error).__name__}>"


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
