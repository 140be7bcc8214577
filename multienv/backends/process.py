"""A host in a process of its own."""

from __future__ import annotations

import errno
import io
import math
import os
import secrets
import select
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from multienv.backends.base import Backend, Gone
from multienv.processes.launch import ENDED_PIPE_TIMEOUT, FATE_TIMEOUT, Launch, Worker, milliseconds, reap_strays
from multienv.processes.protocol import UNKNOWN_FATE, WAKE, Fate
from multienv.wire.memory import (
    BUSY,
    CORE,
    DEADLINE,
    LOOKS,
    NO_SNAPSHOTS,
    OBSERVATIONS,
    PID,
    REPLAYING,
    RESETTING,
    SLOT,
    SNAPSHOTS,
    STEP_SECONDS,
    Block,
)
from multienv.wire.messages import (
    ARRIVED,
    FAILED,
    GONE,
    GONE_FRAME,
    MARK_SIZE,
    REPLY,
    STEPPED,
    VALUE,
    mark_frame,
    seq_of,
)
from multienv.worker.snapshots import OBSTACLES

_BIG_CHUNK = 2**20
# A pipe takes so much whole or not at all.
ATOMIC = select.PIPE_BUF
# What writing raises when nobody reads any more.
_DEAD = frozenset((errno.EPIPE, errno.ECONNRESET, errno.EBADF))
_REPLIES = frozenset((STEPPED, VALUE, FAILED))


def _send_nothing(frame: bytes) -> None:
    """A frame is half sent: another one, which can only be Close, would land in the middle of it."""


def _as_gone(busy: int, seq: int, **what: Any) -> Gone:
    """As whoever awaits the reply to ``seq`` is to see it, which need not be what it was executing."""
    return Gone(executing=busy == seq + 1, **what)


def _nothing() -> int:
    """What is next does not come from the pipe: complete() has it."""
    return 0


