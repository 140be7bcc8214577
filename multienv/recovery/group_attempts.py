"""Which way back a group takes: the first on which all envs are what they were, else the one that loses fewest."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any, NamedTuple

from multienv.backends.arena import Arena
from multienv.backends.base import Backend, Gone
from multienv.events import Rung
from multienv.recovery.group_rows import DIFFERENT, GroupKeeper
from multienv.recovery.healer import BudgetSpent, Effort, Unrecoverable
from multienv.recovery.journal import Plan
from multienv.wire.messages import Initialize


class Attempt(NamedTuple):
    """A process that has replayed, and of whom that showed something else than was seen."""

    backend: Backend
    strays: dict[int, str]
    rung: Rung
    plan: Plan | None

    def let_go(self) -> None:
        """End the process."""
        self.backend.kill()
        self.backend.release()


class GroupMender(GroupKeeper):
    """Brings the envs of a process back together.

    Args:
        arena: Where the rows lie.
    """

    __slots__ = ("_erratic",)

    def __init__(self, launch: Any, initialize: Initialize, arena: Arena, **options: Any) -> None:
        """Start nothing yet."""
        super().__init__(launch, initialize, arena, **options)
        self._erratic: set[int] = set()  # who differed the last time, whatever was tried

    def _brought_back(self, gone: Gone, effort: Effort) -> Backend:
        """A process that holds all of them as they were, but for the strays.

        The best so far is kept alive while others are tried, so that none has to be replayed twice. For the sake of
        envs that have differed on all ways the last time no second one is tried.
        """
        best, tried = None, 0
        try:
            with closing(self._attempts(gone, effort)) as attempts:
                for backend in attempts:
                    attempt, tried = Attempt(backend, self._strays, effort.rung, effort.plan), tried + 1
                    if best is None or len(attempt.strays) < len(best.strays):
                        best, attempt = attempt, best
                    if attempt is not None:
                        attempt.let_go()
                    if all(why == DIFFERENT and slot in self._erratic for slot, why in best.strays.items()):
                        break
                    effort.admitted = True  # for all of them together it is one restart
        except (BudgetSpent, Unrecoverable):
            if best is None:
                raise
        except BaseException:
            if best is not None:
                best.let_go()
            raise
        assert best is not None
        self._strays, effort.rung, effort.plan = best.strays, best.rung, best.plan
        differing = {slot for slot, why in best.strays.items() if why == DIFFERENT}
        self._erratic = differing if tried > 1 else differing & self._erratic
        if not best.strays:
            self._journal.learn(effort.refuted, effort.plan)
        return best.backend

    def _attempts(self, gone: Gone, effort: Effort) -> Generator[Backend, None, None]:
        woken = self._wake(gone, effort)
        if woken is not None:
            yield woken
        yield from self._healer.attempts(self._journal.plans(), effort, self._steps, self._looks_the_same)
