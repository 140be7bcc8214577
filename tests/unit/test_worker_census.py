"""What a process has beyond its memory: each kind is looked at in a process of its own, with real descriptors."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.own_process import Forks
from multienv._engine.worker.census import OBSTACLES, Found, census, reopen, standard_streams

# Nobody holds them; the process is about to end.
libc = ctypes.CDLL(None, use_errno=True)
F_OFD_SETLK = 37
PR_SET_NAME = 15
FILE_LOCK = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)


def opened(path: str | Path, flags: int = os.O_RDONLY) -> int:
    return os.open(path, flags | os.O_CREAT if Path(path).parent.name == "files" else flags, 0o600)


def locked(how: Callable[[int], Any], flags: int = os.O_RDONLY) -> Callable[[Path], Any]:
    def lock(path: Path) -> int:
        file = opened(path, flags)
        how(file)
        return file

    return lock


def a_fifo(path: Path) -> Any:
    os.mkfifo(path)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def a_mapping(path: Path, flags: int, protection: int) -> Any:
    """Map a file; the descriptor is not kept, except by Python's mmap."""
    path.write_bytes(bytes(mmap.PAGESIZE))
    file = os.open(path, flags)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    assert libc.mmap(None, mmap.PAGESIZE, protection, mmap.MAP_SHARED, file, 0) != ctypes.c_void_p(-1).value
    os.close(file)


def a_file_as_standard_input(path: Path) -> Any:
    os.close(0)
    assert opened(path, os.O_RDWR) == 0


def a_timer(path: Path) -> Any:
    assert libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0


def a_thread(path: Path) -> Any:
    threading.Thread(target=signal.pause, daemon=True).start()


def a_thread_with_half_a_letter(path: Path) -> Any:
    """Start a thread whose name the kernel has cut after 15 bytes, within a letter."""
    named = threading.Event()

    def run() -> None:
        libc.prctl(PR_SET_NAME, "fourteen bytesé".encode(), 0, 0, 0)
        named.set()
        signal.pause()

    threading.Thread(target=run, daemon=True).start()
    named.wait()


LOCKS: dict[str, Callable[[Path], Any]] = {
    "a flock": locked(lambda file: fcntl.flock(file, fcntl.LOCK_EX)),
    "a shared flock": locked(lambda file: fcntl.flock(file, fcntl.LOCK_SH)),
    "a record lock": locked(lambda file: fcntl.lockf(file, fcntl.LOCK_EX), os.O_WRONLY),
    "a shared record lock": locked(lambda file: fcntl.lockf(file, fcntl.LOCK_SH)),
    "a lock of the open file": locked(lambda file: fcntl.fcntl(file, F_OFD_SETLK, FILE_LOCK)),
    "a lease": locked(lambda file: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)),
}
# What is found of each: words of OBSTACLES; "": it is put back.
FOUND: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "nothing": (lambda path: None, []),
    "a socket": (lambda path: socket.socket(), ["sockets"]),
    "two connected sockets": (lambda path: socket.socketpair(), ["sockets"] * 2),
    "news of devices": (lambda path: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15), []),
    "news of routes": (lambda path: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0), ["sockets"]),
    "a pipe": (lambda path: os.pipe(), ["pipes"] * 2),
    "a named pipe": (a_fifo, ["pipes"]),
    "a terminal": (lambda path: os.openpty(), ["devices"] * 2),
    "an epoll": (lambda path: select.epoll(), ["descriptors"]),
    "an eventfd": (lambda path: os.eventfd(0), ["descriptors"]),
    "a timerfd": (lambda path: libc.timerfd_create(1, 0), ["descriptors"]),
    "an inotify": (lambda path: libc.inotify_init1(0), ["descriptors"]),
    "a signalfd": (lambda path: libc.signalfd(-1, bytes(8), 0), ["descriptors"]),
    "a memfd": (lambda path: os.memfd_create("env"), ["files"]),
    "a file for reading and writing": (lambda path: opened(path, os.O_RDWR), ["files"]),
    "a file for reading": (opened, [""]),
    "a file for writing": (lambda path: opened(path, os.O_WRONLY), [""]),
    "a file for appending": (lambda path: opened(path, os.O_WRONLY | os.O_APPEND), [""]),
    "a folder": (lambda path: opened(path.parent), [""]),
    "a name": (lambda path: os.open(path.parent, os.O_PATH), []),
    "a file of the process table": (lambda path: os.open("/proc/self/stat", os.O_RDONLY), ["devices"]),
    "a folder of the process table": (lambda path: os.open("/proc/self", os.O_RDONLY), ["devices"]),
    "a file of the system": (lambda path: os.open("/sys/kernel/mm", os.O_RDONLY), ["devices"]),
    "nothing at all": (lambda path: [os.open(f"/dev/{one}", os.O_RDWR) for one in ("null", "zero", "full")], []),
    "random numbers": (lambda path: [os.open(f"/dev/{one}", os.O_RDONLY) for one in ("random", "urandom")], []),
    "shared memory": (lambda path: mmap.mmap(-1, mmap.PAGESIZE), ["shared memory"]),
    "memory of its own": (lambda path: mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), []),
    "a file mapped for reading": (lambda path: a_mapping(path, os.O_RDONLY, mmap.PROT_READ), []),
    "a file mapped for writing": (
        lambda path: a_mapping(path, os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE),
        ["shared memory"],
    ),
    "memory of others mapped for reading": (
        lambda path: a_mapping(Path(f"/dev/shm/{path.parent.parent.name}{os.getpid()}"), os.O_RDONLY, mmap.PROT_READ),
        ["shared memory"],
    ),
    "a file as standard input": (a_file_as_standard_input, ["files"]),
    "a timer": (a_timer, ["timers"]),
    "an interval timer": (lambda path: signal.setitimer(signal.ITIMER_REAL, 1000), []),
    "a thread": (a_thread, ["threads"]),
    "a thread with half a letter": (a_thread_with_half_a_letter, ["threads"]),
    "a duplicate of standard output": (lambda path: os.dup(1), []),
    "a child process": (lambda path: subprocess.Popen(["sleep", "0.01"]), ["child processes"]),
}


