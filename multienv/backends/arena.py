"""The memory that the workers of a batch share."""

from __future__ import annotations

import threading

from multienv.errors import ClosedError
from multienv.processes import descriptors
from multienv.wire.batch import BatchLayout, Place, places
from multienv.wire.memory import Block, anonymous_file


class Arena:
    """Memory for the rows of all envs, sized by whoever first knows how much they take.

    Attributes:
        descriptor: To be handed to the workers; -1 if it is this process's alone.

    Args:
        shared: With other processes.
    """

    def __init__(self, *, shared: bool) -> None:
        """Of no size yet."""
        self.descriptor, self._token = -1, object()
        if shared:
            with descriptors.lock:
                self.descriptor = anonymous_file()
                self._token = descriptors.own(self.descriptor)
        self._block: Block | None = None
        self._places: tuple[Place, Place] | None = None
        self._lock, self._closed = threading.Lock(), False

    def block(self, size: int) -> Block:
        """The memory itself, mapped once."""
        with self._lock:
            if self._closed:
                raise ClosedError("This vector env has been closed.")
            if self._block is None:
                self._block = Block.private(size) if self.descriptor < 0 else Block.sized(self.descriptor, size)
            return self._block

    def places(self, layout: BatchLayout) -> tuple[Place, Place]:
        """The arrays in it."""
        block = self.block(2 * layout.size)
        if self._places is None:
            self._places = places(layout, block.view)
        return self._places

    def close(self) -> None:
        """Let go of the descriptor; what is mapped stays so as long as arrays look into it."""
        descriptors.close(self._token)
        self._closed = True
        block, self._block, self._places = self._block, None, None
        if block is not None:
            block.close()
