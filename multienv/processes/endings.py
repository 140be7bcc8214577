"""End workers that are not closed, because their trainer ends or has forgotten them: as close() does, no longer."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from functools import partial

from multienv.processes.channel import LONGEST_SLEEP, Channel
from multienv.processes.worker_process import KILL_PATIENCE, ProcessChannel, readable
from multienv.threads import start_plain_thread

logger = logging.getLogger("multienv")

# Seconds that a worker may take to finish the request that it is executing: it may hang, and its answer is not awaited.
BUSY_PATIENCE = 0.5


class Ending:
    """Watches one process that closes its envs, and has it killed if that takes too long.

    Args:
        channel: To the process, which has been told that no more requests will come.
    """

    def __init__(self, channel: ProcessChannel) -> None:
        self.channel = channel
        self._began = time.monotonic()
        self._killed = 0.0  # when; 0: it was not

    @property
    def _due(self) -> float:
        """Return when there is something to do, unless the process ends before."""
        if self._killed:
            return self._killed + KILL_PATIENCE
        patience = self.channel.patience
        return self._began + (min(BUSY_PATIENCE, patience) if self.channel.is_busy() else patience)

    @property
    def left(self) -> float:
        """Return the seconds until there is something to do; at most a second: an env may become busy or idle."""
        return min(self._due - time.monotonic(), LONGEST_SLEEP, BUSY_PATIENCE)

    def is_over(self) -> bool:
        """Tell whether the process has ended; kill it if it is time to."""
        channel, now = self.channel, time.monotonic()
        if channel.has_ended():
            return True
        if now < self._due:
            return False
        if self._killed:
            return True
        busy = channel.is_busy()
        self._killed = now
        if channel.give_up() and channel.patience:
            logger.warning(cut_short(channel.envs, now - self._began, busy="a call" if busy else ""))
        return False


def cut_short(envs: str, seconds: float, *, busy: str = "") -> str:
    """Return the warning that the process of envs was killed before they were closed.

    Args:
        envs: The envs, such as "env 3".
        seconds: How long was waited.
        busy: The call that was still being made; ``""``: none, the envs were being closed.
    """
    if busy:
        return (
            f"close() of {envs} was not called: {busy} had not ended after {seconds:.1f} s, and the process was killed."
        )
    return (
        f"close() of {envs} was cut short: it had not returned after {seconds:.1f} s, and the process was killed. "
        "Give it more time: Deadlines(close=...)."
    )


def end_all(channels: Sequence[ProcessChannel]) -> None:
    """Ask processes to close their envs and end, all at the same time; wait for it, and kill those that take too long.

    Each has the seconds of its ``patience``; one that is executing a request has :data:`BUSY_PATIENCE` to finish it.
    """
    for channel in channels:
        channel.end_requests()
    endings = [Ending(channel) for channel in channels]
    while endings := [ending for ending in endings if not ending.is_over()]:
        fates = [descriptor for ending in endings for descriptor in ending.channel.descriptors()[1:]]
        if not readable(fates, min(ending.left for ending in endings)):
            endings[0].channel.resume()


def let_go(channels: Sequence[Channel]) -> None:
    """Release channels that nobody will close; does not wait. A thread waits for processes that close their envs.

    Finalizers call this: it takes no lock but those of the channels.
    """
    alive = [one for one in channels if isinstance(one, ProcessChannel) and not one.has_ended()]
    for channel in channels:
        if channel not in alive:
            channel.release()
    if alive and not sys.is_finalizing():
        try:
            start_plain_thread(partial(_end_and_release, alive))
            return
        except RuntimeError:  # no thread is to be had
            pass
    for channel in alive:
        channel.release()


def _end_and_release(channels: list[ProcessChannel]) -> None:
    end_all(channels)
    for channel in channels:
        channel.release()
