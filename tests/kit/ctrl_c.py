"""Ctrl-C in the middle of a step: what presses while a ``GateEnv`` waits there."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import multienv
from kit.trainer_process import becomes_true
from multienv._engine.processes import worker_process
from multienv._engine.wire.segment import TRAINER_SLEEPS

PACKAGE = str(Path(multienv.__file__).parent)


def is_waiting() -> bool:
    """Whether the trainer sleeps until a worker answers."""
    return any(channel.segment.words[TRAINER_SLEEPS] for channel in worker_process.living())


@contextmanager
def ctrl_c(directory: Path, pids: Sequence[int] = ()) -> Iterator[None]:
    """Press Ctrl-C while the env waits at its gate, and open the gate when the block has been left."""

    def press() -> None:
        assert becomes_true((directory / "waits").exists)
        assert becomes_true(is_waiting)  # the worker may have begun while the trainer was still sending
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
