"""What a call to a host leaves behind is freed at once: replies are large, and a lost host has descriptors."""

from __future__ import annotations

import gc
import os
import signal
from concurrent.futures import Future
from functools import partial

import gymnasium
import pytest

from multienv import RayOptions, RayVectorEnv
from multienv.cluster.courier import Courier

pytest.importorskip("ray")


def alive(kind: type) -> int:
    return sum(isinstance(one, kind) for one in gc.get_objects())


def test_calls_and_lost_hosts_leave_nothing_to_the_garbage_collector(ray_cluster):
    hosts = RayOptions(address=ray_cluster.address, hosts=2)
    gc.collect()
    with RayVectorEnv([partial(gymnasium.make, "CartPole-v1")] * 2, ray=hosts) as envs:
        envs.reset(seed=1)
        gc.collect()
        gc.disable()
        try:
            for node in ray_cluster.nodes[:3]:
                for pid in ray_cluster.actors_of(node):
                    os.kill(pid, signal.SIGKILL)
                for _ in range(20):
                    envs.step(envs.action_space.sample())
            assert sum(one.exact_recoveries for one in envs.statistics()) >= 2
            assert alive(Courier) == 2
            assert alive(Future) <= 4  # those under way
        finally:
            gc.enable()
