"""Tianshou's vector envs over ``MultienvWorker``: the same transitions as over its own, whatever dies."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from striking import assert_all_exact

from kit import CounterEnv
from kit.gates import WAIT, GateEnv
from multienv import RestartPolicy
from multienv.testing import Killer

os.environ.setdefault("NUMBA_DISABLE_JIT", "1")  # to compile takes longer than all of these tests

from tianshou.algorithm.algorithm_base import Policy
from tianshou.data import Batch, Collector, VectorReplayBuffer
from tianshou.env import BaseVectorEnv, DummyVectorEnv
from tianshou_worker import MultienvWorker

pytestmark = pytest.mark.ci

CARTPOLE = partial(gymnasium.make, "CartPole-v1")


def killer_of(envs: Any) -> Killer:
    return Killer(lambda: [worker.env.statistics().pid for worker in envs.workers], seed=1)


def test_synchronous_envs_go_through_the_same_episodes():
    ours, theirs = BaseVectorEnv([CARTPOLE] * 3, MultienvWorker), DummyVectorEnv([CARTPOLE] * 3)
    killer, ended = killer_of(ours), 0
    try:
        ours.seed(1)
        theirs.seed(1)
        assert np.array_equal(ours.reset()[0], theirs.reset()[0])
        for step in range(120):
            if step % 10 == 5:
                assert killer.strike()
            actions = np.array([step % 2] * 3)
            found, expected = ours.step(actions), theirs.step(actions)
            for one, other in zip(found[:4], expected[:4], strict=True):
                assert np.array_equal(one, other)
            done = np.flatnonzero(expected[2] | expected[3])
            if len(done):
                assert np.array_equal(ours.reset(done)[0], theirs.reset(done)[0])
            ended += len(done)
        assert_all_exact(ours.workers[0].env, deaths=1)
    finally:
        ours.close()
        theirs.close()
    assert ended >= 6


def test_asynchronous_envs_return_those_that_have_answered(tmp_path):
    quick, slow = partial(CounterEnv, horizon=10**6), partial(GateEnv, tmp_path)
    envs = BaseVectorEnv([quick, slow], MultienvWorker, wait_num=1)
    try:
        envs.reset()
        observations, _, _, _, infos = envs.step(np.array([0, WAIT]))
        assert [info["env_id"] for info in infos] == [0]
        assert observations[:, 0].tolist() == [1]
        assert killer_of(envs).strike()
        (tmp_path / "gate").touch()
        steps = {0: 1, 1: 0}
        while steps[1] < 2:
            ids = [info["env_id"] for info in infos]
            observations, _, _, _, infos = envs.step(np.zeros(len(ids), int), ids)
            for observation, info in zip(observations, infos, strict=True):
                steps[info["env_id"]] += 1
                assert observation[0] == steps[info["env_id"]]
    finally:
        envs.close()


class Left(Policy):
    """Always goes left."""

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        return Batch(act=np.zeros(len(batch.obs), int))


def test_a_collector_fills_a_buffer_and_a_lost_episode_ends_truncated():
    worker = partial(MultienvWorker, restart=RestartPolicy(on_crash="truncate"), reports="")
    envs = BaseVectorEnv([CARTPOLE] * 2, worker)
    try:
        buffer = VectorReplayBuffer(200, 2)
        collector = Collector(Left(envs.action_space[0]), envs, buffer)
        collector.reset()
        collector.collect(n_step=4)
        assert killer_of(envs).strike()
        collector.collect(n_step=4)
        assert buffer.truncated.sum() == 1
        assert not buffer.terminated.any()
        assert [bool(one) for one in buffer.info.multienv.reason[buffer.truncated]] == [True]
    finally:
        envs.close()