def look(make: str, path: str) -> list[str]:
    """Make something, and return what the census finds that was not there before."""
    before, standard = descriptors(), standard_streams()
    kept = (LOCKS.get(make) or FOUND[make][0])(Path(path))
    try:
        return [OBSTACLES[one.obstacle] for one in census(before, (), standard)]
    finally:
        del kept
        for file in Path("/dev/shm").glob(f"*{os.getpid()}"):
            file.unlink()


def descriptors() -> set[int]:
    """Return those that are open, without the standard streams and the one that lists them."""
    listed = os.listdir("/proc/self/fd")
    return {one for one in map(int, listed) if one > 2 and os.path.lexists(f"/proc/self/fd/{one}")}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "files").mkdir()
    return str(tmp_path / "files" / "file")


@pytest.mark.parametrize("what", list(FOUND))
def test_each_kind_of_thing_is_found_and_judged(what: str, path: str, forks: Forks) -> None:
    assert forks.call(look, what, path) == FOUND[what][1]


@pytest.mark.parametrize("what", list(LOCKS))
def test_each_kind_of_lock_is_found(what: str, path: str, forks: Forks) -> None:
    assert forks.call(look, what, path) == ["locks"]


def look_beside_a_lock(path: str) -> list[str]:
    Path(path).touch()
    other = os.open(path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    before = descriptors()
    kept = os.open(path, os.O_RDONLY)
    found = [OBSTACLES[one.obstacle] for one in census(before, (), standard_streams())]
    os.close(kept)
    return found


def test_a_lock_of_another_open_file_is_none_of_this_one(path: str, forks: Forks) -> None:
    assert forks.call(look_beside_a_lock, path) == [""]


def put_files_back(path: str) -> dict[str, Any]:
    """Put files back in this process, which then moves those that it had before."""
    Path(path).write_bytes(bytes(range(100)))
    before = descriptors()
    files = [os.open(path, os.O_RDONLY) for _ in range(2)]
    files.append(os.dup(files[0]))
    os.set_inheritable(files[2], True)
    for file in files[:2]:
        os.lseek(file, 5, os.SEEK_SET)
    found: list[Found] = list(census(before, (), standard_streams()))
    told: dict[str, Any] = {"moved": [os.lseek(file, 0, os.SEEK_CUR) for file in files]}
    olds = [os.dup(file) for file in files]
    fcntl.flock(olds[1], fcntl.LOCK_EX)
    reopen(found)
    told["left"] = len(descriptors()) - len(before) - len(files) - len(olds)
    for old in olds:
        os.lseek(old, 50, os.SEEK_SET)
    told["read"] = [os.read(files[number], 1)[0] for number in (0, 2, 1, 0)]
    told["inheritable"] = [os.get_inheritable(file) for file in files]
    told["locked"] = any("lock:" in Path(f"/proc/self/fdinfo/{file}").read_text() for file in files)
    return told


def test_files_that_are_put_back_share_nothing_but_with_their_duplicates(path: str, forks: Forks) -> None:
    assert forks.call(put_files_back, path) == {
        "moved": [5, 5, 5],
        "left": 0,
        "read": [5, 6, 5, 7],
        "inheritable": [False, False, True],
        "locked": False,
    }
