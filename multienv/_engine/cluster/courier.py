"""The trainer's end of a host: a thread that exchanges frames with its relay, and a channel for each of its workers.

Nobody who posts a frame waits for this thread, nor it for them: frames lie in a deque, and a bell wakes it. While the
trainer's thread still rings for other workers it keeps the GIL, so all that it asks in a round goes with one call.

A call answers within a second (``relay.HOLD``), with what there is to tell. If one fails, or is silent for
``suspect_after``, the host is lost: whether its frames were carried out is not known, and no call is made twice. A call
may be long under way, because much is to be carried. So the host is asked for a sign of life meanwhile, which carries
nothing: one that gives none for ``PULSE_PATIENCE`` is lost, too, long before Ray says so of its node. What comes from
the host later is dropped, because its channels have ended and a new relay has other names. The courier is the
incarnation that fences it off.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from multienv._engine.cluster import frames
from multienv._engine.cluster.cluster import RayHost
from multienv._engine.cluster.frames import Frame
from multienv._engine.cluster.relay import HOLD, TOLD
from multienv._engine.interrupts import finalizer, interruptible, shielded
from multienv._engine.processes.channel import LONGEST_SLEEP, Channel, Gone, readable
from multienv._engine.threads import Bell
from multienv._engine.wire.actions import PICKLED
from multienv._engine.wire.banks import HEAD, MESSAGE, SKIPPED, STEP
from multienv._engine.wire.segment import LOSS_SECONDS, REPLY, REQUEST, TRAINER_SLEEPS, WORKER_SLEEPS, Segment
from multienv.events import LossCause

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
# Seconds given to the stack of a live process, and to its end, on the node and on the way.
_STACK_PATIENCE = 2.0
_KILL_PATIENCE = 5.0


class RelayChannel(Channel):
    """Connects the trainer to one worker on a node: requests and replies lie in memory of the trainer's own.

    The courier fills that memory from other threads, and the one who waits polls the descriptor of a bell. So nothing
    here takes a lock, and Ctrl-C may come anywhere: what was posted twice is executed once.

    Args:
        courier: Carries frames to its relay.
        begin: Makes the frame that launches or wakes the worker, of the channel's name.

    Attributes:
        bell: Wakes what waits for news of this channel.
    """

    spins = 1  # an answer that is there is taken at once; to spin longer is of no use over a network

    def __init__(self, courier: Courier, begin: Callable[[int], Frame]) -> None:
        self.segment = Segment(-1)
        self.segment.words[WORKER_SLEEPS] = 1  # ring() is always called
        self.bell = Bell()
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
        return (self.bell.descriptor,)

    def attend(self) -> bool:
        """Silence the bell, unless the process has ended or the channel is closed; tell whether that is so."""
        self.bell.silence()
        ended = self._gone is not None or self._is_released
        if ended:
            self.bell.ring()
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

    def hear_progress(self, words: bytes) -> None:
        """Note what the worker is at."""
        mine = self.segment.words
        for word, value in zip(TOLD, memoryview(words).cast("q"), strict=True):
            mine[word] = value

    def hear_stacks(self, text: str) -> None:
        """Note the stacks that were asked for."""
        self._stacks.append(text)
        self.bell.ring()

    def hear_gone(self, gone: Gone) -> None:
        """Note how the process ended; only the first time."""
        if self._gone is None:
            self._gone = gone
        self.bell.ring()

    # --- the end --------------------------------------------------------------------------------

    def how_it_ended(self, cause: LossCause = "died", detail: str = "the channel is closed") -> Gone:
        """Return what the relay told of the end."""
        return Gone(cause, pid=self.pid, detail=detail) if self._gone is None else replace(self._gone)

    def _await(self, is_done: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not is_done():
            left = until - time.monotonic()
            if left <= 0 or not self._courier.is_up:
                return False
            readable((self.bell.descriptor,), min(left, LONGEST_SLEEP))
            self.bell.silence()
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
        return self.how_it_ended(cause, detail)

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
            self.bell.ring()
        if not keep_memory:
            self.segment.unmap()

    @finalizer
    def __del__(self) -> None:
        """Release a process whose channel was not closed."""
        if "name" in self.__dict__:
            with contextlib.suppress(IndexError):  # in a cycle that is collected its bell may have been closed before
                self.release()


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
        connect: Callable[[Callable[[], bool]], RayHost],
        trouble: Callable[[], str] = str,
        *,
        suspect_after: float,
    ) -> None:
        self.name = "a node that is being chosen"
        self.lost = ""
        self.error: Exception | None = None
        self._connect, self._trouble = connect, trouble
        self._suspect_after = suspect_after
        self._host: RayHost | None = None
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

    def _look(self, host: RayHost) -> None:
        """Hear what has come, send what there is, and wait for more."""
        self._bell.silence()
        while self._ended:
            self._handle_reply(*self._ended.popleft())
        now = time.monotonic()
        self._look_for_silence(host, now)
        self._send(host, now)
        if not self.lost:
            nap = _PULSE_EVERY if self._calls else HOLD
            self._look_at = now + nap
            readable((self._bell.descriptor,), nap)

    def _send(self, host: RayHost, now: float) -> None:
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
            host.call(serial, given).add_done_callback(partial(self._on_call_ended, serial))

    def _on_call_ended(self, serial: int, future: Future[list[Frame]]) -> None:
        """Note, in whatever thread, that a call has ended."""
        self._ended.append((serial, future))
        self._bell.ring()

    def _handle_reply(self, serial: int, future: Future[list[Frame]]) -> None:
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
            if kind == frames.GONE:
                self._waiting.pop(name, None)
                rest = [Gone(**rest[0])]
            elif kind == frames.ANSWER and self._waiting.get(name) == rest[0]:
                del self._waiting[name]
            if channel is not None and getattr(channel, f"hear_{kind}")(*rest):
                sleepers.append(channel)
        for channel in sleepers:  # last: the trainer finds all answers when it is woken once
            channel.bell.ring()

    def _look_for_silence(self, host: RayHost, now: float) -> None:
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
