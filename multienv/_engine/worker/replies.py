"""How a worker writes its replies, and exceptions of an env in a form that can be sent to the trainer."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import cloudpickle

from multienv._engine.wire.banks import FAILED, HEAD, U32
from multienv._engine.wire.messages import Failure, dumps
from multienv._engine.wire.segment import Segment


def answer(
    segment: Segment, number: int, kind: int, payload: bytes, *, flags: int = 0, tag: int = 0, pickled_part: int = 0
) -> None:
    """Write head and payload of the reply to a request; ``pickled_part``: length of the pickled part of the payload."""
    view = segment.banks[number & 1].view
    HEAD.pack_into(view, 0, view[0], view[1], kind, flags, tag, number & U32, pickled_part)
    segment.write_reply_payload(number, payload)


def answer_failure(segment: Segment, number: int, error: Exception) -> None:
    """Reply with an exception."""
    answer(segment, number, FAILED, dumps(failure_of(error)))


class ResultNotPicklable(Exception):  # noqa: N818 - travels as a flag of Failure, never seen by users
    """Says that what the env returned cannot be pickled."""


def wrong_result(method: str, wanted: str, result: Any) -> Exception:
    """Return the error for an env whose ``step`` or ``reset`` does not return what gymnasium's API wants."""
    return TypeError(
        f"env.{method}() must return ({wanted}), and returned {type(result).__name__} {_text_of(result):.200}. "
        "Wrap an env of the old gym API, or fix the env."
    )


def wrong_value(name: str, wanted: str, value: Any) -> Exception:
    """Return the error for a reward that is not a number, or an info that is not a dict."""
    return TypeError(
        f"The env returned {type(value).__name__} {_text_of(value):.200} as {name}; gymnasium's API wants a {wanted}. "
        "Fix the env."
    )


def pickled(name: str, result: Any) -> bytes:
    """Pickle what the method or attribute ``name`` has returned. Raises :class:`ResultNotPicklable`."""
    try:
        return dumps(result)
    except Exception as error:
        raise ResultNotPicklable(
            f"What the env returned from {name}() cannot be sent to the trainer: {type(error).__name__}: {error}. "
            "Keep objects that cannot be pickled (locks, files, handles) out of observations and infos."
        ) from error


def failure_of(error: BaseException) -> Failure:
    """Return the exception in a form that can always be pickled."""
    return Failure(
        type_name=f"{type(error).__module__}.{type(error).__qualname__}",
        text=_text_of(error),
        traceback="".join(traceback.format_exception(error)),
        exception=_pickled(error),
        result_not_picklable=isinstance(error, ResultNotPicklable),
    )


def exit_code(error: SystemExit) -> int:
    """Return the exit code of a process that this exception ends."""
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _text_of(value: object) -> str:
    try:
        return str(value)
    except Exception:  # code of the user
        return f"<a {type(value).__name__} whose str() raises>"


def _pickled(error: BaseException) -> bytes | None:
    """Pickle type, arguments and attributes; ``None`` where they cannot be.

    Not the exception itself: to unpickle it would call its constructor, which may want other arguments.
    """
    for state in (vars(error), {}):
        try:
            data: bytes = cloudpickle.dumps((type(error), error.args, state))
            pickle.loads(data)
        except Exception:  # noqa: S112 - pickling runs code of the user, in both directions
            continue
        return data
    return None
