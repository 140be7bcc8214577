"""A thread of the trainer that exchanges frames with one relay, and knows when that is lost.

Nobody who posts a frame waits for this thread, nor it for them: frames lie in a deque, and a bell wakes it. While the
trainer's thread still rings for other workers it keeps the GIL, so all that it asks in a round goes with one call.

A call answers within a second (``relay.HOLD``), with what there is to tell. If one fails, or is silent for
``suspect_after``, the host is lost: whether its frames were carried out is not known, and no call is made twice. A call
may be long under way, because much is to be carried. So the host is asked for a sign of life meanwhile, which carries
nothing: one that gives none for ``PULSE_PATIENCE`` is lost, too, long before Ray says so of its node. What comes from
the host later is dropped, because its channels have ended and a new relay has other names. This object is the
incarnation that fences it off.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from multienv._engine.cluster import frames
from multienv._engine.cluster.channel import RelayChannel
from multienv._engine.cluster.frames import Frame
from multienv._engine.cluster.relay import HOLD
from multienv._engine.processes.channel import Gone, readable
from multienv._engine.threads import Bell

# Calls under way at most. Two, because the next one ends the wait of the last one.
_CALLS = 2
# Awaited of a channel that is being killed or closed: no request has this number.
_ITS_END = 0
# Seconds that a call is under way before the host is asked for a sign of life; then as often. And how long it may take:
# more than a busy node or a short break of its network, less than a user notices.
_PULSE_EVERY = 0.25
PULSE_PATIENCE = 1.25
# Seconds by which a look that is due may come late. Later, and this process was stopped (Ctrl-Z), or kept from running.
_LATE = 0.25


class RemoteHost(Protocol):
    """A relay, as the courier sees it."""

    name: str  # where it is, for messages

    def call(self, serial: int, sent: list[Frame]) -> Future[list[Frame]]:
        """Call ``Relay.exchange``. If the future raises, the host is lost."""
        ...

    def pulse(self) -> Future[None]:
        """Ask for a sign of life: the future is done when it comes."""
        ...

    def end(self) -> None:
        """End the host, its workers included; does not wait and never raises."""
        ...


class Courier:
    """Carries frames between the channels of one host and its relay.

    Args:
        connect: Has the host made and returns it; may take long. Raises what is wrong. Called with a function that
            says whether it is still wanted.
        trouble: Returns why all hosts are lost, or ``""``.
        suspect_after: Seconds of silence after which the host is lost.

    Attributes:
        name: Where the host is, for messages.
        lost: Why it is lost; ``""`` while it is not.
        error: What ``connect`` raised.
    """

    def __init__(
        self,
        connect: Callable[[Callable[[], bool]], RemoteHost],
        trouble: Callable[[], str] = str,
        *,
        suspect_after: float,
    ) -> None:
        self.name = "a node that is being chosen"
        self.lost = ""
        self.error: Exception | None = None
        self._connect, self._trouble = connect, trouble
        self._suspect_after = suspect_after
        self._host: RemoteHost | None = None
        self._names = itertools.count(1)
        self._channels: weakref.WeakValueDictionary[int, RelayChannel] = weakref.WeakValueDictionary()
        self._outbox: deque[Frame] = deque()
        self._ended: deque[tuple[int, Future[list[Frame]]]] = deque()  # calls whose futures are done
        self._calls: dict[int, float] = {}  # those under way by number, and when they were made
        self._pulse: Future[None] | None = None  # a sign of life that was asked for
        self._pulsed = 0.0  # when that was
        self._look_at = math.inf  # when the next look is due
        self._serials = itertools.count(1)
        self._waiting: dict[int, int] = {}  # channel → request that is not answered
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
        """Take a frame to be carried."""
        self._outbox.append(frame)
        self._bell.ring()

    @property
    def is_up(self) -> bool:
        """Whether the relay has been reached, and is not lost."""
        return self._host is not None and not self.lost

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
        for reference in self._channels.valuerefs():  # not values(), which other threads must not add to meanwhile
            channel = reference()
            if channel is not None:
                channel.hear_gone(self._loss_of(channel))

    def _loss_of(self, channel: RelayChannel) -> Gone:
        return Gone("died", pid=channel.pid, detail=f"its host on {self.name} is lost ({self.lost.rstrip('.')})")

    def _look(self, host: RemoteHost) -> None:
        """Hear what has come, send what there is, and wait for more."""
        self._bell.silence()
        while self._ended:
            self._hear(*self._ended.popleft())
        now = time.monotonic()
        self._look_for_silence(host, now)
        self._send(host, now)
        if not self.lost:
            nap = _PULSE_EVERY if self._calls else HOLD
            self._look_at = now + nap
            readable((self._bell.descriptor,), nap)

    def _send(self, host: RemoteHost, now: float) -> None:
        """Make a call with all frames that lie in the outbox, or one that only waits for answers."""
        given: list[Frame] = []
        while self._outbox and len(self._calls) < _CALLS:
            frame = self._outbox.popleft()
            if frame[0] in (frames.ASK, frames.AWAIT):
                self._waiting[frame[1]] = frame[2]
            elif frame[0] in (frames.KILL, frames.CLOSE):
                self._waiting[frame[1]] = _ITS_END
            elif frame[0] == frames.RELEASE:
                self._waiting.pop(frame[1], None)
            given.append(frame)
        if given or (self._waiting and not self._calls):
            serial = next(self._serials)
            self._calls[serial] = now
            host.call(serial, given).add_done_callback(partial(self._note, serial))

    def _note(self, serial: int, future: Future[list[Frame]]) -> None:
        """Note, in whatever thread, that a call has ended."""
        self._ended.append((serial, future))
        self._bell.ring()

    def _hear(self, serial: int, future: Future[list[Frame]]) -> None:
        """Give the frames of a reply to their channels; if the call has failed, the host is lost."""
        del self._calls[serial]
        error = future.exception()  # raised, it would hold this frame, and that the future: a cycle that keeps the bell
        if error is None:
            self._pulse = None  # this is a sign of life
            self._hand_out(future.result())
        else:
            self.lost = self.lost or _short(error)

    def _hand_out(self, told: list[Frame]) -> None:
        """Give frames of the relay to their channels."""
        sleepers = []
        for kind, name, *rest in told:
            channel = self._channels.get(name)
            if kind == frames.ANSWER:
                if self._waiting.get(name) == rest[0]:
                    del self._waiting[name]
                if channel is not None and channel.hear_answer(*rest):
                    sleepers.append(channel)
            elif kind == frames.GONE:
                self._waiting.pop(name, None)
                if channel is not None:
                    channel.hear_gone(Gone(**rest[0]))
            elif channel is not None and kind == frames.PROGRESS:
                channel.hear_progress(*rest)
            elif channel is not None and kind == frames.STACKS:
                channel.hear_stack(*rest)
        for channel in sleepers:  # last: the trainer finds all answers when it is woken once
            channel.rouse()

    def _look_for_silence(self, host: RemoteHost, now: float) -> None:
        """See whether the host is silent for too long. While this process was stopped, it could not hear anybody."""
        late = now - self._look_at
        if late > _LATE:
            self._calls = {serial: made + late for serial, made in self._calls.items()}
            self._pulsed += late
        oldest = min(self._calls.values(), default=math.inf)
        silent, without_pulse = now - oldest - HOLD, now - self._pulsed
        if silent >= self._suspect_after:
            self.lost = f"it has been silent for {silent:.1f} s"
        elif self._pulse is None or self._pulse.done():
            if now >= max(oldest, self._pulsed) + _PULSE_EVERY:
                self._pulse, self._pulsed = host.pulse(), now
        elif self._calls and without_pulse >= min(self._suspect_after, PULSE_PATIENCE):
            self.lost = f"it has been silent for {without_pulse:.1f} s, and gave no sign of life when it was asked"


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
