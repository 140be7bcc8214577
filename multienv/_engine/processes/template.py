"""Keep a process that has imported what envs need, and fork it for each worker that needs that.

It is a child of the monitor, so an import that crashes, hangs, or starts threads harms no other process. A template
that cannot be forked safely is not used, and workers import for themselves, as without it. Workers are children of the
monitor all the same, so that their exit status is exact: a process that the template forks for a moment forks the
worker and ends, and the monitor, a subreaper, adopts the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NoReturn

from multienv._engine.processes.channel import readable
from multienv._engine.processes.forked import become_worker, part_from_monitor
from multienv._engine.processes.leftovers import kill, open_descriptors, parent_of
from multienv._engine.processes.protocol import Order, close_all
from multienv._engine.wire.messages import Setting
from multienv._engine.worker import imports
from multienv._engine.worker import main as worker_main
from multienv._engine.worker.census import OBSTACLES, census, standard_streams
from multienv._engine.worker.snapshots import flush_streams

# Seconds given to a template to fork a worker: milliseconds, unless the machine is short of memory.
FORK_PATIENCE = 5.0
# So many may be killed while they import: by the user, or for want of memory.
_MOST_KILLED = 3
_IMPORTED = b"imported"
_LEFT_OUT = "\0"  # before the name of a package that is to be left out, and before the reason
_OWN = 5  # so many descriptors that come with an order are the worker's ends and stderr; then comes stdout
_MOST_TEXT = 2000
# The pid of a worker that was forked, or the negative number of the error.
_ANSWER = struct.Struct("<q")


class Template:
    """Holds what the monitor knows of a template.

    Args:
        title: The names.
        folder: For the temporary files of the imports, and the folders of workers for theirs; ``""``: there is none.

    Attributes:
        pid: Of the process; 0: there is none.
        can_fork: It has imported, and workers can be forked from it.
        refusal: Why it is never to be used; empty if nothing speaks against it.
        waiting: Launches that wait until the import is done, with their descriptors.
        left_out: Packages that a process for ``preload="auto"`` is not to import, because they cannot be forked.
    """

    def __init__(self, title: str, folder: str) -> None:
        self._title, self._folder, self._told = title, folder, b""
        self.pid, self.can_fork, self.refusal = 0, False, ""
        self.waiting: list[tuple[Order, list[int]]] = []
        self.left_out: set[str] = set()
        self._channel: socket.socket | None = None
        self._imports = b""
        self._killed = 0  # so many were killed while they imported, or because of their answer

    def read_imports(self, descriptors: list[int]) -> None:
        """Read what to import from a file: the arguments of ``_import`` but the first, pickled; close the file."""
        for descriptor in descriptors:
            self._imports = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        close_all(descriptors)

    def start(self) -> None:
        """Fork the process from the monitor; it imports, and then says whether it can be forked. Raises OSError."""
        monitor = os.getpid()
        ours, theirs = socket.socketpair()
        try:
            pid = os.fork()
            if pid == 0:
                _serve(theirs, monitor, self._imports, self.left_out, self._folder)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid, self._channel = pid, ours

    def fileno(self) -> int:
        """Return the descriptor over which it tells what came of its imports; -1: there is no process."""
        return -1 if self._channel is None else self._channel.fileno()

    def read_outcome(self) -> None:
        """Read whether the imports are done, and what speaks against a fork."""
        with contextlib.suppress(OSError):
            assert self._channel is not None
            self._told = self._channel.recv(_MOST_TEXT, socket.MSG_DONTWAIT)
        self.can_fork = self._told == _IMPORTED

    def note_end(self, code: int) -> str:
        """Note that the process has ended with this exit code; return what to tell the user if it was no good.

        One that was killed is no reason to do without, if that does not happen again and again.
        """
        if not self._told:
            self.read_outcome()
        could_fork, told = self.can_fork, self._told.decode(errors="replace")
        self._forget_process()
        self._killed += not told and code == -signal.SIGKILL
        if could_fork or (not told and code == -signal.SIGKILL and self._killed < _MOST_KILLED):
            return ""
        left_out, _, why = told[1:].partition(_LEFT_OUT)
        if told.startswith(_LEFT_OUT) and left_out not in self.left_out:
            self.left_out.add(left_out)
            return f"preload='auto' leaves out {left_out}: {why}."
        self.refusal = f"preload is not used, and each worker imports {self._title} for itself: {told or _words(code)}."
        return self.refusal

    def fork(self, order: Order, descriptors: Sequence[int], known: AbstractSet[int]) -> int:
        """Fork a worker, with these descriptors and the stdout of this process; return its pid.

        Returns 0 if there is no process. Raises OSError, also if the answer is no new child of the monitor's: what was
        imported can write to the channel, too.

        Args:
            order: What the trainer wants.
            descriptors: Of the worker.
            known: Children that the monitor knows.
        """
        if self._channel is None:
            return 0
        kill([self.pid], signal.SIGCONT)
        try:
            order.send(self._channel, [*descriptors, 1])
        except OSError:
            return 0
        answer = self._channel.recv(_ANSWER.size) if readable((self.fileno(),), FORK_PATIENCE) else b""
        pid = int(_ANSWER.unpack(answer)[0]) if len(answer) == _ANSWER.size else 0
        if -pid in errno.errorcode:
            raise OSError(-pid, os.strerror(-pid))
        if pid in known or parent_of(pid) != os.getpid():
            kill([self.pid])
            if answer:  # not its own: it counts as killed while it imported
                self._channel.close()
                self.can_fork, self._told = False, b""
            raise OSError(errno.ESRCH, f"The process that has imported {self._title} has ended, or gives no answer")
        return pid

    def end(self) -> None:
        """Kill the process; the monitor reaps it."""
        kill([self.pid])
        self._forget_process()

    def _forget_process(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self.pid, self.can_fork, self._told, self._channel = 0, False, b"", None


def _words(code: int) -> str:
    if code == -signal.SIGALRM:
        return "the import was not done after half of Deadlines.start"
    how = f"by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"with exit code {code}"
    return f"the process that was to import it ended {how}"


# --- in the process -------------------------------------------------------------------------------


def _serve(channel: socket.socket, monitor: int, imports: bytes, left_out: AbstractSet[str], folder: str) -> NoReturn:
    """Import, tell the monitor whether that was all right, then fork a worker for each order."""
    try:
        part_from_monitor(monitor, [channel.fileno()])
        worker_main.set_title("multienv preload")
        if folder:
            os.environ["TMPDIR"] = folder
        own = os.getpid()
        refusal = _import(left_out, *pickle.loads(imports))
        if os.getpid() != own:  # an import has forked, and goes on in the child
            os._exit(0)
        worker_main.set_signal_handlers()  # a module may have set others
        channel.sendall(refusal.encode(errors="replace")[:_MOST_TEXT] or _IMPORTED)
        while not refusal:
            received = Order.receive(channel)
            if received is None:
                break
            _fork(channel, *received, monitor, folder)
    finally:
        os._exit(0)


def _import(
    left_out: AbstractSet[str], names: Sequence[str], setting: Setting, seconds: float | None, is_learned: bool
) -> str:
    """Import modules; return why this process cannot be forked, or an empty text.

    Args:
        left_out: Packages not to import.
        names: Of the modules.
        setting: The surroundings.
        seconds: After which the process is killed: by SIGALRM, which also ends an import that hangs in C code.
        is_learned: The user has not named the modules: one that cannot be imported is passed over, and one that speaks
            against a fork is told, to be left out.
    """
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0.0)
    worker_main.apply_surroundings(setting)
    before, standard = open_descriptors(), standard_streams()
    began = time.time_ns()
    for name in names:
        package = name.partition(".")[0]
        if is_learned and (name in sys.modules or package in left_out):
            continue
        try:
            importlib.import_module(name)
        except BaseException as error:
            if not is_learned:
                return f"importing {name} raised {type(error).__name__}: {error}".rstrip(": ")
        left = _left(before, standard)
        if left:
            why = f"importing {name} has left {left}, which a fork would share or lose"
            return f"{_LEFT_OUT}{package}{_LEFT_OUT}{why}" if is_learned else why
    imports.note_files(began)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    faulthandler.unregister(signal.SIGALRM)
    flush_streams()  # or each worker would write the buffered text again
    ctypes.CDLL(None).fflush(None)
    gc.collect()
    gc.freeze()  # as in the monitor
    return ""


def _left(before: set[int], standard: set[tuple[int, int, int]]) -> str:
    """Return in words what imports have left besides modules."""
    for found in census(before, (), standard):
        return f"{OBSTACLES[found.obstacle] or 'an open file'} ({found.name})"
    return ""


def _fork(channel: socket.socket, order: Order, descriptors: list[int], monitor: int, folder: str) -> None:
    """Fork a process that forks the worker and ends, so that the worker becomes the monitor's child; tell its pid."""
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            between = os.fork()
            if between == 0:
                _fork_worker(theirs, order, descriptors, monitor, folder)
            os.waitpid(between, 0)
            answer = ours.recv(_ANSWER.size, socket.MSG_DONTWAIT)
    except OSError as error:
        answer = _ANSWER.pack(-(error.errno or errno.EIO))
    channel.sendall(answer)
    close_all(descriptors)


def _fork_worker(ours: socket.socket, order: Order, descriptors: list[int], monitor: int, folder: str) -> NoReturn:
    own = os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            while os.getppid() == own:
                time.sleep(0.0005)  # not a poll: nothing tells a process that its parent has changed
            os.dup2(descriptors[-1], 1)
            become_worker(descriptors[:_OWN], order, monitor, folder and f"{folder}/{order.folder}")
        ours.sendall(_ANSWER.pack(pid))
    except OSError as error:
        ours.sendall(_ANSWER.pack(-(error.errno or errno.EIO)))
    finally:
        os._exit(0)
