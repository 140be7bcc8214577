"""On a node: a relay has the workers of one host, and does for their channels what the trainer asks.

It holds no env, no journal and no deadline. Its workers are ordinary ones: children of a monitor, with forked
snapshots. It is called from several threads; one at a time, the newest, waits for answers. That is a long poll: a call
returns when all that was asked is answered, a little after the first answer, when a newer one comes, or after a second.

Two calls may be under way, and Ray may swap them: so they are numbered, and their frames are carried out in order.
"""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

from multienv._engine.cluster import frames
from multienv._engine.cluster.frames import Frame
from multienv._engine.processes.channel import Channel, Gone, resident_bytes, wait_any
from multienv._engine.processes.launcher import Launch
from multienv._engine.processes.worker_process import crowd_seconds
from multienv._engine.threads import Bell
from multienv._engine.wire.banks import HEAD, STEPPED, BankLayout
from multienv._engine.wire.segment import BUSY, LOSS_SECONDS, PID, REPLY_PAYLOAD, RESIDENT

# Seconds a call waits for answers at the most, and for further ones after the first.
HOLD = 1.0
LINGER = 0.002
# Wakes and frees kept snapshots: any will do.
_SNAPSHOTS = Launch("forkserver")
# Seconds between two looks at the memory of a worker.
_LOOK = 0.1
# The control words that the trainer reads: what the worker is at, and what it tells of itself.
TOLD = (*range(BUSY, BUSY + 3), *range(PID, PID + 9))


