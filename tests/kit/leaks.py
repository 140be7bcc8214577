"""What a process leaves behind: descriptors, processes and zombies, names in /dev/shm, anonymous shared memory.

    before = snapshot_resources()
    ...
    assert_nothing_left(before)

or ``with no_leaks(): ...``. Read from /proc of Linux.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kit.process_table import ProcessRecord, family, mark_descendants

__all__ = [
    "Ignored",
    "LeakError",
    "Resources",
    "assert_nothing_left",
    "kept_by_libraries",
    "multiprocessing_helpers",
    "new_names",
    "no_leaks",
    "snapshot_resources",
    "what_is_left",
]

POLL_SECONDS = 0.01

# Descriptors of this process that a library has opened and will not close. Who makes one do so adds them.
kept_by_libraries: set[int] = set()


class LeakError(AssertionError):
    """Something was left behind; the message names it."""


@dataclass(frozen=True)
class Ignored:
    """What may stay: typically a helper process that a library keeps for the life of the trainer.

    Args:
        pids: these processes (their children are not ignored with them).
        descriptors: these descriptors of this process.
        threads: threads of these names.

    ``a | b`` ignores what either ignores.
    """

    pids: frozenset[int] = frozenset()
    descriptors: frozenset[int] = frozenset()
    threads: tuple[str, ...] = ()

    def __or__(self, other: Ignored) -> Ignored:
        return Ignored(
            self.pids | other.pids,
            self.descriptors | other.descriptors,
            self.threads + other.threads,
        )


def multiprocessing_helpers() -> Ignored:
    """Python's own helpers of this process: the resource tracker and the fork server, with our ends of their pipes.

    And what is `kept_by_libraries`.
    """
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    pids = (getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None))
    descriptors = (getattr(tracker, "_fd", None), getattr(server, "_forkserver_alive_fd", None))
    return Ignored(
        pids=frozenset(pid for pid in pids if pid is not None),
        descriptors=frozenset(descriptor for descriptor in descriptors if descriptor is not None) | kept_by_libraries,
    )


@dataclass(frozen=True)
class Resources:
    """What a process holds at a moment.

    Args:
        pid: the process.
        descriptors: its open descriptors and what they lead to.
        processes: its descendants, zombies included, by pid; also those that lost their parent, as long as they were
            started after the first snapshot and by way of an exec.
        shared_memory: the names in /dev/shm. They belong to the machine, not to a process: see `new_names`.
        memory_maps: its mappings of anonymous files (memfd) and of files in /dev/shm: (name, inode) each.
        threads: the native ids and names of its Python threads; None if not asked for.
    """

    pid: int
    descriptors: Mapping[int, str] = field(default_factory=dict)
    processes: Mapping[int, ProcessRecord] = field(default_factory=dict)
    shared_memory: frozenset[str] = frozenset()
    memory_maps: frozenset[tuple[str, int]] = frozenset()
    threads: Mapping[int, str] | None = None


def snapshot_resources(*, threads: bool = False) -> Resources:
    """What this process holds now. The first call also marks the environment, so that later descendants are known."""
    token = mark_descendants()
    return Resources(
        pid=token.pid,
        descriptors=_descriptors(),
        processes=family(token),
        shared_memory=frozenset(os.listdir("/dev/shm")),
        memory_maps=_memory_maps(),
        threads=_threads() if threads else None,
    )


def what_is_left(before: Resources, now: Resources, ignored: Ignored = Ignored()) -> list[str]:
    """One line for each thing that *now* has and *before* had not."""
    return [
        *_left_descriptors(before, now, ignored),
        *_left_processes(before, now, ignored),
        *(f"shared memory /dev/shm/{name}" for name in sorted(new_names(before.shared_memory, now.shared_memory))),
        *(f"memory map {name} (inode {inode})" for name, inode in sorted(now.memory_maps - before.memory_maps)),
        *_left_threads(before, now, ignored),
    ]


def new_names(before: frozenset[str], now: frozenset[str]) -> frozenset[str]:
    """The names in /dev/shm that are new, but for those that a process maps which is none of ours.

    Another process that runs tests at the same time may use semaphores of ``multiprocessing``.
    """
    inodes = {}
    for name in now - before:
        with suppress(OSError):  # it is gone again
            inodes[name] = Path("/dev/shm", name).stat().st_ino
    if not inodes:
        return frozenset()
    ours, foreign = {os.getpid(), *family(mark_descendants())}, set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in ours:
            with suppress(OSError):  # it has ended
                # A semaphore is mapped by another name than the one it has in the end: only its inode tells.
                foreign.update(inode for _, inode in _memory_maps(entry))
    return frozenset(name for name, inode in inodes.items() if inode not in foreign)


def assert_nothing_left(
    before: Resources, *, timeout: float = 2.0, ignore: Callable[[], Ignored] = multiprocessing_helpers
) -> None:
    """Wait until this process holds nothing that it did not hold *before*; after *timeout* seconds fail.

    Args:
        before: a snapshot made by this process. Threads are compared if it has them.
        timeout: how long what is on its way out may take.
        ignore: says what may stay; it is asked anew at each look. Yours replaces the default: call
            `multiprocessing_helpers` in it and join the two with ``|`` to keep both.

    Raises:
        LeakError: an `AssertionError` that names everything left.
    """
    deadline = time.monotonic() + timeout
    while True:
        last_look = time.monotonic() >= deadline
        now = snapshot_resources(threads=before.threads is not None)
        left = what_is_left(before, now, ignore())
        if not left:
            return
        if last_look:
            lines = "\n  ".join(left)
            raise LeakError(f"{len(left)} left behind by process {before.pid} after {timeout:g} s:\n  {lines}")
        time.sleep(POLL_SECONDS)


@contextmanager
def no_leaks(
    *, timeout: float = 2.0, ignore: Callable[[], Ignored] = multiprocessing_helpers, threads: bool = False
) -> Iterator[Resources]:
    """Fail if the block leaves anything behind, also when it raises (the leak is then noted on its exception)."""
    before = snapshot_resources(threads=threads)
    try:
        yield before
    except BaseException as error:
        try:
            assert_nothing_left(before, timeout=timeout, ignore=ignore)
        except LeakError as leak:
            _annotate(error, str(leak))
        raise
    assert_nothing_left(before, timeout=timeout, ignore=ignore)


def _annotate(error: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        sys.stderr.write(note + "\n")


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = str(Path("/proc/self/fd", name).readlink())
        except FileNotFoundError:
            continue  # closed meanwhile, as the one that lists the directory is
    return found


def _memory_maps(pid: str = "self") -> frozenset[tuple[str, int]]:
    found = set()
    for line in Path("/proc", pid, "maps").read_bytes().splitlines():
        if b"/memfd:" in line or b"/dev/shm/" in line:
            fields = line.decode(errors="replace").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(("/memfd:", "/dev/shm/")):
                found.add((fields[5], int(fields[4])))
    return frozenset(found)


def _threads() -> dict[int, str]:
    return {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id is not None}


def _left_descriptors(before: Resources, now: Resources, ignored: Ignored) -> Iterator[str]:
    """Descriptors are held against each other by what they lead to: their numbers may be dealt anew."""
    had = Counter(link for number, link in before.descriptors.items() if number not in ignored.descriptors)
    for number, link in sorted(
        now.descriptors.items(), key=lambda item: (item not in before.descriptors.items(), item)
    ):
        if number in ignored.descriptors:
            continue
        if had[link] > 0:
            had[link] -= 1
        else:
            yield f"descriptor {number} -> {link}"


def _left_processes(before: Resources, now: Resources, ignored: Ignored) -> Iterator[str]:
    for pid, record in sorted(now.processes.items()):
        if pid in ignored.pids:
            continue
        earlier = before.processes.get(pid)
        if earlier is None or earlier.started != record.started:
            yield f"{'zombie' if record.is_zombie else 'process'} {record}"
        elif record.is_zombie and not earlier.is_zombie:
            yield f"zombie {record}, which was alive before"


def _left_threads(before: Resources, now: Resources, ignored: Ignored) -> Iterator[str]:
    if before.threads is None or now.threads is None:
        return
    for native_id, name in sorted(now.threads.items()):
        if native_id not in before.threads and name not in ignored.threads:
            yield f"thread {name} (native id {native_id})"
