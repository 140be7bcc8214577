"""A Ray cluster of several nodes on this machine, for tests that lose its nodes.

    with RayCluster() as cluster:  # three nodes, and this process is connected
        cluster.kill_node(cluster.nodes[0])

What is killed here gets no chance to say so: all processes of a node are stopped before the first of them dies. Ray's
own processes are found as children of the node's raylet, and what they start by a token in its environment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.cluster_utils import Cluster

from kit import trainer_process
from kit.leaks import LeakError, kept_by_libraries, snapshot_resources
from kit.process_table import Mark, ProcessRecord, family, record

TOKEN_VARIABLE = "MULTIENV_TEST_CLUSTER"
CPUS = 4
# The least that Ray takes.
OBJECT_STORE_BYTES = 80 * 2**20
# A killed node is declared dead after 2 s. Less, and a busy machine loses living nodes.
SYSTEM = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 400,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 5,
    # Actors run at nice 15 otherwise, and starve beside other tests.
    "worker_niceness": 0,
}
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
# A busy machine takes seconds to start an interpreter.
PATIENCE = 30.0
GONE_WITHIN = 10.0
# What a raylet starts for itself; every other child of it with such a title is an actor.
OWN = {"ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::IDLE"}

# Where actors find the library under test, and the modules of tests.
PLACES = list(map(str, trainer_process.PLACES))

Node = Any  # ray._private.node.Node


def wait_until(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Return as soon as *condition* holds; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds:g} s still not: {what}"
        time.sleep(0.02)


class RayCluster:
    """Some nodes, and a head that has no CPU: this process is connected there, so every node may be lost.

    Args:
        nodes: How many, of four CPUs each.
    """

    def __init__(self, nodes: int = 3) -> None:
        self.nodes: list[Node] = []
        self._count = nodes
        self._marks: dict[str, Mark] = {}  # by node id
        self._token = uuid.uuid4().hex

    def __enter__(self) -> RayCluster:
        # Ray remembers the newest cluster of a machine in a file; it is not to be this one, nor another test's.
        self._directory = tempfile.mkdtemp(prefix="ray-")
        self._before = snapshot_resources().descriptors.items()
        self._sigterm = signal.getsignal(signal.SIGTERM)  # Ray replaces it
        try:
            with self._environment():
                head: dict[str, Any] = {"num_cpus": 0, "include_dashboard": False, "_system_config": SYSTEM}
                head["object_store_memory"] = OBJECT_STORE_BYTES
                self._cluster = Cluster(initialize_head=True, head_node_args=head)
                self._head = self._cluster.head_node
                self._gcs = self._head.all_processes["gcs_server"][0].process.pid
                self._mark(self._head, self._token)
            for _ in range(self._count):
                self.add_node()
            with self._environment():
                ray.init(address=str(self._head.gcs_address), log_to_driver=False, logging_level="ERROR")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_node(self) -> Node:
        """Start one more node; only the main thread may."""
        token = uuid.uuid4().hex
        with self._environment():
            node = self._cluster.add_node(
                num_cpus=CPUS,
                object_store_memory=OBJECT_STORE_BYTES,
                env_vars={TOKEN_VARIABLE: f"{self._token} {token}"},
            )
        self._mark(node, token)
        self.nodes.append(node)
        return node

    def close(self) -> None:
        """End all, and see that nothing is left."""
        cluster = getattr(self, "_cluster", None)
        try:
            for node in self.nodes:
                if any(record.state == "T" for record in self.processes_of(node).values()):
                    self.kill_node(node)
            with self._environment():
                if ray.is_initialized():
                    ray.shutdown()
                if cluster is not None:
                    cluster.shutdown()
                    self._kill_agents()
            self._assert_gone()
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)
            signal.signal(signal.SIGTERM, self._sigterm)
            # Ray keeps its event loops, some sockets and its logs open for the life of the process.
            new = snapshot_resources().descriptors.items() - self._before
            own = ("anon_inode:", "socket:", self._directory)
            kept_by_libraries.update(number for number, link in new if link.startswith(own))

    # --- what lives -----------------------------------------------------------------------------------

    def processes(self) -> dict[int, ProcessRecord]:
        """The processes of the cluster, and what they have started."""
        found = alive(Mark(self._gcs, self._token))
        for mark in self._marks.values():
            found |= alive(mark)
        return found

    def processes_of(self, node: Node) -> dict[int, ProcessRecord]:
        """The processes of one node: its raylet, its agents, its actors, and what those have started."""
        return alive(self._marks[node.node_id])

    def actors_of(self, node: Node) -> list[int]:
        """The pids of the actors on a node."""
        return sorted(pid for pid, record in self.processes_of(node).items() if is_actor(record))

    def node_of(self, pid: int) -> Node:
        """The node that a process belongs to."""
        return next(node for node in self.nodes if pid in self.processes_of(node))

    def assert_idle(self) -> None:
        """Wait until no actor and no process of the library is left; fail after some seconds."""

        def busy() -> list[ProcessRecord]:
            return [one for one in self.processes().values() if is_actor(one) or "multienv" in one.command]

        deadline = time.monotonic() + GONE_WITHIN
        while left := busy():
            if time.monotonic() > deadline:
                raise LeakError("\n  ".join(["left on the cluster:", *map(str, left)]))
            time.sleep(0.02)

    # --- faults ---------------------------------------------------------------------------------------

    def kill_node(self, node: Node) -> None:
        """SIGKILL a node: nobody is told, and its connections break all at once."""
        stopped: set[int] = set()
        while new := self.processes_of(node).keys() - stopped:  # one may have been started meanwhile
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= new
        for pid in self.processes_of(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.all_processes["raylet"][0].process.wait(PATIENCE)
        wait_until(lambda: not self.processes_of(node), "all processes of the node have ended")

    def kill_head(self) -> None:
        """SIGKILL the head's store of who is where. Ray ends every connected process by itself a minute later."""
        os.kill(self._gcs, signal.SIGKILL)
        self._head.all_processes["gcs_server"][0].process.wait(PATIENCE)

    # --- inside ---------------------------------------------------------------------------------------

    def _mark(self, node: Node, token: str) -> None:
        self._marks[node.node_id] = Mark(node.all_processes["raylet"][0].process.pid, token)

    def _kill_agents(self) -> None:
        """Kill what waits for a dead head: Ray's helpers of a node do so for a minute."""
        for pid, process in self.processes().items():
            if process.command in OWN:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _assert_gone(self) -> None:
        deadline = time.monotonic() + GONE_WITHIN
        while left := self.processes():
            if time.monotonic() > deadline:
                raise LeakError(
                    "\n  ".join([f"left of a Ray cluster after {GONE_WITHIN:g} s:", *map(str, left.values())])
                )
            time.sleep(0.02)

    @contextlib.contextmanager
    def _environment(self) -> Iterator[None]:
        """Set what Ray and its processes read, for a while, and undo what Ray sets."""
        before = dict(os.environ)
        path = os.pathsep.join(filter(None, [*PLACES, before.get("PYTHONPATH", "")]))
        own = {**ENVIRONMENT, "RAY_TMPDIR": self._directory, TOKEN_VARIABLE: self._token, "PYTHONPATH": path}
        os.environ.update(own)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def alive(mark: Mark) -> dict[int, ProcessRecord]:
    """What lives of a process, its descendants, and all that carry its token."""
    found = family(mark) | {mark.pid: process} if (process := record(mark.pid)) else family(mark)
    return {pid: process for pid, process in found.items() if not process.is_zombie}


def is_actor(record: ProcessRecord) -> bool:
    """Whether a process runs an actor."""
    return record.command.startswith("ray::") and record.command.split()[0] not in OWN
