"""Hooks are called when the call in which something happened is done, by the thread that made it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit import CounterEnv, Fault, FaultyEnv, kill_worker
from multienv import (
    AsyncSubprocessEnvManager,
    AutoResetWrapper,
    MultiEnv,
    RestartPolicy,
    StackedSubprocessEnvManager,
    SubprocessEnv,
    SubprocessVectorEnv,
    SyncSubprocessEnvManager,
    create_subprocess_envs,
    flat_statistics,
)
from multienv.events import Event, Loss, Recovery, Recycled

ENDLESS = partial(CounterEnv, horizon=None)
FNS = [ENDLESS] * 3
BY_ID = dict.fromkeys(range(3), 1)

# What makes the envs, and what is given to step().
FACES: dict[str, tuple[Callable[..., Any], Any]] = {
    "SubprocessEnv": (lambda **options: SubprocessEnv(ENDLESS, **options).initialize(), 1),
    "MultiEnv": (lambda **options: MultiEnv(create_subprocess_envs(FNS, **options)), [1] * 3),
    "SubprocessVectorEnv": (
        lambda **options: SubprocessVectorEnv(FNS, envs_per_worker=1, **options),
        np.ones(3, np.int64),
    ),
    "AsyncSubprocessEnvManager": (partial(AsyncSubprocessEnvManager, FNS, wait_num=3), BY_ID),
    "SyncSubprocessEnvManager": (partial(SyncSubprocessEnvManager, FNS), BY_ID),
    "StackedSubprocessEnvManager": (partial(StackedSubprocessEnvManager, FNS), [1] * 3),
}


class Told:
    """A hook that notes what it is told, and in which thread; then it raises, which harms nothing."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.threads: set[int] = set()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self.threads.add(threading.get_ident())
        raise RuntimeError("of a hook")


def begin(face: str, told: Told, **options: Any) -> tuple[Any, Callable[[], Any]]:
    """Return envs in an episode, and what steps all of them."""
    make, actions = FACES[face]
    envs = make(hooks=[told], **options)
    envs.launch() if hasattr(envs, "launch") else envs.reset(seed=0)
    return envs, lambda: envs.step(actions)


@pytest.mark.parametrize("face", FACES)
def test_a_loss_and_its_recovery_are_told_by_the_thread_of_the_call(face: str) -> None:
    told = Told()
    envs, step = begin(face, told)
    with closing(envs):
        step()
        kill_worker(envs, -1)
        step()
        assert [type(event) for event in told.events] == [Loss, Recovery]
        assert told.threads == {threading.get_ident()}
        step()
        assert len(told.events) == 2


@pytest.mark.parametrize(
    ("wrap", "action"),
    [(AutoResetWrapper, 1), (lambda env: MultiEnv([env]), [1])],
    ids=["AutoResetWrapper", "MultiEnv"],
)
def test_loss_of_a_wrapped_env_is_told_by_whichever_of_the_two_is_stepped(wrap: Any, action: Any) -> None:
    told = Told()
    with SubprocessEnv(ENDLESS, hooks=[told]) as env:
        wrapped = wrap(env)
        env.reset(seed=0)
        for step in (partial(env.step, 1), partial(wrapped.step, action)):
            kill_worker(env)
            step()
            assert [type(event) for event in told.events] == [Loss, Recovery]
            told.events.clear()


def test_a_replacement_by_plan_is_told_by_the_thread_of_the_call() -> None:
    told = Told()
    envs, step = begin("AsyncSubprocessEnvManager", told, restart=RestartPolicy(recycle_after_steps=64))
    with closing(envs):
        for _ in range(135):
            step()
            assert len(told.events) == sum(one.recycled for one in envs.statistics())
        assert {type(event) for event in told.events} == {Recycled}
        assert told.threads == {threading.get_ident()}


@pytest.mark.parametrize("snapshots", [True, False], ids=["snapshots", "journal alone"])
def test_replayed_steps_are_those_of_all_recoveries_and_replacements_by_plan(snapshots: bool) -> None:
    """The episodes of a worker's two envs end at different steps, so that a replacement has something to replay."""
    told = Told()
    env_fns = [partial(CounterEnv, horizon=horizon, count_episodes=False) for horizon in (6, 10)] * 2
    restart = RestartPolicy(snapshots=snapshots, recycle_after_steps=64)
    with SubprocessVectorEnv(env_fns, envs_per_worker=2, restart=restart, hooks=[told]) as envs:
        envs.reset(seed=0)
        for step in range(250):
            if step in (20, 51, 180, 221):
                kill_worker(envs, step % 2)
            envs.step(np.ones(4, np.int64))
        statistics = envs.statistics()
    expected, kinds = [0, 0], set()
    for event in told.events:
        if not isinstance(event, Loss):
            first = event.loss.envs[0] if isinstance(event, Recovery) else event.env_index
            expected[(first or 0) // 2] += event.replayed
            kinds.add((type(event), event.replayed > 0))
    assert sum(one.losses for one in statistics) == 4
    assert {(Recovery, True), (Recycled, True)} <= kinds
    assert [one.replayed_steps for one in statistics] == expected
    assert flat_statistics(statistics)["replayed_steps"] == sum(expected)


def test_losses_while_envs_are_built_are_told_too(tmp_path: Path) -> None:
    env_fns = [partial(FaultyEnv, fault=Fault("exit", "construct", once=str(tmp_path / "struck")))]
    for make in (
        lambda **options: SubprocessEnv(env_fns[0], **options).initialize(),
        lambda **options: SyncSubprocessEnvManager(env_fns, **options).__enter__(),
        partial(SubprocessVectorEnv, env_fns),
        lambda **options: MultiEnv(create_subprocess_envs(env_fns, **options)),
    ):
        told = Told()
        (tmp_path / "struck").unlink(missing_ok=True)
        envs = make(hooks=[told])
        assert [type(event) for event in told.events] == [Loss, Recovery]
        assert told.threads == {threading.get_ident()}
        envs.close()
