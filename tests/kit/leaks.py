"""What a process leaves behind: descriptors, processes and zombies, names in /dev/shm, anonymous shared memory.

    before = snapshot_resources()
    ...
    assert_nothing_left(before)

or ``with no_leaks(): ...``. Read from /proc of Linux.
"""

from __future__ import annotations

import gc
import os
import secrets
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kit.patience import Patience
from kit.process_table import Mark, ProcessRecord, family, mark_descendants, tokens

# Descriptors of this process that a library has opened and will not close. Who makes one do so adds them.
kept_by_libraries: set[int] = set()


class LeakError(AssertionError):
    """Something was left behind; the message names it."""


@dataclass(frozen=True)
class Ignored:
    """What may stay: processes (not their children), descriptors of this process, threads by their names."""

    pids: frozenset[int] = frozenset()
    descriptors: frozenset[int] = frozenset()
    threads: tuple[str, ...] = ()


def multiprocessing_helpers() -> Ignored:
    """Python's resource tracker and fork server, with our ends of their pipes; and what is `kept_by_libraries`."""
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    pids = {getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None)}
    descriptors = {getattr(tracker, "_fd", None), getattr(server, "_forkserver_alive_fd", None)}
    return Ignored(frozenset(pids - {None}), frozenset(descriptors - {None}) | kept_by_libraries)


@dataclass(frozen=True)
class Resources:
    """What this process holds at a moment.

    Attributes:
        descriptors: What each leads to.
        processes: Its descendants, zombies included; also those that lost their parent, if they were started after the
            first snapshot and by way of an exec.
        shared_memory: The names in /dev/shm that this process or a descendant has made by `own_name`.
        memory_maps: Its mappings of anonymous files and of those in /dev/shm: (name, inode) each.
        threads: The native ids and names of its Python threads; None if not asked for.
    """

    descriptors: Mapping[int, str]
    processes: Mapping[int, ProcessRecord]
    shared_memory: frozenset[str]
    memory_maps: frozenset[tuple[str, int]]
    threads: Mapping[int, str] | None


def snapshot_resources(*, threads: bool = False) -> Resources:
    """What this process holds now. The first call also marks the environment, so that later descendants are known."""
    mark = mark_descendants()
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile, as the one that lists the directory is
            descriptors[int(name)] = str(Path("/proc/self/fd", name).readlink())
    return Resources(
        descriptors,
        family(mark),
        names_of(mark),
        _memory_maps(),
        {one.native_id: one.name for one in threading.enumerate() if one.native_id is not None} if threads else None,
    )


def _what_is_left(before: Resources, now: Resources, ignored: Ignored) -> Iterator[str]:
    """One line for each thing that *now* has and *before* had not."""
    # Descriptors are held against each other by what they lead to: their numbers may be dealt anew.
    had = Counter(link for number, link in before.descriptors.items() if number not in ignored.descriptors)
    known = before.descriptors.items()
    for number, link in sorted(now.descriptors.items(), key=lambda item: (item not in known, item)):
        if number not in ignored.descriptors:
            had[link] -= 1
            if had[link] < 0:
                yield f"descriptor {number} -> {link}"
    for pid, record in sorted(now.processes.items()):
        earlier = before.processes.get(pid)
        is_new = earlier is None or earlier.started != record.started
        if pid not in ignored.pids and (is_new or (record.is_zombie and not earlier.is_zombie)):  # type: ignore[union-attr]
            yield f"{'zombie' if record.is_zombie else 'process'} {record}"
    for name in sorted(now.shared_memory - before.shared_memory):
        yield f"shared memory /dev/shm/{name}"
    for name, inode in sorted(now.memory_maps - before.memory_maps):
        yield f"memory map {name} (inode {inode})"
    for native_id, name in sorted((now.threads or {}).items()):
        if before.threads is not None and native_id not in before.threads and name not in ignored.threads:
            yield f"thread {name} (native id {native_id})"


def own_name() -> str:
    """A new name for shared memory; it tells which processes it belongs to.

    Any program may leave names in /dev/shm, also by Python's multiprocessing, and nothing else tells who made one.
    """
    return f"multienv-{'-'.join(tokens())}-{secrets.token_hex(4)}"


def names_of(mark: Mark) -> frozenset[str]:
    """The names in /dev/shm that the marked process or a descendant has made by `own_name`."""
    return frozenset(name for name in os.listdir("/dev/shm") if mark.token in name)


def assert_nothing_left(
    before: Resources,
    *,
    timeout: float = 2.0,
    ignore: Callable[[], Ignored] = multiprocessing_helpers,
    collects: bool = False,
) -> None:
    """Wait until this process holds nothing that it did not hold *before*; fail after *timeout* seconds.

    Args:
        before: A snapshot made by this process. Threads are compared if it has them.
        timeout: Seconds that what is on its way out may take, see `Patience`.
        ignore: Says what may stay, asked anew at each look.
        collects: Collect garbage before each look.
    """
    patience, lasts = Patience(timeout), True
    if collects:
        gc.collect()
    while left := list(_what_is_left(before, snapshot_resources(threads=before.threads is not None), ignore())):
        if not lasts:
            raise LeakError("\n  ".join([f"{len(left)} left behind after {timeout:g} s:", *left]))
        lasts = patience.lasts()
        if collects:
            gc.collect()


@contextmanager
def no_leaks(
    *, timeout: float = 2.0, ignore: Callable[[], Ignored] = multiprocessing_helpers, threads: bool = False
) -> Iterator[None]:
    """Fail if the block leaves anything behind."""
    before = snapshot_resources(threads=threads)
    yield
    assert_nothing_left(before, timeout=timeout, ignore=ignore)


def _memory_maps() -> frozenset[tuple[str, int]]:
    found = set()
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        if b"/memfd:" in line or b"/dev/shm/" in line:
            fields = line.decode(errors="replace").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(("/memfd:", "/dev/shm/")):
                found.add((fields[5], int(fields[4])))
    return frozenset(found)
