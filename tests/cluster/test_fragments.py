"""Fragments on a cluster: many steps a call, of which none is lost with a node."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import fields
from functools import partial

import numpy as np
import pytest

pytest.importorskip("ray")

from cluster_envs import Noisy, make

from multienv import RayEnv, RayOptions, RayVectorEnv, SerialEnv, SerialVectorEnv

OPTIONS = RayOptions(cpus_per_host=2, suspect_after=5.0)
ARRAYS = ("observations", "actions", "rewards", "terminations", "truncations", "final_observations")


def assert_same(one, other):
    assert {field.name for field in fields(one)} >= set(ARRAYS)
    for name in ARRAYS:
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), name
    assert one.extras.keys() == other.extras.keys()


@pytest.mark.parametrize("name", ["CartPole-v1", "HalfCheetah-v5"])
def test_fragments_go_on_to_the_bit_when_their_node_is_killed(ray_cluster, name):
    env_fns = [partial(make, name)] * 6
    # One worker a host and one env a worker here: a policy that draws sees the same batches in both.
    with RayVectorEnv(env_fns, ray=OPTIONS, envs_per_worker=1) as envs:
        twin = [SerialVectorEnv([env_fn]) for env_fn in env_fns]
        envs.reset(seed=7)
        for index, one in enumerate(twin):
            one.reset(seed=7 + index)

        def both(steps):
            fragment = envs.rollout(Noisy(name), steps)
            parts = [one.rollout(Noisy(name), steps) for one in twin]
            for field in ARRAYS[:-1]:
                expected = np.concatenate([getattr(part, field) for part in parts], axis=1)
                assert getattr(fragment, field).tobytes() == expected.tobytes(), field
            expected = np.concatenate([part.final_observations for part in parts])
            assert fragment.final_observations.tobytes() == expected.tobytes()

        both(50)
        pid = envs.statistics()[0].pid
        node = ray_cluster.node_of(pid)
        # In the middle of a fragment, as a rule; before or after it is as good.
        timer = threading.Timer(0.05, ray_cluster.kill_node, (node,))
        timer.start()
        for _ in range(4):
            both(300)
        timer.join()
        both(50)
        outcomes = {one.last_recovery.outcome for one in envs.statistics() if one.last_recovery is not None}
        assert outcomes == {"exact"}
        actions = np.stack([envs.single_action_space.sample() for _ in env_fns])
        shown, expected = envs.step(actions), [one.step(actions[index : index + 1]) for index, one in enumerate(twin)]
        assert shown[0].tobytes() == np.concatenate([one[0] for one in expected]).tobytes()
    ray_cluster.nodes.remove(node)
    ray_cluster.add_node()


def test_a_fragment_of_one_env_survives_the_death_of_its_worker(ray_cluster):
    def policy(observation):
        return int(observation[2] > 0)

    with RayEnv(partial(make, "CartPole-v1"), ray=OPTIONS) as env:
        twin = SerialEnv(partial(make, "CartPole-v1")).initialize()
        env.reset(seed=3), twin.reset(seed=3)
        for _ in range(4):
            assert_same(env.rollout(policy, 100), twin.rollout(policy, 100))
            os.kill(env.statistics().pid, signal.SIGKILL)
        assert env.statistics().exact_recoveries == 3
