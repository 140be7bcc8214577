"""A pickle whose large parts lie in a file that several workers share.

The trainer writes and seals the file; it has no name (``memfd_create``), as a segment has none. A worker maps it
privately: it may write there, and no other process sees that; a page is shared until it is written to.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pickle
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from multienv._engine.interrupts import finalizer
from multienv._engine.threads import Lock
from multienv._engine.wire.reducers import PickledCall
from multienv._engine.wire.segment import anonymous_file, mapped_file
from multienv.errors import ClosedError

# What the kernel's lists of descriptors and mappings call the file; a segment has another name.
DATA_NAME = "multienv-data"
# Bytes of an array, or of a pickle, from which on it is shared: far less than a process itself takes.
LARGE = 2**16
# Where a part lies, and how many bytes it has.
Place = tuple[int, int]

# A part may be in the file already if its size and so many bytes at both of its ends are equal.
_SAMPLE = 4096
# Held while parts are placed.
_lock = Lock()
_files: weakref.WeakSet[SharedFile] = weakref.WeakSet()


class SharedFile:
    """Holds parts of pickles, equal ones once; no part can be added once it is sealed. Open as long as it is used.

    Attributes:
        descriptor: The file; -1 once it is closed.
    """

    def __init__(self) -> None:
        self.descriptor = anonymous_file(DATA_NAME)
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

    def place_all(self, parts: Sequence[memoryview]) -> tuple[Place, ...] | None:
        """Return where the file holds these parts; ``None``: not all of them, and they cannot be added."""
        places = [place for place in map(self.place, parts) if place is not None]
        return tuple(places) if len(places) == len(parts) else None

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
        """Compare, with numpy: a memoryview itself compares item by item, ten times as slowly."""
        offset, size = place
        return np.array_equal(mapped_file(self.descriptor, size, offset, mmap.MAP_PRIVATE), part)

    def close(self) -> None:
        """Close the descriptor. Again does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @finalizer
    def __del__(self) -> None:
        if "descriptor" in self.__dict__:  # else it could not be made
            self.close()


class SharedPickle:
    """Says where a pickle and its buffers lie in a file; keeps the file open until :meth:`close`.

    It is sent to a worker without the file: the worker receives the descriptor when it is launched.

    Args:
        data: The pickle; ``b""``: it lies at the first of the places.
        places: Of the buffers.
        file: Where they lie; ``None`` in a worker.
    """

    def __init__(self, data: bytes, places: Sequence[Place], file: SharedFile | None = None) -> None:
        self.data, self.places, self._file = data, tuple(places), file

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedPickle, (self.data, self.places)

    def sealed_descriptor(self) -> int:
        """Return the descriptor of the file, to be handed to a worker; from now on the file does not change.

        Raises ClosedError after :meth:`close`.
        """
        with _lock:
            if self._file is None or self._file.descriptor < 0:
                raise ClosedError("This env has been closed. Make a new one.")
            self._file.seal()
            return self._file.descriptor

    def load(self, descriptor: int) -> Any:
        """Unpickle, in a worker, from the file that it was handed. The buffers are private copies, made page by page.

        Parts at one place are mapped once each: a write to one must not show in the other.

        Raises:
            OSError: The file cannot be mapped.
            Exception: What unpickling raises: it runs code of the user.
        """
        parts: list[Any] = [mapped_file(descriptor, size, offset, mmap.MAP_PRIVATE) for offset, size in self.places]
        return _unpickled(*self._split(parts))

    def copy(self) -> SharedPickle:
        """Return a second object for the same parts; it keeps the file open until nothing refers to it."""
        return SharedPickle(self.data, self.places, self._file)

    def without_file(self, most: int) -> bytes:
        """Return a pickle of the same value that needs no file, in the trainer.

        ``b""``: it has more bytes than ``most``, or the file is closed.
        """
        descriptor = -1 if self._file is None else self._file.descriptor
        if descriptor < 0 or len(self.data) + sum(size for _, size in self.places) > most:
            return b""
        parts = [bytearray(os.pread(descriptor, size, offset)) for offset, size in self.places]
        return pickle.dumps(PickledCall(_unpickled, *self._split(parts)), protocol=5)

    def _split(self, parts: list[Any]) -> tuple[Any, list[Any]]:
        """Return pickle and buffers, given what lies at the places."""
        return (self.data, parts) if self.data else (parts[0], parts[1:])

    def close(self) -> None:
        """Release the file, which is closed with its last user. Again does nothing."""
        self._file = None


def _unpickled(data: Any, buffers: list[Any]) -> Any:
    return pickle.loads(data, buffers=buffers)


def share(data: bytes, buffers: Sequence[memoryview]) -> SharedPickle:
    """Write large parts of a pickle into a file for several workers, unless a file holds the same bytes already.

    More parts can be added to a file until its first worker is launched.

    Args:
        data: The pickle. A small one is left outside: it differs between functions that have captured the same.
        buffers: What was left out of it (see ``pickle.PickleBuffer``): one-dimensional, of bytes.

    Raises:
        OSError: There is no descriptor, or no room, for the file.
    """
    parts = list(buffers)
    if len(data) >= LARGE:
        parts.insert(0, memoryview(data))
        data = b""
    with _lock:
        for file in list(_files):
            places = file.place_all(parts)
            if places is not None:
                return SharedPickle(data, places, file)
        made = SharedFile()
        _files.add(made)
        return SharedPickle(data, made.place_all(parts) or (), made)


def _close_in_child() -> None:
    """Close the copies of the files in a forked child of the trainer, where a thread may have held the lock."""
    global _lock
    _lock = Lock()
    for file in list(_files):
        file.close()
    _files.clear()


os.register_at_fork(after_in_child=_close_in_child)
