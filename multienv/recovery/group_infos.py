"""What the envs of a group tell besides their rows; what one tells that cannot be read here costs that one alone.

All infos of a process are pickled together, which is cheapest. Where they cannot be unpickled (a class that only the
worker has, a ``__setstate__`` that raises) the worker is asked for each by itself, while the request is still pending:
so that a loss or an interruption meanwhile is what it is at any other time.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Sequence
from typing import Any

from multienv.backends.arena import Arena
from multienv.errors import ResultNotPicklableError
from multienv.recovery.group_attempts import GroupMender
from multienv.recovery.report import decoded
from multienv.wire.messages import (
    APART,
    REPLY,
    STEPPED,
    Failure,
    Initialize,
    TellApart,
    pack_message,
)
from multienv.wire.observations import info_of

_unpack = REPLY.unpack_from


class GroupReader(GroupMender):
    """Reads what comes with the replies of a group.

    Args:
        arena: Where the rows lie.
    """

    __slots__ = ("_read",)

    def __init__(self, launch: Any, initialize: Initialize, arena: Arena, **options: Any) -> None:
        """Start nothing yet."""
        super().__init__(launch, initialize, arena, **options)
        self._read: tuple[bytes, Any] | None = None  # a reply, and what it tells: to be unpickled once

    def _await(self, start: bytes, *, defer: bool = False) -> bytes:
        return self._legible(super()._await(start, defer=defer))

    def _legible(self, reply: bytes) -> bytes:
        """The reply, or the same with all infos apart."""
        while not self._can_read(reply):
            self._arm_pending()
            self._backend.send(pack_message(self.seq, TellApart()))  # its own number: it is the same answer
            reply = super()._await(b"")
        return reply

    def _can_read(self, reply: bytes) -> bool:
        _, _, info_length, kind, _, _, _ = _unpack(reply)
        if not info_length or kind != STEPPED:
            return True
        read = self._read
        if read is None or read[0] is not reply:
            try:
                self._read = reply, info_of(reply)
            except Exception:
                with contextlib.suppress(Exception):
                    info_of(reply)
                    reply = b""  # it is not to blame: a signal handler raised
                if not reply:
                    raise
                return False
        return True

    def _info_in(self, reply: bytes, command: str) -> tuple[dict[str, Any], bytes | None]:
        read, self._read = self._read, None
        told = super()._info_in(reply, command) if read is None or read[0] is not reply else read[1]
        return (self._joined(told[0], command), told[1]) if APART in told[0] else told

    def _joined(self, extras: dict[str, Any], command: str) -> dict[str, Any]:
        """The infos, and for those that cannot be read a failure."""
        slots = [slot for slot, _ in extras[APART]]
        told, illegible = self._values([data for _, data in extras[APART]], command)
        infos = [pair for place, pair in enumerate(zip(slots, told, strict=True)) if place not in illegible]
        failures = {slots[place]: failure for place, failure in illegible.items()}
        return {
            "infos": infos,
            "failures": {**extras.get("failures", {}), **failures},
            "illegible": sorted(failures),
        }

    def _values(self, pickled: Sequence[bytes | None], command: str) -> tuple[list[Any], dict[int, Failure]]:
        """What has been pickled one by one; ``None`` where there is nothing, and for what cannot be read a failure."""
        values: list[Any] = [None] * len(pickled)
        failures: dict[int, Failure] = {}
        for place, data in enumerate(pickled):
            try:
                if data is not None:
                    values[place] = decoded(pickle.loads, data, command)
            except ResultNotPicklableError as error:
                told = "".join(traceback.format_exception(error.__cause__))
                failures[place] = Failure("", str(error), told, None, result_not_picklable=True)
        return values, failures

    def _read_loose(
        self, pickled: Sequence[bytes] | None, extras: dict[str, Any], command: str
    ) -> tuple[list[Any] | None, dict[str, Any]]:
        """Observations that came in the reply, and the extras with those that cannot be read."""
        if pickled is None:
            return None, extras
        values, failures = self._values(pickled, command)
        if failures:
            extras = {
                "infos": [pair for pair in extras.get("infos", ()) if pair[0] not in failures],
                "failures": {**extras.get("failures", {}), **failures},
                "illegible": sorted({*extras.get("illegible", ()), *failures}),
            }
        return values, extras

    def _error_in(self, reply: bytes) -> Failure | None:
        if _unpack(reply)[3] != STEPPED:
            return super()._error_in(reply)
        if not _unpack(reply)[2] or not self._can_read(reply):
            return None
        assert self._read is not None
        return next(iter(self._read[1][0].get("failures", {}).values()), None)
