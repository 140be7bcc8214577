"""The warden holds out: many workers, no descriptor left for one more, its own death."""

from __future__ import annotations

import os
import signal

import pytest

from multienv import SubprocessEnv
from multienv.processes import launch
from multienv.testing import CounterEnv, descendants

METHODS = ["forkserver", "spawn", "fork"]


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def warden_pid() -> int:
    assert launch._client is not None
    return launch._client.process.pid


def children() -> list[tuple[int, str]]:
    """The trainer's own, with their states."""
    return [(record.pid, record.state) for record in descendants(os.getpid()).values() if record.parent == os.getpid()]


def test_close_reaps_a_forked_worker_whose_warden_is_dead() -> None:
    with SubprocessEnv(CounterEnv, context="fork") as env:
        env.reset(seed=0)
        pid = env.statistics().pid
        os.kill(warden_pid(), signal.SIGKILL)
    assert pid not in dict(children())
