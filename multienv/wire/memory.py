"""Shared memory without a name: nothing to leak when a process is killed."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
from pathlib import Path

# What the kernel's list of mappings calls what is shared here.
SHARED_NAME = "multienv"


class Block:
    """A block of memory that several processes map through one descriptor.

    Linux has ``memfd_create``; elsewhere an unlinked temporary file does the same. The descriptor is handed
    over, never a name, so the kernel frees the block with its last user, however that one ends.
    """

    def __init__(self, descriptor: int, size: int, offset: int = 0) -> None:
        """Map ``size`` bytes of what is behind ``descriptor``, which stays the caller's to close."""
        self.size = size
        self.memory = mmap.mmap(descriptor, size) if descriptor < 0 else mmap.mmap(descriptor, size, offset=offset)
        self.view = memoryview(self.memory)

    @classmethod
    def private(cls, size: int) -> Block:
        """A block of this process alone."""
        return cls(-1, size)

    @classmethod
    def sized(cls, descriptor: int, size: int) -> Block:
        """A block of which every user knows the size; whoever comes makes room.

        By a byte written behind it, which only ever makes the file longer: users that disagree on the size, and come at
        the same time, could cut off with ``ftruncate`` what another has just mapped.
        """
        os.pwrite(descriptor, b"\0", size)
        return cls(descriptor, size)

    @classmethod
    def create(cls, size: int) -> tuple[Block, int]:
        """A new block and the descriptor to hand over (and to close afterwards)."""
        descriptor = anonymous_file()
        try:
            os.ftruncate(descriptor, size)
            return cls(descriptor, size), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    def forbid_writing(self) -> None:
        """From now on this process ends with SIGSEGV when it writes here."""
        if _libc is not None:
            with contextlib.suppress(ValueError):  # it has been closed
                start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self.memory)))
                _libc.mprotect(start, ctypes.c_size_t(self.size), mmap.PROT_READ)

    def close(self) -> None:
        """Unmap. Arrays that still look into the block keep it mapped until they are gone."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self.memory.close()


_libc = None if sys.platform == "win32" else ctypes.CDLL(None)


def anonymous_file() -> int:
    """A descriptor of memory, or of a file, that has no name."""
    if sys.platform == "linux":
        return os.memfd_create(SHARED_NAME, os.MFD_CLOEXEC)
    descriptor, path = tempfile.mkstemp(prefix=f"{SHARED_NAME}-")
    Path(path).unlink()
    return descriptor


# --- the control block ------------------------------------------------------------------------
# One small block per worker, shared by the trainer, the worker and the warden.

# Observations that do not travel inline follow it, in the same file, at OBSERVATIONS.
CONTROL_SIZE = 4096
OBSERVATIONS = mmap.ALLOCATIONGRANULARITY
BUSY = 0  # u64: 1 + the number of the request being executed, 0 when there is none (worker)
REPLAYING = 1  # u64: 1 + the index of the request inside a replay (worker)
STEP_SECONDS = 4  # f64: how long the env takes for a step, smoothed; 0 while that is not known (worker)
CORE = 3  # u64: 1 + the core to run on while steps are short, 0 for any (trainer)
SNAPSHOTS = 5  # u64: how many it has taken (worker)
NO_SNAPSHOTS = 6  # u64: why it takes none, see worker.snapshots (worker)
PID = 7  # u64: of a snapshot that has been woken, else 0 (worker)
SLOT = 8  # u64: 1 + the place in its group of the env that is being called, 0 when there is none (worker)
RESETTING = 2**32  # added to that while it is being reset
LOOKS = 9  # u64: 1 if the worker looks out for its next request before it sleeps (trainer)
WORDS = 10
DEADLINE = 2  # f64: when the pending request is overdue, CLOCK_MONOTONIC; 0 is never (trainer sets, worker clears)


class Control:
    """Words shared by a worker, its trainer and the warden that watches over it."""

    def __init__(self, block: Block) -> None:
        """Lay the words over ``block``."""
        self.block = block
        self.words = block.view.cast("Q")
        self.times = block.view.cast("d")

    def close(self) -> None:
        """Unmap."""
        self.words.release()
        self.times.release()
        self.block.close()
