"""Messages between the trainer and its monitor.

Two kinds of sockets: *control*, one per monitor, takes orders that concern no running worker; *fate*, one per worker,
takes orders that concern it, and tells its pid, its stack when asked, and how it ended, each as a line of JSON.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from multienv.processes.channel import Fate

# Orders on the control socket.
LAUNCH = 1  # a new process; descriptors: line, memory, fate
BRANCH = 2  # wake the snapshot kept under this token; descriptors as for LAUNCH
FREE = 3  # let the snapshot kept under this token go
# Orders on the fate socket of a worker.
KILL = 4  # SIGTERM, then SIGKILL
KILL_WITH_STACK = 5  # the stack first
STACK = 6  # tell the stack, and go on
WAKE = 7  # the worker has ended: wake the snapshot it left; descriptors as for LAUNCH

# CPython ignores the flags given to socket.send_fds() and socket.recv_fds(): sendmsg() and recvmsg() are called here.
NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_MOST_DESCRIPTORS = 8
_FORM = struct.Struct("<B?hxxxxQQ64s")


@dataclass(frozen=True, slots=True)
class Order:
    """What the trainer wants of the monitor.

    Attributes:
        operation: One of the above.
        fresh: Launch a fresh interpreter (spawn) instead of a fork of the monitor (forkserver).
        native_threads: Threads of native libraries in a fresh interpreter; 0: as the user has set them.
        number: Number of the worker, unique in its trainer.
        token: Of the snapshot.
        title: Name of the process.
    """

    operation: int
    fresh: bool = False
    native_threads: int = 0
    number: int = 0
    token: int = 0
    title: str = ""

    def send(self, over: socket.socket, descriptors: Sequence[int] = ()) -> None:
        """Send it without blocking; raises OSError."""
        title = self.title.encode()[:64]
        data = _FORM.pack(self.operation, self.fresh, self.native_threads, self.number, self.token, title)
        send_with_descriptors(over, data, descriptors)

    @classmethod
    def receive(cls, over: socket.socket) -> tuple[Order, list[int]] | None:
        """Receive one with its descriptors; ``None`` when there are no more. Raises BlockingIOError."""
        try:
            data, descriptors = receive_with_descriptors(over, _FORM.size)
        except BlockingIOError:
            raise
        except OSError:
            return None
        if len(data) < _FORM.size:
            close_all(descriptors)
            return None
        operation, fresh, native_threads, number, token, title = _FORM.unpack(data)
        name = title.rstrip(b"\0").decode(errors="replace")
        return cls(operation, fresh, native_threads, number, token, name), descriptors


def send_with_descriptors(over: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a message without blocking; raises OSError."""
    handed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    over.sendmsg([data], handed, NO_SIGNAL | socket.MSG_DONTWAIT)


def receive_with_descriptors(over: socket.socket, size: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """Receive a message and the descriptors that came with it; raises OSError."""
    data, ancillary, _, _ = over.recvmsg(size, ANCILLARY_SIZE, flags | _CLOSE_ON_EXEC)
    return data, descriptors_in(ancillary)


ANCILLARY_SIZE = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array("i").itemsize)
RECEIVE_FLAGS = socket.MSG_DONTWAIT | _CLOSE_ON_EXEC


def descriptors_in(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors in what ``recvmsg`` has returned."""
    found = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found.tolist()


def close_all(descriptors: Sequence[int]) -> None:
    """Close these descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


# --- what the monitor tells -------------------------------------------------------------------


def tell_pid(pid: int) -> bytes:
    """Encode that the worker is this process; its pidfd goes with it where there is one."""
    return json.dumps({"pid": pid}).encode() + b"\n"


def tell_stack(stack: str) -> bytes:
    """Encode the stack that was asked for."""
    return json.dumps({"stack": stack}).encode() + b"\n"


def tell_fate(fate: Fate) -> bytes:
    """Encode how the worker ended."""
    told = {"code": fate.code, "stack": fate.stack, "stderr": fate.stderr, "snapshot": fate.snapshot}
    return json.dumps({"fate": told}).encode() + b"\n"


@dataclass(slots=True)
class Told:
    """What the monitor has told of one worker so far."""

    pid: int | None = None
    stacks: tuple[str, ...] = ()
    fate: Fate | None = None

    @classmethod
    def of(cls, data: bytes) -> Told:
        """Decode all that has been received; a line that is not whole yet counts as not received."""
        told = cls()
        for line in data.split(b"\n")[:-1]:
            fields = json.loads(line)
            told.pid = fields.get("pid", told.pid)
            if "stack" in fields:
                told.stacks += (fields["stack"],)
            if "fate" in fields:
                snapshot = fields["fate"].pop("snapshot")
                told.fate = Fate(**fields["fate"], snapshot=None if snapshot is None else tuple(snapshot))
        return told
