"""End workers: those that are closed, and those that are not, because their trainer ends or has forgotten them."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from multienv._engine.processes.channel import Channel, readable
from multienv._engine.processes.worker_process import KILL_PATIENCE, ProcessChannel, crowd_seconds
from multienv._engine.threads import beside, close_at_once, start_plain_thread

logger = logging.getLogger("multienv")

# Seconds that a worker may take to finish the request that it is executing: it may hang, and its answer is not awaited.
BUSY_PATIENCE = 0.5
# Seconds that close() waits for a call whose process it has killed, and for the log to take its warning.
SOON = 0.5
# A warning names so many of the processes that were killed, by their envs.
_NAMED = 3

# Set once the trainer ends: all its processes are then ended together, and told of in one line.
trainer_ends = threading.Event()


def log_cuts(envs: Collection[str]) -> None:
    """Log one warning for all processes that were killed before their envs were closed, each named by its envs."""
    if envs:
        named = sorted(envs, key=lambda name: (len(name), name))  # env 2 before env 10
        more = f" and {len(envs) - _NAMED:,} more" if len(envs) > _NAMED else ""
        logger.warning(
            "close() of %s%s was cut short, and the process was killed. Deadlines(close=...) gives envs more time to "
            "close; a call that they are still in has %.1f s to end.",
            ", ".join(named[:_NAMED]),
            more,
            BUSY_PATIENCE,
        )


class Closing:
    """Ends the processes of a worker that is closed, and notes those that were killed before their envs were closed.

    Args:
        ask: Asks a process to close its envs and end.
        seconds: That they may take.

    Attributes:
        cuts: Where it notes their envs; ``None``: it logs each at once.
    """

    def __init__(self, ask: Callable[[Channel], object], seconds: float) -> None:
        self._ask, self._seconds = ask, seconds
        self.cuts: list[str] | None = None

    def time(self, patience: float | None = None) -> tuple[float, float]:
        """Return the seconds that a process has, and when it is killed; ``patience``: it has no more than that."""
        limit = self._seconds if patience is None else min(self._seconds, max(0.0, patience))
        spare = crowd_seconds() if limit == self._seconds else 0.0  # a timeout of the caller's is kept
        return limit, time.monotonic() + limit + spare

    def finish(self, channel: Channel, number: int, until: float) -> bool:
        """Wait a short time for the answer to a call, for nobody; kill the process if it does not come."""
        if channel.wait(number, min(time.monotonic() + BUSY_PATIENCE, until)):
            return True
        if channel.close(0.0):
            self._note_cut(channel)
        return False

    def end(self, channel: Channel, until: float, *, keep_memory: bool = False) -> None:
        """Ask a process to close its envs and end; kill it if it has not by ``until``."""
        channel.is_closing = True
        self._ask(channel)
        if channel.close(max(0.0, until - time.monotonic()), keep_memory=keep_memory):
            self._note_cut(channel)

    def _note_cut(self, channel: Channel) -> None:
        if self.cuts is not None:
            self.cuts.append(channel.envs)
        else:
            beside(partial(log_cuts, [channel.envs]), SOON)


def close_together(workers: Collection[Any], calls: Iterable[Callable[[], Any]]) -> None:
    """Make the calls that close these workers, all at the same time; log once for all that had to be killed."""
    cuts: list[str] = []
    for worker in workers:
        worker.closing.cuts = cuts
    try:
        close_at_once(calls)
    finally:
        for worker in workers:
            worker.closing.cuts = None
        if cuts:
            beside(partial(log_cuts, cuts), SOON)


def end_all(channels: Sequence[ProcessChannel], *, at_exit: bool = False) -> bool:
    """Ask processes to close their envs and end, all at the same time; wait for it, and kill those that take too long.

    Each has the seconds of its ``patience``; one that is executing a request has :data:`BUSY_PATIENCE` to finish it.

    Returns:
        Whether they have ended; else the end of the trainer, which has begun meanwhile, ends them (``at_exit``).
    """
    for channel in channels:
        channel.end_requests()
    began, cuts = time.monotonic(), list[str]()
    left = dict.fromkeys(channels, 0.0)  # when each was killed; 0: it was not
    try:
        while left := {channel: killed for channel, killed in left.items() if not channel.has_ended()}:
            if trainer_ends.is_set() and not at_exit:
                return False
            soonest = BUSY_PATIENCE  # an env may become busy or idle
            for channel, killed in list(left.items()):
                patience, now = channel.patience, time.monotonic()
                patience = min(BUSY_PATIENCE, patience) if channel.is_busy() else patience
                due = killed + KILL_PATIENCE if killed else began + patience + crowd_seconds()
                if now < due:
                    soonest = min(soonest, due - now)
                elif killed:
                    del left[channel]
                else:
                    left[channel] = now
                    if channel.order_kill() and channel.patience:  # else another thread logs it
                        cuts.append(channel.envs)
            fates = [descriptor for channel in left for descriptor in channel.descriptors()[1:]]
            if left and not readable(fates, soonest):
                next(iter(left)).resume()
        return True
    finally:
        log_cuts(cuts)


def let_go(channels: Sequence[Channel]) -> None:
    """Release channels that nobody will close; does not wait. A thread waits for processes that close their envs.

    Finalizers call this: it takes no lock but those of the channels.
    """
    alive = [one for one in channels if isinstance(one, ProcessChannel) and not one.has_ended()]
    for channel in channels:
        if channel not in alive:
            channel.release()
    with contextlib.suppress(RuntimeError):  # no thread is to be had
        if alive and not sys.is_finalizing():
            start_plain_thread(partial(_end_and_release, alive))
            return
    for channel in alive:
        channel.release()


def _end_and_release(channels: list[ProcessChannel]) -> None:
    if end_all(channels):
        for channel in channels:
            channel.release()
