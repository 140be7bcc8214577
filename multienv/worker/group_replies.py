"""What a group answers to a step or a reset, besides its rows; what of it cannot be pickled costs its own env alone."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from multienv.wire.messages import ANCHORED, REPLY, STEPPED, Failure, dumps
from multienv.worker.failures import not_picklable, not_sent
from multienv.worker.group_states import GroupStates

# What rides in a reply besides the rows: infos by env, and what the envs have raised.
Infos = list[tuple[int, dict[str, Any]]]
Failures = dict[int, Failure]


class GroupReplies(GroupStates):
    """Makes the replies that are not plain."""

    _careful = False  # a request is done again: whose answer it is that ends the process is to be known

    @abstractmethod
    def _failed(self, seq: int, slot: int, error: Exception) -> Failure:
        """An env has raised: its episode ends there, at what was seen last."""

    def _packed(self, seq: int, infos: Infos, failures: Failures, state: bytes | None) -> bytes:
        """The reply, with all that is not in the rows."""
        if self._careful:
            self._careful = False
            self._try_out([*infos, *enumerate(self._rows.loose)])
        extras: dict[str, Any] = {}
        if infos:
            extras["infos"] = infos
        if failures:
            extras["failures"] = failures
        try:
            reply = self._framed(seq, extras, state)
        except Exception:
            if not self._excuse(seq, infos, failures):
                raise
            return self._packed(seq, infos, failures, state)
        self._told = infos, failures, state
        return reply

    def _framed(self, seq: int, extras: dict[str, Any], state: bytes | None) -> bytes:
        rows = self._rows
        flags, data, tail = (0, rows.shown[seq & 1](), 0) if rows.laid_out else rows.loose_evidence(seq)
        info = b"" if not extras and state is None else dumps(extras if state is None else (extras, state))
        flags |= ANCHORED if state is not None else 0
        length = REPLY.size + len(data) + len(info)
        return REPLY.pack(length, seq, len(info), STEPPED, flags, 0, tail) + data + info

    def _excuse(self, seq: int, infos: Infos, failures: Failures) -> bool:
        """Find what cannot be pickled, and take it for the failure of its env; false if there is nothing left."""
        for slot, info in infos:
            try:
                dumps(info)
            except Exception as error:
                infos[:] = [one for one in infos if one[0] != slot]
                failures[slot] = self._failed(seq, slot, not_sent("step", error, info=info))
                return True
        for slot, observation in enumerate(self._rows.loose):
            try:
                dumps(observation)
            except Exception as error:
                self._rows.loose[slot] = None
                failures[slot] = self._failed(seq, slot, not_picklable("step", error))
                return True
        return False
