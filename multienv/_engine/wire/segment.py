"""The shared memory of one worker process: control words, two banks, payload.

One file without a name (``memfd_create``) that the trainer and one process map::

    0         control words: those that one side writes while the other looks share a cache line
    1024      two small banks, for requests that are sent before the layout is known
    2048      short payload: what has no fixed size, up to 512 bytes
    4096      two banks with the layout of the envs, used in turn
    2**40 …   longer payload, written and read with ``pwrite`` and ``pread``; lower where the size of files is limited

Reading changes nothing here, so an interrupted reader can read again.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import sys
import tempfile
from pathlib import Path

from multienv._engine.native import native
from multienv._engine.wire.banks import SMALL, Bank, BankLayout
from multienv.errors import SystemLimitError

# What the kernel's list of mappings calls the segment.
SHARED_NAME = "multienv"
CONTROL_SIZE = 4096
_SMALL_BANKS = 1024

# Words of 8 bytes; a cache line has 8 of them. Each is written by the side that is named.
REQUEST = 0  # number of the newest request (trainer)
REPLY = 8  # number of the newest request that has been answered (worker)
WORKER_SLEEPS = 9  # 1: the worker is about to sleep until a wake byte comes (worker)
BOUND = 12  # 1 + the core that the worker is bound to; 0: none (worker)
TRAINER_SLEEPS = 1  # 1: the trainer sleeps, or is about to, until a wake byte comes (trainer)
BUSY = 32  # number of the request being executed; 0: none (worker)
SLOT = 33  # 1 + the slot of the env that is being called; 0: none (worker)
REPLAYING = 34  # 1 + the index of the request inside a replay (worker)
REPLY_PAYLOAD = 10  # and 11: bytes of payload with the reply of an even and of an odd request (worker)
REQUEST_PAYLOAD = 2  # and 3: bytes of payload with an even and with an odd request (trainer)
CORE = 50  # 1 + the core to run on while steps are short; 0: any (trainer)
SPINNERS = 51  # so many workers share a core, and spin before they sleep; 0: do not spin (trainer)
RESTARTS = 52  # processes that were started in place of lost ones, up to this one (trainer)
LOSS_SECONDS = 54  # float64: mean time of the envs between two losses; 0: there was none (trainer)
BANK_SIZE = 53  # bytes of one bank; 0: not laid out yet (both, the same)
FILE_LIMIT = 48  # bytes that the file may have: a half for the banks, an eighth for each longer payload (trainer)
PID = 56  # the process that serves this segment (worker)
SNAPSHOTS = 57  # forked snapshots it has taken (worker)
OBSTACLE = 58  # index into census.OBSTACLES: why it takes none (worker)
STEP_SECONDS = 59  # float64: env time of a step without resets in it, smoothed; 0: not known (worker)
RESIDENT = 60  # its resident memory in bytes, where its process is on another machine; 0: ask the system (relay)
SNAPSHOT = 61  # number of the last request executed in its newest forked snapshot; 0: there is none (worker)
OTHER_SECONDS = 62  # float64: time that resets and recorded calls have taken, all together (worker)
ASKED_OUTSIDE = 63  # number of the last request in which an env asked outside, as Python tells; 0: in none (worker)
SNAPSHOT_SECONDS = 64  # float64: time of the envs between two snapshots, at present (worker)
SHARED = 65  # 1: the first byte on the wake socket brings the file that the workers share (trainer)

_MAP_FIXED = 0x10  # on Linux
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

_SHORT_PAYLOAD = 2048
_SHORT = 512
_FILE_LIMIT = 2**41
_UNUSED = 2**42


class Segment:
    """Maps the memory that the trainer shares with one process.

    Args:
        descriptor: The file, which becomes the segment's to close; -1: memory of this process alone.
        read_only: Look on from a third process: nothing is written, and the file may have been opened for reading.

    Attributes:
        descriptor: To be handed to the process.
        words: The control words as integers.
        times: The same memory as float64.
        layout: Layout of the banks; the small one until :meth:`lay_out`.
        banks: For even and for odd requests.
    """

    def __init__(self, descriptor: int, *, read_only: bool = False) -> None:
        self.descriptor = descriptor
        if descriptor >= 0 and not read_only and os.fstat(descriptor).st_size < CONTROL_SIZE:
            os.ftruncate(descriptor, CONTROL_SIZE)
        if read_only:
            view = memoryview(mmap.mmap(descriptor, CONTROL_SIZE, mmap.MAP_SHARED, mmap.PROT_READ))
        else:
            view = _mapped(descriptor, CONTROL_SIZE)
        self._is_mapped = True
        self._long: dict[int, bytes] = {}  # payload, where there is no file
        self.words, self.times = _words(view), view.cast("d")
        offsets = range(_SHORT_PAYLOAD, CONTROL_SIZE, _SHORT)
        self._short = [view[offset : offset + _SHORT] for offset in offsets]  # one for each area of payload
        self.layout = SMALL
        self.banks: tuple[Bank, ...] = tuple(Bank(SMALL, view, _SMALL_BANKS + side * SMALL.size) for side in (0, 1))

    @classmethod
    def create(cls) -> Segment:
        """Make a segment that can be handed to another process."""
        descriptor = anonymous_file()
        try:
            segment = cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]  # ulimit -f holds for this file too
        segment.words[FILE_LIMIT] = _FILE_LIMIT if limit == resource.RLIM_INFINITY else min(limit, _FILE_LIMIT)
        return segment

    def lay_out(self, layout: BankLayout) -> None:
        """Use banks with this layout for all requests from now on; both sides call this with equal layouts.

        Raises:
            SystemLimitError: They are larger than a file may be here.
        """
        if self.descriptor < 0 and layout == self.layout:
            return  # trainer and host share this very object
        size = CONTROL_SIZE + 2 * layout.size
        if self.descriptor >= 0 and size > self._offset(0):
            raise _too_large(size, 2 * size)
        if self.descriptor >= 0 and os.fstat(self.descriptor).st_size < size:
            # A byte written behind the banks only ever makes the file longer. Both sides may do it at the same time.
            os.pwrite(self.descriptor, b"\0", size)
        view = _mapped(self.descriptor, size)
        banks = tuple(Bank(layout, view, CONTROL_SIZE + side * layout.size) for side in (0, 1))
        self.words[BANK_SIZE] = layout.size
        self.layout, self.banks = layout, banks

    def with_private_banks(self) -> Segment:
        """Return a segment of this process alone with the same layout and, shared with this one, the control words."""
        aside = Segment(-1)
        aside.words, aside.times = self.words, self.times
        aside.lay_out(self.layout)
        return aside

    def kind_of(self, number: int) -> int:
        """Return the kind of request ``number``, read by a process that does not know the layout; 0: not known."""
        size, side = self.words[BANK_SIZE], number & 1
        offset = CONTROL_SIZE + side * size if size else _SMALL_BANKS + side * SMALL.size
        return next(iter(os.pread(self.descriptor, 1, offset)), 0)

    # --- payload -------------------------------------------------------------------------------------

    def write_request_payload(self, number: int, data: bytes) -> None:
        """Write the payload of request ``number``."""
        self._write(number & 1, data)
        self.words[REQUEST_PAYLOAD + (number & 1)] = len(data)

    def read_request_payload(self, number: int) -> bytes:
        """Return the payload of request ``number``."""
        return self._read(number & 1, self.words[REQUEST_PAYLOAD + (number & 1)])

    @property
    def reply_areas(self) -> list[memoryview]:
        """Return the areas of short reply payloads, for even and for odd requests."""
        return self._short[2:4]

    def write_reply_payload(self, number: int, data: bytes) -> None:
        """Write the payload of the reply to request ``number``."""
        self._write(2 + (number & 1), data)
        self.words[REPLY_PAYLOAD + (number & 1)] = len(data)

    def read_reply_payload(self, number: int) -> bytes:
        """Return the payload of the reply to request ``number``."""
        return self._read(2 + (number & 1), self.words[REPLY_PAYLOAD + (number & 1)])

    def _write(self, area: int, data: bytes) -> None:
        if len(data) <= _SHORT:
            self._short[area][: len(data)] = data
            return
        if self.descriptor < 0:
            self._long[area] = data
            return
        if len(data) > self.words[FILE_LIMIT] // 8:
            raise _too_large(len(data), 8 * len(data))
        rest, offset = memoryview(data), self._offset(area)
        while rest:
            written = os.pwrite(self.descriptor, rest, offset)
            rest, offset = rest[written:], offset + written

    def _read(self, area: int, length: int) -> bytes:
        if length <= _SHORT:
            return bytes(self._short[area][:length])
        if self.descriptor < 0:
            return self._long.get(area, b"")[:length]
        offset = self._offset(area)
        data = os.pread(self.descriptor, length, offset)
        while len(data) < length:  # the kernel hands out 2 GiB at a time
            more = os.pread(self.descriptor, length - len(data), offset + len(data))
            if not more:
                raise EOFError(f"{length} bytes of payload were announced, {len(data)} are there")
            data += more
        return data

    def _offset(self, area: int) -> int:
        return (4 + area) * (self.words[FILE_LIMIT] // 8)

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped, without the long payload."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def unmap(self) -> None:
        """Close the descriptor and let go of the memory; the control words stay readable as they were last.

        The memory goes with the last array or view that looks into it: a caller may have been handed one. An error that
        the caller keeps refers to this object, by the frames of its traceback, but not to the memory any more.
        """
        self.close()
        if self._is_mapped:
            view = memoryview(bytearray(self.words))
            self.words, self.times, self.banks = _words(view), view.cast("d"), ()
            self._short = [memoryview(bytearray(_SHORT)) for _ in self._short]
            self._is_mapped = False  # last: an interruption leaves all to do again


def _mapped(descriptor: int, size: int) -> memoryview:
    """Map the beginning of the file; -1: memory of this process alone, which a forked snapshot does not share."""
    if descriptor < 0:
        return memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE))
    return mapped_file(descriptor, size)


def mapped_file(descriptor: int, size: int, offset: int = 0, flags: int = mmap.MAP_SHARED) -> memoryview:
    """Map a part of a file, for reading and writing. Raises OSError.

    The mapping goes with the last view of it, and needs no descriptor: ``mmap.mmap`` duplicates the one that it is
    given, and keeps it (always until Python 3.13), which were two of five that a worker cost its trainer.

    The file takes the place of memory without a file, which Python unmaps. A weakref would unmap it too early: of
    garbage in a cycle Python calls weakrefs first, and then the finalizers, which still look into the memory.
    """
    if _libc is None:
        return memoryview(mmap.mmap(descriptor, size, flags, offset=offset))
    memory = mmap.mmap(-1, size, flags)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(address, size, protection, flags | _MAP_FIXED, descriptor, offset) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return memoryview(memory)


def _words(memory: memoryview) -> memoryview[int]:
    """Return the control words in a memory as integers."""
    return memory.cast("q") if native is None else native.Words(memory)  # which stands in for one


def _too_large(size: int, limit: int) -> SystemLimitError:
    """Return the error for bytes that do not fit into the segment's file, given the limit under which they would."""
    return SystemLimitError(
        errno.EFBIG,
        f"{size} bytes do not fit into the memory that a worker shares with the trainer: it counts as a file, and the "
        f"size of files is limited here. Raise the limit to {limit} bytes at least (ulimit -f unlimited).",
    )


def anonymous_file(kind: str = SHARED_NAME) -> int:
    """Return a descriptor of memory, or of a file, that has no name: nothing to leak when a process is killed.

    Args:
        kind: What the kernel's lists of descriptors and mappings call it.
    """
    if sys.platform == "linux":
        descriptor = os.memfd_create(kind, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # An env may truncate descriptors that are not its own: the trainer would die by SIGBUS at its next look.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    else:
        descriptor, path = tempfile.mkstemp(prefix=f"{kind}-")
        Path(path).unlink()
    if descriptor < 3:  # a daemon has closed its standard streams: what is printed would be written into the memory
        number = descriptor
        descriptor = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(number)
    # An env that writes to descriptors which are not its own writes where nobody reads.
    os.lseek(descriptor, _UNUSED, os.SEEK_SET)
    return descriptor
