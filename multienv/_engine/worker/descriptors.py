"""The descriptors that a worker is given when it starts, or when it is woken."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

# In the environment of each worker, so that what its envs start can be told from the rest.
MARK_VARIABLE = "MULTIENV_WORKER"
# In that of each monitor, and of all that was forked from it and from its workers.
MONITOR_VARIABLE = "MULTIENV_MONITOR"


def mark_of(monitor: int, worker: int) -> str:
    """Return the value of MARK_VARIABLE for a worker, given the pids of its monitor and of itself."""
    return f"{monitor}.{worker}"


@dataclass(frozen=True, slots=True)
class WorkerDescriptors:
    """Holds the descriptors of a worker.

    Attributes:
        wake_socket: Carries wake bytes to and from the trainer; ends when the trainer is gone.
        memory: The segment's.
        stack: Where faulthandler writes stacks.
        announcements: Where the monitor is told of snapshots.
    """

    wake_socket: socket.socket
    memory: int
    stack: int
    announcements: socket.socket

    @classmethod
    def of(cls, wake_socket: int, memory: int, stack: int, announcements: int) -> WorkerDescriptors:
        """Build the object from descriptor numbers, which it then owns; no program that an env starts gets them."""
        for descriptor in (wake_socket, memory, stack, announcements):
            os.set_inheritable(descriptor, False)
        return cls(socket.socket(fileno=wake_socket), memory, stack, socket.socket(fileno=announcements))

    def descriptors(self) -> tuple[int, ...]:
        """Return the numbers of all descriptors."""
        return self.wake_socket.fileno(), self.memory, self.stack, self.announcements.fileno()

    def close(self) -> None:
        """Close all descriptors but ``memory``, which the segment closes."""
        self.wake_socket.close()
        self.announcements.close()
        os.close(self.stack)
