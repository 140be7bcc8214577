"""What the warden holds of a worker, and what it asks of the kernel."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path

from multienv.processes.protocol import Fate
from multienv.wire.memory import Control
from multienv.wire.messages import GONE_FRAME
from multienv.worker.snapshots import ANNOUNCEMENT


@dataclass(frozen=True, slots=True)
class Standby:
    """A snapshot of a worker, frozen; see ``worker.snapshots``."""

    pid: int
    seq: int  # of the last request it has executed
    channel: socket.socket  # a message wakes it, closing ends it

    def end(self) -> None:
        """Have it end, also if somebody has stopped it."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGCONT)
        self.channel.close()


@dataclass(slots=True)
class Ward:
    """A worker and what the warden holds of it."""

    number: int
    pid: int
    is_child: bool
    replies: int
    control: Control
    fate: socket.socket
    stderr: int
    stack: int
    shortest_deadline: float
    announcements: socket.socket | None = None
    standby: Standby | None = None
    overdue: bool = False
    stage: str = ""  # "", "stack", "term", "kill": how far the killing has come
    next_stage_at: float = float("inf")
    tail: bytearray = field(default_factory=bytearray)
    stack_text: bytearray = field(default_factory=bytearray)
    pidfd: int = -1
    pipes: frozenset[str] = frozenset()  # its stderr's and stack's, as /proc names them

    def hear(self, tokens: dict[int, Standby]) -> bool:
        """Take note of all snapshots announced so far, here or under their tokens; false when none will be any more."""
        assert self.announcements is not None
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.announcements, ANNOUNCEMENT.size, 1)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if len(data) < ANNOUNCEMENT.size or not descriptors:
                for descriptor in descriptors:
                    os.close(descriptor)
                return False
            pid, seq, token = ANNOUNCEMENT.unpack(data)
            snapshot = Standby(pid, seq, socket.socket(fileno=descriptors[0]))
            if token:
                tokens[token] = snapshot
            else:
                self.drop_standby()
                self.standby = snapshot

    def drop_standby(self) -> None:
        """Let it end."""
        standby, self.standby = self.standby, None
        if standby is not None:
            standby.end()

    def __post_init__(self) -> None:
        """Remember the pipes by inode: both ends share it, and whatever it forks holds them too."""
        if self.announcements is not None:
            self.announcements.setblocking(False)  # the flags that socket.recv_fds() takes are ignored by CPython
        self.pipes = frozenset(f"pipe:[{os.fstat(end).st_ino}]" for end in (self.stderr, self.stack))


def pipe(descriptors: list[int]) -> tuple[int, int]:
    """A new pipe, whose ends are noted with those that are to be closed if something fails."""
    ends = os.pipe()
    descriptors += ends
    return ends


def pair(descriptors: list[int]) -> tuple[int, int]:
    """A new pair of sockets, noted likewise."""
    one, other = socket.socketpair()
    ends = one.detach(), other.detach()
    descriptors += ends
    return ends


def decline(descriptors: list[int], replies: int, fate: int, error: Exception) -> None:
    """This worker cannot be launched, or watched over: tell its trainer, who holds the other ends, why."""
    told = Fate(None, stderr=f"The warden cannot launch it: {error}")
    with contextlib.suppress(OSError, IndexError):  # without these ends it is told by their being closed
        os.write(descriptors[fate], told.encode())
        tell_gone(descriptors[replies])
    for descriptor in descriptors:
        os.close(descriptor)


def tell_gone(replies: int) -> None:
    """Wake whoever waits for this worker's reply, also if another process holds the pipe open."""
    with contextlib.suppress(OSError):
        if takes_more(replies):
            os.write(replies, GONE_FRAME)


def dispatch(selector: selectors.BaseSelector, timeout: float | None) -> None:
    """Wait for descriptors, and call what is registered with those that are ready.

    What one call has closed is passed over, also if the next thing opened has been given its number and is registered
    too: it is not ready, and reading it would block for as long as nobody writes.
    """
    for key, _ in selector.select(timeout):
        if selector.get_map().get(key.fd) is key:
            key.data()


def takes_more(descriptor: int, patience: float = 0.0) -> bool:
    """Whether PIPE_BUF bytes can be written without waiting, in so many seconds at the latest."""
    poller = select.poll()  # select.select() knows descriptors below 1024 only
    poller.register(descriptor, select.POLLOUT)
    return bool(poller.poll(1000 * patience))


def kill_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a worker and what it has started: it leads a process group, once it has got that far."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def drain(descriptor: int) -> bytes:
    """What there is to read, or nothing if that fails."""
    try:
        return os.read(descriptor, 65_536)
    except OSError:
        return b""


def text(data: bytearray) -> str:
    """What a process has written, readable whatever it was."""
    return data.decode(errors="replace")


def open_descriptors() -> set[int]:
    """Of this process."""
    for directory in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return {int(name) for name in os.listdir(directory)}
    return set(range(3, 1024))


def children() -> set[int]:
    """Of this process, zombies included."""
    with contextlib.suppress(OSError):
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    return set()
