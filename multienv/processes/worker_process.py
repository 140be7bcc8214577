"""The channel to a real process.

Three things tell the trainer of a death: the *line* (a socketpair that carries wake bytes) ends; the *pidfd* of the
process, which the monitor sends with the pid, becomes readable; the *fate* socket says how it ended. The line alone
would not do: a process that the env has forked may hold it open. The fate alone would not do: the monitor may have been
stopped. Where the kernel has no pidfd (Linux before 5.3, some sandboxes) the fate takes its place.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Protocol, TypeVar

from multienv.processes.channel import (
    FIRST_SLEEP,
    LONGEST_SLEEP,
    TRAINER_LOOKS,
    UNKNOWN_FATE,
    Cause,
    Channel,
    Fate,
    Gone,
    SystemErrors,
    give_way,
)
from multienv.processes.leftovers import kill_group, kill_marked, orphaned_snapshots, reap
from multienv.processes.protocol import (
    ANCILLARY_SIZE,
    KILL,
    KILL_WITH_STACK,
    NO_SIGNAL,
    RECEIVE_FLAGS,
    STACK,
    WAKE,
    Order,
    Told,
    descriptors_in,
)
from multienv.wire.segment import (
    BUSY,
    PID,
    REPLAYING,
    REPLY,
    REQUEST,
    RESETTING,
    SLOT,
    TRAINER_SLEEPS,
    WORKER_SLEEPS,
    Segment,
)
from multienv.worker.ends import mark_of

T = TypeVar("T")

# Seconds the monitor may take to tell of a death or to acknowledge an order, before the trainer does something about
# it; and for a process whose line has ended to be dead.
PATIENCE = 1.0
# Seconds given to the stack of a live process, and to the kernel after SIGKILL.
_STACK_PATIENCE = 1.0
_KILL_PATIENCE = 1.0
# Two threads may wait for the same news, and only one of them receives it: the other looks after so many seconds.
_BOTH_WAIT = 0.05

_numbers = count(1)
# All there are in this process, for its end.
live: weakref.WeakSet[ProcessChannel] = weakref.WeakSet()


class Monitor(Protocol):
    """What a channel needs of the monitor's launcher."""

    def send(self, order: Order, descriptors: Sequence[int], over: socket.socket | None = None) -> None:
        """Give an order, over the control socket if not told otherwise; raises OSError."""
        ...

    def lose(self) -> None:
        """Note that it is dead, if it is."""
        ...

    def rouse(self, *, again: bool) -> None:
        """Have it go on if it has been stopped; ``again``: kill it if it is stopped though it was told to go on."""
        ...


