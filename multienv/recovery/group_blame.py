"""Which env of a group has ended its process, and whether it takes part when the request is asked again."""

from __future__ import annotations

from collections import Counter
from typing import Any

from multienv.backends.arena import Arena
from multienv.backends.base import Gone
from multienv.errors import MultienvError
from multienv.events import Loss
from multienv.recovery.group_infos import GroupReader
from multienv.recovery.report import what_happened
from multienv.wire.messages import Initialize, LeftOut

# In place of the slot of whoever has ended the process.
UNKNOWN = -1


class GroupBlame(GroupReader):
    """Keeps account of one request: who has died of it, and who is left out of it.

    Args:
        arena: Where the rows lie.
    """

    __slots__ = ("_absent", "_blamed", "_built_anew", "_deaths_of", "_raised")

    def __init__(self, launch: Any, initialize: Initialize, arena: Arena, **options: Any) -> None:
        """Nobody is to blame for anything."""
        super().__init__(launch, initialize, arena, **options)
        self._blamed = -1  # number of the request that the rest is about
        self._absent: dict[int, LeftOut] = {}  # who does not take part in it
        self._raised: dict[int, MultienvError] = {}  # what is raised of them
        self._deaths_of: Counter[int] = Counter()  # processes that it has killed, by slot
        self._built_anew: Counter[int] = Counter()  # how often it was to be built anew for it, by slot

    def _slot_of(self, gone: Gone) -> int:
        """Whose call it was; after garbage others may have been called since, unless it was asked for once more."""
        again = self._blamed == self.seq and self._deaths_of[UNKNOWN]
        return gone.slot if gone.cause != "broken" or again else UNKNOWN

    def _forget_blame(self) -> None:
        self._absent, self._raised, self._deaths_of, self._built_anew = {}, {}, Counter(), Counter()

    def _blame(self, gone: Gone, loss: Loss, slot: int, command: str) -> None:
        """Decide whether the env that was being called takes part when the request is asked again."""
        self._deaths_of[slot] += 1
        if slot < 0:  # asked again it is tried out env by env, and whose it is shows
            deaths = self._deaths_of[UNKNOWN]
            if deaths < max(2, self._policy.poison_after):
                return
            blamed: list[int] = [one for one in range(self._group.size) if one not in self._absent]
        else:
            deaths, blamed = self._deaths_of[slot] + self._deaths_of[UNKNOWN], [slot]
        on_loss, resetting = self._on_loss(gone.cause), gone.resetting or command == "reset"
        poison = deaths >= self._policy.poison_after
        killed = f"The same {'reset' if gone.resetting else command} killed {deaths} processes; it was not tried again."
        for one in blamed:
            if on_loss == "raise" and command in ("step", "reset"):
                error = self._lost_error(loss, loss.cause, "Its episode is lost; the others go on.")
                self._leave_out(one, error, self._for_anew(one, resetting and slot >= 0))
            elif poison and (resetting or command != "step"):
                lasting = self._for_anew(one, resetting and slot >= 0)
                advice = killed if lasting is None else f"{killed} The env is built anew."
                self._leave_out(one, self._lost_error(loss, "poison", advice), lasting)
            elif command == "step" and not resetting and (poison or on_loss == "truncate"):
                self._absent[one] = LeftOut(None, f"{what_happened(loss)} {killed if poison else ''}".rstrip())

    def _leave_out(self, slot: int, error: MultienvError, lasting: tuple[bytes, ...] | None = None) -> None:
        self._absent[slot], self._raised[slot] = LeftOut(None, "", lasting=lasting), error

    def _for_anew(self, slot: int, anew: bool) -> tuple[bytes, ...] | None:
        """What is done to an env that is built anew, whose reset would end any process; ``None``: it stays as it is.

        So it does where building it has ended one too, and then another that has left out what was called and set.
        """
        if not anew:
            return None
        self._built_anew[slot] += 1
        if self._built_anew[slot] > 1:
            return () if self._built_anew[slot] == 2 else None
        return tuple(self._journal.lasting())
