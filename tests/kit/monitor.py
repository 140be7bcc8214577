"""The monitor of this process: the tests that kill or stop it, and those that look for leaks, ask for it here."""

from __future__ import annotations

import subprocess

from kit.leaks import Ignored, multiprocessing_helpers
from multienv._engine.processes import launcher


def monitor_process() -> subprocess.Popen[bytes]:
    """Return the process of the monitor; there must be one."""
    client = launcher._client
    assert client is not None
    return client.process


def monitor_pid() -> int:
    """Return the pid of the monitor; there must be one."""
    return monitor_process().pid


def monitor_itself() -> Ignored:
    """Ignore the monitor, its socket and the thread that waits for its end: it ends a second after the last worker."""
    client = launcher._client
    if client is None:
        return multiprocessing_helpers()
    descriptor, others = client._control.fileno(), multiprocessing_helpers()
    return Ignored(
        others.pids | {client.process.pid},
        others.descriptors | ({descriptor} if descriptor >= 0 else set()),
        ("multienv-monitor",),
    )
