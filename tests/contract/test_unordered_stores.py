"""On a processor that does not order stores a word counts only once its number has come over the line.

The processors that the tests run on do order them. So what is shown here is that nobody believes a word alone, and that
the faces work in this way too.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from kit import CounterEnv, first_difference
from multienv import SubprocessEnv
from multienv.envs.subprocess_env import supervisor_of
from multienv.wire.segment import NUMBERED, REPLY, REQUEST

SOON = 0.05


@pytest.fixture(autouse=True)
def _unordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multienv.processes.worker_process.ORDERED_STORES", False)


def kill(pid: int | None) -> None:
    os.kill(pid or 0, signal.SIGKILL)


def test_a_request_and_a_reply_whose_numbers_have_not_come_are_not_believed() -> None:
    with SubprocessEnv(CounterEnv) as env:
        env.reset(seed=0)
        supervisor: Any = supervisor_of(env)
        channel, number = supervisor.channel, supervisor.number + 1
        supervisor.buffers.encode(number, 1)
        os.kill(channel.pid, signal.SIGSTOP)
        channel._rung = 0
        channel.ring(number - 1)  # once more, as after an interruption: what wakes the worker is an old number
        channel.segment.words[REQUEST] = number
        os.kill(channel.pid, signal.SIGCONT)
        assert not channel.wait(number, time.monotonic() + SOON), "the worker believed it"
        channel.segment.words[REPLY] = number
        assert not channel.answered(number)
        assert not channel.wait(number, time.monotonic() + SOON)
        channel.segment.words[REPLY] = number - 1
        channel.ring(number)
        assert channel.wait(number, None)
        assert channel.segment.words[NUMBERED]


def test_an_env_whose_process_is_killed_goes_on_exactly() -> None:
    twin, episodes = CounterEnv(horizon=50), 0
    with SubprocessEnv(partial(CounterEnv, horizon=50)) as env:
        assert first_difference(env.reset(seed=3), twin.reset(seed=3)) is None
        for step in range(300):
            if step in (40, 170, 171):
                kill(env.statistics().pid)
            transition = env.step(step % 4)
            assert first_difference(transition[:4], twin.step(np.int64(step % 4))[:4]) is None
            if transition[2]:
                episodes += 1
                assert first_difference(env.reset(), twin.reset()) is None
        assert episodes == 6
        assert env.statistics().exact_recoveries == 3
        env.reset()
        here = env.snapshot()
        transition = env.step(1)
        env.restore(here)
        assert first_difference(env.step(1), transition) is None
