"""What a worker is handed at its birth, or when it is woken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# In each worker's environment, so that the processes it starts can be told from others'.
WARD_VARIABLE = "MULTIENV_WORKER"


def ward_mark(trainer: int, number: int) -> str:
    """Its value: worker numbers are one trainer's own."""
    return f"{trainer}.{number}"


@dataclass(frozen=True, slots=True)
class Ends:
    """The worker's descriptors."""

    requests: int
    replies: int
    memory: int
    stack: int  # where faulthandler writes
    announcements: int = -1  # a socket: the warden is told of snapshots there
    arena: int = -1  # memory shared with other workers

    @classmethod
    def parse(cls, text: str) -> Ends:
        """From the command line of a spawned worker."""
        return cls(*map(int, text.split(",")))

    def __str__(self) -> str:
        """For the command line of a spawned worker."""
        return ",".join(map(str, self._all()))

    def moved(self, move: Callable[[int], int]) -> Ends:
        """The same by other numbers."""
        return Ends(*map(move, self._all()))

    def descriptors(self) -> list[int]:
        """All there are."""
        return [descriptor for descriptor in self._all() if descriptor >= 0]

    def _all(self) -> tuple[int, ...]:
        return (self.requests, self.replies, self.memory, self.stack, self.announcements, self.arena)
