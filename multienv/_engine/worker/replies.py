"""How a worker writes its replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from multienv._engine.wire.banks import FAILED, HEAD, STEPPED, U32, pack_pickled_rows
from multienv._engine.wire.infos import NONE, InfoPacker, pack_extras
from multienv._engine.wire.messages import Failure, dumps
from multienv._engine.wire.segment import Segment
from multienv._engine.worker.failures import failure_of, pickled


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


def answer_rows(
    segment: Segment,
    number: int,
    packer: InfoPacker,
    infos: Sequence[tuple[int, Any]],
    *,
    flags: int = 0,
    tag: int = 0,
    evidence: bytes = b"",
    pickled_rows: bytes = b"",
    failures: Mapping[int, Failure] | None = None,
    generators: Mapping[int, bytes] = NONE,
    spaces: bytes = b"",
) -> None:
    """Reply to a step or a reset whose rows are written.

    Args:
        segment: With the rows.
        number: Of the request.
        packer: The worker's.
        infos: Slot and info, or the pickle of an info.
        flags: Of the reply.
        tag: That of the reward.
        evidence: A digest of each pickled row, packed.
        pickled_rows: The list of the pickled rows, itself pickled; ``b""`` if all rows are in the bank.
        failures: What envs have raised, by slot.
        generators: Slot → state of its random generators before it was reset.
        spaces: New ones of a single env, pickled.
    """
    rest = b""
    if infos and not failures and not generators and not spaces:
        rest = packer.numbers(infos)
    if not rest:
        taken = [(slot, info if type(info) is bytes else pickled("step", info)) for slot, info in infos]
        rest = pack_extras(taken, failures or {}, generators, spaces)
    first = pack_pickled_rows(evidence, pickled_rows)
    answer(segment, number, STEPPED, first + rest, flags=flags, tag=tag, pickled_part=len(first))
