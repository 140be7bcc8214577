"""What goes wrong in an env, in a form that travels."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import cloudpickle

from multienv.wire.messages import Failure


class ResultNotPicklable(Exception):  # noqa: N818 - travels as a flag of Failure, never seen by users
    """What the env returned cannot travel."""


def wrong_result(what: str, wanted: str, result: Any) -> Exception:
    """The env does not keep to gymnasium's API."""
    return TypeError(
        f"env.{what}() returned {type(result).__name__} {result!r:.200}; gymnasium's API wants ({wanted}). "
        "Wrap an env of the old gym API, or mend the env."
    )


def wrong_reward(reward: Any) -> Exception:
    """It is no number."""
    return TypeError(
        f"env.step() returned {type(reward).__name__} {_text_of(reward):.200} as reward; gymnasium's API wants a "
        "float. Mend the env."
    )


def not_sent(what: str, error: Exception, **parts: Any) -> Exception:
    """The fault of a part that is not even true or false, an array for instance; or else of pickling."""
    for name, part in parts.items():
        try:
            bool(part)
        except Exception as fault:
            wanted = "a dict" if name == "info" else "a bool"
            return TypeError(
                f"env.{what}() returned {type(part).__name__} {_text_of(part):.200} as {name}; gymnasium's API wants "
                f"{wanted}. It is neither true nor false: {_text_of(fault)}"
            )
    return not_picklable(what, error)


def not_picklable(what: str, error: Exception) -> Exception:
    """What it has returned cannot travel."""
    return ResultNotPicklable(
        f"What the env returned from {what}() cannot be sent to the trainer: {type(error).__name__}: {error}. "
        "Keep objects that cannot be pickled (locks, files, handles) out of observations and infos."
    )


def failure_of(error: BaseException) -> Failure:
    """The exception in a form that travels whatever it is made of."""
    return Failure(
        type_name=f"{type(error).__module__}.{type(error).__qualname__}",
        text=_text_of(error),
        traceback="".join(traceback.format_exception(error)),
        exception=_travelling(error),
        result_not_picklable=isinstance(error, ResultNotPicklable),
    )


def _text_of(value: object) -> str:
    try:
        return str(value)
    except Exception:  # foreign code
        return "<its text cannot be had>"


def _travelling(error: BaseException) -> bytes | None:
    """Type, arguments and attributes, pickled; ``None`` where they cannot be.

    Not the exception itself: to unpickle it would call its constructor, which may want other arguments.
    """
    for state in (vars(error), {}):
        try:
            data: bytes = cloudpickle.dumps((type(error), error.args, state))
            pickle.loads(data)
        except Exception:  # noqa: S112 - pickling runs foreign code, in both directions
            continue
        return data
    return None