class ProcessBackend(Backend):
    """Request and reply over two pipes.

    Sending does not block: what the pipe does not take at once waits in an outbox and is pumped while
    reading. Reading blocks without a timeout, in one system call: the pipe ends, or the warden writes GONE
    into it, when the worker dies or is overdue.
    """

    __slots__ = (
        "__weakref__",
        "_block",
        "_fill_directly",
        "_inbox",
        "_launch",
        "_lost",
        "_mark",
        "_outbox",
        "_pid",
        "_replies",
        "_send_directly",
        "_times",
        "_unsettled",
        "_worker",
    )

    def __init__(self, launch: Launch, start_deadline: float | None, snapshot: tuple[int, int] | None = None) -> None:
        """Launch the process, or wake a snapshot: the order and the number to give; does not wait for it."""
        super().__init__()
        self._launch = launch
        self._worker = Worker(launch, start_deadline, snapshot)
        self._pid: int | None = self._worker.pid
        # A BufferedWriter, because it counts what is written where no signal handler can come in between.
        self._outbox: io.BufferedWriter[io.FileIO] | None = None
        self._inbox = b""
        self._lost: Callable[[int], Gone] | None = None  # not the exception itself: its traceback would hold everything
        self._unsettled = b""  # a request of which an interruption left unknown how far it got
        self._mark: tuple[bytes, bool, bytes] | None = None  # where settling that goes on
        self._block: Block | None = None
        self._times = self._worker.control.times
        # Unbuffered: one system call. It does not own the descriptor.
        self._replies = io.FileIO(self._worker.replies, closefd=False)
        self._fill_directly = partial(self._replies.readinto, self.buffer)
        self.fill = self._fill_directly
        self.send = self._send_directly = self._sender()

    @property
    def pid(self) -> int | None:
        """The worker's process, once it has said who it is."""
        if self._pid is None and self._worker.ended >= 0 and self._worker.control.words[PID]:
            self.pid = self._worker.control.words[PID]
        return self._pid

    @pid.setter
    def pid(self, pid: int) -> None:
        if self._pid is None:  # else the system has said it, not the worker
            self._pid = self._worker.pid = pid

    def arm(self, seconds: float | None) -> None:
        """Set the deadline; the worker clears it when it is done, the warden enforces it."""
        self._times[DEADLINE] = 0.0 if seconds is None else time.monotonic() + seconds

    def snapshots(self) -> tuple[int, str]:
        """How many it has taken, and why none at present, if there is a reason."""
        words = self._worker.control.words
        return words[SNAPSHOTS], OBSTACLES[words[NO_SNAPSHOTS]]

    def step_seconds(self) -> float | None:
        """From a sample of the steps, measured by the worker."""
        return self._times[STEP_SECONDS] or None

    def prefer(self, core: int | None, *, looks: bool) -> None:
        """The worker looks at this now and then; see ``worker.affinity`` and ``worker.lookout``."""
        words = self._worker.control.words
        words[CORE], words[LOOKS] = 0 if core is None else core + 1, looks

    # --- writing --------------------------------------------------------------------------------

    def _sender(self) -> Callable[[bytes], None]:
        write, descriptor = os.write, self._worker.requests
        # Weakly: whoever is interrupted before it could let go of its worker is to lose it at once, not when garbage is
        # collected next.
        send_long = weakref.WeakMethod(self._send_long)

        def send(frame: bytes) -> None:
            if len(frame) > ATOMIC:
                send_long()(frame)  # type: ignore[misc]
                return
            try:
                write(descriptor, frame)  # the whole of it or nothing
            except BlockingIOError:
                send_long()(frame)  # type: ignore[misc]
            except OSError as error:
                if error.errno not in _DEAD:
                    raise  # a signal handler's: TimeoutError is one
                return  # the replies will end

        return send

    def _send_long(self, frame: bytes) -> None:
        raw = io.FileIO(self._worker.requests, "w", closefd=False)
        outbox = io.BufferedWriter(raw, len(frame) + 1)  # what fills it would be written at once, from Python 3.13 on
        outbox.write(frame)
        self._outbox, self.fill, self.send = outbox, self._pump, _send_nothing
        self._write_outbox()

    def _write_outbox(self) -> None:
        assert self._outbox is not None
        try:
            self._outbox.flush()
        except BlockingIOError:
            return  # it will be writable again
        except OSError as error:
            if error.errno not in _DEAD:
                raise
            self._outbox.raw.close()  # or it would try once more when it is collected
        self._outbox, self.send = None, self._send_directly

    # --- reading --------------------------------------------------------------------------------

    def _pump(self) -> int:
        """Write the outbox and wait for the reply at the same time."""
        worker = self._worker
        poller = select.poll()
        poller.register(worker.requests, select.POLLOUT)
        poller.register(worker.replies, select.POLLIN)
        while self._outbox:
            ready = dict(poller.poll())
            if worker.requests in ready:
                self._write_outbox()
            if worker.replies in ready:
                break
        if not self._outbox:
            self.fill = self._fill_directly
        return self._fill_directly()

    def poll(self, timeout: float) -> bool:
        """Whether a reply, or the end, is there within ``timeout`` seconds."""
        worker, until = self._worker, time.monotonic() + timeout
        try:
            if self._unsettled and not self._settle(seq_of(self._unsettled), until):
                return False
        except Gone:
            return True  # complete() raises it
        if self._inbox:
            return True
        poller = select.poll()
        poller.register(worker.replies, select.POLLIN)
        if self._outbox:
            poller.register(worker.requests, select.POLLOUT)
        while True:
            ready = dict(poller.poll(milliseconds(until - time.monotonic())))
            if worker.replies in ready:
                return True
            if worker.requests not in ready:
                return False
            self._write_outbox()
            if not self._outbox:
                self.fill = self._fill_directly
                poller.unregister(worker.requests)

    def interests(self) -> list[tuple[int, int]]:
        """The replies; and the requests, while there is more to write."""
        if self._inbox or self._lost is not None:
            return []
        writing = [(self._worker.requests, select.POLLOUT)] if self._outbox else []
        return [(self._worker.replies, select.POLLIN), *writing]

    def complete(self, start: bytes, seq: int) -> bytes:
        """Read on until the reply to ``seq`` is whole."""
        if self._unsettled:
            self._settle(seq)
        data = bytearray(self._inbox)
        data += start
        self._inbox = b""
        while True:
            if not data and self._worker.fate is not None:
                raise self._gone("died", "", seq)
            reply = self._take(data, seq)
            if reply is not None:
                if data:
                    self._inbox, self.fill = bytes(data), _nothing
                return reply
            before = len(data)
            data = self._read_more(data)
            if len(data) == before:
                raise self._gone("died", "in the middle of a reply" if data else "", seq)

    def _read_more(self, data: bytearray) -> bytearray:
        """``data`` and what there is to read; of a long reply, all of it, unless it was cut short."""
        if self._outbox:
            return data + memoryview(self.buffer)[: self._pump()]
        self.fill = self._fill_directly
        end = len(data)
        whole = int.from_bytes(data[:4], "little") if end >= REPLY.size else 0
        if end >= whole:
            return data + os.read(self._worker.replies, _BIG_CHUNK if data else len(self.buffer))
        # Each byte into its place at once; and room for GONE, which must not be cut in two.
        longer = bytearray(whole + REPLY.size)
        longer[:end] = data
        with memoryview(longer) as view:
            while end < whole:
                received = self._replies.readinto(view[end:])
                end += received
                if not received or view[end - REPLY.size : end] == GONE_FRAME:
                    break
        del longer[end:]
        return longer

    def _take(self, data: bytearray, seq: int) -> bytes | None:
        """Take the first whole frame off ``data`` if it is the reply to ``seq``."""
        if len(data) < REPLY.size:
            return None
        length, number, _, kind, _, _, _ = REPLY.unpack_from(data)
        if kind == GONE and number == 0 and length == REPLY.size:
            raise self._gone("died", "", seq)
        if kind not in _REPLIES or length < REPLY.size or number != seq:
            raise self._gone("broken", f"a reply that starts with {bytes(data[:32])!r}", seq)
        # What is too long to be written in one piece, also behind a mark, may be cut short, and GONE be in its place.
        if length > ATOMIC - MARK_SIZE - 1 and len(data) < length + REPLY.size and data.endswith(GONE_FRAME):
            raise self._gone("died", "in the middle of a reply", seq)
        if len(data) < length:
            return None
        with memoryview(data) as view:
            frame = bytes(view[:length])
        del data[:length]
        return frame

    # --- after an interruption ------------------------------------------------------------------

    def ask_again(self, frame: bytes) -> None:
        """See to it that the request is executed, once, and answered.

        Any line of sending or reading may have been its last: the request may have been sent or not, and some
        bytes of the reply may have been read and lost.
        """
        self._unsettled, self._mark, self._inbox, self.fill = frame, None, b"", _nothing

    def _settle(self, seq: int, until: float = math.inf) -> bool:
        """Ask for a mark, skip all that comes before it, and hear behind it whether the request had arrived.

        False if there is no answer by then: the worker is busy. The next call goes on.
        """
        if self._lost is not None:
            raise self._lost(seq)
        worker = self._worker
        mark, asked, data = self._mark or (secrets.token_bytes(MARK_SIZE), False, b"")
        self._mark = None  # if this is interrupted too, nothing is known of that mark
        poller = select.poll()
        poller.register(worker.replies, select.POLLIN)
        poller.register(worker.ended, select.POLLIN)  # GONE may be among what is skipped
        poller.register(worker.requests, select.POLLOUT)
        while mark not in data[:-1]:
            ready = dict(poller.poll(milliseconds(until - time.monotonic())))
            if not ready and time.monotonic() >= until:
                self._mark = mark, asked, data
                return False
            if worker.requests in ready:
                if self._outbox:  # the rest of the request first
                    self._write_outbox()
                elif not asked:
                    asked = True
                    self.send(mark_frame(mark, seq))
                else:
                    poller.unregister(worker.requests)
            more = os.read(worker.replies, _BIG_CHUNK) if worker.replies in ready else b""
            if worker.ended in ready or (worker.replies in ready and not more):
                raise self._gone("died", "", seq)
            data = data[-MARK_SIZE:] + more
        behind = data.partition(mark)[2]
        frame, self._unsettled = self._unsettled, b""
        if behind[:1] == ARRIVED:
            self._inbox = behind[1:]
            self.fill = _nothing if self._inbox else self._fill_directly
        else:
            self.fill = self._fill_directly
            self.send(frame)
        return True

    def _gone(self, cause: str, detail: str, seq: int) -> Gone:
        """Make sure it is dead, and learn how it died. From now on reading finds this same end at once."""
        self.fill = _nothing
        if self._lost is not None:
            return self._lost(seq)
        words = self._worker.control.words
        busy, replaying = words[BUSY], words[REPLAYING] - 1
        resetting, slot = divmod(words[SLOT], RESETTING)
        if cause == "broken":
            self._worker.kill()
        fate = self._worker.wait(FATE_TIMEOUT if cause == "broken" else ENDED_PIPE_TIMEOUT)
        if fate is None:  # its pipe ended, yet it lives
            fate = self.kill()
            cause = "broken"
        self._lost = partial(
            _as_gone,
            busy,
            cause="hung" if fate.overdue else "broken" if cause == "broken" else "died",
            fate=fate,
            pid=self.pid,
            replaying=replaying,
            slot=slot - 1,
            resetting=bool(resetting),
            detail=detail,
        )
        return self._lost(seq)

    # --- memory and the end ---------------------------------------------------------------------

    def observations(self, size: int) -> Block:
        """Map what the worker has laid behind the control block."""
        if self._block is None:
            self._block = Block(self._worker.memory, size, OBSERVATIONS)
        return self._block

    def kill(self) -> Fate:
        """Have it killed, and wait for its end."""
        self._worker.kill()
        return self._worker.wait(FATE_TIMEOUT) or UNKNOWN_FATE

    def strike(self) -> None:
        """Have it killed, by its number alone."""
        self._worker.kill()

    def wake(self, deadline: float | None) -> ProcessBackend | None:
        """Its snapshot, once it is dead and if it has left one."""
        fate = self._worker.fate
        if fate is None or fate.standby is None:
            return None
        return self.woken(self._launch, deadline, (WAKE, self._worker.number))

    @classmethod
    def woken(cls, launch: Launch, deadline: float | None, snapshot: tuple[int, int]) -> ProcessBackend | None:
        """A snapshot, awake, if it can be reached."""
        try:
            return cls(launch, deadline, snapshot)
        except OSError:  # the warden is gone, and the snapshot with it
            return None

    def finish(self, timeout: float) -> None:
        """Wait for its end; kill it after ``timeout`` seconds, or at once if it waits for the rest of a request."""
        if self._outbox or not self._worker.ends_within(timeout):
            self.kill()
        self.release()
        reap_strays(self._launch, ENDED_PIPE_TIMEOUT)  # those it has replaced, under fork

    def release(self) -> None:
        """Close the pipes and unmap the memory, unless somebody still looks into it."""
        if self._outbox is not None:
            self._outbox.raw.close()  # the descriptor is no longer ours to write to
        self._worker.release()
        if self._block is not None:
            self._block.close()
