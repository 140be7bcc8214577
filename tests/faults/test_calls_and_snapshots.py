"""Calls that are not journalled take numbers too: what comes since a snapshot is found all the same."""

import os
import signal

import gymnasium
import numpy as np
import pytest

from multienv import RestartPolicy, SubprocessEnv


def cart_pole():
    return gymnasium.make("CartPole-v1", sutton_barto_reward=True)


@pytest.mark.parametrize("kill_at", range(64, 96, 4))
def test_a_worker_killed_after_an_attribute_was_read_comes_back_exactly_from_its_snapshot(kill_at):
    twin = cart_pole()
    with SubprocessEnv(cart_pole, restart=RestartPolicy(snapshot_every=32)) as env:
        expected, _ = twin.reset(seed=7)
        observation, _ = env.reset(seed=7)
        actions = np.random.default_rng(0).integers(2, size=120)
        for step, action in enumerate(actions):
            assert np.array_equal(observation, expected), step
            if step in (10, kill_at - 3):
                assert env.get_attr("gravity") == 9.8
            if step == kill_at:
                os.kill(env.statistics().pid, signal.SIGKILL)
            observation, reward, terminated, *_ = env.step(action)
            expected, expected_reward, expected_end, *_ = twin.step(action)
            assert (reward, terminated) == (expected_reward, expected_end)
            if terminated:
                expected, _ = twin.reset()
                observation, _ = env.reset()
        statistics = env.statistics()
        assert statistics.losses == statistics.exact_recoveries == 1
