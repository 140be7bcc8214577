"""What is lost on a real cluster of two nodes, and how it comes back."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from concurrent.futures import Future
from functools import partial

import numpy as np
import pytest
from cluster_envs import CountingEnv, InStep, Noisy, make

from kit.ray_cluster import wait_until
from multienv import (
    AsyncSubprocessEnvManager,
    ClusterError,
    MultiEnv,
    RayOptions,
    RayVectorEnv,
    SerialVectorEnv,
    create_ray_envs,
)
from multienv._engine.cluster.courier import Courier

pytestmark = pytest.mark.ci

# Two hosts of two CPUs on nodes of four: what is lost with a node has room on the other.
OPTIONS = RayOptions(cpus_per_host=2, suspect_after=5.0)


def batch(env_fns, **options):
    return RayVectorEnv(env_fns, **{"ray": OPTIONS, **options})


def pids(envs):
    return [statistics.pid for statistics in envs.statistics()]


def test_without_room_for_a_new_host_the_episodes_are_truncated_in_bounded_time_and_go_on_with_a_new_node(ray_cluster):
    # Enough here, in the first test: no CPU is still reserved by the one before.
    options = RayOptions(cpus_per_host=4, suspect_after=5.0, placement_timeout=2.0)
    with batch([CountingEnv] * 2, ray=options, envs_per_worker=1, autoreset_mode="Disabled") as envs:
        envs.reset(seed=3)
        envs.step([0, 0])
        node = ray_cluster.node_of(pids(envs)[0])
        ray_cluster.kill_node(node)
        began = time.monotonic()
        observations, rewards, _, truncations, infos = envs.step([0, 0])
        assert time.monotonic() - began < 60
        assert truncations.tolist() == [True, False]
        assert observations[:, 0].tolist() == [1, 2]
        assert rewards.tolist() == [0, 2]
        assert "CPUs free" in infos["multienv"]["reason"][0]
        ray_cluster.nodes.remove(node)
        ray_cluster.add_node()
        deadline = time.monotonic() + 60
        while True:
            try:
                envs.reset(options={"reset_mask": truncations})
                break
            except Exception:
                assert time.monotonic() < deadline
        assert envs.step([0, 0])[1].tolist() == [1, 3]


def test_a_stopped_host_is_given_up_and_what_it_answers_late_is_dropped(ray_cluster):
    env_fns = [partial(make, "CartPole-v1")] * 6
    with batch(env_fns) as envs:
        run = InStep(envs, env_fns)
        run.step(20)
        node = ray_cluster.node_of(pids(envs)[0])
        (actor,) = ray_cluster.actors_of(node)
        family = [actor, *[pid for pid in ray_cluster.processes_of(node) if pid in pids(envs)]]
        couriers = [one for one in gc.get_objects() if isinstance(one, Courier) and not one.lost]

        def resume() -> None:  # at once: some seconds later Ray has killed them, which the recovery may take, too
            wait_until(lambda: any(one.lost for one in couriers), "the host is given up")
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

        resuming = threading.Thread(target=resume)
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        resuming.start()
        began = time.monotonic()
        run.step(1)
        assert time.monotonic() - began < 30
        resuming.join()
        assert ["silent" in one.loss.detail for one in run.recoveries] == [True, True]
        run.step(200)  # its late answers have come meanwhile, and its workers have ended
        wait_until(lambda: not any(pid in ray_cluster.processes_of(node) for pid in family), "the old host has ended")


def test_a_runtime_env_that_ray_refuses_is_told_of_as_such(ray_cluster):
    with pytest.raises(ClusterError, match=r"runtime_env=.*not a valid path"):
        batch([CountingEnv], ray=RayOptions(cpus_per_host=1, runtime_env={"working_dir": "/nowhere"}))


def test_lists_snapshots_and_managers_work_on_the_cluster(ray_cluster):
    with MultiEnv(create_ray_envs([CountingEnv] * 4, ray=OPTIONS)) as envs:
        envs.reset(seed=5)
        assert [one[0] for one in envs.step([0] * 4)[0]] == [1] * 4
        kept = envs.envs[0].snapshot()
        observations = [envs.step([0] * 4)[0][0] for _ in range(2)]
        envs.envs[0].restore(kept)
        assert [envs.envs[0].step(0)[0].tolist() for _ in range(2)] == [one.tolist() for one in observations]
    manager = AsyncSubprocessEnvManager([CountingEnv] * 4, backend="ray", ray=OPTIONS, episode_num=1)
    with manager:
        steps = [manager.step(dict.fromkeys(manager.ready_obs, 0)) for _ in range(10)]
    assert sum(map(len, steps)) >= 10


# --- fragments ------------------------------------------------------------------------------------------

ARRAYS = ("observations", "actions", "rewards", "terminations", "truncations", "final_observations")


def test_a_node_killed_in_the_middle_of_a_rollout_leaves_the_trajectory_whole_to_the_bit(ray_cluster):
    name = "HalfCheetah-v5"
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
        assert {ray_cluster.node_of(pid).node_id for pid in pids(envs)} == {one.node_id for one in ray_cluster.nodes}
        node = ray_cluster.node_of(pids(envs)[0])
        # In the middle of a fragment, as a rule; before or after it is as good.
        timer = threading.Timer(0.05, ray_cluster.kill_node, (node,))
        timer.start()
        for _ in range(2):
            both(200)
        timer.join()
        both(50)
        recoveries = [one.last_recovery for one in envs.statistics() if one.last_recovery is not None]
        assert {(one.outcome, one.method) for one in recoveries} == {("exact", "journal")}
        assert all("is lost" in one.loss.detail for one in recoveries)
        actions = np.stack([envs.single_action_space.sample() for _ in env_fns])
        shown, expected = envs.step(actions), [one.step(actions[index : index + 1]) for index, one in enumerate(twin)]
        assert shown[0].tobytes() == np.concatenate([one[0] for one in expected]).tobytes()
    ray_cluster.nodes.remove(node)
    ray_cluster.add_node()


# --- what is freed at once -------------------------------------------------------------------------------


def alive(kind: type) -> int:
    return sum(isinstance(one, kind) for one in gc.get_objects())


def test_calls_and_lost_hosts_leave_nothing_to_the_garbage_collector(ray_cluster):
    gc.collect()
    with batch([partial(make, "CartPole-v1")] * 2, ray=RayOptions(hosts=2)) as envs:
        envs.reset(seed=1)
        gc.collect()
        gc.disable()
        try:
            for node in ray_cluster.nodes:
                for pid in ray_cluster.actors_of(node):
                    os.kill(pid, signal.SIGKILL)
            for _ in range(20):
                envs.step(envs.action_space.sample())
            assert sum(one.exact_recoveries for one in envs.statistics()) >= 2
            # The threads of the lost hosts may still be ending; and of the futures, those under way.
            wait_until(lambda: alive(Courier) == 2, "the couriers of the lost hosts are gone")
            wait_until(lambda: alive(Future) <= 4, "the futures of the calls are gone")
        finally:
            gc.enable()
