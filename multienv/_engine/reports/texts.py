"""Sentences and errors about a lost worker or an env that raised: all that is known, in order, for people to read."""

from __future__ import annotations

import contextlib
import pickle
import re
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from multienv._engine.wire.messages import Failure
from multienv.errors import (
    EnvError,
    RemoteTraceback,
    ResultNotPicklableError,
    WorkerHungError,
    WorkerLostError,
    catchable_as,
    listed,
    rebuilt,
    show_remotely,
)
from multienv.events import Loss, Recovery

# What an outcome that is not exact costs the caller.
_COSTS = {"truncated": "the episode has ended", "reset": "in a new process", "raised": "an error is raised"}
# Lines of a stack or of stderr that an error shows.
_LINES = 60
# The frames of multienv's own code in a traceback or a stack of a worker, and what faulthandler writes below the stack.
_OUR_FRAMES = re.compile(
    rf'(?:^  File "{re.escape(str(Path(__file__).parents[1]))}/(?:worker|processes|wire)/.*\n?(?:    .*\n?)*)+'
    r'(?:  File "<string>", line 1 in <module>\n?)?|^\nExtension modules: .*\n?',
    re.MULTILINE,
)


def counted(number: int, thing: str) -> str:
    """Return a number of things for people to read: ``"1 request"``, ``"2 requests"``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def exit_text(code: int | None) -> str:
    """Return an exit code in words, signals by name."""
    if code is None:
        return "ended in an unknown way"
    if code >= 0:
        return f"exited with code {code}"
    hint = " (often the kernel's out-of-memory killer: look at dmesg and at the env's memory)" if code == -9 else ""
    return f"was killed by {signal_name(code)}{hint}"


def signal_name(code: int) -> str:
    """Return the name of the signal in a negative exit code."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def what_happened(loss: Loss) -> str:
    """Return one sentence: which process, how it was lost, and where in its work."""
    envs = loss.envs if loss.env_index is None else (loss.env_index,)
    process = f"The process of {named(envs)}" if envs else "The env's process"
    text = f"{process} {how_lost(loss)} {where(loss.command, loss.step, loss.seed, idle=loss.idle)}"
    if loss.env_index is None and len(loss.seeds) > 1 and None not in loss.seeds:
        text += f" (last seeds {listed(loss.seeds)})"
    return text + ("." if loss.pid is None else f" (pid {loss.pid}).")


def named(envs: Sequence[int]) -> str:
    """Return how sentences name the envs with these indexes; ``"the env"`` if it has none."""
    return f"env{'s' if len(envs) > 1 else ''} {listed(envs)}" if envs else "the env"


def deadline_of(command: str) -> str:
    """Return the name of the deadline, a field of ``Deadlines``, that a command has."""
    return {"step": "step", "rollout": "step", "reset": "reset", "initialize": "start"}.get(command, "call")


def how_lost(loss: Loss) -> str:
    """Return how the process was lost, the end of a sentence about it."""
    if loss.cause == "hung":
        name = deadline_of(loss.command)
        limit = "" if loss.deadline is None else f" of {loss.deadline:g} s (Deadlines.{name})"
        return f"did not answer within its deadline{limit} and was killed"
    if loss.cause == "broken":
        return "answered something that cannot be decoded and was killed"
    if loss.detail:
        return f"is gone: {loss.detail}"
    return exit_text(loss.exit_code)


def where(command: str, step: int | None, seed: int | None, *, idle: bool = False) -> str:
    """Return what the env was doing, how far into its episode, and its last seed."""
    text = f"while it was idle before {command}()" if idle else f"during {command}()"
    if step is not None and command not in ("initialize", "reset"):
        text += f"{',' if idle else ''} after {counted(step, 'step')} of its episode"
    return text + (f" (last seed {seed})" if seed is not None else "")


