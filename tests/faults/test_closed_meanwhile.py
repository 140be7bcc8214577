"""close() by a signal handler, or by another thread, at any moment of another call: that call says so, or returns."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from functools import partial
from itertools import count

import pytest

from multienv import SubprocessEnv
from multienv.errors import ClosedError
from multienv.testing import CounterEnv, Fault, FaultyEnv, is_alive

ENDLESS = partial(CounterEnv, horizon=None)


@pytest.fixture
def closing() -> Iterator[list[SubprocessEnv]]:
    envs: list[SubprocessEnv] = []
    before = signal.signal(signal.SIGALRM, lambda *_: envs[-1].close())
    yield envs
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def step_until_closed(env: SubprocessEnv) -> None:
    """From the first step of an episode on; each that returns is the one after the last."""
    with pytest.raises(ClosedError):
        for expected in count(1):
            observation, _, _, truncated, _ = env.step(1)
            assert (observation[0], truncated) == (expected, False)


def test_in_the_middle_of_a_step(closing: list[SubprocessEnv]) -> None:
    moments = random.Random(2)
    for _ in range(60):
        env = SubprocessEnv(ENDLESS).initialize()
        closing.append(env)
        env.reset(seed=0)
        pid = env.statistics().pid
        signal.setitimer(signal.ITIMER_REAL, moments.uniform(5e-4, 3e-3))
        step_until_closed(env)
        assert env.statistics().state == "closed"
        with pytest.raises(ClosedError):
            env.reset()
        env.close()
        assert pid is not None
        assert not is_alive(pid)


def test_by_another_thread_in_the_middle_of_a_step() -> None:
    moments = random.Random(3)
    for _ in range(40):
        env = SubprocessEnv(ENDLESS).initialize()
        env.reset(seed=0)
        pid = env.statistics().pid
        closer = threading.Timer(moments.uniform(5e-4, 3e-3), env.close)
        closer.start()
        step_until_closed(env)
        closer.join()
        assert env.statistics().state == "closed"
        assert pid is not None
        assert not is_alive(pid)


def test_by_another_thread_while_a_step_hangs() -> None:
    env = SubprocessEnv(partial(FaultyEnv, fault=Fault("hang_c", "step", at=1))).initialize()
    env.reset(seed=0)
    closer = threading.Timer(0.2, env.close)
    closer.start()
    with pytest.raises(ClosedError):
        env.step(1)
    closer.join()


@pytest.mark.parametrize("by", ["handler", "thread"])
def test_in_the_middle_of_building(closing: list[SubprocessEnv], by: str) -> None:
    def build() -> CounterEnv:
        threading.Event().wait(20)
        return CounterEnv()

    env = SubprocessEnv(build)
    closing.append(env)
    env.start()
    closer = threading.Timer(0.2, env.close)
    if by == "thread":
        closer.start()
    else:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(ClosedError):
        env.initialize()
    if by == "thread":
        closer.join()
    assert env.statistics().state == "closed"
    with pytest.raises(ClosedError):
        env.initialize()
    env.close()


def test_close_interrupted_leaves_no_process() -> None:
    class Impatient(Exception):
        pass

    def strike(*_: object) -> None:
        raise Impatient

    class Slow(CounterEnv):
        def close(self) -> None:
            threading.Event().wait(20)

    env = SubprocessEnv(Slow).initialize()
    pid = env.statistics().pid
    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Impatient):
            env.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    env.close()
    assert pid is not None
    assert not is_alive(pid)
