"""A pickle whose large parts lie in a file that several workers share."""

from __future__ import annotations

import mmap
import os
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from multienv._engine.threads import Lock
from multienv._engine.wire.shared_file import Place, SharedFile
from multienv.errors import ClosedError

# Bytes of an array, or of a pickle, from which on it is shared: far less than a process itself takes.
LARGE = 2**16
# Held while parts are placed, and while a file is let go of. Reentrant: a finalizer may do the latter anywhere.
_lock = Lock()
_files: weakref.WeakSet[SharedFile] = weakref.WeakSet()


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
        if file is not None:
            file.users.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedPickle, (self.data, self.places)

    def place(self, parts: Sequence[memoryview]) -> bool:
        """Place these parts in the file; tell whether it could take all of them."""
        file = self._file
        assert file is not None
        places = [file.place(part) for part in parts] if file.descriptor >= 0 else [None]
        self.places = tuple(place for place in places if place is not None)
        return len(self.places) == len(places)

    def handed(self) -> int:
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

        Raises:
            OSError: The file cannot be mapped.
            Exception: What unpickling raises: it runs code of the user.
        """
        first = min(offset for offset, _ in self.places)
        end = max(offset + size for offset, size in self.places)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        # Few mappings, because until Python 3.13 each has a descriptor of its own: one for all parts; and another one
        # where several lie at the same place, because a write to one must not show in the other.
        memory: list[memoryview] = []
        used: Counter[Place] = Counter()
        parts = []
        for place in self.places:
            if used[place] == len(memory):
                mapping = mmap.mmap(descriptor, end - first, mmap.MAP_PRIVATE, access, offset=first)
                memory.append(memoryview(mapping))
            start = place[0] - first
            parts.append(memory[used[place]][start : start + place[1]])
            used[place] += 1
        return self._loaded(parts, _loaded)

    def again(self) -> SharedPickle:
        """Return a second object for the same parts; it keeps the file open until nothing refers to it."""
        return SharedPickle(self.data, self.places, self._file)

    def whole(self, most: int) -> bytes:
        """Return a pickle of the same value that needs no file, in the trainer.

        ``b""``: it has more bytes than ``most``, or the file is closed.
        """
        descriptor = -1 if self._file is None else self._file.descriptor
        if descriptor < 0 or len(self.data) + sum(size for _, size in self.places) > most:
            return b""
        parts = [bytearray(os.pread(descriptor, size, offset)) for offset, size in self.places]
        return pickle.dumps(self._loaded(parts, _Whole), protocol=5)

    def _loaded(self, parts: list[Any], load: Callable[[Any, list[Any]], Any]) -> Any:
        """Call ``load`` with pickle and buffers, which are ``parts``."""
        return load(self.data, parts) if self.data else load(parts[0], parts[1:])

    def close(self) -> None:
        """Release the file, which is closed with its last user. Again does nothing."""
        with _lock:
            file, self._file = self._file, None
            if file is not None:
                file.users.discard(self)
                if not file.users:
                    file.close()


class _Whole:
    """Pickles as the value of a pickle and its buffers: it needs no file any more."""

    def __init__(self, data: Any, buffers: list[Any]) -> None:
        self._data, self._buffers = data, buffers

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (self._data, self._buffers)


def _loaded(data: Any, buffers: list[Any]) -> Any:
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
            shared = SharedPickle(data, (), file)  # a user from here on: nothing closes the file meanwhile
            if shared.place(parts):
                return shared
            shared.close()
        made = SharedFile()
        _files.add(made)
        shared = SharedPickle(data, (), made)
        shared.place(parts)
        return shared


def _forget() -> None:
    """Close the copies of the files in a forked child of the trainer, where a thread may have held the lock."""
    global _lock
    _lock = Lock()
    for file in list(_files):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
