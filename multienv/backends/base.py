"""The seam between faces and whatever runs the env."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

from multienv.processes.protocol import UNKNOWN_FATE, Fate
from multienv.wire.memory import Block

BUFFER_SIZE = 4096


class Gone(Exception):  # noqa: N818 - internal: always turned into a recovery or a WorkerLostError
    """The worker is lost.

    Attributes:
        cause: ``"died"``, ``"hung"`` or ``"broken"`` (it answered something undecodable).
        executing: It was lost while executing the pending request, not before or after.
        replaying: The place of the request inside a replay it was executing, or -1.
        slot: The place in its group of the env that was being called, or -1.
        resetting: That env was being reset.
        traceback: Of the exception it raised, where that is the cause.
    """

    def __init__(
        self,
        cause: Literal["died", "hung", "broken", "error"],
        fate: Fate = UNKNOWN_FATE,
        *,
        pid: int | None = None,
        executing: bool = True,
        replaying: int = -1,
        slot: int = -1,
        resetting: bool = False,
        detail: str = "",
        traceback: str = "",
    ) -> None:
        """Say how it was lost."""
        super().__init__(cause, detail)
        self.cause = cause
        self.fate = fate
        self.pid = pid
        self.executing = executing
        self.replaying = replaying
        self.slot = slot
        self.resetting = resetting
        self.detail = detail
        self.traceback = traceback


class Backend(ABC):
    """One host somewhere, reachable by request and reply.

    Attributes:
        send: Send a request frame. Never blocks, never raises: a loss shows when reading.
        fill: Wait for something to read, put it into ``buffer`` and tell how many bytes: usually exactly one
            reply; whatever else it is, :meth:`complete` makes sense of it.
        buffer: Overwritten by the next ``fill``.
    """

    # Slots: an instance's dict would be one more place in memory that each step has to touch.
    __slots__ = ("buffer", "fill", "send")

    send: Callable[[bytes], None]
    fill: Callable[[], int]
    buffer: bytearray

    def __init__(self) -> None:
        """Lay out the buffer: any reply with an inline observation fits, and most infos do."""
        self.buffer = bytearray(BUFFER_SIZE)

    @abstractmethod
    def complete(self, start: bytes, seq: int) -> bytes:
        """The reply to request ``seq``, of which ``start`` has been read. Raises :class:`Gone`."""

    @abstractmethod
    def poll(self, timeout: float) -> bool:
        """Whether there is something to read within ``timeout`` seconds."""

    def interests(self) -> list[tuple[int, int]]:
        """Descriptors and events for ``select.poll()``: one comes before ``poll(0)`` changes; none if that is true."""
        return []

    @abstractmethod
    def arm(self, seconds: float | None) -> None:
        """From now on the pending request may take this long; ``None``: as long as it likes."""

    def step_seconds(self) -> float | None:
        """How long the env itself takes for a step, if that is known."""
        return None

    def snapshots(self) -> tuple[int, str]:
        """How many it has taken of itself, and why none at present, if there is a reason."""
        return 0, ""

    def prefer(self, core: int | None, *, looks: bool) -> None:  # noqa: B027 - a host without a process of its own has no choice
        """Run on this core while steps are short, ``None``: on any. With ``looks``: look out for the next request."""

    @abstractmethod
    def observations(self, size: int) -> Block:
        """The memory the host has laid its observations in."""

    @abstractmethod
    def ask_again(self, frame: bytes) -> None:
        """Send a request that may or may not have been sent, or answered, before: it is executed once."""

    @abstractmethod
    def kill(self) -> Fate:
        """End it now, whatever it is doing."""

    def strike(self) -> None:
        """As :meth:`kill`, from a thread that does not hold it: nothing is touched that may be let go of meanwhile."""
        self.kill()

    def wake(self, deadline: float | None) -> Backend | None:
        """After its end: its snapshot, awake, if it has left one; to be asked before this is released.

        That has ``deadline`` seconds for the first request.
        """
        return None

    @abstractmethod
    def finish(self, timeout: float) -> None:
        """Wait until it has ended by itself, or end it; then let go of everything."""

    @abstractmethod
    def release(self) -> None:
        """Let go of everything without waiting."""

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The process, once known."""

    @pid.setter
    @abstractmethod
    def pid(self, pid: int) -> None:
        """The process, as the host told it."""
