"""Looking out for the next request before the process sleeps.

A process that sleeps is woken by an interrupt from another core; on a virtual machine, whose core has been given away
meanwhile, that takes 20 to 50 µs, as long as several steps of CartPole, and the caches are cold afterwards. So on each
core one worker, if its trainer was back within some 200 µs the last times, looks for that long whether there is a
request, before it waits for one. At each look it gives way to whoever wants the core, another worker that has been
asked for instance, so only time is spent that nobody else has use for; and where the trainer takes longer, because its
policy does, it does not look.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from time import perf_counter
from typing import Any

from multienv.wire.memory import LOOKS

# Seconds: so long it looks, and a trainer that is back by then is worth looking for.
PATIENCE = 200e-6
# To have looked in vain costs as much as so many times gain; when more is lost than was gained it stops looking.
COST = 4
_MOST = 4 * COST


class Lookout:
    """Looks for requests, as long as that pays.

    Args:
        ready: Tells, given 0, whether there is a request; ``None`` where that cannot be asked.
        give_way: Lets others have the core, if they want it; ``None`` where that cannot be done.
        words: The control words; the trainer says there whether this worker is to look at all.
        clock: Tells seconds.
    """

    def __init__(
        self,
        ready: Callable[[int], object] | None,
        give_way: Callable[[], object] | None,
        words: Any,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Nothing is known of the trainer."""
        self._able = ready is not None and give_way is not None
        self._ready, self._give_way = ready or bool, give_way or int
        self._words = words
        self._clock = clock
        self._credit = 0

    @classmethod
    def over(cls, requests: int, words: Any) -> Lookout:
        """For what comes through this pipe, with what the system offers."""
        ready = None
        if hasattr(select, "poll"):
            poller = select.poll()
            poller.register(requests, select.POLLIN)
            ready = poller.poll
        return cls(ready, getattr(os, "sched_yield", None), words)

    def after(self, seconds: float) -> Callable[[], bool] | None:
        """What to call before the next request is waited for, if anything, after the trainer has been away so long."""
        if seconds > PATIENCE or not self._able or not self._words[LOOKS]:
            return None
        self._credit = COST
        return self.look

    def look(self) -> bool:
        """Return when there is a request, or when it has taken too long; false if this is not to be called again."""
        ready, give_way, clock = self._ready, self._give_way, self._clock
        until = clock() + PATIENCE
        while not ready(0):
            if clock() > until:
                self._credit -= COST
                return self._credit > 0
            give_way()
        self._credit = min(_MOST, self._credit + 1)
        return True
