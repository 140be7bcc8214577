"""What a worker is handed at its birth, or when it is woken."""

from __future__ import annotations

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

    @classmethod
    def parse(cls, text: str) -> Ends:
        """From the command line of a spawned worker."""
        return cls(*map(int, text.split(",")))

    def __str__(self) -> str:
        """For the command line of a spawned worker."""
        return f"{self.requests},{self.replies},{self.memory},{self.stack},{self.announcements}"

    def descriptors(self) -> list[int]:
        """All there are."""
        every = (self.requests, self.replies, self.memory, self.stack, self.announcements)
        return [descriptor for descriptor in every if descriptor >= 0]