def undisturbed(function: Callable[[], T]) -> T:
    """Call a function so that no signal handler interrupts it.

    Between the system call that makes a descriptor and the line that notes it, a signal handler may raise
    KeyboardInterrupt, and the descriptor is lost. Blocking signals does not help: another thread, of BLAS for
    instance, takes the signal, and Python runs the handler in the main thread all the same. But only there: so what is
    called from the main thread runs in a thread of its own. An interruption then finds the caller waiting; what the
    function returns is dropped, and its finalizer lets go of what it holds.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="multienv-launch", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread is to be had
        return function()
    thread.join()
    try:
        if errors:
            raise errors[0]
        return results[0]
    finally:
        errors.clear()  # the traceback holds this frame


class ProcessChannel(Channel):
    """Talks to one process. To be made inside :func:`undisturbed`.

    Args:
        monitor: The launcher of the monitor that is to launch the process.
        order: What to launch; the number is filled in.
        over: The socket to send the order over; ``None``: the control socket.

    Raises:
        OSError: The order cannot be given, or descriptors have run out. Nothing is left open.
    """

    def __init__(self, monitor: Monitor, order: Order, over: socket.socket | None = None) -> None:
        self._owner = os.getpid()
        self._monitor = monitor
        self._number = next(_numbers)
        self._messages: list[tuple[bytes, list[tuple[int, int, bytes]], int, object]] = []
        self._told = Told()
        self._pidfd = -1
        self._rung = 0  # the newest request that a byte was sent for
        self._lock = threading.RLock()  # held for moments; a signal handler may come in between
        self._begun = time.monotonic()
        self._is_overdue = False  # the monitor has not acknowledged the order within PATIENCE
        self._is_released = False
        self._ended = False
        self._lost: Callable[[], Gone] | None = None  # not the exception: its traceback would hold everything
        with contextlib.ExitStack() as ours:
            self.segment = Segment.create()
            ours.callback(self.segment.unmap)
            self._line, line = map(ours.enter_context, socket.socketpair())
            with line:
                self._fate, fate = map(ours.enter_context, socket.socketpair())
                with fate:
                    descriptors = [line.fileno(), self.segment.descriptor, fate.fileno()]
                    monitor.send(replace(order, number=self._number), descriptors, over)
            ours.pop_all()
        live.add(self)

    @property
    def pid(self) -> int | None:
        """The process, once the monitor or it itself has told."""
        return self._told.pid or self.segment.words[PID] or None

    # --- requests and replies -------------------------------------------------------------------

    def ring(self, number: int) -> None:
        """Store the number, and send a byte if the worker sleeps."""
        words = self.segment.words
        words[REQUEST] = number
        if words[WORKER_SLEEPS] and self._rung != number:  # one byte is enough; it stays in the line until it is read
            with SystemErrors():  # gone, which wait() finds; or full of bytes that wake it as well
                self._line.send(b"\0", NO_SIGNAL | socket.MSG_DONTWAIT)
            self._rung = number  # after it: an interruption before has it sent once more

    def wait(self, number: int, until: float | None) -> bool:
        """Look for the reply, then sleep until it, the end or ``until`` comes."""
        words = self.segment.words
        for _ in range(TRAINER_LOOKS):
            if words[REPLY] == number:
                return True
            give_way()
        patience = FIRST_SLEEP
        try:
            while True:
                words[TRAINER_SLEEPS] = 1
                if words[REPLY] == number:
                    return True
                left = patience if until is None else min(patience, until - time.monotonic())
                _readable(self.descriptors(), left)
                ended = self.attend()
                if words[REPLY] == number:  # read after the end was seen: a reply given before it counts
                    return True
                if ended:
                    raise self._lose()
                if until is not None and time.monotonic() >= until:
                    return False
                patience = LONGEST_SLEEP
        finally:
            words[TRAINER_SLEEPS] = 0
            del words  # the traceback of an error holds this frame, and an error may be kept for long

    def descriptors(self) -> tuple[int, ...]:
        """Return the line, and the pidfd or, as long as there is none, the fate."""
        if self._is_released:
            return ()
        return self._line.fileno(), self._pidfd if self._pidfd >= 0 else self._fate.fileno()

    def attend(self) -> bool:
        """Read wake bytes and news; return whether the process has ended or the line is closed."""
        if self._ended or self._is_released:
            return True
        try:
            self._ended = not self._line.recv(4096, socket.MSG_DONTWAIT)
            if self._pidfd >= 0 and not self._ended:
                return False  # a wake byte: the reply is there, as a rule; the pidfd is asked when there is no byte
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno is None:  # a signal handler's: see SystemErrors
                raise
            self._ended = True
        if self._pidfd < 0:
            self._hear()
            if self._told.pid is None and time.monotonic() > self._begun + PATIENCE:
                self._monitor.rouse(again=self._is_overdue)
                self._begun, self._is_overdue = time.monotonic(), True
        if self._is_told() or (self._pidfd >= 0 and _readable((self._pidfd,), 0.0)):
            self._ended = True
        return self._ended

    # --- news from the monitor ------------------------------------------------------------------

    def _hear(self) -> None:
        """Receive what the monitor has told; what is known is worked out anew each time, in case of an interruption."""
        with self._lock:
            with SystemErrors():
                while not self._is_cut_off():
                    # One call into C: what has been received is kept, whatever comes next.
                    self._messages.extend(map(self._fate.recvmsg, (65_536,), (ANCILLARY_SIZE,), (RECEIVE_FLAGS,)))
            if self._pidfd < 0 and not self._is_released:
                handed = [one for message in self._messages for one in descriptors_in(message[1])]
                if handed:
                    self._pidfd = handed[0]
            self._told = Told.of(b"".join(message[0] for message in self._messages))

    def _is_cut_off(self) -> bool:
        """Tell whether the fate socket has ended."""
        return bool(self._messages) and not self._messages[-1][0]

    def _is_told(self) -> bool:
        return self._told.fate is not None or self._is_cut_off()

    def _learn(self, seconds: float) -> Fate | None:
        """Return how the process ended, as soon as the monitor has told or is dead; ``None`` after so many seconds."""
        until = time.monotonic() + seconds
        while True:
            self._hear()
            if self._told.fate is not None:
                return self._told.fate
            if self._is_cut_off():
                self._end_without_monitor()
                return UNKNOWN_FATE
            left = until - time.monotonic()
            if left <= 0 or self._is_released:
                return None
            _readable((self._fate.fileno(),), min(left, _BOTH_WAIT))

    def _end_without_monitor(self) -> None:
        """The monitor is dead, and the kernel kills its workers: make sure of that, and of what they started."""
        self._kill_directly()
        if self._owner == os.getpid():
            self._monitor.lose()
            orphans = kill_marked(mark_of(self._owner, self._number))
            if os.getpid() == 1:  # of a container: all orphans are the trainer's children now, to be reaped by it
                reap({*orphans, self._told.pid or 0, *orphaned_snapshots()} - {0}, PATIENCE)

    def _kill_directly(self) -> None:
        """Kill the process without the monitor, and wait for its end if there is a pidfd."""
        pid = self._told.pid
        if pid is None or self._owner != os.getpid() or self._is_released:
            return
        if self._pidfd >= 0:
            if not _readable((self._pidfd,), 0.0):  # alive, so the number is its own
                kill_group(pid, signal.SIGKILL)
                _readable((self._pidfd,), _KILL_PATIENCE)
        else:
            kill_group(pid, signal.SIGKILL)

    # --- the end --------------------------------------------------------------------------------

    def _lose(self, cause: Cause = "died", detail: str = "") -> Gone:
        """Learn how the process has ended, which has been seen; kill it if only its line has."""
        if self._lost is None:
            if self._is_released:
                return Gone(cause, self._told.fate or UNKNOWN_FATE, self.pid, detail=detail or "the channel is closed")
            fate = self._learn(PATIENCE)
            if fate is None and self._is_alive():
                return self.kill(cause="broken", detail=detail or "it closed its connection to the trainer")
            for again in (False, True):
                if fate is None:
                    self._monitor.rouse(again=again)
                    fate = self._learn(_BOTH_WAIT if again else PATIENCE)
            self._settle(cause, fate or UNKNOWN_FATE, detail)
        assert self._lost is not None
        return self._lost()

    def _is_alive(self) -> bool:
        if self._pidfd >= 0:
            return not _readable((self._pidfd,), 0.0)
        return self._told.pid is None or os.path.exists(f"/proc/{self._told.pid}")  # noqa: PTH110 - no need for a Path

    def _settle(self, cause: Cause, fate: Fate, detail: str) -> None:
        """Note how it ended, once and for all."""
        words = self.segment.words
        resetting, slot = divmod(words[SLOT], RESETTING)
        self._ended = True
        self._lost = partial(
            Gone,
            cause,
            fate,
            self.pid,
            number=words[BUSY],
            slot=slot - 1,
            resetting=bool(resetting),
            replaying=words[REPLAYING] - 1,
            detail=detail,
        )

    def kill(self, *, cause: Cause = "died", stack: bool = False, detail: str = "") -> Gone:
        """Have the monitor kill it; without the monitor, if that does not tell of its end in time."""
        if self._lost is None and not self._is_released and self._owner == os.getpid():
            fate = None
            for again in (False, True):
                if fate is None:
                    with SystemErrors():
                        Order(KILL_WITH_STACK if stack else KILL).send(self._fate)
                    fate = self._learn(PATIENCE)
                if fate is None:
                    self._monitor.rouse(again=again)
            if fate is None:
                self._kill_directly()
                fate = self._learn(_BOTH_WAIT) or UNKNOWN_FATE
            self._settle(cause, fate, detail)
        return self._lose(cause, detail)

    def stack(self) -> str:
        """Have the monitor send SIGUSR2, for which faulthandler writes the stacks."""
        self._hear()
        before, until = len(self._told.stacks), time.monotonic() + _STACK_PATIENCE
        if self._is_released or self._is_told():
            return ""
        with SystemErrors():
            Order(STACK).send(self._fate)
            while len(self._told.stacks) == before and time.monotonic() < until and not self._is_told():
                _readable((self._fate.fileno(),), _BOTH_WAIT)
                self._hear()
        return self._told.stacks[-1] if len(self._told.stacks) > before else ""

    def wake(self) -> ProcessChannel | None:
        """Have the monitor wake the snapshot."""
        if self._told.fate is None or self._told.fate.snapshot is None or self._is_released:
            return None
        try:
            return undisturbed(partial(ProcessChannel, self._monitor, Order(WAKE), self._fate))
        except OSError as error:  # the monitor is gone, and the snapshot with it
            if error.errno is None:  # a signal handler's: see SystemErrors
                raise
            return None

    def close(self, timeout: float) -> None:
        """Wait for the end of the process, then kill it; release."""
        if self._lost is None and not self._is_released and self._owner == os.getpid():
            fate = self._learn(timeout)
            if fate is None:
                self.kill()
            else:
                self._settle("died", fate, "")
        self.release()

    def end_requests(self) -> None:
        """Have the worker see that no request will come: it closes its envs and ends."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)

    def release(self, *, keep_memory: bool = False) -> None:
        """Close the descriptors; may be repeated, and interrupted."""
        with self._lock:
            if not self._is_released:
                self._hear()  # a pidfd may have been sent since
                if self._is_cut_off() and self._told.fate is None and self._told.pid is not None and self._lost is None:
                    self._end_without_monitor()
            if self._owner == os.getpid():
                for one in (self._line, self._fate):  # a child that the trainer forked may hold copies of them
                    with SystemErrors():
                        one.shutdown(socket.SHUT_RDWR)
            self._is_released = True
            self._line.close()
            self._fate.close()
            pidfd, self._pidfd = self._pidfd, -1
            if pidfd >= 0:
                os.close(pidfd)
            if keep_memory:
                self.segment.close()
            else:
                self.segment.unmap()

    def __del__(self) -> None:
        """Let go of a process that nobody has closed."""
        with contextlib.suppress(AttributeError):  # its making failed half way
            self.release()


def _readable(descriptors: Sequence[int], seconds: float) -> bool:
    """Wait until one of these is readable or has ended."""
    poller = select.poll()  # a new one: it cannot be used by two threads, nor by a signal handler meanwhile
    for descriptor in descriptors:
        if descriptor >= 0:
            poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(max(0.0, seconds) * 1000))