def outcome_text(recovery: Recovery) -> str:
    """Return what the log says of a loss and of what became of it; no sentence stands in it twice."""
    happened = what_happened(recovery.loss)
    cost = f"from the {recovery.method}, {counted(recovery.replayed, 'request')} replayed" if recovery.method else ""
    cost = cost or _COSTS.get(recovery.outcome, "")
    outcome = ", ".join(filter(None, [recovery.outcome, cost, f"in {recovery.seconds:.3f} s"]))
    parts = [happened, f"Outcome: {outcome}."]
    # The reason often begins with what happened.
    parts.append(recovery.reason.removeprefix(happened).strip())
    if recovery.loss.cause == "hung" and recovery.outcome not in ("exact", "replayed"):
        parts.append(f"The env may only be slower than Deadlines.{deadline_of(recovery.loss.command)}: give it more.")
    parts.append(replay_advice(recovery.report))
    return " ".join(filter(None, parts))


def replay_command(report: str) -> str:
    """Return the command that runs a report again."""
    return f"multienv replay {shlex.quote(report)}"


def replay_advice(report: str) -> str:
    """Return how to see it happen again; ``""`` without a report."""
    return f"To see it again: {replay_command(report)}" if report else ""


def lost_error(loss: Loss, advice: str, report: str = "", kind: type[WorkerLostError] | None = None) -> WorkerLostError:
    """Build the error for a loss, with all that is known of it.

    Args:
        loss: What happened.
        advice: What to do next, in sentences.
        report: Path of the crash report; ``""``: none is written.
        kind: The class of the error; ``None``: as the process was lost.
    """
    parts = [f"{what_happened(loss)} {advice}".strip()]
    if loss.stack.strip():
        parts.append(f"Its stack:\n{_indented(foreign_frames(loss.stack))}")
    if loss.stderr.strip():
        parts.append(f"Its last lines on stderr:\n{_indented(loss.stderr)}")
    if report:
        parts.append(replay_advice(report))
    kind = kind or (WorkerHungError if loss.cause == "hung" else WorkerLostError)
    error = kind("\n".join(parts))
    error.env_index, error.command, error.step, error.seed = loss.env_index, loss.command, loss.step, loss.seed
    error.idle, error.envs = loss.idle, loss.envs
    error.exit_code, error.stack, error.stderr = loss.exit_code, loss.stack, loss.stderr
    error.report = report
    return error


def foreign_frames(text: str) -> str:
    """Return a traceback or a stack without the frames of multienv; a stack keeps them if it has no others."""
    left = _OUR_FRAMES.sub("", text)
    is_bare = "most recent call first" in text and '  File "' not in left
    return (text if is_bare else left).strip("\n")


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.strip().splitlines()[-_LINES:])


def env_error(failure: Failure, *, index: int | None, command: str, step: int | None, seed: int | None) -> EnvError:
    """Build the error for an exception that the env raised: ``except`` its own type catches it.

    Args:
        failure: What the worker told.
        index: The env's index in its batch, or ``None``.
        command: What was asked: ``"step"``.
        step: Steps of the episode so far.
        seed: That of the last seeded reset.
    """
    moment = where(command, step, seed)
    if failure.result_not_picklable:
        error: Any = ResultNotPicklableError(f"{failure.text} ({moment}.)")
        error.__cause__ = RemoteTraceback(failure.traceback)
    else:
        env = "The env" if index is None else f"Env {index}"
        message = f"{env} raised {failure.type_name}: {failure.text}\n{moment}."
        cause = cause_of(failure)
        error = EnvError(message) if isinstance(cause, RemoteTraceback) else catchable_as(EnvError, cause, message)
        error.__cause__ = cause
    error.env_index, error.command, error.step, error.seed = index, command, step, seed
    error.remote_traceback = failure.traceback
    if failure.returned is not None:
        with contextlib.suppress(Exception):  # its info may be of a class that is not importable here
            error.returned = pickle.loads(failure.returned)
    return error  # type: ignore[no-any-return]


def cause_of(failure: Failure) -> BaseException:
    """Return the exception of a failure; where it cannot be had here, what carries its traceback."""
    if failure.exception is not None:
        with contextlib.suppress(Exception):  # its class is not importable here, or refuses to be rebuilt
            original = rebuilt(cloudpickle.loads(failure.exception))
            show_remotely(original, foreign_frames(failure.traceback))
            return original
    return RemoteTraceback(failure.traceback)
