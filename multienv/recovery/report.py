"""What is said of a lost worker: one text with everything that is known."""

from __future__ import annotations

import contextlib
import pickle
import signal
from collections.abc import Callable
from typing import Any

import cloudpickle

from multienv.errors import (
    EnvError,
    EnvRaisedError,
    HangingPoisonError,
    PoisonError,
    RemoteTraceback,
    ReplyBrokenError,
    RestartBudgetExceeded,
    ResultNotPicklableError,
    WorkerDiedError,
    WorkerHungError,
    WorkerLostError,
    catchable_as,
    rebuilt,
)
from multienv.events import Loss
from multienv.reports.crash import replay_command
from multienv.wire.messages import Failure


def decoded(decode: Callable[[bytes], Any], reply: bytes, command: str) -> Any:
    """What the env returned, if it can be unpickled here; where not, the request has been done all the same."""
    try:
        return decode(reply)
    except Exception as error:
        with contextlib.suppress(Exception):
            decode(reply)
            reply = b""  # it is not to blame: a signal handler raised
        if not reply:
            raise
        raise ResultNotPicklableError(
            f"{command}(): what the env returned was pickled, but cannot be unpickled here: "
            f"{type(error).__name__}: {error}. The {command} itself is done."
        ) from error


_CLASSES: dict[str, type[WorkerLostError]] = {
    "died": WorkerDiedError,
    "hung": WorkerHungError,
    "broken": ReplyBrokenError,
    "error": WorkerLostError,
    "poison": PoisonError,
    "budget": RestartBudgetExceeded,
}


def exit_text(code: int | None) -> str:
    """An exit code in words, signals by name."""
    if code is None:
        return "ended in an unknown way"
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (often the kernel's out-of-memory killer: look at dmesg and at the env's memory)" if -code == 9 else ""
    return f"was killed by {name}{hint}"


def what_happened(loss: Loss) -> str:
    """One sentence."""
    who = "The env's process" if loss.env_index is None else f"The process of env {loss.env_index}"
    if loss.cause == "hung":
        how = "did not answer within its deadline and was killed"
    elif loss.cause == "broken":
        how = "answered something that cannot be decoded and was killed"
    elif loss.cause == "error":
        how = "raised an exception"
    else:
        how = exit_text(loss.exit_code)
    return f"{who} {how} {where(loss.command, loss.step, loss.seed)}."


def where(command: str, step: int | None, seed: int | None) -> str:
    """What it was doing, how far into the episode, from which seed."""
    text = f"during {command}()" if command else "while idle"
    if step is not None and command not in ("initialize", "reset"):
        text += f" after {step} steps of its episode"
    return text + (f" (last seed {seed})" if seed is not None else "")


def replay_advice(report: str) -> str:
    """How to see it happen again, or nothing without a report."""
    return f"To see it again: {replay_command(report)}" if report else ""


def lost_error(loss: Loss, kind: str, advice: str, report: str = "") -> WorkerLostError:
    """The typed error for a loss, with all that is known of it."""
    parts = [f"{what_happened(loss)} {advice}".strip()]
    if loss.stack.strip():
        parts.append(f"Its stack:\n{_indented(loss.stack)}")
    if loss.stderr.strip():
        parts.append(f"Its last lines on stderr:\n{_indented(loss.stderr)}")
    if report:
        parts.append(replay_advice(report))
    hangs = kind == "poison" and loss.cause == "hung"
    error = (HangingPoisonError if hangs else _CLASSES[kind])("\n".join(parts))
    error.env_index, error.command, error.step, error.seed = loss.env_index, loss.command, loss.step, loss.seed
    error.exit_code, error.stack, error.stderr = loss.exit_code, loss.stack, loss.stderr
    error.report = report
    return error


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.strip().splitlines()[-60:])


def env_error(failure: Failure, *, index: int | None, command: str, step: int | None, seed: int | None) -> EnvError:
    """The error for an exception that the env raised: catchable by the exception's own type."""
    who = "The env" if index is None else f"Env {index}"
    message = f"{who} raised {failure.type_name}: {failure.text}\n{where(command, step, seed)}."
    if failure.result_not_picklable:
        error: Any = ResultNotPicklableError(f"{failure.text} ({where(command, step, seed)}.)")
        error.__cause__ = RemoteTraceback(failure.traceback)
    else:
        original = _original(failure)
        error = catchable_as(EnvRaisedError, original, message) if original else EnvRaisedError(message)
        remote = RemoteTraceback(failure.traceback)
        if original is not None:
            original.__cause__ = remote
        error.__cause__ = original or remote
    error.env_index, error.command, error.step, error.seed = index, command, step, seed
    error.remote_traceback = failure.traceback
    if failure.returned is not None:
        with contextlib.suppress(Exception):  # its info may be of a class that cannot be had here
            error.returned = pickle.loads(failure.returned)
    assert isinstance(error, EnvError)
    return error


def _original(failure: Failure) -> BaseException | None:
    if failure.exception is None:
        return None
    try:
        return rebuilt(cloudpickle.loads(failure.exception))
    except Exception:  # its class cannot be had here, or does not like to be rebuilt
        return None
