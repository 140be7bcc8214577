"""The messages between trainer and monitor, over a real socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from multienv._engine.processes.protocol import send_with_descriptors

LONG = bytes(range(256)) * 400


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return both ends of a connection; what the first one sends goes through a small buffer."""
    one, other = socket.socketpair()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel takes its least, some 4 KB
    other.settimeout(10.0)
    with one, other:
        yield one, other


def test_nothing_follows_a_message_of_which_the_socket_has_taken_a_part(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, other = ends
    for message in (LONG, b"the next"):
        with pytest.raises(BrokenPipeError):
            send_with_descriptors(one, message)
    received = b"".join(iter(lambda: other.recv(4096), b""))
    assert received == LONG[: len(received)]


class ClosedByAnotherThread(socket.socket):
    """Is closed right after the message was taken, as ``close()`` in another thread does it."""

    def sendmsg(self, *arguments):
        sent = super().sendmsg(*arguments)
        self.close()
        return sent


def test_message_was_sent_though_the_socket_is_closed_right_after():
    mine, theirs = socket.socketpair()
    with theirs, ClosedByAnotherThread(fileno=mine.detach()) as sender:
        send_with_descriptors(sender, b"kill")
        assert theirs.recv(10) == b"kill"
