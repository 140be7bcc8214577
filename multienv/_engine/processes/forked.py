"""The first steps of a process that the monitor or a template has forked."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from multienv._engine.processes.leftovers import open_descriptors
from multienv._engine.processes.protocol import Order
from multienv._engine.worker import main as worker_main
from multienv._engine.worker.descriptors import MARK_VARIABLE, WorkerDescriptors, mark_of

_PR_SET_PDEATHSIG = 1


def part_from_monitor(monitor: int, kept: Sequence[int]) -> None:
    """Make a child of the monitor a process of its own: it dies with the monitor, and has none of its descriptors.

    Args:
        monitor: The pid of the monitor, which is the parent.
        kept: Descriptors that stay open, besides the standard streams.
    """
    signal.set_wakeup_fd(-1)
    worker_main.set_signal_handlers()
    os.setpgid(0, 0)
    worker_main.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # sent when the forking thread ends: the monitor has only one
    if os.getppid() != monitor:
        os._exit(worker_main.LOOP_FAILED)  # the monitor died before the line above
    for descriptor in open_descriptors() - {0, 1, 2, *kept}:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    os.environ[MARK_VARIABLE] = mark_of(monitor, os.getpid())


def become_worker(
    descriptors: Sequence[int],
    order: Order,
    monitor: int,
    folder: str,
    spawn_command: Sequence[str] = (),
    thread_variables: Sequence[str] = (),
) -> NoReturn:
    """Turn a child of the monitor into a worker, and run.

    Args:
        descriptors: The worker's, in the order in which `WorkerDescriptors.of` takes them, then its stderr.
        order: What the trainer wants.
        monitor: The pid of the monitor.
        folder: Is made for temporary files; ``""``, or if that fails: the trainer's.
        spawn_command: Of a fresh interpreter; needed only if the order is for one.
        thread_variables: See `Monitor`; for a fresh interpreter.
    """
    try:
        *ends, stderr = descriptors
        os.dup2(stderr, 2)
        part_from_monitor(monitor, ends)
        if folder:
            with contextlib.suppress(OSError):
                Path(folder).mkdir(mode=0o700)
                os.environ["TMPDIR"] = folder
        if not order.fresh:
            worker_main.main(WorkerDescriptors.of(*ends), order.title)
        for name in thread_variables:
            os.environ.pop(name, None)
            if order.native_threads:
                os.environ[name] = str(order.native_threads)
        for descriptor in ends:
            os.set_inheritable(descriptor, True)
        os.execv(spawn_command[0], [*spawn_command, order.title, *map(str, ends)])  # noqa: S606 - our interpreter
    finally:
        os._exit(worker_main.LOOP_FAILED)
