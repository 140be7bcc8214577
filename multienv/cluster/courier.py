"""A thread of the trainer that exchanges frames with one relay, and knows when that is lost.

Nobody who posts a frame waits for this thread, nor it for them: frames lie in a deque, and a bell wakes it. While the
trainer's thread still rings for other workers it keeps the GIL, so all that it asks in a round goes with one call.

Calls to a relay are made so that any may be lost. What becomes of one:

- It answers within a second (``relay.HOLD``), with what there is to tell.
- It fails, and it is not known whether it was executed: its frames are sent again, and all that is asked is asked again
  by its number. What was executed is answered from its bank.
- It is silent for half of ``suspect_after``: the same, beside it. A reply may have been lost on its way.
- It fails for good, or is silent for ``suspect_after``: the host is lost. What comes from it later is dropped, because
  its channels have ended and a new relay has other names. This object is the incarnation that fences it off.
"""

from __future__ import annotations

import itertools
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from multienv.cluster import frames
from multienv.cluster.channel import RelayChannel
from multienv.cluster.frames import Frame, Sent
from multienv.cluster.relay import HOLD
from multienv.processes.channel import Gone
from multienv.threads import Bell
from multienv.wire.banks import HEAD

# Seconds before a call that has failed is made again.
_PAUSE = 0.05
# Seconds by which a look that is due may come late. Later, and this process was stopped (Ctrl-Z), or kept from running.
_LATE = 1.0


class UnansweredError(Exception):
    """Raised by a call of which nobody knows whether it was executed."""


class Host(Protocol):
    """A relay, as the courier sees it."""

    name: str  # where it is, for messages

    def call(self, data: bytes) -> Future[Any]:
        """Call ``Relay.exchange``. The future raises UnansweredError, or anything else if the host is lost."""
        ...

    def end(self) -> None:
        """End the host, its workers included; does not wait and never raises."""
        ...


@dataclass(eq=False, slots=True)
class Call:
    """A call.

    Attributes:
        serial: Its number; the same when it is made once more.
        frames: What is sent.
        size: Bytes sent; 0: not made yet.
        made: When it was made.
        is_doubted: It has been silent for so long that it was made once more.
    """

    serial: int
    frames: list[Frame]
    size: int = 0
    made: float = 0.0
    is_doubted: bool = False


