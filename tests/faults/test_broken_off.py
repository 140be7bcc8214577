"""A step broken off by a signal at any moment is completed by the next: nothing lost, nothing doubled."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from multienv import MultiEnv, SubprocessEnv, create_subprocess_envs
from multienv.testing import CounterEnv

ENDLESS = partial(CounterEnv, horizon=None)


class Tick(Exception):
    """What the handler raises: an ordinary exception, which must not be taken for the env's."""


@pytest.fixture(params=[Tick, KeyboardInterrupt])
def interruption(request: pytest.FixtureRequest) -> Iterator[type[BaseException]]:
    def strike(*_: Any) -> None:
        raise request.param

    before = signal.signal(signal.SIGALRM, strike)
    yield request.param
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def count(step: Callable[[], float], interruption: type[BaseException], rounds: int = 800) -> int:
    """How many steps were broken off; the counter in the observation must go on by one each time."""
    moments, hits = random.Random(3), 0
    for expected in range(1, rounds + 1):
        got = None
        try:
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 2.5e-4))
            got = step()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except interruption:
            hits += 1
        assert (step() if got is None else got) == expected
    return hits


def test_of_one_env(interruption: type[BaseException]) -> None:
    with SubprocessEnv(ENDLESS) as env:
        env.reset(seed=0)
        assert count(lambda: env.step(1)[0][0], interruption) > 10
        assert env.statistics().losses == 0


def test_of_several_envs(interruption: type[BaseException]) -> None:
    with MultiEnv(create_subprocess_envs([ENDLESS] * 3)) as m:
        m.reset(seed=0)
        assert count(lambda: m.step([1, 1, 1])[0][2][0], interruption) > 10
        assert [statistics.losses for statistics in m.statistics() if statistics] == [0, 0, 0]