class Relayed:
    """Holds one worker, and what was asked of it last."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.segment = channel, channel.segment
        self.gone: Gone | None = None  # how it ended
        self.asked = 0  # the request whose answer is to be told; 0: none
        self.posted = 0  # the newest request that it was given
        self.is_told = False  # that it is gone
        self.is_ending = False  # a thread kills or closes it, and tells of its end
        self.looked = 0.0

    def post(self, number: int, layout: BankLayout | None, mean: float, part: bytes, payload: bytes | None) -> None:
        """Give the worker a request, unless it has it already; ``mean``: time between two losses."""
        self.asked = number
        if self.posted == number or self.is_ending or self.gone is not None:
            return
        segment = self.segment
        if layout is not None and layout != segment.layout:
            segment.lay_out(layout)
        if payload is not None:
            segment.write_request_payload(number, payload)
        segment.banks[number & 1].view[: len(part)] = part
        segment.times[LOSS_SECONDS] = mean
        self.posted = number
        self.channel.ring(number)

    def look(self) -> None:
        """Note how the worker has ended, if it has not answered."""
        if not self.channel.answered(self.asked):
            self.gone = self.channel.how_it_ended()

    def words(self) -> bytes:
        """Return the control words that the trainer reads."""
        words, now = self.segment.words, time.monotonic()
        if now - self.looked > _LOOK:
            self.looked = now
            words[RESIDENT] = resident_bytes(words[PID]) or 0
        return array("q", [words[word] for word in TOLD]).tobytes()


class Relay:
    """Has the workers of one host."""

    def __init__(self) -> None:
        self._workers: dict[int, Relayed] = {}
        self._inbox: deque[tuple[int, list[Frame]]] = deque()
        self._serial = 1  # of the call whose frames are carried out next
        self._early: dict[int, list[Frame]] = {}
        self._asides: set[int] = set()  # threads that kill, close or ask for a stack
        self._news: deque[Frame] = deque()  # of these threads
        self._bell = Bell()
        self._turn = threading.Lock()
        self._calls = itertools.count(1)
        self._newest = 0

    def exchange(self, serial: int, sent: list[Frame]) -> list[Frame]:
        """Do what frames say, and return what there is to tell; see the module ``frames``.

        Args:
            serial: Number of the call, from 1.
            sent: The frames.
        """
        self._inbox.append((serial, sent))
        mine = self._newest = next(self._calls)
        self._bell.ring()  # an older call returns now, with what it has
        with self._turn:
            while self._inbox:
                self._carry_out(*self._inbox.popleft())
            return self._collect(mine, is_poll=not sent)

    def _carry_out(self, serial: int, sent: list[Frame]) -> None:
        """Carry out the frames of a call when it is its turn, and of those that came before their turn."""
        self._early[serial] = sent
        while self._serial in self._early:
            for frame in self._early.pop(self._serial):
                try:
                    getattr(self, f"_do_{frame[0]}")(*frame[1:])
                except Exception as error:  # no memory, no thread: that of one worker, not of the host
                    if frame[0] != frames.FREE:
                        self._mark_broken(frame[1], error)
            self._serial += 1

    # --- waiting ------------------------------------------------------------------------------------

    def _collect(self, mine: int, *, is_poll: bool) -> list[Frame]:
        """Wait for answers; return them. A call that carries nothing is not answered with nothing at once."""
        told: list[Frame] = []
        until = time.monotonic() + HOLD
        while True:
            waiting = self._look(told)
            now = time.monotonic()
            if told:
                until = min(until, now + LINGER)
            is_done = not (waiting or self._asides) and (told or not is_poll)
            if is_done or self._newest != mine or now >= until:
                break
            for index in wait_any([(one.channel, one.asked) for one in waiting], until, self._bell):
                waiting[index].look()
        return told or [
            (frames.PROGRESS, name, worker.words()) for name, worker in self._workers.items() if worker.asked
        ]

    def _look(self, told: list[Frame]) -> list[Relayed]:
        """Add what there is to tell to ``told``; return the workers that have not answered yet."""
        waiting = []
        while self._news:
            told.append(self._news.popleft())
        for name, worker in self._workers.items():
            if worker.gone is not None and not worker.is_told:
                worker.is_told, worker.asked = True, 0
                told.append((frames.GONE, name, vars(worker.gone)))
            elif worker.asked and worker.gone is None and not worker.is_ending:
                if worker.channel.answered(worker.asked):
                    told.append(self._answer(name, worker))
                else:
                    waiting.append(worker)
        return waiting

    def _answer(self, name: int, worker: Relayed) -> Frame:
        """Return the answer of a worker."""
        segment, number = worker.segment, worker.asked
        bank = segment.banks[number & 1]
        rows = bytes(bank.view[bank.layout.rewards :]) if bank.view[2] == STEPPED else b""
        payload = segment.read_reply_payload(number) if segment.words[REPLY_PAYLOAD + (number & 1)] else b""
        worker.asked = 0
        return frames.ANSWER, name, number, worker.words(), bytes(bank.view[: HEAD.size]), rows, payload

    def _mark_broken(self, name: int, error: Exception) -> None:
        """Tell that a worker is lost because its relay failed, or that it could not be launched."""
        worker = self._workers.get(name)
        gone = Gone("broken", detail=f"its relay failed: {type(error).__name__}: {error}")
        if worker is None:
            self._news.append((frames.GONE, name, vars(gone)))
        elif worker.gone is None:
            worker.gone = gone

    # --- what the trainer asks: for each kind of its frames a method of that name -------------------

    def _keep(self, name: int, channel: Channel | None) -> None:
        """Keep a worker under this name."""
        if channel is None:
            self._news.append((frames.GONE, name, vars(Gone("died", detail="its snapshot is gone"))))
        else:
            self._workers[name] = Relayed(channel)

    def _do_launch(self, name: int, method: str, native_threads: int | None, title: str) -> None:
        self._keep(name, Launch(method, native_threads, title).start())

    def _do_wake(self, name: int, lost: int) -> None:
        worker = self._workers.get(lost)
        self._keep(name, None if worker is None else worker.channel.wake())

    def _do_wake_kept(self, name: int, token: int) -> None:
        self._keep(name, _SNAPSHOTS.wake_kept(token))

    def _do_free(self, token: int) -> None:
        _SNAPSHOTS.free(token)

    def _do_ask(self, name: int, *request: Any) -> None:
        worker = self._workers.get(name)
        if worker is not None:
            worker.post(*request)
            worker.is_told = False

    def _do_await(self, name: int, number: int) -> None:
        self._workers[name].asked = number

    def _do_stack(self, name: int) -> None:
        worker = self._workers.get(name)
        if worker is not None:
            channel = worker.channel
            self._aside(lambda: (frames.STACKS, name, channel.stack()))

    def _do_kill(self, name: int, cause: Any, stack: bool, detail: str) -> None:
        self._end(name, lambda channel: channel.kill(cause=cause, stack=stack, detail=detail))

    def _do_close(self, name: int, seconds: float) -> None:
        def close(channel: Channel) -> Gone:
            channel.close(seconds + crowd_seconds())
            return Gone("died")

        self._end(name, close)

    def _do_release(self, name: int) -> None:
        worker = self._workers.pop(name, None)
        if worker is not None:
            worker.channel.release()

    def _end(self, name: int, end: Callable[[Channel], Gone]) -> None:
        """End a worker in a thread, unless it has ended, and tell how it ended."""
        worker = self._workers.get(name)
        if worker is None or worker.gone is not None:
            return
        channel, worker.is_ending = worker.channel, True

        def run() -> Frame:
            gone = end(channel)
            worker.gone, worker.is_told, worker.asked = gone, True, 0
            return frames.GONE, name, vars(gone)

        self._aside(run)

    def _aside(self, tell: Callable[[], Frame]) -> None:
        """Do in a thread what takes a while, and tell what came of it."""
        serial = next(self._calls)
        self._asides.add(serial)

        def run() -> None:
            try:
                self._news.append(tell())
            finally:
                self._asides.discard(serial)
                self._bell.ring()

        threading.Thread(target=run, name="multienv-relay", daemon=True).start()
