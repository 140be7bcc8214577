"""Ctrl-C is raised where multienv waits, or at the end of a call, and nowhere else in the package.

**The problem.** Python's own handler of SIGINT raises KeyboardInterrupt between any two instructions of the main
thread. A training loop that catches it, saves and goes on wants to find its envs as it left them. But the instruction
that was interrupted may lie between "the request is published" and "the state says so", or in a finalizer, where the
interpreter prints the exception and drops it. The supervisor survives an exception at any line: it takes the worker
for lost and recovers its envs, exactly. That is a high price for a key that somebody pressed beside a healthy worker.

**What does not work.** To write each line so that an exception before or after it does no harm: there is always one
more line. To block the signal: another thread takes it then, of BLAS for instance, and Python runs the handler in the
main thread all the same. To have another thread do the work: a plain step takes less time than to wake a thread.

**The solution** is that of trio (``trio/_core/_ki.py``). A handler of ours looks at the frames that it has interrupted,
from the innermost outwards. The first one that belongs to multienv decides.

- It is that of a function marked :func:`interruptible`, which only waits, or that of one marked :func:`runs_user_code`,
  in which code of the user's runs now and may take for ever. KeyboardInterrupt is raised.
- It is any other: the interrupt is *noted*.
- There is none: the trainer's own code runs. KeyboardInterrupt is raised, as without multienv.

An interrupt that is noted is raised at the end of the call (:func:`raise_noted`), before the outcome counts as handed
over: the next call has it. For waits, and for calls that end otherwise (a constructor, a property, ``close()``), a
thread that lives only while something is noted sends SIGINT to the main thread again every few milliseconds, until it
can be raised. Each SIGINT is raised once; one that comes while another is noted is merged with it. A plain step costs
nothing: it is the handler that looks up what may be interrupted.

**When.** Our handler is installed when a worker is started in the main thread, if Python's own is installed then, and
Python's own is put back when the last worker is closed. A handler of anybody else's is left alone: what it
raises in the middle of a call makes the workers of that call count as lost, and they are recovered like any other loss.

**The gaps.**

- What waits without a mark, or works long, is interrupted after :data:`PATIENCE` seconds all the same. Better a worker
  that has to be recovered than a trainer that cannot be stopped.
- Who replaces our handler by Python's own has the behaviour of Python's own until the next worker is started.
- asyncio.run() cancels its main task upon Ctrl-C only if it finds Python's own handler. Else KeyboardInterrupt is
  raised in the event loop, as it was before Python 3.11. An AsyncEnv starts its worker in another thread, and so never
  installs our handler.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

# Seconds after which an interrupt that is noted is raised wherever the main thread is.
PATIENCE = 5.0
# Seconds between two tries to raise it; and until a SIGINT counts as missed that no handler was called for.
_AGAIN, _MISSED = 0.002, 0.05

_PACKAGE = __name__.partition(".")[0] + "."
# Rooms that count as code of the user's: one hosts the envs, the others are programs that use the library.
_OF_USER = tuple(_PACKAGE + room for room in ("_engine.worker", "cli", "testing"))
_interruptible: set[CodeType] = set()
_running_user_code: set[CodeType] = set()


def _inside(function: Any, name: str) -> set[CodeType]:
    """Return the code of the functions of this name that a function of the standard library makes, if it does."""
    constants = getattr(getattr(function, "__code__", None), "co_consts", ())
    return {one for one in constants if isinstance(one, CodeType) and one.co_name == name}


# Finalizers: the interpreter drops what is raised there.
_shielded: set[CodeType] = {
    weakref.finalize.__call__.__code__,
    *_inside(weakref.WeakSet.__init__, "_remove"),
    *_inside(weakref.WeakValueDictionary.__init__, "remove"),
    *_inside(weakref.WeakKeyDictionary.__init__, "remove"),
    *_inside(getattr(ThreadPoolExecutor, "_adjust_thread_count", None), "weakref_cb"),
}

# What needs the handler: each worker that was started and not closed.
users: weakref.WeakSet[Any] = weakref.WeakSet()


class PendingInterrupt:
    """Describes an interrupt that could not be raised yet.

    Attributes:
        since: When it came, seconds of the clock.
        is_repeated: The thread has sent SIGINT again, and the handler has not been called since.
    """

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.is_repeated = False


# The interrupt that is to be raised, if there is one.
noted: PendingInterrupt | None = None
# One that was raised while a SIGINT that repeats it may still have been on its way: that one is to be dropped.
_raised: PendingInterrupt | None = None


def interruptible(function: Function) -> Function:
    """Mark a function that only waits: KeyboardInterrupt may be raised in any line of it."""
    _interruptible.add(function.__code__)
    return function


def runs_user_code(function: Function) -> Function:
    """Mark a function that calls code of the user's: KeyboardInterrupt is raised in there, not between the calls."""
    _running_user_code.add(function.__code__)
    return function


