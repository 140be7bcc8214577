"""The channel to a real process.

A death is told twice: the *wake socket* (a socketpair that carries wake bytes) ends, at once; and the monitor tells
over the *fate* socket how it ended. The wake socket alone would not do: a process that the env has forked may hold it
open. The fate alone would not do: the monitor may have been stopped. Each wait for the monitor resumes it, at once
and every second. If the fate socket ends without a message the monitor is dead, and so is the process: the kernel
kills it then.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from multienv._engine.interrupts import shielded
from multienv._engine.processes.channel import (
    LONGEST_SLEEP,
    UNKNOWN_FATE,
    Channel,
    Fate,
    Gone,
    SystemErrors,
    readable,
)
from multienv._engine.processes.protocol import AT_ONCE, KILL, STACK, WAKE, MonitorNews, Order, send_with_descriptors
from multienv._engine.threads import Lock, Task
from multienv._engine.wire.segment import (
    BUSY,
    PID,
    REPLAYING,
    REQUEST,
    SHARED,
    SLOT,
    WORKER_SLEEPS,
    Segment,
)
from multienv.events import LossCause

T = TypeVar("T")

# Seconds until a process must be dead after its wake socket has ended.
_FATE_PATIENCE = 1.0
# Seconds given to the stack of a live process, and to SIGTERM, SIGKILL and the kernel.
_STACK_PATIENCE = 1.0
KILL_PATIENCE = 2.0
# Seconds that the end of a process keeps a core busy, at most. If many end together, the last waits for the others.
_END_SECONDS = 0.01
# Seconds until what a socket does not take is given up: an order, or descriptors when too many are on their way.
LONGEST_SEND = 30.0
# The socket is full, or too many descriptors wait in it, or in those of other processes.
_FULL = (errno.EAGAIN, errno.ETOOMANYREFS)

# All channels of this process that have descriptors, by their ids, for its exit and for forked children.
live: weakref.WeakValueDictionary[int, ProcessChannel] = weakref.WeakValueDictionary()


def living() -> list[ProcessChannel]:
    """Return all channels of this process that have descriptors, though other threads open and close some meanwhile."""
    return [channel for reference in live.valuerefs() if (channel := reference()) is not None]


@shielded
def run_uninterrupted(function: Callable[[], T]) -> T:
    """Run a function in another thread, where no signal handler interrupts it, and return its result.

    The problem: between the system call that makes a descriptor and the line that stores it, a signal handler of the
    user may raise, and the descriptor is lost. (Ctrl-C is not raised there: see ``interrupts.py``.) To block signals
    does not help: another thread, of BLAS for instance, takes the signal, and Python runs the handler in the main
    thread all the same. It runs handlers nowhere else, so a function that is called in the main thread runs in a thread
    of its own. If a handler raises meanwhile, it is the wait for that thread that is interrupted: the result of the
    function is dropped, and its finalizer closes the descriptors.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    task = Task(function)
    task.start_alone()
    task.wait()
    try:
        if task.error is not None:
            raise task.error
        return task.result  # type: ignore[no-any-return]
    finally:
        del task  # the traceback holds this frame


