"""A host in the trainer itself: for debugging, and to hold the process backend against."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from multienv.backends.base import Backend, Gone
from multienv.processes.protocol import UNKNOWN_FATE, Fate
from multienv.wire.memory import Block
from multienv.wire.messages import REPLY, seq_of
from multienv.worker.host import Host


class SerialBackend(Backend):
    """Requests are answered when their reply is read, in the same thread."""

    def __init__(self, env_fn: Any, arena: Callable[[int], Block] = Block.private) -> None:
        """Hold a host, which holds no env yet."""
        super().__init__()
        self._host = Host(env_fn=env_fn, arena=arena)
        self._requests: list[bytes] = []
        self._begun = b""
        self._gone: Gone | None = None
        self._ready = b""
        self.send = self._requests.append
        self.fill = self._fill

    @property
    def pid(self) -> int | None:
        """This process."""
        return os.getpid()

    @pid.setter
    def pid(self, pid: int) -> None:
        """The host tells; it is known already."""

    def _answer(self) -> bytes:
        frame = self._requests[-1]
        if self._gone is not None:
            raise self._gone
        self._begun = frame
        try:
            reply = self._host.answer(frame)
        except SystemExit as error:  # in a worker this would end the process
            self._gone = Gone("died", Fate(error.code if isinstance(error.code, int) else 1))
            raise self._gone from error
        self._requests.clear()
        return reply

    def _fill(self) -> int:
        try:
            reply = self._answer()
        except Gone:
            return 0  # complete() raises it
        if len(reply) > len(self.buffer):
            self._ready = reply
            return 0
        self.buffer[: len(reply)] = reply
        return len(reply)

    def complete(self, start: bytes, seq: int) -> bytes:
        """Replies are always whole."""
        reply, self._ready = start or self._ready or self._answer(), b""
        assert REPLY.unpack_from(reply)[1] == seq
        return reply

    def poll(self, timeout: float) -> bool:
        """There is always an answer: it is computed when read."""
        return True

    def arm(self, seconds: float | None) -> None:
        """Nobody could interrupt it."""

    def observations(self, size: int) -> Block:
        """The host's own memory."""
        assert self._host.block is not None
        return self._host.block

    def ask_again(self, frame: bytes) -> None:
        """Answer once; repeat the answer."""
        self._requests.clear()
        # An env that was interrupted in the middle cannot be asked twice; one may have been asked to tell the rest.
        if self._begun and seq_of(self._begun) == seq_of(frame):
            self._gone = Gone("broken", detail="the answer to an interrupted call is lost")
        self.send(frame)

    def kill(self) -> Fate:
        """There is nothing to kill."""
        return UNKNOWN_FATE

    def finish(self, timeout: float) -> None:
        """Close the env."""
        self.release()

    def release(self) -> None:
        """Close the env."""
        self._host.close_env()
