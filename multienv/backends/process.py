"""A host in a process of its own."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from functools import partial

from multienv.backends.base import Backend, Gone
from multienv.processes.launch import ENDED_PIPE_TIMEOUT, FATE_TIMEOUT, Launch, Worker
from multienv.processes.protocol import UNKNOWN_FATE, Fate
from multienv.wire.memory import BUSY, DEADLINE, OBSERVATIONS, REPLAYING, Block
from multienv.wire.messages import FAILED, GONE, REPLY, STEPPED, VALUE

# One read takes most replies with an inline observation, and CPython's small-object allocator serves it. Where
# replies are larger the first read grows with them.
_CHUNK = 476
_LARGEST_CHUNK = 2**16
_BIG_CHUNK = 2**20
_REPLIES = frozenset((STEPPED, VALUE, FAILED))


class ProcessBackend(Backend):
    """Request and reply over two pipes.

    Sending does not block: what the pipe does not take at once waits in an outbox and is pumped while
    reading. Reading blocks without a timeout, in one system call: the pipe ends, or the warden writes GONE
    into it, when the worker dies or is overdue.
    """

    def __init__(self, launch: Launch, start_deadline: float | None) -> None:
        """Launch the process; does not wait for it."""
        self._worker = Worker(launch, start_deadline)
        self._pid: int | None = self._worker.pid
        self._outbox = memoryview(b"")
        self._inbox = b""
        self._asked_again = 0
        self._block: Block | None = None
        self._times = self._worker.control.times
        self._read_directly = partial(os.read, self._worker.replies, _CHUNK)
        self._chunk = _CHUNK
        self.read = self._read_directly
        self.send = self._sender()

    @property
    def pid(self) -> int | None:
        """The worker's process, once it has said who it is."""
        return self._pid

    @pid.setter
    def pid(self, pid: int) -> None:
        self._pid = self._worker.pid = pid

    def _sender(self) -> Callable[[bytes], None]:
        write, descriptor = os.write, self._worker.requests

        def send(frame: bytes) -> None:
            try:
                written = write(descriptor, frame)
            except BlockingIOError:
                written = 0
            except OSError:  # it is dead: the replies will end
                return
            if written < len(frame):
                self._outbox = memoryview(frame)[written:]
                self.read = self._pump

        return send

    def arm(self, seconds: float | None) -> None:
        """Set the deadline; the worker clears it when it is done, the warden enforces it."""
        if seconds is not None:
            self._times[DEADLINE] = time.monotonic() + seconds

    def ask_again(self, frame: bytes) -> None:
        """Send once more; the worker does not execute a request twice, it repeats its answer."""
        self._asked_again += 1
        if self._outbox:
            raise Gone("broken", pid=self.pid, detail="interrupted in the middle of a long request")
        self.send(frame)

    # --- reading --------------------------------------------------------------------------------

    def _pump(self) -> bytes:
        """Write the outbox and wait for the reply at the same time."""
        worker = self._worker
        poller = select.poll()
        poller.register(worker.requests, select.POLLOUT)
        poller.register(worker.replies, select.POLLIN)
        while self._outbox:
            ready = dict(poller.poll())
            if worker.requests in ready:
                try:
                    self._outbox = self._outbox[os.write(worker.requests, self._outbox) :]
                except BlockingIOError:
                    pass
                except OSError:
                    self._outbox = memoryview(b"")
            if worker.replies in ready:
                break
        if not self._outbox:
            self.read = self._read_directly
        return os.read(worker.replies, _BIG_CHUNK)

    def _read_inbox(self) -> bytes:
        data, self._inbox = self._inbox, b""
        self.read = self._read_directly
        return data

    def poll(self, timeout: float) -> bool:
        """Whether a reply, or the end, is there within ``timeout`` seconds."""
        if self._inbox:
            return True
        worker, until = self._worker, time.monotonic() + timeout
        poller = select.poll()
        poller.register(worker.replies, select.POLLIN)
        if self._outbox:
            poller.register(worker.requests, select.POLLOUT)
        while True:
            ready = dict(poller.poll(max(0.0, until - time.monotonic()) * 1000))
            if worker.replies in ready:
                return True
            if worker.requests not in ready:
                return False
            try:
                self._outbox = self._outbox[os.write(worker.requests, self._outbox) :]
            except OSError:
                self._outbox = memoryview(b"")
            if not self._outbox:
                self.read = self._read_directly
                poller.unregister(worker.requests)

    def complete(self, start: bytes, seq: int) -> bytes:
        """Read on until the reply to ``seq`` is whole; skip repeated answers to earlier requests."""
        data = bytearray(self._inbox)
        data += start
        self._inbox = b""
        while True:
            if not data and self._worker.fate is not None:
                raise self._gone("died", "", seq)
            reply = self._take(data, seq)
            if reply is not None:
                if data:
                    self._inbox, self.read = bytes(data), self._read_inbox
                return reply
            more = self._read_more(data)
            if not more:
                raise self._gone("died", "" if not data else "in the middle of a reply", seq)
            data += more

    def _read_more(self, data: bytearray) -> bytes:
        if self._outbox:
            return self._pump()
        return os.read(self._worker.replies, _BIG_CHUNK if data else self._chunk)

    def _take(self, data: bytearray, seq: int) -> bytes | None:
        """Take the first whole frame off ``data`` if it is the reply to ``seq``."""
        while len(data) >= REPLY.size:
            length, number, _, kind, _, _, _ = REPLY.unpack_from(data)
            if kind == GONE and number == 0 and length == REPLY.size:
                raise self._gone("died", "", seq)
            if kind not in _REPLIES or length < REPLY.size or (number != seq and not self._asked_again):
                raise self._gone("broken", f"a reply that starts with {bytes(data[:32])!r}", seq)
            if len(data) < length:
                self._expect(length)
                return None
            frame = bytes(data[:length])
            del data[:length]
            if number == seq:
                return frame
        return None

    def _expect(self, length: int) -> None:
        """Replies are longer than one read: make it longer."""
        if self._chunk < length <= _LARGEST_CHUNK:
            self._chunk = min(2 * length, _LARGEST_CHUNK)
            was_direct = self.read is self._read_directly
            self._read_directly = partial(os.read, self._worker.replies, self._chunk)
            if was_direct:
                self.read = self._read_directly

    def _gone(self, cause: str, detail: str, seq: int) -> Gone:
        """Make sure it is dead, and learn how it died. From now on reading finds the end at once."""
        self.read = bytes
        words = self._worker.control.words
        executing, replaying = words[BUSY] == seq + 1, words[REPLAYING] - 1
        if cause == "broken":
            self._worker.kill()
        fate = self._worker.wait(FATE_TIMEOUT if cause == "broken" else ENDED_PIPE_TIMEOUT)
        if fate is None:  # its pipe ended, yet it lives
            fate = self.kill()
            cause = "broken"
        return Gone(
            "hung" if fate.overdue else "broken" if cause == "broken" else "died",
            fate,
            pid=self.pid,
            executing=executing,
            replaying=replaying,
            detail=detail,
        )

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

    def finish(self, timeout: float) -> None:
        """Wait for its end; kill it after ``timeout`` seconds."""
        if self._worker.wait(timeout) is None:
            self.kill()
        self.release()

    def release(self) -> None:
        """Close the pipes. The memory stays mapped for whoever still looks into it."""
        self._worker.release()
