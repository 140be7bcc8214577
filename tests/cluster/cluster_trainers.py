"""Trainers in processes of their own, which are killed, or whose Ray loses something."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path

from cluster_envs import CountingEnv

from multienv import RayOptions, RayVectorEnv


def hang_on_a_local_ray() -> None:
    """Step envs on a local Ray until one of them hangs."""
    gate = Path(os.environ.get("TMPDIR", "/tmp")) / f"hangs-{os.getpid()}"
    gate.touch()
    envs = RayVectorEnv([partial(CountingEnv, hangs=str(gate))] * 3, ray=RayOptions(hosts=1), envs_per_worker=1)
    envs.reset(seed=1)
    assert "RAY_gcs_rpc_server_reconnect_timeout_s" not in os.environ  # set for its Ray alone
    envs.step([0, 0, 0])
    envs.step_async([0, 1, 0])
    while gate.exists():
        time.sleep(0.01)
    print("ready", flush=True)
    time.sleep(1000)


def lost_replies() -> None:
    """Take 100 steps, while Ray throws some replies away; tell what was seen."""
    with RayVectorEnv([CountingEnv], ray=RayOptions(hosts=1, cpus_per_host=1)) as envs:
        envs.reset(seed=1)
        observations = [int(envs.step([0])[0][0, 0]) for _ in range(100)]
        (statistics,) = envs.statistics()
    told = {"losses": statistics.losses, "exact": statistics.exact_recoveries, "observations": observations}
    print("told", json.dumps(told))


def lost_head() -> None:
    """Have the head of a cluster killed between two steps; tell what the next steps raise."""
    import ray

    from kit.ray_cluster import RayCluster

    with RayCluster(nodes=1) as cluster:
        envs = RayVectorEnv([CountingEnv] * 2, ray=RayOptions(cpus_per_host=2, suspect_after=3.0))
        envs.reset(seed=1)
        envs.step([0, 0])
        cluster.kill_head()
        errors, message, until = [], "", time.monotonic() + 60
        while len(errors) < 2 and time.monotonic() < until:
            try:
                envs.step([0, 0])
                time.sleep(0.05)
            except Exception as error:
                errors.append(type(error).__name__)
                message = str(error)
        began = time.monotonic()
        envs.close()
        closed = time.monotonic() - began
        print("told", json.dumps({"errors": errors, "message": message, "closed": closed}), flush=True)
        for node in cluster.nodes:
            cluster.kill_node(node)
        assert not ray.is_initialized()
