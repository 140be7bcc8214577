"""A node that is killed, stopped or drained, as Ray tells of it: what the backend is built on."""

from __future__ import annotations

import os

import pytest

ray = pytest.importorskip("ray")

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from kit.ray_cluster import PATIENCE, wait_until  # noqa: E402


class Host:
    def pid(self):
        return os.getpid()


@pytest.fixture
def host_on():
    made = []

    def make(node):
        strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        actor = ray.remote(Host).options(num_cpus=1, max_restarts=0, scheduling_strategy=strategy).remote()
        made.append(actor)
        return actor, ray.get(actor.pid.remote(), timeout=PATIENCE)

    yield make
    for actor in made:
        ray.kill(actor)


def test_a_stopped_node_is_silent_and_answers_when_it_goes_on(ray_cluster, host_on):
    node = ray_cluster.nodes[0]
    actor, pid = host_on(node)
    assert ray_cluster.actors_of(node) == [pid]
    assert ray_cluster.node_of(pid) is node
    ray_cluster.stop_node(node)
    answer = actor.pid.remote()
    with pytest.raises(ray.exceptions.GetTimeoutError):
        ray.get(answer, timeout=1.0)
    ray_cluster.resume_node(node)
    assert ray.get(answer, timeout=PATIENCE) == pid


def test_the_actor_of_a_killed_node_is_dead_once_the_node_is_declared_dead(ray_cluster, host_on):
    node = ray_cluster.add_node()
    actor, _ = host_on(node)
    ray_cluster.kill_node(node)
    assert not ray_cluster.is_declared_dead(node)
    with pytest.raises(ray.exceptions.RayActorError):  # "may be executed or not", or "dead", as it happens
        ray.get(actor.pid.remote(), timeout=PATIENCE)
    wait_until(lambda: ray_cluster.is_declared_dead(node), "declared dead")
    with pytest.raises(ray.exceptions.ActorDiedError, match="its node has died"):
        ray.get(actor.pid.remote(), timeout=PATIENCE)


def test_a_drained_node_takes_no_new_actor_and_keeps_those_it_has(ray_cluster, host_on):
    node = ray_cluster.add_node()
    actor, pid = host_on(node)
    ray_cluster.drain_node(node)
    assert node.node_id in ray._private.state.state.get_draining_nodes()
    with pytest.raises(ray.exceptions.ActorUnschedulableError):
        host_on(node)
    assert ray.get(actor.pid.remote(), timeout=PATIENCE) == pid
