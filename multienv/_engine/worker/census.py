"""Take a census of what a worker has beyond its memory: a fork copies memory, not the world.

What a forked copy shares with its worker (the position of an open file, a lock), lacks (record locks, timers, threads)
or cannot take back (a server, a pipe, another process) is looked for at each fork. Everything found is one of three:

- *harmless*: on a closed list, which is all that this module lets pass without a word;
- *put back*: a regular file or a folder that is open for reading or for writing. The copy opens it anew, so that it has
  a position of its own, which is that of the moment of the fork, and no part in a lock that the worker takes later;
- an *obstacle*, one of ``OBSTACLES``: there is no snapshot as long as it is there.

What is not known to survive a fork is an obstacle. CRIU and DMTCP judge each kind of descriptor in the same way.

A connection, a program or a file that is opened and closed within one step is gone when the census looks for it, and a
fork does not take it back. Python tells of each by an audit event (PEP 578), before it happens: :class:`AskedOutside`.
What C code does by itself is not told.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from multienv._engine.native import native
from multienv._engine.wire.segment import ASKED_OUTSIDE, BUSY, PID, SHARED_NAME, SLOT

# Why there is no snapshot; control word OBSTACLE is an index.
OBSTACLES = (
    "", "threads", "child processes", "sockets", "devices", "the fork failed", "shared memory", "pipes", "locks",
    "timers", "files", "descriptors",
)  # fmt: skip
THREADS, CHILDREN, SOCKETS, DEVICES, FAILED, SHARED, PIPES, LOCKS, TIMERS, FILES, DESCRIPTORS = range(1, 12)

# Pygame starts this thread for callbacks by the clock, which no deterministic env asks for.
_HARMLESS_THREADS = ("SDLTimer\n",)
# /dev/null, /dev/zero, /dev/full, /dev/random and /dev/urandom: they have no state.
_HARMLESS_DEVICES = {os.makedev(1, minor) for minor in (3, 5, 7, 8, 9)}
# The protocol by which the kernel tells of devices that are plugged in: SDL opens such a socket, and no env needs it.
_NEWS_OF_DEVICES = 15
# In the kernel's list of mappings: the last of the permissions says that memory is shared, the file comes at the end.
_SHARED_MAPPING = re.compile(rb"s [0-9a-f]{8,} \S+ \d+ *(.*)\n")
# A file of these folders that is mapped for reading may be memory that another process writes to.
_MEMORY = (b"/dev/", b"/memfd:", b"/SYSV")
_OUR_MAPPING = f"/memfd:{SHARED_NAME} ".encode()
# All other kinds are obstacles; epoll, eventfd, timerfd, inotify and so on have none of these.
_OBSTACLE_OF = {stat.S_IFSOCK: SOCKETS, stat.S_IFIFO: PIPES, stat.S_IFCHR: DEVICES, stat.S_IFBLK: DEVICES}
# Their files look like regular ones.
_KERNEL_FOLDERS = ("/proc", "/sys", "/sys/fs/cgroup", "/dev/mqueue")
_STANDARD = 2  # standard input, output and error


class Found(NamedTuple):
    """Tells of one thing that a worker has beyond its memory, and that is not harmless.

    Attributes:
        obstacle: An index of OBSTACLES; 0: it is put back.
        name: What it is, for people: a path, or the kernel's name.
        descriptor, flags, position: Of a file that is put back.
        same_as: Another descriptor of the same open file, which shares its position; -1: there is none.
    """

    obstacle: int
    name: str
    descriptor: int = -1
    flags: int = 0
    position: int = 0
    same_as: int = -1


def census(
    ours: Collection[int], copies: Collection[int], standard: Collection[tuple[int, int, int]]
) -> Iterator[Found]:
    """Yield what this process has beyond its memory, except what is harmless.

    Args:
        ours: The descriptors of multienv.
        copies: The child processes that are snapshots.
        standard: What :func:`standard_streams` returned when the process began.

    Raises:
        OSError: No descriptor is left to look with.
    """
    yield from _tasks(copies)
    yield from _mappings()
    with contextlib.suppress(FileNotFoundError):  # the kernel does not tell
        for line in Path("/proc/self/timers").read_text().splitlines():
            if line.startswith("ID:"):
                yield Found(TIMERS, "a timer of timer_create(2)")
    yield from _descriptors(ours, standard)


def standard_streams() -> set[tuple[int, int, int]]:
    """Return what standard input, output and error are: number, device and inode of each."""
    found = set()
    for descriptor in range(_STANDARD + 1):
        with contextlib.suppress(OSError):
            status = os.fstat(descriptor)
            found.add((descriptor, status.st_dev, status.st_ino))
    return found


def reopen(files: Sequence[Found]) -> None:
    """Open files anew, in a copy, at the positions that they had when it was forked. Raises OSError.

    The copy then shares nothing with the worker: neither the position, nor a ``flock()``, which belongs to the open
    file and lasts until the last process has closed it.
    """
    for file in files:
        is_inheritable = os.get_inheritable(file.descriptor)
        if file.same_as >= 0:
            os.dup2(file.same_as, file.descriptor, is_inheritable)
            continue
        # By this link, because a path may lead to another file by now, or to none.
        anew = os.open(f"/proc/self/fd/{file.descriptor}", file.flags)
        os.lseek(anew, file.position, os.SEEK_SET)
        os.dup2(anew, file.descriptor, is_inheritable)
        os.close(anew)


def _tasks(copies: Collection[int]) -> Iterator[Found]:
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if int(task) == os.getpid():
                for child in Path(f"/proc/self/task/{task}/children").read_text().split():
                    if int(child) not in copies:
                        yield Found(CHILDREN, f"process {child}")
            else:
                name = os.fsdecode(Path(f"/proc/self/task/{task}/comm").read_bytes())  # cut after 15 bytes
                if name not in _HARMLESS_THREADS:
                    yield Found(THREADS, f"thread {name.strip()}")


def _mappings() -> Iterator[Found]:
    mappings = Path("/proc/self/maps").read_bytes()
    for match in _SHARED_MAPPING.finditer(mappings):
        name, permission_to_write = match[1], mappings[match.start() - 2]
        is_read_only_file = permission_to_write == ord("-") and name.startswith(b"/") and not name.startswith(_MEMORY)
        if not is_read_only_file and not name.startswith(_OUR_MAPPING):
            yield Found(SHARED, os.fsdecode(name) or "memory")


def _descriptors(ours: Collection[int], standard: Collection[tuple[int, int, int]]) -> Iterator[Found]:
    files = dict[tuple[int, ...], list[Found]]()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor in ours:
            continue
        try:
            status = os.fstat(descriptor)
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        except OSError:  # it was open while the list was read
            continue
        place = status.st_dev, status.st_ino
        # A duplicate of standard output shares its position with the trainer: opened anew it would overwrite.
        if (1, *place) in standard or (descriptor <= _STANDARD and (descriptor, *place) in standard):
            continue
        found = _judged(descriptor, status, flags)
        if found is not None and found.obstacle:
            yield found
        elif found is not None:  # together with those that may be the same open file
            single = descriptor if stat.S_ISDIR(status.st_mode) else -1
            files.setdefault((*place, flags, found.position, single), []).append(found)
    for alike in files.values():
        yield from alike if len(alike) == 1 else _with_duplicates(alike)


def _judged(descriptor: int, status: os.stat_result, flags: int) -> Found | None:
    """Return what is found of a descriptor; ``None``: it is harmless."""
    kind = stat.S_IFMT(status.st_mode)
    if kind in (stat.S_IFREG, stat.S_IFDIR):
        return _judged_file(descriptor, status, flags)
    if kind == stat.S_IFCHR and status.st_rdev in _HARMLESS_DEVICES:
        return None
    if kind == stat.S_IFSOCK:
        with socket.socket(fileno=os.dup(descriptor)) as opened:
            if opened.family == socket.AF_NETLINK and opened.proto == _NEWS_OF_DEVICES:
                return None
    return Found(_OBSTACLE_OF.get(kind, DESCRIPTORS), _name(descriptor))


def _judged_file(descriptor: int, status: os.stat_result, flags: int) -> Found | None:
    """Return what is found of a regular file or a folder; ``None``: it is harmless."""
    if flags & os.O_PATH:  # only a name
        return None
    if status.st_dev in _kernel_devices():
        return Found(DEVICES, _name(descriptor))
    if flags & os.O_ACCMODE == os.O_RDWR:
        return Found(FILES, _name(descriptor))
    if _is_locked(descriptor):
        return Found(LOCKS, _name(descriptor))
    return Found(0, _name(descriptor), descriptor, flags, os.lseek(descriptor, 0, os.SEEK_CUR))


def _with_duplicates(alike: Sequence[Found]) -> list[Found]:
    """Return these files, all at one position; a descriptor that is a duplicate of another says so.

    Duplicates share their position: each gets another one, for a moment, and what was overwritten shows.
    """
    found, firsts = [], dict[int, int]()
    try:
        for place, file in enumerate(alike, 1):
            os.lseek(file.descriptor, file.position + place, os.SEEK_SET)
        for file in alike:
            first = firsts.setdefault(os.lseek(file.descriptor, 0, os.SEEK_CUR), file.descriptor)
            found.append(file if first == file.descriptor else file._replace(same_as=first))
    finally:
        for file in alike:
            os.lseek(file.descriptor, file.position, os.SEEK_SET)
    return found


def _is_locked(descriptor: int) -> bool:
    # Not by /proc/locks: to read that stops all file locking of the system for a moment, which may take milliseconds.
    told = os.open(f"/proc/self/fdinfo/{descriptor}", os.O_RDONLY)
    try:
        return b"lock:" in os.read(told, 4096)
    finally:
        os.close(told)


@cache
def _kernel_devices() -> set[int]:
    return {os.stat(folder).st_dev for folder in _KERNEL_FOLDERS if os.path.isdir(folder)}  # noqa: PTH112, PTH116


def _name(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - a Path costs ten times as much


# --- what is asked outside in a step ---------------------------------------------------------------

_EVENTS = {
    **dict.fromkeys(("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"), SOCKETS),
    **dict.fromkeys(
        ("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec"),
        CHILDREN,
    ),
    **dict.fromkeys(
        ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "sqlite3.connect"),
        FILES,
    ),
    "open": FILES,
}
_HARMLESS = (os.devnull, ":memory:")
_CACHE = "__pycache__"  # of a module that is imported for the first time


class AskedOutside:
    """Notes in the control word ``ASKED_OUTSIDE`` in which request the envs of this process asked outside last.

    Args:
        words: The control words.
    """

    def __init__(self, words: Any) -> None:
        self._words = words
        self._number = 0
        self._obstacle = 0
        (sys.addaudithook if native is None else native.watch_audit_events)(self._on_audit_event)

    def move(self, words: Any) -> None:
        """Go on with other control words: this process is a snapshot that was woken."""
        self._words = words
        words[ASKED_OUTSIDE] = self._number

    def pop_obstacle(self) -> int:
        """Return the index in OBSTACLES of what was asked since the last call, or 0."""
        obstacle, self._obstacle = self._obstacle, 0
        return obstacle

    def _on_audit_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _EVENTS:
            return
        words = self._words
        number = words[BUSY]  # a request of multienv's own, such as the construction of the envs, has a negative one
        if number > 0 and words[SLOT] and words[PID] == os.getpid():
            obstacle = obstacle_of(event, arguments)
            if obstacle:
                words[ASKED_OUTSIDE], self._number, self._obstacle = number, number, obstacle


def obstacle_of(event: str, arguments: tuple[Any, ...]) -> int:
    """Return the index in OBSTACLES of what an audit event tells; 0: nothing is asked outside."""
    obstacle = _EVENTS.get(event, 0)
    if not obstacle or not arguments:
        return obstacle
    what = arguments[0]
    if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
        return 0
    is_harmless = what in _HARMLESS or (obstacle == FILES and _CACHE in str(what))
    return 0 if is_harmless else obstacle
