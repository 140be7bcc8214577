"""Which core each worker of a batch runs on, and in which turn a round asks them.

A worker on another core than the caller begins as soon as it is asked; one on the caller's own core has to wait until
the caller waits. So the others are asked first. And to be woken takes as long as some steps do: so the caller first
waits for the worker that was asked last, on its own core; by then most of the others have answered, and to read what
they say does not put it to sleep again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

from multienv.cores import busy_cores, cores


class _Worker(Protocol):
    core: int | None

    def prefer(self, core: int | None, *, looks: bool) -> None: ...


def spread(workers: Sequence[_Worker]) -> None:
    """Deal the workers to the cores; where there are fewer than cores, the scheduler knows better which are idle.

    On each core one of them, the last to be asked there, looks out for its next request while it could sleep: so the
    core is awake when any of them is asked. Where the time of the cores is rationed, nobody is bound, nor looks out.
    """
    available = cores()
    several = 1 < len(available) == busy_cores()
    for place, worker in enumerate(workers):
        core = available[place % len(available)] if several and len(available) <= len(workers) else None
        worker.prefer(core, looks=several and place + len(available) >= len(workers))


def _current_core() -> Callable[[], int]:
    """A function that tells which core the calling thread runs on; -1 where nobody knows."""
    try:
        found: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu  # keeps the GIL
        found()
    except (AttributeError, OSError, TypeError):
        return lambda: -1
    return found


class Turns:
    """The order in which to ask workers.

    Args:
        cores: Of each the core that it prefers, or ``None``.
    """

    def __init__(self, cores: Sequence[int | None]) -> None:
        """Work it out for each core that the caller may be on."""
        places = range(len(cores))
        self._plain = tuple(places)
        self._on = {
            core: tuple(sorted(places, key=lambda place: cores[place] == core))
            for core in set(cores)
            if core is not None
        }

    def now(self) -> tuple[int, ...]:
        """The places of the workers in the order in which to ask them; they are best heard in the reverse order."""
        return self._on.get(_here(), self._plain) if self._on else self._plain


_here = _current_core()
