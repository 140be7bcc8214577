"""A Ray cluster of several nodes on this machine, whose nodes can be killed."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import random
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import psutil

from multienv._engine.cluster.cluster import import_ray
from multienv.testing.killer import send

# Of Ray: a killed node is declared dead after some 3 s, instead of 15; less, and a busy machine loses living nodes. And
# actors run at nice 15 otherwise, with all that they start.
_SETTINGS = {
    "worker_niceness": 0,
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 5,
}
# Bytes of a node's object store.
_STORE = 100 * 2**20


class RayCluster:
    """Runs a Ray cluster of several nodes on this machine, and connects this process to it.

    ::

        with RayCluster(nodes=3, cpus=4) as cluster, RayVectorEnv(env_fns) as envs:
            ...
            cluster.kill_node(random.Random(0))
            cluster.mend()

    The head has no CPU, so that hosts are on the other nodes. All that Ray writes lies in a directory that is deleted
    at the end, the cluster's address included: no other program joins it.

    Args:
        nodes: How many, beside the head.
        cpus: Of each, whatever the machine has.

    Raises:
        UsageError: Ray is not installed.
        RuntimeError: This process is connected to a Ray already.
    """

    def __init__(self, nodes: int = 3, cpus: int = 2) -> None:
        self._ray = import_ray()
        if self._ray.is_initialized():
            raise RuntimeError("This process is connected to a Ray already: call ray.shutdown() first.")
        self._cpus = cpus
        self._wanted = nodes
        self._nodes: list[Any] = []
        self._elsewhere = os.environ.get("RAY_TMPDIR")
        self._directory = tempfile.mkdtemp(prefix="ray-")
        os.environ["RAY_TMPDIR"] = self._directory
        self._cluster: Any = None
        try:
            self._cluster = self._start()
            self.add_nodes(nodes)
            self._ray.init(address=self.address, log_to_driver=False, logging_level=logging.CRITICAL)
            self._tell(False)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RayCluster:  # noqa: PYI034 - Self needs Python 3.11
        """Return this object, whose nodes are up."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    @property
    def address(self) -> str:
        """Return the address, as for ``RayOptions``."""
        return str(self._cluster.address)

    def add_nodes(self, count: int = 1) -> None:
        """Start more nodes, and wait until they are up. In the main thread only: Ray sets signal handlers."""
        for _ in range(count):
            self._nodes.append(self._cluster.add_node(num_cpus=self._cpus, object_store_memory=_STORE))

    def mend(self) -> None:
        """Start a node for each that was killed."""
        self.add_nodes(self._wanted - len(self._nodes))

    def kill_node(self, dice: random.Random) -> bool:
        """Kill all processes of one of the nodes, the workers of its hosts included; return whether there was one."""
        if not self._nodes:
            return False
        node = self._nodes.pop(dice.randrange(len(self._nodes)))
        own = {info.process.pid for infos in node.all_processes.values() for info in infos}
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none is to hear of the death of another one
            for pid in own.union(*map(_descendants, own)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self._cluster.remove_node(node, allow_graceful=False)  # reaps them
        return True

    def kill_host(self, dice: random.Random) -> bool:
        """Kill the process of one of the hosts; return whether there was one."""
        hosts = [pid for pid in _descendants(os.getpid()) if _command(pid).startswith("ray::HostActor")]
        return bool(hosts) and send(dice.choice(hosts), "SIGKILL")

    def close(self) -> None:
        """Disconnect this process, then end all nodes. Again does nothing."""
        self._tell(True)
        self._ray.shutdown()
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.shutdown()
        shutil.rmtree(self._directory, ignore_errors=True)
        if os.environ.get("RAY_TMPDIR") == self._directory:
            del os.environ["RAY_TMPDIR"]
            if self._elsewhere is not None:
                os.environ["RAY_TMPDIR"] = self._elsewhere

    def _start(self) -> Any:
        make = importlib.import_module("ray.cluster_utils").Cluster
        return make(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": _STORE,
                "_system_config": _SETTINGS,
            },
        )

    def _tell(self, wanted: bool) -> None:
        """Have Ray print on stdout that a process was killed, or not: here that is what was meant."""
        worker: Any = importlib.import_module("ray._private.worker")
        worker._worker_logs_enabled = wanted


def _descendants(pid: int) -> set[int]:
    """Return the processes that a process and its children have started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return {one.pid for one in psutil.Process(pid).children(recursive=True)}
    return set()


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), "cmdline").read_text(errors="replace")
    return ""
