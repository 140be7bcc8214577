"""Launch workers through the monitor, and the monitor when there is none.

One monitor serves a trainer; it is launched with the first worker and ends by itself a second after the last. A thread
of the trainer waits for that end: a zombie would be left otherwise. A second fork, which would
give the monitor to process 1, does not help where the trainer is process 1 of a container: it gets all orphans there.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its exit handler must be registered before ours
import contextlib
import errno
import fcntl
import json
import os
import pickle
import secrets
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from multienv._engine.interrupts import finalizer
from multienv._engine.processes.channel import Fate, SystemErrors
from multienv._engine.processes.endings import end_all, trainer_ends
from multienv._engine.processes.environment import (
    THREAD_VARIABLES,
    import_path,
    refuse_other_namespace,
    worker_environment,
)
from multienv._engine.processes.leftovers import end_orphans, remove_folder
from multienv._engine.processes.limits import limit_error, raise_descriptor_limit, refuse_too_many
from multienv._engine.processes.protocol import DROP, FREE, LAUNCH, PRELOAD, WAKE, Order, fate_line
from multienv._engine.processes.worker_process import (
    LONGEST_SEND,
    ProcessChannel,
    live,
    living,
    run_uninterrupted,
    send_patiently,
)
from multienv._engine.sometimes import sometimes
from multienv._engine.threads import Lock
from multienv._engine.wire.messages import Imports, MainScript, Setting
from multienv._engine.wire.segment import anonymous_file
from multienv._engine.wire.shared_pickle import SharedPickle
from multienv._engine.worker.descriptors import MONITOR_VARIABLE
from multienv.errors import ClosedError, UsageError

METHODS = ("forkserver", "spawn")
# What the monitor imports; the host imports numpy, cloudpickle and gymnasium.
LIGHT = ("gymnasium.wrappers", "gymnasium.envs.classic_control", "multienv._engine.worker.host")
# Out of reach of the terminal's Ctrl-C, yet in the trainer's session: Linux schedules session against session
# (autogroups), and workers in a session of their own step half as fast.
_APART: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
# Of all workers, or a set would be iterated in another order in a replacement; the trainer's own cannot be had.
hash_seed = os.environ.get("PYTHONHASHSEED") or str(1 + secrets.randbelow(2**32 - 1))
# As LONGEST_SEND, where a finalizer gives the order: the monitor takes hundreds of them in a second.
_LONGEST_FREE = 1.0
# Monitors that may end, one after the other, before one of them has taken the order to launch a worker.
_MONITORS = 3
_NO_LAUNCH = (
    f"It was not launched: {_MONITORS} monitors in a row, which launch workers, ended before they did. Something kills "
    "the processes of this trainer: look at dmesg, and at the memory limits of its container or job."
)
# The monitor has ended, or takes no more orders.
_ENDED = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)


def method_of(context: Any) -> str:
    """Return the start method that ``context`` names.

    Args:
        context: A name, a multiprocessing context, or ``None`` for the best.

    Raises:
        UsageError: There is no such method.
    """
    name = context if context is None or isinstance(context, str) else getattr(context, "_name", context)
    if name is None:
        return "forkserver" if sys.platform == "linux" else "spawn"
    if name == "fork":
        raise UsageError(
            'context="fork" is not supported: forking a trainer that has threads deadlocks. '
            'Use "forkserver", which is as fast.'
        )
    if name not in METHODS:
        raise UsageError(f"context is {context!r}; choose one of {', '.join(map(repr, METHODS))}, or None.")
    return str(name)


class Preload:
    """Names what workers have imported when they are forked: see the module ``template``.

    The monitor keeps a process for it until nothing refers to this object.

    Args:
        names: Of modules; none: they are learned from workers that have built their envs.
        setting: The surroundings in which they are imported.
        seconds: Time for the import; ``None``: no limit.

    Attributes:
        names: Those known so far. Without any, workers are forked from the monitor.
    """

    def __init__(self, names: Sequence[str], setting: Setting, seconds: float | None) -> None:
        self.token, self.names = next(_tokens), tuple(names)
        self._title, self._is_learned = ", ".join(names) or "what it needs", not names
        self._setting, self._seconds = setting, seconds
        self._sent: tuple[Any, ...] = ()  # the monitor, and the names that it knows

    def learn(self, imports: Imports) -> None:
        """Add what a worker has imported; the variables that were set for that are set before it is imported again."""
        self.names = tuple(dict.fromkeys(self.names + imports.names))
        self._setting = replace(self._setting, variables={**self._setting.variables, **imports.variables})

    def send_to(self, client: MonitorClient) -> None:
        """Tell the monitor what to import, unless it knows. Raises OSError."""
        if self._sent == (client, self.names):
            return
        descriptor = anonymous_file()
        try:
            imports = pickle.dumps((self.names, self._setting, self._seconds, self._is_learned))
            os.pwrite(descriptor, imports, 0)
            client.send(Order(PRELOAD, token=self.token, title=self._title), [descriptor, *_standard_streams()])
        finally:
            os.close(descriptor)
        self._sent = client, self.names

    @finalizer
    def __del__(self) -> None:
        """Tell the monitor that no worker needs it any more."""
        _send_at_once(Order(DROP, token=self.token))


_tokens = count(1)
_preloads: weakref.WeakValueDictionary[str, Preload] = weakref.WeakValueDictionary()


def preload_of(names: Sequence[str], setting: Setting, seconds: float | None) -> Preload:
    """Return the same object for the same modules in the same surroundings; see :class:`Preload`."""
    setting = replace(setting, main=MainScript(), registrations=b"", values=b"")  # for workers only
    key = repr((names, setting, seconds))
    return _preloads.get(key) or _preloads.setdefault(key, Preload(names, setting, seconds))


@dataclass(slots=True, eq=False)
class Launch:
    """Says how to launch the processes of one worker: the same for the first and every replacement.

    Args:
        method: ``"forkserver"`` or ``"spawn"``.
        native_threads: Threads of native libraries (BLAS, OpenMP, OpenCV); ``None``: as the user has set them.
        title: What ``ps`` shows.
        shared: What its envs are built from, in the file that several workers share; ``None``: nothing is.
        preload: What the processes have imported when they are forked; ``None``: nothing.
    """

    method: str
    native_threads: int | None = 1
    title: str = ""
    shared: SharedPickle | None = None
    preload: Preload | None = None

    def start(self) -> ProcessChannel:
        """Launch a process; does not wait for it. Raises SystemLimitError, UsageError, ClosedError."""
        preload = self.preload if self.preload is not None and self.preload.names else None
        token = 0 if preload is None else preload.token
        order = Order(LAUNCH, self.method == "spawn", self.native_threads or 0, token, self.title)
        shared = -1 if self.shared is None else self.shared.sealed_descriptor()
        return run_uninterrupted(partial(_launched, order, shared, preload))

    def learn(self, imports: Imports) -> None:
        """Have the monitor import at once what a worker has imported, for those that are launched later."""
        preload, client = self.preload, _client
        if preload is not None and client is not None and not set(imports.names) <= set(preload.names):
            run_uninterrupted(partial(_learned, client, preload, imports))

    def wake_kept(self, token: int) -> ProcessChannel | None:
        """Wake the snapshot kept under this token, as a new process with a new segment; ``None`` if it is gone.

        The worker that the snapshot was taken from must have ended, or end within 2 s.
        """
        client = _client
        if client is not None:
            with SystemErrors():
                return run_uninterrupted(partial(_ordered, client, Order(WAKE, token=token)))
        return None

    def free(self, token: int) -> None:
        """End the snapshot kept under this token. Waits only for room in the monitor's socket; no error."""
        _send_at_once(Order(FREE, token=token))

    def close(self) -> None:
        """Release what is shared; the monitor ends by itself, and a preload's process with the last of its workers."""
        self.preload = None
        if self.shared is not None:
            self.shared.close()