def send_patiently(send: Callable[[], object], resume: Callable[[], None], seconds: float) -> None:
    """Send; try it again for so many seconds while the socket, or all that hold descriptors, is full. Raises OSError.

    Args:
        send: Sends at once, or raises OSError.
        resume: Has the monitor go on if it has been stopped.
        seconds: How long.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            send()
            return
        except OSError as error:
            if error.errno not in _FULL or time.monotonic() >= until:
                raise
        resume()
        time.sleep(0.001)  # not a poll: a socket with room may still hold as many descriptors as are allowed


class ProcessChannel(Channel):
    """Talks to one process. To be made inside :func:`run_uninterrupted`.

    Args:
        send: Sends the monitor the order that leads to the process; called with the descriptors that go with it.
        resume: Has the monitor go on if it has been stopped: before each wait for it.
        shared: Descriptor of the file that the workers share; -1: this one needs none.

    Raises:
        OSError: The order cannot be given, or descriptors have run out. Nothing is left open.
    """

    def __init__(self, send: Callable[[Sequence[int]], None], resume: Callable[[], None], shared: int = -1) -> None:
        self.resume = resume
        self._received: list[bytes] = []  # all that was received from the monitor; an empty last item: the end
        self._news = MonitorNews()
        self._rung = 0  # the newest request that the worker was woken for
        self._lock = Lock()  # held for moments; a signal handler may come in between
        self._is_released = self._is_kill_ordered = False
        self._ended = False
        self._gone: Gone | None = None  # a copy of it is raised: the traceback of this one would hold everything
        with contextlib.ExitStack() as ours:
            self.segment = Segment.create()
            ours.callback(self.segment.unmap)
            self._wake_socket, wake_socket = map(ours.enter_context, socket.socketpair())
            with wake_socket:
                if shared >= 0:
                    self.segment.words[SHARED] = 1
                    hand = partial(send_with_descriptors, self._wake_socket, b"\0", [shared])
                    send_patiently(hand, resume, LONGEST_SEND)  # ahead of all wake bytes
                self._fate, fate = map(ours.enter_context, socket.socketpair())
                with fate:
                    send([fate.fileno(), wake_socket.fileno(), self.segment.descriptor])
            ours.pop_all()
        live[id(self)] = self

    # --- requests and replies -------------------------------------------------------------------

    def ring(self, number: int) -> None:
        """Store the number, and wake the worker if it sleeps."""
        words = self.segment.words
        words[REQUEST] = number
        if words[WORKER_SLEEPS] and self._rung != number:  # once is enough: it stays until the worker reads
            with SystemErrors():  # the process is gone, which wait() finds; or the wake socket is full of wake bytes
                self._wake_socket.send(b"s", AT_ONCE)
            self._rung = number

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors of wake socket and fate socket; none once they are released."""
        if self._is_released:
            return ()
        return self._wake_socket.fileno(), self._fate.fileno()

    def attend(self) -> bool:
        """Read wake bytes and the monitor's news; return whether the process has ended or the wake socket is closed."""
        if self._ended or self._is_released:
            return True
        try:
            if self._wake_socket.recv(4096, AT_ONCE):
                return False  # a wake byte: the reply is there, as a rule; news are read when there is none
            self._ended = True
        except BlockingIOError:
            if not self.segment.words[PID]:  # the monitor may have been stopped before it launched the process
                self.resume()
            self._receive_news()
            self._ended = self._news.fate is not None
        except OSError as error:
            if error.errno is None:  # a signal handler's: see SystemErrors
                raise
            self._ended = True
        return self._ended

    # --- news from the monitor ------------------------------------------------------------------

    def _receive_news(self) -> None:
        """Receive the monitor's messages; decode all of them anew each time, because a call may be interrupted."""
        with self._lock:
            with SystemErrors():
                while not self._received or self._received[-1]:
                    self._received.append(self._fate.recv(65_536, socket.MSG_DONTWAIT))
            news = MonitorNews.of(b"".join(self._received))
            if news.fate is None and self._received and not self._received[-1]:
                news = replace(news, fate=UNKNOWN_FATE)
            self._news = news
            if news.fate is not None:
                with SystemErrors():  # from now on the socket is readable: other threads may wait for the same news
                    self._fate.shutdown(socket.SHUT_RD)

    def _await_fate(self, seconds: float, stacks: int | None = None) -> Fate | None:
        """Wait until the monitor has reported how the process ended, or is dead; ``None`` after so many seconds.

        Args:
            seconds: How long.
            stacks: Stop waiting, too, once more stacks than this number have been received.
        """
        until = time.monotonic() + seconds
        while True:
            self.resume()
            self._receive_news()
            news, left = self._news, until - time.monotonic()
            if news.fate is not None or (stacks is not None and len(news.stacks) > stacks):
                return news.fate
            if left <= 0 or self._is_released:
                return None
            readable((self._fate.fileno(),), min(left, LONGEST_SLEEP))

    # --- the end --------------------------------------------------------------------------------

    def how_it_ended(self, cause: LossCause = "died", detail: str = "") -> Gone:
        """Return how the process ended; kill the process first if only its wake socket has ended."""
        if self._gone is None:
            if self._is_released:
                return Gone(cause, self._news.fate or UNKNOWN_FATE, self.pid, detail=detail or "the channel is closed")
            fate = self._await_fate(_FATE_PATIENCE)
            if fate is None:
                return self.kill(cause="broken", detail=detail or "it closed its connection to the trainer")
            self._note_end(cause, fate, detail)
        assert self._gone is not None
        return replace(self._gone)

    def _note_end(self, cause: LossCause, fate: Fate, detail: str) -> None:
        """Keep how the process ended, and the request it was executing, for all later calls."""
        words = self.segment.words
        self._ended = True
        self._gone = Gone(cause, fate, self.pid, words[BUSY], words[SLOT] - 1, words[REPLAYING] - 1, detail)

    @shielded
    def kill(self, *, cause: LossCause = "died", stack: bool = False, detail: str = "") -> Gone:
        """Ask the monitor to kill the process, which counts as dead even if a system call delays its end."""
        if self._gone is None and not self._is_released:
            stacks = self.stack() if stack else ""
            with SystemErrors():
                Order(KILL).send(self._fate)
            fate = self._await_fate(KILL_PATIENCE) or UNKNOWN_FATE
            self._note_end(cause, replace(fate, stack=stacks or fate.stack), detail)
        return self.how_it_ended(cause, detail)

    def stack(self) -> str:
        """Ask the monitor to send SIGUSR2, for which faulthandler writes the stacks."""
        if not self.segment.words[PID] or self._is_released:  # the signal kills a process without its handler
            return ""
        self._receive_news()
        before = len(self._news.stacks)
        with SystemErrors():
            Order(STACK).send(self._fate)
            self._await_fate(_STACK_PATIENCE, before)
        return self._news.stacks[-1] if len(self._news.stacks) > before else ""

    def wake(self) -> ProcessChannel | None:
        """Ask the monitor to wake the snapshot."""
        fate = self._news.fate
        if fate is not None and fate.snapshot is not None and not self._is_released:
            with SystemErrors():  # the monitor is gone, and the snapshot with it
                return run_uninterrupted(partial(ProcessChannel, partial(Order(WAKE).send, self._fate), self.resume))
        return None

    def close(self, timeout: float, *, keep_memory: bool = False) -> bool:
        """Wait up to ``timeout`` seconds for the end of the process, else kill it; then release."""
        is_cut = False
        if self._gone is None and not self._is_released:
            fate = self._await_fate(timeout)
            if fate is None:
                is_cut = self.order_kill()
                self.kill()
            else:
                self._note_end("died", fate, "")
        self.release(keep_memory=keep_memory)
        return is_cut

    def has_ended(self) -> bool:
        """Tell whether the monitor has reported the end of the process, or the channel is released."""
        if self._gone is None and not self._is_released:
            self._receive_news()
        return self._gone is not None or self._is_released or self._news.fate is not None

    def is_busy(self) -> bool:
        """Tell whether the process is not up yet, or executes a request other than that to close its envs."""
        words = self.segment.words
        return not words[PID] or bool(words[BUSY] and not self.is_closing)

    def order_kill(self) -> bool:
        """Ask the monitor to kill the process, without waiting; return false if another thread has done so before."""
        with self._lock:
            is_first, self._is_kill_ordered = not self._is_kill_ordered, True
            with SystemErrors():
                Order(KILL).send(self._fate)
        return is_first

    def end_requests(self) -> None:
        """Shut down the wake socket for writing: the worker sees that no request will come, and ends."""
        with contextlib.suppress(OSError):
            self._wake_socket.shutdown(socket.SHUT_WR)

    def release(self, *, keep_memory: bool = False) -> None:
        """Close the descriptors; may be repeated, and interrupted."""
        with self._lock:
            for one in (self._wake_socket, self._fate):  # another thread may poll them, which close() does not end
                with SystemErrors():
                    one.shutdown(socket.SHUT_RDWR)
            self._is_released = True
            live.pop(id(self), None)
            self._wake_socket.close()
            self._fate.close()
            if keep_memory:
                self.segment.close()
            else:
                self.segment.unmap()

    def abandon(self) -> None:
        """Close the copies of the descriptors in a forked child of the trainer. The process is the trainer's."""
        self._lock = Lock()  # a thread of the trainer may hold the old one
        self._is_released = True
        self._wake_socket.close()
        self._fate.close()
        self.segment.close()

    def __del__(self) -> None:
        """Release a process whose channel was not closed."""
        try:  # noqa: SIM105 - contextlib may be gone already
            self.release()
        except (AttributeError, TypeError):  # its making failed half way; or the interpreter ends, and names are gone
            pass


def crowd_seconds() -> float:
    """Return how much longer a process may take to end because all others of this trainer may end at the same time."""
    return _END_SECONDS * len(live)
