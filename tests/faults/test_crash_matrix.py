"""Moment × manner: a passing fault heals exactly, a lasting one is recognised. Several envs: test_vector_crash_matrix."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from trainer_process import becomes_true

from kit import CounterEnv, Fault, FaultyEnv, assert_same_trajectory, is_alive, rollout
from multienv import Deadlines, RestartPolicy, SubprocessEnv
from multienv.errors import MultienvError, PoisonError

DEADLINES = Deadlines(start=20, reset=0.6, step=0.6, call=0.6, close=2.0, recovery=30)


def make(fault: Fault, method: str, **options: Any) -> SubprocessEnv:
    options.setdefault("deadlines", replace(DEADLINES, start=START[method]) if "hang" in fault.manner else DEADLINES)
    options.setdefault("restart", RestartPolicy(backoff=0.01))
    return SubprocessEnv(partial(FaultyEnv, fault=fault), context=method, **options)


class ClosingEnv(CounterEnv):
    """With action 3 it closes the descriptors of its process, which ends of that as soon as it waits for a request."""

    def step(self, action: Any) -> Any:
        transition = super().step(action)
        if action == 3:
            os.closerange(3, 100)
        return transition


def test_a_step_that_closes_the_workers_descriptors_is_answered_and_the_next_one_truncated() -> None:
    with SubprocessEnv(ClosingEnv, deadlines=DEADLINES, restart=RestartPolicy(backoff=0.01)) as env:
        seen = rollout(env, [1, 3], seed=1)
        assert_same_trajectory(seen, rollout(CounterEnv(), [1, 3], seed=1))
        pid = env.statistics().pid or -1
        assert becomes_true(lambda: not is_alive(pid))  # until it sleeps it would answer another step, too
        observation, _, _, truncated, info = env.step(1)
        assert truncated
        assert (observation == seen[-1].observation).all()
        # In its replays, or each time that the step was asked again: it depends on when a worker goes to sleep.
        assert re.search("2 processes ended|ended 6 processes", info["multienv"]["reason"])
        try:
            env.reset(seed=2)
        except PoisonError:  # the replay closes them in each process that is to be reset; the next one is a new life
            env.reset(seed=2)
        assert env.step(2)[0][0] == 1


@pytest.mark.parametrize("manner", [*QUICK, "raise"])
def test_close_is_bounded_and_never_raises(manner: str) -> None:
    env = make(Fault(manner, "close"), "forkserver", deadlines=Deadlines(close=0.5))
    env.initialize()
    env.reset()
    env.close()
    env.close()
    with pytest.raises(MultienvError):
        env.step(0)
