"""What two readers of the code found: numbers that come again, requests of multienv's own that Ctrl-C breaks off."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import numpy as np
import pytest

from kit import CounterEnv
from kit.interruption import Interrupted, every_place
from multienv import RestartPolicy, SubprocessEnv


def kill(env: SubprocessEnv) -> None:
    os.kill(env.statistics().pid or 0, signal.SIGKILL)


def action_of(transition: tuple[object, ...]) -> int:
    return int(transition[0][3])  # type: ignore[index]


def test_a_step_after_restore_is_asked_with_its_own_action_though_it_has_the_number_of_a_lost_one() -> None:
    with SubprocessEnv(partial(CounterEnv, horizon=None)) as env:
        env.reset(seed=0)
        env.step(0)
        kept = env.snapshot()
        for action in (1, 2, 3):
            kill(env)
            assert action_of(env.step(action)) == action
            assert env.statistics().last_recovery is not None
            env.restore(kept)
        assert env.statistics().exact_recoveries == 3


def test_a_snapshot_from_before_the_first_reset_is_restored_without_waiting() -> None:
    with SubprocessEnv(partial(CounterEnv, horizon=None)) as env:
        kept = env.snapshot()
        first = env.reset(seed=3)[0]
        env.step(1)
        began = time.monotonic()
        env.restore(kept)
        assert time.monotonic() - began < 5
        np.testing.assert_array_equal(env.reset(seed=3)[0], first)


def test_more_requests_than_a_head_has_numbers() -> None:
    with SubprocessEnv(partial(CounterEnv, horizon=4), restart=RestartPolicy(snapshots=False)) as env:
        env.reset(seed=0)
        supervisor = env._supervisor
        supervisor.journal.skip(2**32 - 4)
        supervisor.number = 2**32 - 4
        for round_ in range(3):
            for step in range(4):
                if step == 1:
                    kill(env)
                observation, _, terminated, _, _ = env.step(step % 2)
                assert observation[0] == step + 1, round_
            assert terminated
            env.reset()


@pytest.mark.parametrize("what", ["snapshot", "state"])
def test_a_request_of_our_own_that_is_broken_off_does_not_meet_the_next_step(what: str) -> None:
    """At each place: the next steps are the undisturbed ones, and so is what a recovery brings back."""
    policy = RestartPolicy(snapshots=False, journal_limit=200_000)
    fired = 0
    for interruption in every_place(Interrupted, stride=5):
        with SubprocessEnv(partial(CounterEnv, horizon=None), restart=policy) as env:
            env.reset(seed=0)
            for step in range(3):
                env.step(step % 2)
            if what == "state":
                env._supervisor.maintenance.is_due = env._supervisor.maintenance.state_due = True
            with interruption:
                if what == "snapshot":
                    env.snapshot()
                else:
                    env._supervisor._maintain(resetting=False)
            fired += interruption.fired
            for step in range(3, 6):
                observation, *_ = env.step(step % 2)
                assert observation[0] == step + 1, interruption.where
            kill(env)
            observation, _, _, truncated, info = env.step(1)
            assert (observation[0], truncated) == (7, False), (interruption.where, info)
    assert fired > 5
