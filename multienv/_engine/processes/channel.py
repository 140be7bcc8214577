"""The seam between the trainer and the process that holds envs: a channel.

Requests and replies lie in the channel's segment; the channel itself only tells that there is one, and that the process
has ended. A wait may be interrupted and repeated: reading a reply does not use it up.
"""

from __future__ import annotations

import select
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from multienv._engine.cores import give_way
from multienv._engine.interrupts import interruptible
from multienv._engine.threads import Bell
from multienv._engine.wire.segment import CORE, PID, REPLY, RESIDENT, SPINNERS, TRAINER_SLEEPS, Segment
from multienv.events import LossCause

# Looks at the reply before the trainer goes to sleep, giving the core away at each: 30 to 50 µs.
SPINS = 50
# Seconds that they may take: where other processes want the core, each takes milliseconds.
SPIN_SECONDS = 0.5e-3
# Seconds. "I sleep" is stored and the reply is loaded after it; without a fence, which Python does not have, the
# processor may do it the other way round, and a wake-up is lost. After this time the store is visible to all.
FIRST_SLEEP_SECONDS = 0.002
# Seconds until a sleeping trainer looks again on its own.
LONGEST_SLEEP = 1.0


class SystemErrors:
    """Suppresses the OSErrors of system calls in a block, and no others.

    A handler of SIGALRM may raise TimeoutError, as the usual recipe of a time limit has it. That is an OSError too, but
    without ``errno``: it must come through, or the limit, and what the block was about to do, would be lost.
    """

    def __enter__(self) -> None:
        """Do nothing: the block begins."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        """Return true, which suppresses the error, for an OSError with ``errno``."""
        return isinstance(error, OSError) and error.errno is not None


@dataclass(frozen=True, slots=True)
class Fate:
    """Tells how a process ended.

    Attributes:
        code: Exit code; negative: minus the number of the signal; ``None``: not known.
        stack: Stacks that faulthandler wrote, at a crash or when asked before a kill.
        stderr: The last lines on stderr.
        snapshot: Number of the last request executed in the forked snapshot that the process left; ``None``: none.
    """

    code: int | None
    stack: str = ""
    stderr: str = ""
    snapshot: int | None = None


UNKNOWN_FATE = Fate(None)


@dataclass(eq=False)
class Gone(Exception):  # noqa: N818 - internal: becomes a recovery, a truncation or a WorkerLostError
    """Raised by a channel whose process has ended without the awaited reply.

    Attributes:
        cause: Whether it died, was killed because it hung, or broke the channel.
        fate: How it ended.
        pid: The process, if known.
        number: The request it was executing; 0: none.
        slot: The slot whose env was being called; -1: none.
        replaying: Index of the request inside a replay; -1: none.
        detail: What else is known, for the message.
    """

    cause: LossCause
    fate: Fate = UNKNOWN_FATE
    pid: int | None = None
    number: int = 0
    slot: int = -1
    replaying: int = -1
    detail: str = ""

    @property
    def is_from_outside(self) -> bool:
        """Return whether the process was killed from outside: by SIGKILL, or because the monitor has ended."""
        return self.cause == "died" and self.fate.code in (None, -9)


def resident_bytes(pid: int | None) -> int | None:
    """Return the resident memory of a process, ``None`` where it cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:  # not Linux, or it has just ended
        return None
    import resource

    return int(fields[1]) * resource.getpagesize()


