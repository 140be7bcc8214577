"""Kill workers while they work, at random or chosen moments, reproducibly."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, get_args

from multienv.testing.processes import descendants

KillManner = Literal["SIGKILL", "SIGSEGV", "SIGTERM", "SIGSTOP"]
"""The signals a :class:`Killer` knows. A stopped process hangs: a deadline has to end it."""

Pids = int | Iterable[int] | None


@dataclass(frozen=True)
class Strike:
    """One attempt of a :class:`Killer`.

    Attributes:
        pid: The process aimed at; ``None`` if there was none.
        manner: The signal.
        elapsed: Seconds since the killer was started; since it was made, if it never was.
        delivered: Whether the signal was sent; it is not if the process is gone or is none of ours.
    """

    pid: int | None
    manner: KillManner
    elapsed: float
    delivered: bool


def worker_pids(face: Any) -> list[int]:
    """Return the processes of the workers of an env, a batch or a manager that are alive, each once."""
    found = face.statistics()
    several = found.values() if isinstance(found, Mapping) else found if isinstance(found, Iterable) else [found]
    pids = [one.pid for one in several if one is not None and one.pid is not None]
    return list(dict.fromkeys(pids))


class Killer:
    """Kills workers from a thread of its own while its context is open.

    ::

        with Killer(env, interval=(0.05, 0.2), seed=1) as killer:
            ...  # step the env
        assert killer.delivered > 0

    Only descendants of this process are struck: a pid that is out of date does no harm. The order of victims, manners
    and pauses is a function of the seed; what a victim is doing at that moment is not. For kills between two steps
    call :meth:`strike` there, without opening the context.

    Args:
        victims: An env, a batch or a manager of multienv; or a function that says which processes may be struck now: a
            pid, several, or ``None``. It is called from the killer's thread.
        manners: The signals to choose from.
        moments: Seconds after the start at which to strike; ``None``: strike at random.
        interval: The least and greatest pause before each random strike, in seconds.
        kills: End after so many signals delivered; ``None``: go on until the context ends.
        seed: Of the killer's own generator.
    """

    def __init__(
        self,
        victims: Any,
        *,
        manners: Sequence[KillManner] = ("SIGKILL",),
        moments: Iterable[float] | None = None,
        interval: tuple[float, float] = (0.01, 0.1),
        kills: int | None = None,
        seed: int = 0,
    ) -> None:
        if not manners or not set(manners) <= set(get_args(KillManner)):
            raise ValueError(f"manners must be some of {', '.join(get_args(KillManner))}; got {manners!r}")
        if not 0 <= interval[0] <= interval[1]:
            raise ValueError(f"interval must be (least, greatest), both not negative; got {interval}")
        if not callable(victims) and not hasattr(victims, "statistics"):
            raise ValueError(
                f"victims must be an env, a batch or a manager of multienv, or a function; got {victims!r}"
            )
        self._pids: Callable[[], Pids] = (lambda: worker_pids(victims)) if hasattr(victims, "statistics") else victims
        self._manners = tuple(manners)
        self._moments = None if moments is None else tuple(sorted(moments))
        self._interval = interval
        self._kills = kills
        self._random = random.Random(seed)
        self._pause_random = random.Random(f"pauses {seed}")
        self._began = time.monotonic()
        self._strikes: list[Strike] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def strikes(self) -> tuple[Strike, ...]:
        """Every attempt so far, in order."""
        with self._lock:
            return tuple(self._strikes)

    @property
    def delivered(self) -> int:
        """How many signals were sent so far."""
        return sum(strike.delivered for strike in self.strikes)

    def strike(self, manner: KillManner | None = None) -> Strike:
        """Strike one of the victims now; the manner is chosen at random unless given."""
        with self._lock:
            victims = self._victims()
            victim = self._random.choice(victims) if victims else None
            chosen = self._random.choice(self._manners) if manner is None else manner
            delivered = victim is not None and send(victim, chosen)
            strike = Strike(victim, chosen, time.monotonic() - self._began, delivered)
            self._strikes.append(strike)
            return strike

    def start(self) -> None:
        """Begin to strike, in a thread. Use the context manager instead where you can."""
        if self._thread is not None:
            raise ValueError("this killer has been started already; make a new one")
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="multienv-killer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Strike no more, and wait for the thread. Raises what ``victims`` raised, if it did."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> Killer:  # noqa: PYI034 - Self needs Python 3.11
        """Begin to strike."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Strike no more."""
        # What the block raised says more than what the killer met because of it.
        with contextlib.suppress(BaseException) if error is not None else contextlib.nullcontext():
            self.stop()

    def _run(self) -> None:
        try:
            for pause in self._pauses():
                if self._stop.wait(pause) or (self._kills is not None and self.delivered >= self._kills):
                    return
                self.strike()
        except BaseException as error:
            self._error = error

    def _pauses(self) -> Iterable[float]:
        if self._moments is None:
            while True:
                yield self._pause_random.uniform(*self._interval)
        for moment in self._moments:
            yield max(0.0, self._began + moment - time.monotonic())

    def _victims(self) -> list[int]:
        pids = self._pids()
        if pids is None:
            return []
        return [pids] if isinstance(pids, int) else list(pids)


def send(pid: int, manner: KillManner) -> bool:
    """Send a signal to a descendant of this process; return whether it was one, and alive."""
    with contextlib.ExitStack() as stack:
        try:
            signal_it = _bound(pid, stack)
            if sys.platform == "linux" and pid not in descendants(os.getpid()):
                return False
            signal_it(getattr(signal, manner))
        except ProcessLookupError:
            return False
    return True


def _bound(pid: int, stack: contextlib.ExitStack) -> Callable[[int], None]:
    """Return a function that signals this very process, also if its pid is given to another one meanwhile."""
    if sys.platform == "linux":
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except OSError:  # some sandboxes have no pidfd
            return lambda number: os.kill(pid, number)
        stack.callback(os.close, descriptor)
        return lambda number: signal.pidfd_send_signal(descriptor, number)
    return lambda number: os.kill(pid, number)
