"""How a worker writes what it answers besides rows: a value, or a failure."""

from __future__ import annotations

from multienv.wire.banks import FAILED, HEAD
from multienv.wire.messages import Failure, dumps
from multienv.wire.segment import Segment
from multienv.worker.failures import failure_of

U32 = 0xFFFFFFFF


def answer(segment: Segment, number: int, kind: int, mail: bytes) -> None:
    """Write the reply to request ``number``: its kind and its mail; rows stay as they are."""
    view = segment.banks[number & 1].view
    HEAD.pack_into(view, 0, view[0], view[1], kind, 0, 0, number & U32, 0)
    segment.write_reply_mail(number, mail)


def answer_failure(segment: Segment, number: int, error: Exception) -> None:
    """Reply to request ``number`` with an exception."""
    failure: Failure = failure_of(error)
    answer(segment, number, FAILED, dumps(failure))