class Channel(ABC):
    """Connects the trainer to one host: the trainer's end.

    Attributes:
        segment: The memory that both sides share.
        spins: How often to look at the reply, giving the core away each time, before :meth:`wait` is called.
        envs: How messages name the envs.
        patience: Seconds that the envs may take to close where nobody calls :meth:`close`; 0: their process is killed
            when it does not end at once.
        is_closing: The process has been asked to close its envs.
        code: From which files the code of the envs came that were built in this process; ``b""``: none were built here
            yet, or those of a snapshot were woken.
    """

    segment: Segment
    spins = SPINS
    envs = "the env"
    patience = 0.0
    is_closing = False
    code = b""

    @property
    def pid(self) -> int | None:
        """Return the pid of the process, where it runs; ``None`` until the process has written it into the segment."""
        return self.segment.words[PID] or None

    @abstractmethod
    def ring(self, number: int) -> None:
        """Announce that request ``number`` lies in the segment. Never blocks; a repeated call does no harm."""

    @interruptible
    def wait(self, number: int, until: float | None) -> bool:
        """Wait for the reply to request ``number``.

        Args:
            number: The request.
            until: When to give up, by ``time.monotonic()``; ``None``: never.

        Returns:
            Whether the reply is there.

        Raises:
            Gone: The process has ended without that reply.
        """
        ended = wait_any([(self, number)], inf if until is None else until)
        if self.answered(number):
            return True
        if ended:
            raise self.how_it_ended()
        return False

    def how_it_ended(self) -> Gone:
        """Return what :meth:`wait` raises, once the process has ended."""
        return self.kill()

    def answered(self, number: int) -> bool:
        """Tell whether the reply to request ``number`` is there; no system call."""
        return self.segment.words[REPLY] == number

    @abstractmethod
    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that become readable at an event; ask for them again before each poll.

        After the end of the process one of them stays readable.
        """

    @abstractmethod
    def attend(self) -> bool:
        """Read all that waits in the descriptors; return whether the process has ended, or the channel is closed."""

    def has_ended(self) -> bool:
        """Tell whether the end of the process has been reported; reads nothing that a wait needs."""
        return False

    def memory(self) -> int | None:
        """Return the resident memory of the process in bytes, ``None`` where it is not known."""
        return self.segment.words[RESIDENT] or resident_bytes(self.pid)

    def prefer(self, core: int | None, *, sharing: int) -> None:
        """Set the core to run on while steps are short, and how many workers share one; 0: do not look for requests."""
        words = self.segment.words
        words[CORE], words[SPINNERS] = 0 if core is None else core + 1, sharing

    def stack(self) -> str:
        """Return the Python stacks of the process as they are now; ``""`` if they do not come within a second."""
        return ""

    @abstractmethod
    def kill(self, *, cause: LossCause = "died", stack: bool = False, detail: str = "") -> Gone:
        """End the process now and return what :meth:`wait` raises from now on; takes about 2 s at most.

        Args:
            cause: Why it is killed.
            stack: Have its stacks written first.
            detail: For the message.
        """

    def wake(self) -> Channel | None:
        """Wake the snapshot of the ended process, as a new process with a new segment; ``None`` if there is none.

        The new process is up once ``wait(fate.snapshot, …)`` returns true.
        """
        return None

    @abstractmethod
    def close(self, timeout: float, *, keep_memory: bool = False) -> bool:
        """Wait up to ``timeout`` seconds until the process, asked to close, has ended; else kill it; then release.

        Returns:
            Whether the process had to be killed.
        """

    @abstractmethod
    def release(self, *, keep_memory: bool = False) -> None:
        """Close all descriptors without waiting. The monitor ends a process that is still there in about 0.5 s.

        Args:
            keep_memory: Leave the segment readable: what the caller saw last lies in it.
        """


@interruptible
def readable(descriptors: Sequence[int], seconds: float) -> bool:
    """Wait up to ``seconds`` until one of these descriptors is readable or has ended; tell whether one is."""
    poller = select.poll()  # a new one: two threads cannot share one, nor a thread and its signal handler
    for descriptor in descriptors:
        if descriptor >= 0:
            poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(max(0.0, seconds) * 1000))


@interruptible
def wait_any(
    waiting: Sequence[tuple[Channel, int]],
    until: float,
    bell: Bell | None = None,
    watched: Sequence[tuple[Channel, int]] = (),
) -> list[int]:
    """Wait until a reply is there or a process has ended.

    Args:
        waiting: Channels, each with the number of the request it is to answer.
        until: When to give up, by ``time.monotonic()``.
        bell: Ends the wait when it is rung.
        watched: The same for channels whose replies do not end the wait; the end of such a process does.

    Returns:
        The indices of the channels, of both kinds together, whose ``wait()`` now returns or raises at once; may be
        empty.
    """
    asleep_at = time.monotonic() + SPIN_SECONDS
    for _ in range(max((channel.spins for channel, _ in waiting), default=0)):
        found = _answered(waiting)
        if found:
            return found
        give_way()
        if time.monotonic() > asleep_at:
            break
    patience, everyone = FIRST_SLEEP_SECONDS, [*waiting, *watched]
    try:
        while True:
            for channel, _ in waiting:
                channel.segment.words[TRAINER_SLEEPS] = 1
            poller, owners = _poller(everyone)
            if bell is not None:
                poller.register(bell.descriptor, select.POLLIN)
            found = _answered(waiting)
            if found:
                return found
            left = min(patience, until - time.monotonic())
            readable = {descriptor for descriptor, _ in poller.poll(max(0.0, left) * 1000)}
            is_rung = bell is not None and bell.descriptor in readable
            if bell is not None and is_rung:
                bell.silence()
            ready = {owners[descriptor] for descriptor in readable if descriptor in owners}
            attended = ready or range(len(everyone))  # a channel counts the time until its process is acknowledged
            ended = {index for index in attended if everyone[index][0].attend()}
            if ended or is_rung or _answered(waiting) or time.monotonic() >= until:
                return sorted(ended.union(_answered(everyone)))
            patience = LONGEST_SLEEP
    finally:
        for channel, _ in waiting:
            channel.segment.words[TRAINER_SLEEPS] = 0


def _poller(channels: Sequence[tuple[Channel, int]]) -> tuple[select.poll, dict[int, int]]:
    """Return what polls the descriptors of these channels, and the index of the channel that each belongs to."""
    poller, owners = select.poll(), {}
    for index, (channel, _) in enumerate(channels):
        for descriptor in channel.descriptors():
            if descriptor >= 0:  # another thread may close the channel meanwhile
                owners[descriptor] = index
                poller.register(descriptor, select.POLLIN)
    return poller, owners


def _answered(waiting: Sequence[tuple[Channel, int]]) -> list[int]:
    return [index for index, (channel, number) in enumerate(waiting) if channel.answered(number)]
