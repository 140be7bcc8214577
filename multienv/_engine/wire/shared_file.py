"""A file with the large parts of pickled ``env_fn``: written once by the trainer, mapped by each worker.

It has no name (``memfd_create``), as a segment has none. A worker maps it privately: it may write there, and no other
process sees that; a page is shared until it is written to.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import weakref
import zlib

from multienv._engine.interrupts import finalizer
from multienv._engine.wire.segment import anonymous_file

# What the kernel's lists of descriptors and mappings call it; a segment has another name.
DATA_NAME = "multienv-data"
# Where a part lies, and how many bytes it has.
Place = tuple[int, int]

_CHUNK = 2**16
# A part may be in the file already if its size and so many bytes at both of its ends are equal.
_SAMPLE = 4096


class SharedFile:
    """Holds parts of pickles, equal ones once; no part can be added once it is sealed.

    Attributes:
        descriptor: The file; -1 once it is closed.
        users: What keeps it open: see :class:`~multienv._engine.wire.shared_pickle.SharedPickle`.
    """

    def __init__(self) -> None:
        self.descriptor = anonymous_file(DATA_NAME)
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        self._places: dict[tuple[int, int], list[Place]] = {}
        self._end = 0
        self._is_sealed = False

    def seal(self) -> None:
        """Seal the file: nobody can change it any more, no worker and not the trainer."""
        if not self._is_sealed:
            self._is_sealed = True
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            with contextlib.suppress(OSError):  # EBUSY: the kernel uses a page; the seals are a precaution
                fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)

    def place(self, part: memoryview) -> Place | None:
        """Return where the file holds these bytes; they are added if need be, and ``None`` returned if they cannot.

        Args:
            part: One-dimensional, of bytes.
        """
        key = part.nbytes, zlib.crc32(part[-_SAMPLE:], zlib.crc32(part[:_SAMPLE]))
        found = self._places.setdefault(key, [])
        for place in found:
            if self._holds(place, part):
                return place
        if self._is_sealed:
            return None
        place = self._end, part.nbytes
        written = 0
        while written < part.nbytes:
            written += os.pwrite(self.descriptor, part[written:], self._end + written)
        # Each part begins a page, or a worker's write to one would copy the edge of another.
        self._end += -(-part.nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        found.append(place)
        return place

    def _holds(self, place: Place, part: memoryview) -> bool:
        """Compare; piece by piece, because a memoryview itself compares item by item, ten times as slowly."""
        offset, size = place
        return all(
            os.pread(self.descriptor, _CHUNK, offset + at)[: size - at] == part[at : at + _CHUNK].tobytes()
            for at in range(0, size, _CHUNK)
        )

    def close(self) -> None:
        """Close the descriptor. Again does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @finalizer
    def __del__(self) -> None:
        if "descriptor" in self.__dict__:  # else it could not be made
            self.close()
