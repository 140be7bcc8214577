"""A host in a process of its own."""

from __future__ import annotations

import io
import os
import select
import time
from collections.abc import Callable
from functools import partial

from multienv.backends.base import Backend, Gone
from multienv.processes.launch import ENDED_PIPE_TIMEOUT, FATE_TIMEOUT, Launch, Worker, milliseconds
from multienv.processes.protocol import UNKNOWN_FATE, Fate
from multienv.wire.memory import BUSY, DEADLINE, OBSERVATIONS, REPLAYING, Block
from multienv.wire.messages import FAILED, GONE, REPLY, STEPPED, VALUE

_BIG_CHUNK = 2**20
_REPLIES = frozenset((STEPPED, VALUE, FAILED))


def _nothing() -> int:
    """What is next does not come from the pipe: complete() has it."""
    return 0


class ProcessBackend(Backend):
    """Request and reply over two pipes.

    Sending does not block: what the pipe does not take at once waits in an outbox and is pumped while
    reading. Reading blocks without a timeout, in one system call: the pipe ends, or the warden writes GONE
    into it, when the worker dies or is overdue.
    """

    def __init__(self, launch: Launch, start_deadline: float | None) -> None:
        """Launch the process; does not wait for it."""
        super().__init__()
        self._worker = Worker(launch, start_deadline)
        self._pid: int | None = self._worker.pid
        self._outbox = memoryview(b"")
        self._inbox = b""
        self._asked_again = 0
        self._block: Block | None = None
        self._times = self._worker.control.times
        # Unbuffered: one system call. It does not own the descriptor.
        self._replies = io.FileIO(self._worker.replies, closefd=False)
        self._fill_directly = partial(self._replies.readinto, self.buffer)
        self.fill = self._fill_directly
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
                self.fill = self._pump

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

    def _write_outbox(self) -> None:
        try:
            self._outbox = self._outbox[os.write(self._worker.requests, self._outbox) :]
        except BlockingIOError:
            pass  # it will be writable again
        except OSError:  # it is dead: the replies will end
            self._outbox = memoryview(b"")

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
            ready = dict(poller.poll(milliseconds(until - time.monotonic())))
            if worker.replies in ready:
                return True
            if worker.requests not in ready:
                return False
            self._write_outbox()
            if not self._outbox:
                self.fill = self._fill_directly
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
                    self._inbox, self.fill = bytes(data), _nothing
                return reply
            more = self._read_more(data)
            if not more:
                raise self._gone("died", "in the middle of a reply" if data else "", seq)
            data += more

    def _read_more(self, data: bytearray) -> bytes | memoryview:
        if self._outbox:
            return memoryview(self.buffer)[: self._pump()]
        self.fill = self._fill_directly
        return os.read(self._worker.replies, _BIG_CHUNK if data else len(self.buffer))

    def _take(self, data: bytearray, seq: int) -> bytes | None:
        """Take the first whole frame off ``data`` if it is the reply to ``seq``."""
        while len(data) >= REPLY.size:
            length, number, _, kind, _, _, _ = REPLY.unpack_from(data)
            if kind == GONE and number == 0 and length == REPLY.size:
                raise self._gone("died", "", seq)
            if kind not in _REPLIES or length < REPLY.size or (number != seq and not self._asked_again):
                raise self._gone("broken", f"a reply that starts with {bytes(data[:32])!r}", seq)
            if len(data) < length:
                return None
            frame = bytes(data[:length])
            del data[:length]
            if number == seq:
                return frame
        return None

    def _gone(self, cause: str, detail: str, seq: int) -> Gone:
        """Make sure it is dead, and learn how it died. From now on reading finds the end at once."""
        self.fill = _nothing
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
        """Close the pipes and unmap the memory, unless somebody still looks into it."""
        self._worker.release()
        if self._block is not None:
            self._block.close()
