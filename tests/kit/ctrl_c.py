"""Ctrl-C in the middle of a step: an env that waits there, and what presses while it does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import multienv
from kit import CounterEnv
from kit.trainer_process import STUCK_AFTER, becomes_true
from multienv.processes import worker_process
from multienv.wire.segment import TRAINER_SLEEPS

PACKAGE = str(Path(multienv.__file__).parent)


class GateEnv(CounterEnv):
    """Waits in its second step until the gate is there, and says that it does."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def step(self, action: Any) -> Any:
        (self.directory / "waits").touch() if self.episode_step == 1 else None
        while self.episode_step == 1 and not (self.directory / "gate").exists():
            time.sleep(0.002)
        return super().step(action)


def is_waiting() -> bool:
    """Whether the trainer sleeps until a worker answers."""
    return any(channel.segment.words[TRAINER_SLEEPS] for channel in list(worker_process.live))


@contextmanager
def ctrl_c(directory: Path, pids: Sequence[int] = ()) -> Iterator[None]:
    """Press Ctrl-C while the env waits at its gate, and open the gate when the block has been left."""

    def press() -> None:
        assert becomes_true((directory / "waits").exists, STUCK_AFTER)
        assert becomes_true(is_waiting, STUCK_AFTER)  # the worker may have begun while the trainer was still sending
        for pid in pids:  # a terminal sends it to all of its foreground group
            os.kill(pid, signal.SIGINT)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        (directory / "gate").touch()
