"""What an env forks off is not the worker.

A child that an env forks has all that the worker has: its pipes, and the memory it shares with the trainer. As a rule
it does some work and ends. But one that comes back out of the env's method, by a return or by an exception, would go on
as a second worker: step the envs beside it, take requests from the worker's pipe and answer them. So all that leads
outside is taken from it at its birth. The host marks in shared memory what it does, before and after each call of an
env: there the child ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import weakref

from multienv.wire.memory import Block
from multienv.worker.ends import Ends


class Offspring:
    """Looks after what is forked in a worker."""

    def __init__(self) -> None:
        """From now on, as soon as it is told what there is to be taken."""
        self._astray = False
        self._pipes: tuple[int, ...] = ()
        self._files: frozenset[tuple[int, int]] = frozenset()
        self._blocks: weakref.WeakSet[Block] = weakref.WeakSet()
        self._spared = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._part)

    def keep_block(self, block: Block) -> Block:
        """This one is for the worker alone to write to."""
        self._blocks.add(block)
        return block

    def keep_ends(self, ends: Ends) -> None:
        """These are the worker's own. Its stack's is not: by that the warden knows whose child a process is."""
        self._pipes = ends.requests, ends.replies
        self._files = frozenset(_identity(one) for one in ends.descriptors() if one != ends.stack)

    def fork(self) -> int:
        """As ``os.fork``, for a copy that is to have everything."""
        self._spared = True
        try:
            return os.fork()
        finally:
            self._spared = False

    def _part(self) -> None:
        """In a child, once: its own children may have other things under these numbers."""
        if self._spared or self._astray:
            return
        self._astray = True
        faulthandler.disable()  # it would write where the worker's stack is looked for
        for block in self._blocks:
            block.forbid_writing()
        for descriptor in self._pipes:  # the env may have taken all there are, and two are needed here
            with contextlib.suppress(OSError):
                os.close(descriptor)
        null = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"):
            with contextlib.suppress(OSError):  # of the listing itself
                if _identity(int(name)) in self._files:
                    os.dup2(null, int(name), inheritable=False)
        for descriptor in self._pipes:
            if descriptor != null:
                os.dup2(null, descriptor, inheritable=False)
        if null not in self._pipes:
            os.close(null)


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
