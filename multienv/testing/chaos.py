"""Kill processes while they work, at random or scripted moments, reproducibly."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, get_args

from multienv.testing.process_table import descendants

__all__ = ["KillManner", "Killer", "Strike"]

KillManner = Literal["SIGKILL", "SIGSEGV", "SIGTERM", "SIGSTOP"]
"""The signals a `Killer` knows. A stopped process is not continued: whoever owns it has to end it."""

Pids = int | Iterable[int] | None


@dataclass(frozen=True)
class Strike:
    """One attempt of a `Killer`.

    Args:
        pid: the process aimed at; None if there was none.
        manner: the signal.
        elapsed: seconds since the killer was started (or made, if it never was).
        delivered: whether the signal was sent; it is not to a process that is gone or is not ours.
    """

    pid: int | None
    manner: KillManner
    elapsed: float
    delivered: bool


class Killer:
    """Kills processes from a thread of its own, while its context is open.

        with Killer(lambda: env.statistics().pid, interval=(0.05, 0.2), seed=1) as killer:
            ...  # step the env
        assert killer.delivered > 0

    Only descendants of this process are ever struck, so that a pid that is out of date does no harm. The order of
    victims, manners and pauses is a function of the seed; what a victim is doing at that moment is not. For kills at
    exact steps call `strike` between them, without opening the context.

    Args:
        pids: says who may be struck now: a pid, several, or None. It is called from the killer's thread.
        manners: the signals to choose from.
        moments: the seconds after the start at which to strike. If None, strike at random.
        interval: the least and greatest pause before each random strike, in seconds.
        kills: end after so many signals delivered; None for no end.
        seed: of the killer's own generator.
    """

    def __init__(
        self,
        pids: Callable[[], Pids],
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
        self._pids = pids
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
            delivered = victim is not None and _send(victim, getattr(signal, chosen))
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
        """Strike no more, and wait for the thread. Raises what *pids* raised, if it did."""
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


def _send(pid: int, number: signal.Signals) -> bool:
    """Send a signal to a descendant of this process; False if it is none, or is gone."""
    with contextlib.ExitStack() as stack:
        try:
            send = _bind(pid, stack)
            if sys.platform == "linux":
                record = descendants(os.getpid()).get(pid)
                if record is None or record.is_zombie:
                    return False
            send(number)
        except ProcessLookupError:
            return False
    return True


def _bind(pid: int, stack: contextlib.ExitStack) -> Callable[[int], None]:
    """A way to signal this very process, also if its pid is dealt anew between a look at it and the signal."""
    if sys.platform == "linux":
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except OSError:
            return lambda number: os.kill(pid, number)  # some sandboxes have no pidfd: then the pid has to do
        stack.callback(os.close, descriptor)
        return lambda number: signal.pidfd_send_signal(descriptor, number)
    return lambda number: os.kill(pid, number)