class MonitorClient:
    """Connects the trainer to its monitor, which it launches; orders wait in its socket until the monitor is up."""

    def __init__(self) -> None:
        refuse_other_namespace()
        raise_descriptor_limit()  # the monitor inherits it
        self._control, theirs = socket.socketpair()
        self._folder, self._mark = _temporary_folder(), secrets.token_hex(8)
        try:
            # Not by the number of a standard stream, which a daemon may have closed.
            with theirs, socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 3)) as handed:
                self.process = subprocess.Popen(
                    _command(handed.fileno(), self._folder),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[handed.fileno()],
                    env=worker_environment() | {"PYTHONHASHSEED": hash_seed, MONITOR_VARIABLE: self._mark},
                    **_APART,
                )
        except BaseException:
            self._control.close()
            raise
        self._closing = Lock()  # held for moments: the socket is not closed while another thread sends
        self._waiter = threading.Thread(target=self._await_end, name="multienv-monitor", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread is to be had: _monitor() takes note of its end
            self._waiter.start()

    def _await_end(self) -> None:
        """Reap the monitor when it has ended; if it was killed, end the processes that it left."""
        code = self.process.wait()
        with self._closing:
            self._control.close()
        if code:  # one that ends by itself leaves nothing
            end_orphans(self.process.pid, self._mark)
            remove_folder(self._folder)

    def send(self, order: Order, descriptors: Sequence[int] = (), *, patience: float = LONGEST_SEND) -> None:
        """Send an order; wait up to ``patience`` seconds while the socket is full. Raises OSError."""

        def send() -> None:
            with self._closing:
                order.send(self._control, descriptors)

        send_patiently(send, self.resume, patience)

    def resume(self) -> None:
        """Resume the monitor if it has been stopped; called before each wait for the monitor."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)

    def close(self, timeout: float = 0.0) -> None:
        """Close the control socket: the monitor then ends its workers and itself. Wait up to ``timeout`` seconds."""
        with self._closing:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
        if timeout:
            self.resume()
            with contextlib.suppress(RuntimeError):  # the thread could not be started
                self._waiter.join(timeout)

    def abandon(self) -> None:
        """Close the copy of the socket in a forked child of the trainer."""
        self._control.close()
        self.process.returncode = 0  # or the finalizer would warn of a process that still runs


_client: MonitorClient | None = None
_lock = threading.Lock()
# Held by the thread that has a worker launched. If hundreds tried at once while the monitor's socket is full they would
# keep the cores from the monitor, and some would be given up. No signal handler runs in them: see run_uninterrupted().
_turn = threading.Lock()


def _send_at_once(order: Order) -> None:
    """Send an order from a finalizer; it waits only for room in the monitor's socket, and raises nothing."""
    client = _client
    if client is not None:
        with contextlib.suppress(OSError):
            client.send(order, patience=_LONGEST_FREE)


def _launched(order: Order, shared: int = -1, preload: Preload | None = None) -> ProcessChannel:
    """Launch a worker by the present monitor, or by a new one if the present one takes no more orders.

    If one monitor after the other is killed, return the channel to a worker that is lost already: those who launch
    workers know how often they try again, and what to raise in the end. Raises SystemLimitError.
    """
    client: MonitorClient | None = None
    try:
        for _ in range(_MONITORS):
            client = _monitor(ended=client)
            refuse_too_many(len(live) + 1)
            try:
                with _turn:
                    if preload is not None:
                        preload.send_to(client)
                    return _ordered(client, order, shared)
            except OSError as error:
                if error.errno not in _ENDED:
                    raise
                sometimes("the monitor ends while a worker is launched")
        assert client is not None
        return ProcessChannel(_write_no_launch, client.resume)
    except OSError as error:
        raise limit_error(error) from None


def _learned(client: MonitorClient, preload: Preload, imports: Imports) -> None:
    """Add imports to a preload, and tell the monitor of them."""
    with _turn, contextlib.suppress(OSError):  # the next launch tells it
        preload.learn(imports)
        preload.send_to(client)


def _write_no_launch(descriptors: Sequence[int]) -> None:
    """Tell what a monitor would tell of a worker that it cannot launch."""
    os.write(descriptors[0], fate_line(Fate(None, stderr=_NO_LAUNCH)))


def _ordered(client: MonitorClient, order: Order, shared: int = -1) -> ProcessChannel:
    def send(descriptors: Sequence[int]) -> None:
        client.send(order, [*descriptors, *_standard_streams()] if order.operation == LAUNCH else descriptors)

    return ProcessChannel(send, client.resume, shared)


def _standard_streams() -> list[int]:
    """Return the descriptors of standard output and error as they are now; none if one is closed, or is a socket.

    Where a daemon has closed them, sockets of ours may have their numbers.
    """
    try:
        are_sockets = [stat.S_ISSOCK(os.fstat(number).st_mode) for number in (1, 2)]
    except OSError:
        return []
    return [] if any(are_sockets) else [1, 2]


def _monitor(ended: MonitorClient | None = None) -> MonitorClient:
    """Return this process's monitor; launch a new one if there is none, or if it has ended or is ``ended``.

    Raises ClosedError once the interpreter ends.
    """
    global _client
    with _lock:
        if trainer_ends.is_set():
            raise ClosedError("The interpreter is shutting down: envs have ended, and none can be started any more.")
        if _client is None or _client is ended or _client.process.poll() is not None:
            before, _client = _client, MonitorClient()
            if before is not None:
                before.close()
        return _client


def _forget() -> None:
    """Drop monitor, workers and locks in a forked child: they are the trainer's, whose threads may hold the locks."""
    global _client, _lock, _turn
    client, _client, _lock, _turn = _client, None, threading.Lock(), threading.Lock()
    if client is not None:
        client.abandon()
    for channel in living():
        channel.abandon()


os.register_at_fork(after_in_child=_forget)


def _temporary_folder() -> str:
    """Return the path of the folder that a monitor makes for its workers; ``""`` where there is no place for one.

    The path of a socket has at most 107 bytes, and that of a multiprocessing.Manager has 33 after its folder's.
    """
    with contextlib.suppress(OSError):
        folder = f"{tempfile.gettempdir()}/multienv-{secrets.token_hex(4)}"
        return folder if len(os.fsencode(folder)) < 70 else ""
    return ""


def _command(control: int, folder: str) -> list[str]:
    interpreter = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    where = f"import sys; sys.path[:] = {import_path()!r}; "
    spawn = [*interpreter, "-c", where + "from multienv._engine.worker.main import spawned; spawned(*sys.argv[1:])"]
    # Until the monitor's loop looks for the trainer itself: its imports take seconds where the cores are busy.
    watch = (
        f"import os, signal; signal.signal(signal.SIGALRM, lambda *_: os.getppid() == {os.getpid()} or os._exit(0)); "
        "signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5); "
    )
    run = "import json; from multienv._engine.processes.monitor import main; main(*json.loads(sys.argv[1]))"
    settings = [control, LIGHT, spawn, [name for name in THREAD_VARIABLES if name not in os.environ], folder]
    return [*interpreter, "-c", where + watch + run, json.dumps(settings)]


def _shut_down() -> None:
    """End workers and monitor at the trainer's end: workers see that no request will come, then close their envs.

    An exception that a signal handler raises meanwhile (a second Ctrl-C) ends the wait: the monitor then kills them.
    """
    global _client
    # Else a thread that waits for a worker would see the worker end, recover its env and hang once more.
    trainer_ends.set()
    client, _client = _client, None
    if client is not None:
        try:
            end_all(living(), at_exit=True)
        finally:
            client.close(3.0)


# Before the threads of executors are joined: one of them may wait for an env that hangs.
getattr(threading, "_register_atexit", atexit.register)(_shut_down)