def shielded(function: Function) -> Function:
    """Mark a function in which KeyboardInterrupt is not raised, not even where it waits: it does not take long."""
    _shielded.add(function.__code__)
    return function


def finalizer(release: Callable[[Any], object]) -> Callable[[Any], None]:
    """Return a ``__del__`` that does nothing while the interpreter ends, when the names in modules may be gone already.

    All processes have ended by then: the launcher has ended them at exit.
    """
    is_finalizing = sys.is_finalizing

    def __del__(self: Any) -> None:  # noqa: N807 - may_raise() knows finalizers by this name
        if not is_finalizing():
            release(self)

    return __del__


@interruptible
def sleep(seconds: float) -> None:
    """Sleep, or be interrupted; who calls it says why there is nothing to wait for but the time."""
    time.sleep(seconds)


def take_over() -> None:
    """Install our handler in place of Python's own; does nothing in other threads, and if there is another handler."""
    if _is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handle)


def put_back() -> None:
    """Put Python's own handler back if ours is installed and nothing needs it any more; not in other threads."""
    is_coming = noted is not None or (_raised is not None and _raised.is_repeated)  # ours drops a repeated SIGINT
    if not users and not is_coming and _is_main_thread() and signal.getsignal(signal.SIGINT) is handle:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Held:
    """Keeps our handler in a block that closes workers: finalizers run at its end, where Python's own would raise.

    Args:
        user: Who closes its workers.
    """

    def __init__(self, user: Any) -> None:
        self._user = user

    def __enter__(self) -> None:
        """Count as a user of the handler, if workers have installed it."""
        if users:
            users.add(self._user)

    def __exit__(self, *error: object) -> None:
        """Put Python's own handler back if nothing needs ours any more."""
        users.discard(self._user)
        put_back()


def handle(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or note the interrupt: the handler of SIGINT."""
    global noted, _raised
    current, repeats = noted, _raised
    if current is not None:
        current.is_repeated = False
    elif repeats is not None and repeats.is_repeated:
        repeats.is_repeated, _raised = False, None
        put_back()
        return
    if may_raise(frame) or (current is not None and time.monotonic() > current.since + PATIENCE):
        _raise()
    if current is None:
        noted = current = PendingInterrupt()
        with contextlib.suppress(RuntimeError):  # no thread is to be had: the end of the call raises it
            _thread.start_new_thread(_repeat, (current, threading.get_ident()))


def only_waited(error: BaseException) -> bool:
    """Tell whether an exception has come out of a function that only waits: nothing was left half done."""
    codes = {frame.f_code for frame, _ in walk_tb(error.__traceback__)}
    return not codes.isdisjoint(_interruptible) and codes.isdisjoint(_shielded)


def raise_noted() -> None:
    """Raise KeyboardInterrupt if one is noted; does nothing in other threads."""
    if noted is not None and _is_main_thread():
        _raise()


def may_raise(frame: FrameType | None) -> bool:
    """Tell whether KeyboardInterrupt may be raised in this frame: see the module's description."""
    innermost, is_decided = frame, False
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        if code in _shielded or code.co_name == "__del__":  # what is raised in a finalizer is dropped
            return False
        if code in _interruptible or (code in _running_user_code and frame is not innermost):
            is_decided = True
        elif not is_decided and module.startswith(_PACKAGE) and not module.startswith(_OF_USER):
            return False
        frame = frame.f_back
    return True


def _raise() -> NoReturn:
    global noted, _raised
    noted, _raised = None, noted
    put_back()
    raise KeyboardInterrupt


def _repeat(mine: PendingInterrupt, main: int) -> None:
    """Send SIGINT to the main thread again and again, until this interrupt is raised.

    One at a time: each is told from one of the user's. But one that arrives between the moment when the main thread
    gives CPython's lock away and the system call in which it then sleeps interrupts nothing. That is likely, because
    this thread waits for the lock, too.
    """
    sent = 0.0
    while True:
        time.sleep(_AGAIN)  # not a poll: nothing tells when the main thread can be interrupted
        if noted is not mine:
            return
        if not mine.is_repeated or time.monotonic() > sent + _MISSED:
            mine.is_repeated, sent = True, time.monotonic()
            signal.pthread_kill(main, signal.SIGINT)


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _forget() -> None:
    """Forget what is noted, in a forked child: the interrupt is its parent's."""
    global noted, _raised
    noted = _raised = None


os.register_at_fork(after_in_child=_forget)
