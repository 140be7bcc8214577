"""How an environment fails: the manners, the moments, and the record that joins the two.

Everything here fails for real. ``"segv"`` reads address zero, ``"hang_c"`` deadlocks in C with the GIL held,
``"garbage"`` writes on the descriptors of the process it runs in. Use it in processes you can afford to lose.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import gymnasium

from kit.counter import CounterEnv

Manner = Literal[
    "raise", "custom_exception", "exit", "kill", "segv", "abort", "hang", "hang_c", "garbage", "unpicklable", "noise"
]  # fmt: skip
"""What happens: see `misbehave`."""

Moment = Literal["construct", "reset", "step", "call", "close", "unpickle"]
"""When it happens: see `Fault`."""

GARBAGE = b"garbage\xff\x00" * 7
NOISE_LINES = 4000


class FaultError(RuntimeError):
    """What the manner ``"raise"`` raises."""


class TwoArgumentError(Exception):
    """What the manner ``"custom_exception"`` raises: pickles, but cannot be unpickled (two required arguments)."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{detail} (code {code})")
        self.code = code
        self.detail = detail


@dataclass(frozen=True)
class Fault:
    """One failure of an environment: ``Fault("kill", "step", at=7)`` is SIGKILL at the seventh step.

    It strikes before the env's state has changed.

    Attributes:
        manner: See `misbehave`.
        moment: ``"call"`` is a call of `CounterEnv.poke`; ``"unpickle"`` is while the result of a step is unpickled, in
            the reader (by a manner that raises: the others would take the reader down).
        at: Strikes at exactly this event of that moment, counted from 1.
        per: ``"life"``: counted over the life of the env object (a forked copy goes on from the same count; an env built
            anew starts at zero). ``"episode"``: steps, calls and results are counted anew after every reset.
        action: Only steps taken with this action count.
        once: The path of a marker: strikes only while no such file is there, and makes it just before, so that a
            restarted worker passes. Else a worker that is replayed to the same event fails there again.
        exit_code: Of the manners that exit.
        ignore_sigterm: SIGTERM is ignored before it strikes, so that only SIGKILL ends a hang.
    """

    manner: Manner
    moment: Moment
    _: KW_ONLY
    at: int = 1
    per: Literal["life", "episode"] = "life"
    action: int | None = None
    once: str | os.PathLike[str] | None = None
    exit_code: int = 3
    ignore_sigterm: bool = False

    def claim(self) -> bool:
        """Whether the fault may strike now; a transient one leaves its marker."""
        with contextlib.suppress(FileExistsError):
            if self.once is not None:
                Path(self.once).touch(exist_ok=False)
            return True
        return False

    def strike(self) -> object:
        """Fail now. Returns only for the manners that let the env go on: see `misbehave`."""
        if self.ignore_sigterm:
            # Only the main thread may set handlers; elsewhere SIGTERM keeps its effect.
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return misbehave(self.manner, exit_code=self.exit_code, message=f"fault at {self.moment} {self.at}")


class UnpickleBomb:
    """Pickles well; raises in the fault's manner when unpickled. Copies are the object itself."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __copy__(self) -> UnpickleBomb:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> UnpickleBomb:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return Fault.strike, (self.fault,)


def misbehave(manner: Manner, *, exit_code: int = 3, message: str = "fault") -> object:
    """Fail, here and now, in this process.

    =======================  =========================================================================
    ``"raise"``              raises `FaultError`
    ``"custom_exception"``   raises `TwoArgumentError`, which pickles but cannot be unpickled
    ``"exit"``               ``os._exit(exit_code)``
    ``"kill"``               SIGKILL to itself
    ``"segv"``               a real segmentation fault (reads address zero)
    ``"abort"``              ``os.abort()``
    ``"hang"``               waits forever, in Python (signals are served, other threads run)
    ``"hang_c"``             waits forever in C code that holds the GIL (no other thread runs)
    ``"noise"``              writes thousands of lines on stderr, then ``os._exit(exit_code)``
    ``"garbage"``            writes garbage on every pipe and socket above descriptor 2, **then returns None**
    ``"unpicklable"``        **returns** an object that cannot be pickled, to be put into the result
    =======================  =========================================================================
    """
    if manner == "raise":
        raise FaultError(message)
    if manner == "custom_exception":
        raise TwoArgumentError(exit_code, message)
    if manner == "garbage":
        _write_garbage()
        return None
    if manner == "unpicklable":
        return threading.Lock()
    return _end_or_hang(manner, exit_code)


class FailsNthTime:
    """An ``env_fn`` that fails at its n-th call, counted over all processes, and else returns ``env_fn()``.

    Args:
        env_fn: What builds the env.
        counter: The path of a file that keeps count (one byte a call); it need not exist.
        nth: Which calls fail, counted from 1.
        manner: How: see `misbehave`.
    """

    def __init__(
        self,
        *,
        env_fn: Callable[[], gymnasium.Env[Any, Any]] = CounterEnv,
        counter: str | os.PathLike[str],
        nth: int | Iterable[int] = 1,
        manner: Manner = "raise",
    ) -> None:
        self.env_fn, self.counter, self.manner = env_fn, Path(counter), manner
        self.nth = frozenset((nth,) if isinstance(nth, int) else nth)

    def __call__(self) -> gymnasium.Env[Any, Any]:
        with self.counter.open("ab") as file:
            file.write(b".")
            file.flush()
            # After an appending write the position is the end of *this* write: atomic without a lock.
            call = os.lseek(file.fileno(), 0, os.SEEK_CUR)
        if call in self.nth:
            misbehave(self.manner, message=f"env_fn fails at call {call}")
        return self.env_fn()


def _end_or_hang(manner: Manner, exit_code: int) -> NoReturn:
    if manner == "exit":
        os._exit(exit_code)
    if manner == "noise":
        _write_noise()
        os._exit(exit_code)
    if manner == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif manner == "segv":
        ctypes.string_at(0)
    elif manner == "abort":
        os.abort()
    elif manner == "hang_c":
        _hang_in_c()
    while True:
        threading.Event().wait()


def _hang_in_c() -> None:
    """Block in C, the GIL held, not to be woken by a signal handler."""
    # PyDLL keeps the GIL during the call. A mutex locked twice blocks for good: unlike sleep or pause, it does not
    # return when a handled signal arrives.
    library = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(256)
    library.pthread_mutex_init(mutex, None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _write_noise() -> None:
    for line in range(NOISE_LINES):
        _write_all(2, f"noise: line {line} of {NOISE_LINES}, and nobody wants to read it\n".encode())
    _write_all(2, b"noise: last words\n")


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _write_garbage() -> None:
    spared = _resource_tracker_descriptor()
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > 2 and descriptor != spared:
            # A descriptor may be closed, read-only, full or without a reader: then it takes no garbage.
            with contextlib.suppress(OSError, ValueError):
                _spoil(descriptor)


def _spoil(descriptor: int) -> None:
    """Write some garbage without ever blocking."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.send(GARBAGE, socket.MSG_DONTWAIT)
    elif stat.S_ISFIFO(mode):
        _, writable, _ = select.select((), (descriptor,), (), 0)
        if writable:
            os.write(descriptor, GARBAGE)


def _resource_tracker_descriptor() -> int | None:
    """Python's own pipe to its resource tracker, which is nobody's channel and is spared."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(module, "_resource_tracker", None)
    descriptor = getattr(tracker, "_fd", None)
    return descriptor if isinstance(descriptor, int) else None
