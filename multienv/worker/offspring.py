"""What an env forks off is not the worker.

A child that an env forks has all that the worker has: its pipes, and the memory it shares with the trainer. As a rule
it does some work and ends. But one that comes back out of the env's method, by a return or by an exception, would go on
as a second worker, take requests from the first one's pipe and answer them. So all that leads outside is taken from it
at its birth: what it writes is lost, and its next request is the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from pathlib import Path

from multienv.wire.memory import SHARED_NAME
from multienv.worker.ends import Ends

_MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 0x02, 0x10, 0x20


class Offspring:
    """Looks after what is forked in a worker.

    Attributes:
        astray: This process is such a child.
    """

    def __init__(self) -> None:
        """From now on, as soon as it is told what there is to be taken."""
        self.astray = False
        self._files: frozenset[tuple[int, int]] = frozenset()
        self._spared = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._part)

    def keep_from(self, ends: Ends) -> None:
        """These are the worker's own. Its stack's is not: by that the warden knows whose child a process is."""
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
        if self._spared or self.astray:
            return
        self.astray = True
        null = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"):
            with contextlib.suppress(OSError):  # of the listing itself
                if _identity(int(name)) in self._files:
                    os.dup2(null, int(name), inheritable=False)
        os.close(null)
        if sys.platform == "linux":
            _make_private()


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _make_private() -> None:
    """Put empty memory in the place of all that other processes look into."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    name = f"/memfd:{SHARED_NAME}"
    for line in Path("/proc/self/maps").read_text().splitlines():
        if name in line:
            start, stop = (int(place, 16) for place in line.split(maxsplit=1)[0].split("-"))
            flags = _MAP_PRIVATE | _MAP_FIXED | _MAP_ANONYMOUS
            libc.mmap(start, stop - start, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
