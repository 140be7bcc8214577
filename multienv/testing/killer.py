"""Kill workers while they work, at random moments."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from multienv._engine.processes.leftovers import parent_of

KillManner = Literal["SIGKILL", "SIGSEGV", "SIGTERM", "SIGSTOP"]
"""The signals a :class:`Killer` knows. A stopped process hangs: a deadline has to end it."""


def worker_pids(envs: Any) -> list[int]:
    """Return the process ids of the living workers of an env, a batch or a manager, each once."""
    found = envs.statistics()
    several = found if isinstance(found, Iterable) else [found]
    pids = [one.pid for one in several if one is not None and one.pid is not None]
    return list(dict.fromkeys(pids))


def send(pid: int, manner: KillManner) -> bool:
    """Send a signal to a descendant of this process; return whether it was one, and alive."""
    if sys.platform == "linux" and not _is_descendant(pid):
        return False
    try:
        os.kill(pid, getattr(signal, manner))
    except ProcessLookupError:
        return False
    return True


def _is_descendant(pid: int) -> bool:
    """Tell whether this process has started that one, or one of its ancestors."""
    while pid > 1:
        pid = parent_of(pid)
        if pid == os.getpid():
            return True
    return False


class Killer:
    """Kills workers from a thread of its own while its context is open.

    ::

        with Killer(env, interval=(0.05, 0.2), seed=1) as killer:
            ...  # step the env
        assert killer.delivered > 0

    It sends signals only to descendants of this process, so an outdated pid does no harm. The seed decides the order of
    victims, signals and pauses; it does not decide what a victim is doing when the signal arrives. To kill between two
    steps, call :meth:`strike` there and do not open the context.

    Args:
        victims: An env, a batch or a manager of multienv; or a function that returns the ids of the processes that may
            get a signal now. The function is called in the killer's thread; if it raises, the exception is raised when
            the context ends.
        manners: The signals to choose from.
        interval: The shortest and the longest pause before each signal, in seconds.
        kills: End after this many delivered signals; ``None``: go on until the context ends.
        seed: Seed of the killer's own generator.

    Attributes:
        strikes: Number of signals sent so far, by signal.
        struck: Ids of the processes that got one.
    """

    def __init__(
        self,
        victims: Any,
        *,
        manners: Sequence[KillManner] = ("SIGKILL",),
        interval: tuple[float, float] = (0.01, 0.1),
        kills: int | None = None,
        seed: int = 0,
    ) -> None:
        self.strikes: Counter[str] = Counter()
        self.struck: set[int] = set()
        self._pids: Callable[[], Sequence[int]] = victims if callable(victims) else lambda: worker_pids(victims)
        self._manners, self._interval, self._kills = tuple(manners), interval, kills
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, "multienv-killer")

    @property
    def delivered(self) -> int:
        """Return how many signals were sent so far."""
        return self.strikes.total()

    def strike(self) -> bool:
        """Send a signal to one of the victims now; return whether one was sent."""
        victims = self._pids()
        manner = self._random.choice(self._manners)
        if not victims or not send(victim := self._random.choice(victims), manner):
            return False
        self.strikes[manner] += 1
        self.struck.add(victim)
        return True

    def __enter__(self) -> Killer:  # noqa: PYI034 - Self needs Python 3.11
        """Start the thread that sends signals."""
        self._striking = self._pool.submit(self._strike_until_stopped)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Stop the thread that sends signals, and raise the exception that it raised, if any."""
        self._stop.set()
        self._pool.shutdown()
        if error is None:  # what the block raised says more
            self._striking.result()

    def _strike_until_stopped(self) -> None:
        while self._kills is None or self.delivered < self._kills:
            if self._stop.wait(self._random.uniform(*self._interval)):
                return
            self.strike()
