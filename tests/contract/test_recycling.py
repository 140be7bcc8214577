"""A process that has served its time is replaced between two steps, and nobody can tell by the trajectory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

from kit import CounterEnv, NondeterministicEnv, assert_no_splice, assert_same_trajectory, rollout
from multienv import RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv.events import Event, Recycled


def undisturbed(env_fn: Callable[[], gymnasium.Env[Any, Any]], **options: Any) -> list[Any]:
    return rollout(env_fn(), **options)


@pytest.mark.parametrize(
    "limits",
    [{"recycle_after_steps": 100}, {"recycle_after_episodes": 9}, {"recycle_after": 0.1}],
)
@pytest.mark.parametrize("begins_anew", [False, True])
def test_a_process_that_is_replaced_leaves_no_trace(limits: dict[str, Any], begins_anew: bool) -> None:
    env_fn = partial(gymnasium.make, "CartPole-v1")
    events: list[Event] = []
    with SubprocessEnv(env_fn, restart=RestartPolicy(**limits, begins_anew=begins_anew), hooks=[events.append]) as env:
        # In the middle the process becomes old enough on any machine.
        pause = 0.2 if "recycle_after" in limits else 0.0
        record = rollout(env, num_steps=400, seed=3, before_step=lambda step: time.sleep(pause * (step == 200)))
        statistics = env.statistics()
    assert_same_trajectory(record, undisturbed(env_fn, num_steps=400, seed=3))
    assert statistics.recycled >= 1
    assert statistics.losses == statistics.restarts == 0
    outcomes = {event.outcome for event in events if isinstance(event, Recycled)}
    assert outcomes == {"exact" if begins_anew else "replayed"}


def test_what_cannot_be_replayed_waits_for_the_next_reset() -> None:
    events: list[Any] = []
    env_fn = partial(NondeterministicEnv, horizon=None)
    with SubprocessEnv(env_fn, restart=RestartPolicy(recycle_after_steps=50), hooks=[events.append]) as env:
        first = rollout(env, num_steps=300, seed=1)
        pid = env.statistics().pid
        second = rollout(env, num_steps=10, seed=2)
        assert env.statistics().pid != pid
        assert env.statistics().losses == 0
    assert_no_splice([*first, *second])
    assert [event.outcome for event in events] == ["put off", "reset"]
    assert not any(transition.truncated for transition in first)


def test_a_process_that_dies_while_it_is_replaced_is_brought_back() -> None:
    """The old process dies while the new one is being brought up, or the new one dies: still nobody can tell."""
    events: list[Any] = []

    def kill(event: Event) -> None:
        events.append(event)
        if isinstance(event, Recycled):
            os.kill(env.statistics().pid or 0, signal.SIGKILL)

    env_fn = partial(CounterEnv, horizon=40, count_episodes=False)
    with SubprocessEnv(env_fn, restart=RestartPolicy(recycle_after_steps=64), hooks=[kill]) as env:
        record = rollout(env, num_steps=300, seed=1)
        assert env.statistics().losses >= 2
    assert_same_trajectory(record, undisturbed(env_fn, num_steps=300, seed=1))


@pytest.mark.parametrize("mode", ["SAME_STEP"])
def test_a_batch_with_one_env_in_each_process_is_recycled_by_episodes(mode: str) -> None:
    def run(policy: RestartPolicy) -> tuple[list[Any], list[int]]:
        env_fns = [partial(CounterEnv, horizon=horizon, count_episodes=False) for horizon in (7, 11)]
        envs = SubprocessVectorEnv(env_fns, envs_per_worker=1, autoreset_mode=mode, restart=policy)
        record: list[Any] = [envs.reset(seed=5)]
        record += [envs.step(np.array([1, 0])) for _ in range(120)]
        recycled = [one.recycled for one in envs.statistics()]
        envs.close()
        return record, recycled

    plain, none = run(RestartPolicy())
    recycled, some = run(RestartPolicy(recycle_after_episodes=3))
    assert none == [0, 0]
    assert 3 <= some[1] < some[0] <= 6
    assert repr(plain) == repr(recycled)
