"""Messages between the trainer and its monitor.

Two kinds of sockets: *control*, one per monitor, takes orders that concern no running worker; *fate*, one per worker,
takes orders that concern it, and tells its stack when asked, and how it ended, each as a line of JSON.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from multienv._engine.processes.channel import Fate

# Orders on the control socket.
# A new process; descriptors: fate, wake socket, memory; and the trainer's stdout and stderr, unless they are closed.
# Where descriptors run out, the first ones are received: over the fate socket it is told why there is no process.
LAUNCH = 1
FREE = 2  # end the snapshot kept under this token
# Launches with this token are to fork a template; descriptors: a file that says what it imports; stdout and stderr.
PRELOAD = 6
DROP = 7  # end the template with this token
# Of the descriptors that come with LAUNCH, those that are the worker's own.
OWN_DESCRIPTORS = 3
# On the control socket: wake the snapshot kept under this token. On a fate socket: wake the worker's snapshot.
WAKE = 3  # descriptors: fate, wake socket, memory
# On a fate socket.
KILL = 4  # SIGTERM, then SIGKILL
STACK = 5  # tell the stack, and go on

# CPython ignores the flags given to socket.send_fds() and socket.recv_fds(): sendmsg() and recvmsg() are called here.
# For send(): an int, because to join two flags of an enum takes as long as to send a byte.
AT_ONCE = int(getattr(socket, "MSG_NOSIGNAL", 0)) | int(socket.MSG_DONTWAIT)
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_MOST_DESCRIPTORS = 8
_FORM = struct.Struct("<B?hiQ64s")


@dataclass(frozen=True, slots=True)
class Order:
    """Tells the monitor what the trainer wants.

    Attributes:
        operation: One of the above.
        fresh: Launch a fresh interpreter (spawn) instead of a fork of the monitor (forkserver).
        native_threads: Threads of native libraries in a fresh interpreter; 0: as the user has set them.
        token: Of the snapshot, or of the template; 0: none.
        title: Name of the process; of a template, what it imports.
        folder: Number of the worker's folder for temporary files, in that of the monitor.
    """

    operation: int
    fresh: bool = False
    native_threads: int = 0
    token: int = 0
    title: str = ""
    folder: int = 0

    def send(self, over: socket.socket, descriptors: Sequence[int] = ()) -> None:
        """Send the order with these descriptors, without blocking; raises OSError."""
        title = self.title.encode()[:64]
        data = _FORM.pack(self.operation, self.fresh, self.native_threads, self.folder, self.token, title)
        send_with_descriptors(over, data, descriptors)

    @classmethod
    def receive(cls, over: socket.socket) -> tuple[Order, list[int]] | None:
        """Receive an order with its descriptors; ``None`` when no more will come. Raises BlockingIOError."""
        try:
            data, descriptors = receive_with_descriptors(over, _FORM.size)
        except BlockingIOError:
            raise
        except OSError:
            return None
        if len(data) < _FORM.size:
            close_all(descriptors)
            return None
        operation, fresh, native_threads, folder, token, title = _FORM.unpack(data)
        name = title.rstrip(b"\0").decode(errors="replace")
        return cls(operation, fresh, native_threads, token, name, folder), descriptors


def send_with_descriptors(over: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a message; raises OSError at once if the socket does not take all of it.

    A stream socket whose buffer is nearly full takes the first part of a long message (unix(7)). Then it is shut down:
    nothing else is to follow half a message. Orders and announcements are too short to be taken in parts.
    """
    handed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    sent = over.sendmsg([data], handed, AT_ONCE)
    if sent < len(data):  # else another thread may have closed the socket by now
        over.shutdown(socket.SHUT_RDWR)
        raise BrokenPipeError(errno.EPIPE, f"The socket has taken {sent} of {len(data)} bytes")


def takes_more(descriptor: int, patience: float) -> bool:
    """Wait up to ``patience`` seconds; tell whether something (to a pipe PIPE_BUF bytes) can be written at once."""
    poller = select.poll()  # select.select() knows descriptors below 1024 only
    poller.register(descriptor, select.POLLOUT)
    return bool(poller.poll(1000 * patience))


def receive_with_descriptors(over: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Receive a message and the descriptors that came with it; raises OSError."""
    found = array("i")
    data, ancillary, _, _ = over.recvmsg(size, socket.CMSG_SPACE(_MOST_DESCRIPTORS * found.itemsize), _CLOSE_ON_EXEC)
    for level, kind, handed in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(handed[: len(handed) - len(handed) % found.itemsize])
    return data, found.tolist()


def close_all(descriptors: Sequence[int]) -> None:
    """Close these descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


# --- what the monitor tells -------------------------------------------------------------------


def stack_line(stack: str) -> bytes:
    """Encode the stack that was asked for, as a line of JSON."""
    return json.dumps({"stack": stack}).encode() + b"\n"


def fate_line(fate: Fate) -> bytes:
    """Encode how the worker ended, as a line of JSON."""
    return json.dumps({"fate": asdict(fate)}).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class MonitorNews:
    """Holds what the monitor has reported of one worker so far."""

    stacks: tuple[str, ...] = ()
    fate: Fate | None = None

    @classmethod
    def of(cls, data: bytes) -> MonitorNews:
        """Decode all bytes received so far; a last line without its end counts as not received."""
        lines = [json.loads(line) for line in data.split(b"\n")[:-1]]
        fates = [Fate(**line["fate"]) for line in lines if "fate" in line]
        return cls(tuple(line["stack"] for line in lines if "stack" in line), fates[0] if fates else None)
