"""The trainer's side of the warden: one per trainer, launched with the first worker."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its exit handler must be registered before ours
import contextlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from array import array
from typing import Any, Protocol

from multienv.errors import ClosedError
from multienv.processes import descriptors
from multienv.processes.environment import import_path, refuse_other_namespace, worker_environment
from multienv.processes.guard import Guard
from multienv.processes.protocol import ORDER

PRELOAD = ("numpy", "cloudpickle", "gymnasium", "gymnasium.wrappers", "gymnasium.envs.classic_control")
# Out of reach of the terminal's Ctrl-C, yet in the trainer's session: Linux schedules session against session
# (autogroups), and workers in sessions of their own step half as fast.
_APART: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}

# Of all workers, or a set would be iterated in another order in a replacement; the trainer's own cannot be had.
_HASH_SEED = os.environ.get("PYTHONHASHSEED") or str(1 + secrets.randbelow(2**32 - 1))


class _Worker(Protocol):
    def end_requests(self) -> None: ...


# All there are in this process, for its end.
workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


class WardenClient:
    """The trainer's end of its warden."""

    def __init__(self) -> None:
        """Launch the warden; does not wait until it is up: orders queue in its socket."""
        refuse_other_namespace()
        self.trainer = os.getpid()
        self.launched = time.monotonic()
        with descriptors.lock:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            self._token = descriptors.own(ours.fileno())
            try:
                self.process = subprocess.Popen(
                    _warden_command(theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=worker_environment() | {"PYTHONHASHSEED": _HASH_SEED},
                    **_APART,
                )
            except BaseException:
                ours.detach()
                descriptors.close(self._token)
                raise
            finally:
                theirs.close()
        self._control = ours

    def order(
        self,
        operation: int,
        *,
        number: int,
        method: int = 0,
        pid: int = 0,
        shortest: float = 0.0,
        fds: tuple[int, ...] = (),
    ) -> None:
        """Give an order; raises OSError when the warden is gone."""
        # Not by socket.send_fds(): CPython ignores the flags it is given.
        handed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        message = ORDER.pack(operation, method, number, pid, shortest)
        self._control.sendmsg([message], handed, getattr(socket, "MSG_NOSIGNAL", 0))

    def reap(self) -> None:
        """Take note of its end, if its socket says that it was killed."""
        poller = select.poll()
        poller.register(self._control, 0)  # a hangup is always told
        if self.trainer == os.getpid() and poller.poll(0):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)

    def close(self) -> None:
        """Let go of the warden: it kills what is left and ends."""
        self._control.detach()
        descriptors.close(self._token)
        if self.trainer == os.getpid():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(3.0)


_client: WardenClient | None = None
_client_lock = threading.Lock()
_shutting_down = False


def reap() -> None:
    """Take note of the warden's end, if it has been killed."""
    client = _client
    if client is not None:
        with contextlib.suppress(OSError, ValueError):  # another thread has closed it
            client.reap()


guard = Guard()


def _forget() -> None:
    """In a forked child: whichever thread held the lock is not here."""
    global _client_lock
    _client_lock = threading.Lock()
    guard.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def tell(operation: int, *, number: int = 0, pid: int = 0) -> None:
    """Give an order to the warden there is, if there is one; without a lock, so that finalizers may."""
    client = _client
    if client is not None and client.trainer == os.getpid():
        with contextlib.suppress(OSError, ValueError):
            client.order(operation, number=number, pid=pid)


def warden() -> WardenClient:
    """This process's warden, launched when there is none, or none any more; ClosedError once the interpreter ends."""
    global _client
    with _client_lock:
        if _shutting_down:
            raise ClosedError("The interpreter is shutting down: envs have ended, and none can be started any more.")
        if _client is not None and _client.trainer == os.getpid() and _client.process.poll() is None:
            return _client
        if _client is not None:
            _client.close()
        _client = WardenClient()
        return _client


def _warden_command(control: int) -> list[str]:
    interpreter = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    where = f"import sys; sys.path[:] = {import_path()!r}; "
    spawn = [*interpreter, "-c", where + "from multienv.worker.main import spawned; spawned(sys.argv[1])"]
    code = (
        where
        + "import json; from multienv.processes.warden import main; main(*json.loads(sys.argv[1]))  # multienv warden"
    )
    return [*interpreter, "-c", code, json.dumps([control, os.getpid(), PRELOAD, spawn])]


def _shut_down() -> None:
    """At the trainer's end: workers see their requests end, the warden sees that it is no longer needed."""
    global _client, _shutting_down
    # Or a thread that is woken by its worker's end would bring the env back and hang once more.
    _shutting_down = True
    if _client is not None and _client.trainer == os.getpid():
        # Requests alone: another thread may be blocked reading the replies. The warden wakes it.
        for one in list(workers):
            one.end_requests()
        _client.close()
        _client = None


# Before the threads of executors are joined: one of them may wait for an env that hangs.
getattr(threading, "_register_atexit", atexit.register)(_shut_down)
