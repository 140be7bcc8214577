"""The trainer's end of one worker on a node: requests and replies lie in memory of the trainer's own.

The courier fills that memory from other threads, and the one who waits polls the descriptor of a bell. So nothing here
takes a lock, and Ctrl-C may come anywhere: what was posted twice is executed once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from multienv._engine.cluster import frames
from multienv._engine.cluster.frames import Frame
from multienv._engine.cluster.relay import TOLD
from multienv._engine.interrupts import finalizer, interruptible, shielded
from multienv._engine.processes.channel import LONGEST_SLEEP, Channel, Gone, readable
from multienv._engine.threads import Bell
from multienv._engine.wire.actions import PICKLED
from multienv._engine.wire.banks import HEAD, MESSAGE, SKIPPED, STEP
from multienv._engine.wire.segment import LOSS_SECONDS, REPLY, REQUEST, TRAINER_SLEEPS, WORKER_SLEEPS, Segment
from multienv.events import LossCause

# Seconds given to the stack of a live process, and to its end, on the node and on the way.
_STACK_PATIENCE = 2.0
_KILL_PATIENCE = 5.0


class Carrier(Protocol):
    """Carries frames to one relay: a courier."""

    def open(self, channel: RelayChannel) -> int:
        """Note a channel; return its name."""
        ...

    def post(self, frame: Frame) -> None:
        """Take a frame to be carried. Takes no lock and never blocks."""
        ...

    @property
    def is_up(self) -> bool:
        """Whether the relay has ever answered, and is not lost."""
        ...


class RelayChannel(Channel):
    """Connects the trainer to one worker on a node.

    Args:
        courier: Carries frames to its relay.
        begin: Makes the frame that launches or wakes the worker, of the channel's name.
    """

    spins = 1  # an answer that is there is taken at once; to spin longer is of no use over a network

    def __init__(self, courier: Carrier, begin: Callable[[int], Frame]) -> None:
        self.segment = Segment(-1)
        self.segment.words[WORKER_SLEEPS] = 1  # ring() is always called
        self._bell = Bell()
        self._courier = courier
        self._expected = self._posted = 0  # the newest request that is asked, before it is posted and after that
        self._layout: Any = self.segment.layout  # that the relay knows
        self._gone: Gone | None = None  # a copy of it is raised: the traceback of this one would hold everything
        self._stacks: list[str] = []
        self._is_released = False
        self.name = courier.open(self)
        courier.post(begin(self.name))

    # --- requests and replies -------------------------------------------------------------------

    def ring(self, number: int) -> None:
        """Post the request, unless that was done."""
        segment = self.segment
        segment.words[REQUEST] = number
        if self._posted == number or self._gone is not None or self._is_released:
            return
        bank = segment.banks[number & 1]
        kind, tag = bank.view[:2]
        has_payload = kind == MESSAGE or (kind == STEP and tag & ~SKIPPED == PICKLED)
        payload = segment.read_request_payload(number) if has_payload else None
        layout = None if segment.layout == self._layout else segment.layout
        part = bytes(bank.view[: bank.layout.rewards])
        self._expected = number
        mean = segment.times[LOSS_SECONDS]
        self._courier.post((frames.ASK, self.name, number, layout, mean, part, payload))
        self._posted, self._layout = number, segment.layout

    @interruptible
    def wait(self, number: int, until: float | None) -> bool:
        """Sleep until the reply, the end of the process or ``until``."""
        if number not in (self.segment.words[REPLY], self._posted) and self._gone is None:
            self._expected = number
            self._courier.post((frames.AWAIT, self.name, number))  # what a woken snapshot says of itself
            self._posted = number
        return super().wait(number, until)

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptor of the bell."""
        return (self._bell.descriptor,)

    def attend(self) -> bool:
        """Silence the bell, unless the process has ended or the channel is closed; tell whether that is so."""
        self._bell.silence()
        ended = self._gone is not None or self._is_released
        if ended:
            self._bell.ring()
        return ended

    def has_ended(self) -> bool:
        """Tell whether the relay has told how the process ended."""
        return self._gone is not None

    def prefer(self, core: int | None, *, sharing: int) -> None:
        """Do nothing: the cores are the node's, and its relay asks too seldom for a worker to look for requests."""

    # --- news, in a thread of the courier ---------------------------------------------------------

    def hear_answer(self, number: int, words: bytes, head: Any, rows: Any, payload: Any) -> bool:
        """Put a reply where a worker beside the trainer would have written it, the number last.

        Returns:
            Whether somebody sleeps until it is there, and is to be roused.
        """
        segment = self.segment
        banks = segment.banks  # held: another thread may let go of them in the next line
        if number != self._expected or segment.words[REPLY] == number or self._gone is not None or not banks:
            return False
        bank = banks[number & 1]
        if rows:
            bank.view[bank.layout.rewards :] = rows
        if head[0]:  # of a woken snapshot the bank says nothing
            bank.view[: HEAD.size] = head
        segment.write_reply_payload(number, payload)
        self.hear_progress(words)
        segment.words[REPLY] = number
        return bool(segment.words[TRAINER_SLEEPS])

    def rouse(self) -> None:
        """Wake whatever waits for news of this channel."""
        self._bell.ring()

    def hear_progress(self, words: bytes) -> None:
        """Note what the worker is at."""
        mine = self.segment.words
        for word, value in zip(TOLD, memoryview(words).cast("q"), strict=True):
            mine[word] = value

    def hear_stack(self, text: str) -> None:
        """Note the stacks that were asked for."""
        self._stacks.append(text)
        self._bell.ring()

    def hear_gone(self, gone: Gone) -> None:
        """Note how the process ended; only the first time."""
        if self._gone is None:
            self._gone = gone
        self._bell.ring()

    # --- the end --------------------------------------------------------------------------------

    def lose(self, cause: LossCause = "died", detail: str = "the channel is closed") -> Gone:
        """Return what the relay told of the end."""
        return Gone(cause, pid=self.pid, detail=detail) if self._gone is None else replace(self._gone)

    def _await(self, is_done: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not is_done():
            left = until - time.monotonic()
            if left <= 0 or not self._courier.is_up:
                return False
            readable((self._bell.descriptor,), min(left, LONGEST_SLEEP))
            self._bell.silence()
        return True

    def stack(self) -> str:
        """Tell the relay to ask for the stacks."""
        before = len(self._stacks)
        if self._gone is None and not self._is_released:
            self._courier.post((frames.STACK, self.name))
            self._await(lambda: len(self._stacks) > before or self._gone is not None, _STACK_PATIENCE)
        return self._stacks[-1] if len(self._stacks) > before else ""

    @shielded
    def kill(self, *, cause: LossCause = "died", stack: bool = False, detail: str = "") -> Gone:
        """Tell the relay to kill the process; a host that does not say so in time is left to its silence."""
        if self._gone is None and not self._is_released:
            self._courier.post((frames.KILL, self.name, cause, stack, detail))
            if not self._await(lambda: self._gone is not None, _KILL_PATIENCE):
                self.hear_gone(Gone(cause, pid=self.pid, detail=detail or "its host did not tell how"))
        return self.lose(cause, detail)

    def wake(self) -> RelayChannel | None:
        """Tell the relay to wake the snapshot, which says by its first answer that it is up."""
        if self._gone is None or self._gone.fate.snapshot is None or self._is_released or not self._courier.is_up:
            return None
        return RelayChannel(self._courier, lambda name: (frames.WAKE, name, self.name))

    def close(self, timeout: float, *, keep_memory: bool = False) -> bool:
        """Wait up to ``timeout`` seconds for the end of the process; the relay kills it then."""
        until = time.monotonic() + timeout
        if self._gone is None and not self._is_released:
            self._courier.post((frames.CLOSE, self.name, timeout))
            self._await(lambda: self._gone is not None, timeout + _KILL_PATIENCE)
        self.release(keep_memory=keep_memory)
        return time.monotonic() > until

    def release(self, *, keep_memory: bool = False) -> None:
        """Tell the relay to release the process."""
        if not self._is_released:
            self._courier.post((frames.RELEASE, self.name))
            self._is_released = True
            self._bell.ring()
        if not keep_memory:
            self.segment.unmap()

    @finalizer
    def __del__(self) -> None:
        """Release a process whose channel was not closed."""
        if "name" in self.__dict__:
            with contextlib.suppress(IndexError):  # in a cycle that is collected its bell may have been closed before
                self.release()
