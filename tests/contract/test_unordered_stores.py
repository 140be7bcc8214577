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

import pytest

from invariants.faces import Face, assert_as_without_losses, counts
from kit import CounterEnv, first_difference
from multienv import SubprocessEnv
from multienv.envs.subprocess_env import supervisor_of
from multienv.wire.segment import NUMBERED, REPLY, REQUEST

SOON = 0.05


@pytest.fixture(autouse=True)
def _unordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multienv.processes.worker_process.ORDERED_STORES", False)


def test_a_request_and_a_reply_whose_numbers_have_not_come_are_not_believed() -> None:
    with SubprocessEnv(CounterEnv) as env:
        env.reset(seed=0)
        supervisor: Any = supervisor_of(env)
        channel, number = supervisor.channel, supervisor.position.number + 1
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
    with Face("subprocess_env", [partial(CounterEnv, horizon=33)]) as face:
        actions = counts(100, 1)
        records = face.record(actions, 3, lambda step: face.signal() if step in (40, 70, 71) else None)
        assert_as_without_losses(face, records, actions, 3)
        assert face.losses() == 3
        face.reset()
        here = face.envs.snapshot()
        transition = face.envs.step(1)
        face.envs.restore(here)
        assert first_difference(face.envs.step(1), transition) is None
