"""Map a file into memory without a descriptor for the mapping.

``mmap.mmap`` duplicates the descriptor that it is given, and keeps it as long as the mapping: always until Python 3.13,
and unless it is told otherwise since. With two mappings a worker, that was two of the five descriptors that a worker
cost its trainer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

_MAP_FIXED = 0x10  # on Linux
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def shared_memory_of(descriptor: int, size: int) -> memoryview:
    """Map the first ``size`` bytes of a file, for reading and writing, shared with every process that maps it.

    The mapping goes with the last view of it, whatever becomes of the descriptor. Raises OSError.

    The file takes the place of memory without a file, which Python unmaps. A weakref would unmap it too early: of
    garbage in a cycle Python calls weakrefs first, and then the finalizers, which still look into the memory.
    """
    if _libc is None:
        return memoryview(mmap.mmap(descriptor, size))
    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return memoryview(memory)