class Courier:
    """Carries frames between the channels of one host and its relay.

    Args:
        connect: Has the host made and returns it; may take long. Raises what is wrong. Called with a function that
            says whether it is still wanted.
        trouble: Returns why all hosts are lost, or ``""``.
        suspect_after: Seconds of silence after which the host is lost.
        rounds: Calls under way at most.
        most_bytes: Bytes under way at most, each way, about.

    Attributes:
        name: Where the host is, for messages.
        lost: Why it is lost; ``""`` while it is not.
        error: What ``connect`` raised.
    """

    def __init__(
        self,
        connect: Callable[[Callable[[], bool]], Host],
        trouble: Callable[[], str] = str,
        *,
        suspect_after: float,
        rounds: int = 2,
        most_bytes: int = 2**28,
    ) -> None:
        self.name = "a node that is being chosen"
        self.lost = ""
        self.error: Exception | None = None
        self._connect, self._trouble = connect, trouble
        self._suspect_after, self._rounds, self._most_bytes = suspect_after, rounds, most_bytes
        self._host: Host | None = None
        self._names = itertools.count(1)
        self._channels: weakref.WeakValueDictionary[int, RelayChannel] = weakref.WeakValueDictionary()
        self._outbox: deque[Frame] = deque()
        self._ended: deque[tuple[Call, Future[Any]]] = deque()  # calls whose futures are done
        self._calls: list[Call] = []  # under way
        self._failed: list[Call] = []  # to be made once more
        self._failed_at = 0.0
        self._failing_since = 0.0
        self._looked = 0.0
        self._serials = itertools.count(1)
        self._waiting: dict[int, int] = {}  # channel → request that is not answered
        self._asides: set[int] = set()  # channels that are being killed or closed
        self._bell = Bell()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="multienv-courier", daemon=True)
        self._thread.start()

    # --- for channels -------------------------------------------------------------------------------

    def open(self, channel: RelayChannel) -> int:
        """Note a channel; return its name."""
        name = next(self._names)
        self._channels[name] = channel
        if self.lost:
            channel.hear_gone(self._loss_of(channel))
        return name

    def post(self, frame: Frame) -> None:
        """Have a frame carried."""
        self._outbox.append(frame)
        self._bell.ring()

    @property
    def is_up(self) -> bool:
        """Whether the relay has been reached, and is not lost."""
        return self._host is not None and not self.lost

    @property
    def channels(self) -> list[RelayChannel]:
        """Return those that are open."""
        # Not by values(), which other threads must not add to meanwhile.
        known = [reference() for reference in self._channels.valuerefs()]
        return [channel for channel in known if channel is not None and channel.is_open]

    def close(self) -> None:
        """End the host, soon. Takes no lock and does not wait."""
        self._is_closing = True
        self._bell.ring()

    def join(self, seconds: float) -> None:
        """Wait until the host was told to end."""
        self._thread.join(seconds)

    # --- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            host = self._host = self._connect(lambda: not self._is_closing)
        except Exception as error:
            self.error = error
            self._end(str(error) or _short(error))
            return
        self.name = host.name
        try:
            while not self._is_closing and not self.lost:
                self._look(host)
                self.lost = self.lost or self._trouble()
        except Exception as error:  # the interpreter ends, or a defect of ours: nobody may wait for ever
            self.lost = self.lost or _short(error)
        self._end(self.lost or "it was closed")
        host.end()
        self._ended = deque(maxlen=0)  # what ends now would be kept for ever: it holds this object

    def _end(self, why: str) -> None:
        self.lost = self.lost or why
        for channel in self.channels:
            channel.hear_gone(self._loss_of(channel))

    def _loss_of(self, channel: RelayChannel) -> Callable[[], Gone]:
        return partial(
            Gone, "died", pid=channel.pid, detail=f"its host on {self.name} is lost ({self.lost.rstrip('.')})"
        )

    def _look(self, host: Host) -> None:
        """Hear what has come, send what there is, and wait for more."""
        self._bell.silence()
        while self._ended:
            self._hear(host, *self._ended.popleft())
        now = time.monotonic()
        self._excuse(now)
        self._doubt(host, now)
        self._send(host, now)
        if not self.lost:
            until = min([now + HOLD, *map(self._due_of, self._calls)])
            if self._failed:
                until = min(until, self._failed_at + _PAUSE)
            poller = select.poll()
            poller.register(self._bell.descriptor, select.POLLIN)
            poller.poll(max(0.0, until - time.monotonic()) * 1000)

    def _send(self, host: Host, now: float) -> None:
        """Make calls: those that have failed once more, then one with all frames that lie in the outbox."""
        if self._failed:
            if now < self._failed_at + _PAUSE:
                return
            for call in self._failed:
                self._call(host, call)
            self._failed.clear()
        if len(self._calls) >= self._rounds:
            return
        given: list[Frame] = []
        size = sum(call.size for call in self._calls)
        while self._outbox and (size < self._most_bytes or not (given or self._calls)):
            frame = self._outbox.popleft()
            if frame[0] in (frames.ASK, frames.AWAIT):
                self._waiting[frame[1]] = frame[2]
            elif frame[0] in (frames.KILL, frames.CLOSE):
                self._asides.add(frame[1])
            elif frame[0] == frames.RELEASE:
                self._forget(frame[1])
            size += sum(len(part) for part in frame if isinstance(part, bytes))
            given.append(frame)
        if given or ((self._waiting or self._asides) and not self._calls):  # or one that only waits for answers
            self._call(host, Call(next(self._serials), given))

    def _call(self, host: Host, call: Call, *, again: bool = False) -> None:
        """Make a call, or make it once more: then all that is asked is asked again by its number."""
        awaited: list[Frame] = []
        if again or call.size or not call.frames:
            pending = dict.fromkeys(self._asides, 0) | self._waiting
            awaited = [(frames.AWAIT, name, number) for name, number in pending.items()]
        most = max(1, self._most_bytes // self._rounds)  # each of the calls under way may bring so much
        data = Sent(call.serial, call.frames, awaited, most).packed()
        this = Call(call.serial, call.frames, len(data), time.monotonic())
        self._calls.append(this)
        host.call(data).add_done_callback(partial(self._note, this))

    def _note(self, call: Call, future: Future[Any]) -> None:
        """Note, in whatever thread, that a call has ended."""
        self._ended.append((call, future))
        self._bell.ring()

    def _hear(self, host: Host, call: Call, future: Future[Any]) -> None:
        """Give the frames of a reply to their channels."""
        # Of those made before it that were silent for long, the replies were lost: the relay answers one at a time.
        self._calls = [one for one in self._calls if one is not call and not (one.is_doubted and one.made < call.made)]
        error = future.exception()  # raised, it would hold this frame, and that the future: a cycle that keeps the bell
        if isinstance(error, UnansweredError):
            now = self._failed_at = time.monotonic()
            self._failing_since = self._failing_since or now
            self._failed.append(call)
            if now - self._failing_since >= self._suspect_after:
                self.lost = f"it cannot be reached: {error}"
        elif error is not None:
            self.lost = _short(error)
        else:
            self._failing_since = 0.0
            self._hand_out(*frames.unpack_reply(future.result()))

    def _hand_out(self, told: list[Frame], record: memoryview) -> None:
        """Give frames of the relay to their channels; the parts of answers follow each other in ``record``."""
        place, sleepers = 0, []
        for kind, name, *rest in told:
            channel = self._channels.get(name)
            if kind == frames.ANSWER:
                number, words, payload, rows = rest
                middle, end = place + HEAD.size + rows, place + HEAD.size + rows + payload
                if channel is not None:
                    head = record[place : place + HEAD.size]
                    rows, letter = record[place + HEAD.size : middle], record[middle:end]
                    if channel.hear_answer(number, words, head, rows, letter):
                        sleepers.append(channel)
                place = end
                if self._waiting.get(name) == number:
                    del self._waiting[name]
            elif kind == frames.GONE:
                positional, known = rest
                self._forget(name)
                if channel is not None:
                    channel.hear_gone(partial(Gone, *positional, **known))
            elif channel is not None and kind == frames.PROGRESS:
                channel.hear_progress(*rest)
            elif channel is not None and kind == frames.STACKS:
                channel.hear_stack(*rest)
        for channel in sleepers:  # last: the trainer finds all answers when it is woken once
            channel.rouse()

    def _forget(self, name: int) -> None:
        """Expect nothing more of a channel."""
        self._waiting.pop(name, None)
        self._asides.discard(name)

    def _due_of(self, call: Call) -> float:
        """Return when a call is silent for too long: to be doubted first, then for good."""
        return call.made + HOLD + self._suspect_after * (1.0 if call.is_doubted else 0.5)

    def _excuse(self, now: float) -> None:
        """Leave the time in which this process was stopped out of account: it could not hear anybody."""
        late = now - self._looked - HOLD
        if self._looked and late > _LATE:
            for call in self._calls:
                call.made += late
            self._failing_since += late * bool(self._failing_since)
        self._looked = now

    def _doubt(self, host: Host, now: float) -> None:
        """See whether a call is silent for too long."""
        for call in list(self._calls):
            if now >= self._due_of(call):
                if call.is_doubted:
                    self.lost = f"it has been silent for {now - call.made - HOLD:.1f} s"
                else:
                    call.is_doubted = True
                    self._call(host, call, again=True)


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
