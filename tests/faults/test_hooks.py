"""A hook is called in the middle of a recovery, by the thread that does it: what it may ask of the envs, and what not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from multienv import (
    AsyncSubprocessEnvManager,
    MultiEnv,
    RestartPolicy,
    SerialVectorEnv,
    StackedSubprocessEnvManager,
    SubprocessVectorEnv,
    SyncSubprocessEnvManager,
    create_subprocess_envs,
)
from multienv.errors import CallPendingError
from multienv.events import Event
from multienv.testing import CounterEnv, first_difference

ENDLESS = partial(CounterEnv, horizon=None)
CALLS: dict[str, Callable[[Any], Any]] = {
    "step": lambda envs: envs.step(envs.actions),
    "reset": lambda envs: envs.reset(),
    "get_attr": lambda envs: envs.get_attr("horizon"),
}


class Asking:
    """A hook that asks the envs whose step is under way, and keeps what it is told."""

    def __init__(self, ask: Callable[[Any], Any]) -> None:
        self.ask, self.envs = ask, None
        self.told: list[Any] = []

    def __call__(self, event: Event) -> None:
        try:
            self.told.append(self.ask(self.envs))
        except Exception as error:
            self.told.append(error)


@pytest.fixture(params=CALLS)
def asking(request: pytest.FixtureRequest) -> Iterator[Asking]:
    asking = Asking(CALLS[request.param])
    yield asking
    assert {type(one) for one in asking.told} == {CallPendingError}, asking.told
    assert all("a hook calls it" in str(one) for one in asking.told)
    assert len(asking.told) >= 2


def kill(envs: Any) -> None:
    os.kill(envs.statistics()[1].pid, signal.SIGKILL)


def test_of_a_multi_env(asking: Asking) -> None:
    with MultiEnv(create_subprocess_envs([ENDLESS] * 3, hooks=[asking])) as m:
        asking.envs, m.actions = m, [1] * 3  # type: ignore[attr-defined]
        m.reset(seed=0)
        for step in range(4):
            if step == 2:
                kill(m)
            assert [observation[0] for observation in m.step([step] * 3)[0]] == [step + 1] * 3


@pytest.mark.parametrize("halves", [False, True])
def test_of_a_batch(asking: Asking, halves: bool) -> None:
    if halves and asking.ask is CALLS["step"]:
        asking.ask = lambda envs: envs.step_wait()
    twin = SerialVectorEnv([ENDLESS] * 4)
    with SubprocessVectorEnv([ENDLESS] * 4, hooks=[asking], envs_per_worker="auto") as envs, twin:
        asking.envs, envs.actions = envs, np.ones(4, np.int64)  # type: ignore[attr-defined]
        assert first_difference(envs.reset(seed=0)[0], twin.reset(seed=0)[0]) is None
        for step in range(12):
            if step == 2:
                kill(envs)
            actions = np.full(4, step % 4)
            if halves:
                envs.step_async(actions)
                mine = envs.step_wait()
            else:
                mine = envs.step(actions)
            assert first_difference(mine, twin.step(actions)) is None


@pytest.mark.parametrize(
    "manager_of", [AsyncSubprocessEnvManager, SyncSubprocessEnvManager, StackedSubprocessEnvManager]
)
def test_of_a_manager(asking: Asking, manager_of: Any) -> None:
    stacked = manager_of is StackedSubprocessEnvManager
    with manager_of([ENDLESS] * 3, hooks=[asking], wait_num=3) as manager:
        asking.envs = manager
        for step in range(4):
            actions = [step] * 3 if stacked else dict.fromkeys(range(3), step)
            manager.actions = actions
            if step == 2:
                kill(manager)
            seen = manager.step(actions)
            assert [one.observation[0] for one in (seen if stacked else seen.values())] == [step + 1] * 3


def test_of_a_manager_between_two_calls(asking: Asking) -> None:
    """One env is still being brought back, and nobody is in a call."""
    with AsyncSubprocessEnvManager([ENDLESS] * 3, hooks=[asking], wait_num=1, step_wait_timeout=0.0) as manager:
        asking.envs, manager.actions = manager, {}
        slow = asking.ask
        asking.ask = lambda envs: (time.sleep(0.3), slow(envs))
        kill(manager)
        assert list(manager.step(dict.fromkeys(range(3), 1))) != [0, 1, 2]
        time.sleep(1.0)
        seen = {}
        while len(manager.ready_env) < 3:
            seen |= manager.step({})
        assert seen[1].observation[0] == 1


def test_of_a_batch_whose_processes_are_replaced(asking: Asking) -> None:
    """By plan, in the thread of the training loop."""
    policy = RestartPolicy(recycle_after_steps=64)
    twin = SerialVectorEnv([ENDLESS] * 4)
    with SubprocessVectorEnv([ENDLESS] * 4, hooks=[asking], envs_per_worker=2, restart=policy) as envs, twin:
        asking.envs, envs.actions = envs, np.ones(4, np.int64)  # type: ignore[attr-defined]
        assert first_difference(envs.reset(seed=0)[0], twin.reset(seed=0)[0]) is None
        for step in range(150):
            actions = np.full(4, step % 4)
            assert first_difference(envs.step(actions), twin.step(actions)) is None
