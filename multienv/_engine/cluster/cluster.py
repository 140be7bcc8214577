"""All that is asked of Ray: to connect, which nodes there are, to have a host made, and to call it."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from multienv._engine import interrupts
from multienv._engine.cluster.frames import Frame
from multienv._engine.cluster.relay import Relay
from multienv._engine.processes import launcher
from multienv._engine.processes.channel import readable
from multienv._engine.threads import Bell
from multienv._engine.version import __version__
from multienv.config import RayOptions
from multienv.errors import ClusterError, NoCapacityError, UsageError

logger = logging.getLogger("multienv")

# Seconds between two looks for a node with CPUs free.
AGAIN = 0.25
# Seconds until a host that is pinned to a node must be up, and how many it has in any case. With a ``runtime_env`` it
# has all of ``placement_timeout``: packages may have to be installed.
_UP_WITHIN = 30.0
_UP_LEAST = 10.0
# Variable: seconds that Ray's own processes wait for a head that is gone.
_OUTLIVING = "RAY_gcs_rpc_server_reconnect_timeout_s"
# Threads of a host: one waits for answers, one returns them, the others may come meanwhile.
_THREADS = 4
# Seconds between two questions to the head.
WATCH_EVERY = 1.0


def import_ray() -> Any:
    """Return the module; raise UsageError where the extra is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UsageError('Envs on a Ray cluster need the extra "ray": pip install "multienv-rl[ray]"') from error


@dataclass(frozen=True, slots=True)
class Node:
    """A living node of the cluster.

    Attributes:
        id: As Ray has it, in hexadecimal digits.
        name: Its address, for messages.
        free: CPUs that nobody has reserved; may be some tenths of a second old.
    """

    id: str
    name: str
    free: int


class Cluster:
    """Connects this process to Ray.

    Args:
        options: Where it is.

    Raises:
        UsageError: Ray is not installed.
        ClusterError: It cannot be reached.
    """

    _lock = threading.Lock()
    _users = 0  # of a local Ray that was started here
    _is_ours = False

    def __init__(self, options: RayOptions) -> None:
        ray = self._ray = import_ray()
        self._options = options
        self._is_used = False
        with Cluster._lock:
            if not ray.is_initialized():
                self._connect()
            if Cluster._is_ours:
                Cluster._users, self._is_used = Cluster._users + 1, True

    def _connect(self) -> None:
        address, ray = self._options.address, self._ray
        is_ours = address is None and not os.environ.get("RAY_ADDRESS")
        # "local": a Ray that runs on this machine already is somebody else's.
        where = {"address": "local", "include_dashboard": False} if is_ours else {"address": address or "auto"}
        # Ray's agents outlive a trainer that was killed by so many seconds; they inherit the variable.
        kept = os.environ.get(_OUTLIVING)
        try:
            if is_ours:
                os.environ[_OUTLIVING] = kept or "5"
            ray.init(**where, logging_level=logging.ERROR, ignore_reinit_error=True)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise ClusterError(
                f"Ray at {where['address']!r} cannot be reached: {error}. Give RayOptions(address=...) of a cluster "
                "that runs, or none for a local one."
            ) from error
        finally:
            if kept is None:
                os.environ.pop(_OUTLIVING, None)
        Cluster._is_ours, Cluster._users = is_ours, 0

    def disconnect(self) -> None:
        """Disconnect from a cluster whose head is gone: else Ray ends this process, 60 s after it has noticed."""
        with Cluster._lock:
            Cluster._is_ours = self._is_used = False
            if self._ray.is_initialized():
                self._ray.shutdown()

    def leave(self) -> None:
        """Shut a local Ray that was started here down, if nobody else uses it. Again does nothing."""
        with Cluster._lock:
            if self._is_used:
                self._is_used = False
                Cluster._users -= 1
                if Cluster._is_ours and not Cluster._users:
                    Cluster._is_ours = False
                    self._ray.shutdown()

    def nodes(self) -> list[Node]:
        """Return the living nodes. Raises what Ray raises when its head is gone; may block then."""
        refuse_if_disconnected(self._ray)
        state = importlib.import_module("ray._private.state")
        free = state.available_resources_per_node()
        return [
            Node(
                node["NodeID"],
                node["NodeManagerAddress"],
                int(free.get(node["NodeID"], {}).get("CPU", 0)),
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def place(
        self,
        cpus: int,
        pick: Callable[[list[Node], Collection[str]], Node | None],
        is_wanted: Callable[[], bool],
    ) -> RayHost:
        """Make a host on a node that has so many CPUs free.

        A node may have died without anybody knowing, and its host would never come up; so a host is pinned to one node
        and, when it is not there in time, the next one is tried.

        Args:
            cpus: That it reserves.
            pick: Chooses one of the nodes, except those with these ids.
            is_wanted: False: nobody waits any more.

        Raises:
            NoCapacityError: No node had room for ``placement_timeout`` seconds.
            ClusterError: The host cannot be made: multienv is missing on its node, for instance.
        """
        until = time.monotonic() + self._options.placement_timeout
        tried: set[str] = set()
        late = ""
        while is_wanted():
            node = pick(self.nodes(), tried)
            if node is not None:
                host = self._make_host(node, cpus, until)
                if host is not None:
                    return host
                tried.add(node.id)
                late = node.name
                continue
            tried.clear()
            if time.monotonic() >= until:
                break
            interrupts.sleep(AGAIN)  # Ray tells nobody when a CPU gets free
        seconds = f"{self._options.placement_timeout:g} s"
        if late:
            cause = " Ray's log there tells of its runtime_env." if self._options.runtime_env else ""
            raise NoCapacityError(
                f"No host came up within {seconds} (RayOptions.placement_timeout), tried last: {late}.{cause}"
            )
        raise NoCapacityError(
            f"No node has had {cpus} CPUs free for a host, for {seconds}. Add nodes, or ask for less: "
            "RayOptions(cpus_per_host=..., hosts=...)."
        )

    def _make_host(self, node: Node, cpus: int, until: float) -> RayHost | None:
        """Return a host on this node; ``None`` if it is not up in time."""
        ray = self._ray
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        options: dict[str, Any] = {
            "num_cpus": cpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": _THREADS,
            "scheduling_strategy": affinity(node.id, soft=False),
        }
        if self._options.runtime_env:
            options["runtime_env"] = dict(self._options.runtime_env)
        try:
            actor = ray.remote(HostActor).options(**options).remote(launcher.hash_seed)
        except (TypeError, ValueError) as error:
            raise ClusterError(f"Ray takes no host with these RayOptions(runtime_env=...): {error}") from error
        errors = ray.exceptions
        try:
            longest = self._options.placement_timeout if self._options.runtime_env else _UP_WITHIN
            seconds = max(_UP_LEAST, min(longest, until - time.monotonic()))
            version: str = ray.get(actor.version.remote(), timeout=seconds)
        except (
            errors.ActorUnschedulableError,
            errors.ActorUnavailableError,
            errors.GetTimeoutError,
            errors.NodeDiedError,
        ) as error:
            logger.info("no host came up on node %s (%s): another one is tried", node.name, error)
            ray.kill(actor)
            return None
        except errors.ActorDiedError as error:
            if "creation task" in str(error) or "__init__" in str(error):
                raise ClusterError(
                    f"A host cannot be made on node {node.name}: {error}. multienv, gymnasium and what the envs import "
                    "must be installed there, or named in RayOptions(runtime_env=...)."
                ) from error
            return None
        if version != __version__:
            ray.kill(actor)
            raise ClusterError(
                f"Node {node.name} has multienv {version}, the trainer has {__version__}. Install the same, "
                "or give RayOptions(runtime_env=...)."
            )
        return RayHost(ray, actor, f"node {node.name} ({node.id[:8]})")


class HostActor:
    """Runs a relay on a node, as an actor.

    Args:
        hash_seed: That of the trainer: a set is iterated in the same order in all its workers, on whatever node.
    """

    def __init__(self, hash_seed: str) -> None:
        launcher.hash_seed = hash_seed
        self._relay = Relay()

    def version(self) -> str:
        """Return the version of multienv on this node; the first call says that the host is up."""
        return __version__

    def exchange(self, serial: int, sent: list[Frame]) -> list[Frame]:
        """Exchange frames, see ``Relay.exchange``."""
        return self._relay.exchange(serial, sent)

    def pulse(self) -> None:
        """Give a sign of life."""


class RayHost:
    """Is a host that a courier calls; ``name`` says in messages where it is."""

    def __init__(self, ray: Any, actor: Any, name: str) -> None:
        self._ray, self._actor, self.name = ray, actor, name

    def call(self, serial: int, sent: list[Frame]) -> Future[list[Frame]]:
        """Call ``Relay.exchange``. If the future raises, the host is lost."""
        refuse_if_disconnected(self._ray)
        return self._actor.exchange.remote(serial, sent).future()  # type: ignore[no-any-return]

    def pulse(self) -> Future[None]:
        """Ask the actor for a sign of life: the future is done when it comes."""
        return self._actor.pulse.remote().future()  # type: ignore[no-any-return]

    def end(self) -> None:
        """Kill the actor; the monitor sees that and kills the workers. Does not wait and never raises."""
        try:
            refuse_if_disconnected(self._ray)
            self._ray.kill(self._actor)
        except Exception as error:  # the head is gone, or this process is not connected any more
            logger.debug("host on %s: %s", self.name, error)


def refuse_if_disconnected(ray: Any) -> None:
    """Raise ClusterError after a ``ray.shutdown()``: Ray would start anew, or join any cluster that it finds."""
    if not ray.is_initialized():
        raise ClusterError("This process is not connected to its Ray cluster any more: ray.shutdown() was called.")


class HeadWatch:
    """Asks the head something now and then, in a thread of its own, because Ray blocks while its head is gone.

    Args:
        cluster: What is asked.
        end: Called when the thread has been told to end.

    Attributes:
        is_over: The thread has been told to end. Set before the thread can know.
    """

    def __init__(self, cluster: Cluster, end: Callable[[], None]) -> None:
        self._cluster, self._end = cluster, end
        self._asked = 0.0  # when the question was put that is not answered yet; 0: none
        self.is_over = False
        self._bell: Bell | None = Bell()
        threading.Thread(target=self._run, args=(self._bell,), name="multienv-watch", daemon=True).start()

    @property
    def silence(self) -> float:
        """Return for how many seconds the head has left a question unanswered: a trainer that was stopped asks none."""
        asked = self._asked
        return time.monotonic() - asked if asked else 0.0

    def close(self) -> None:
        """End the thread, soon; may be called again. Takes no lock and starts no thread: finalizers call it."""
        self.is_over, bell = True, self._bell
        if bell is not None:
            bell.ring()

    def _run(self, bell: Bell) -> None:
        while not readable((bell.descriptor,), WATCH_EVERY) and not self.is_over:
            self._asked = self._asked or time.monotonic()
            try:
                self._cluster.nodes()
                self._asked = 0.0
            except Exception as error:  # whatever Ray makes of it
                logger.debug("the head of the Ray cluster does not answer: %s", error)
        self._end()
        self._bell = None  # an env that is closed holds its fleet, until a collection


def in_order(nodes: Collection[Node], placement: Any, hosts: Collection[str], avoided: Collection[str]) -> list[Node]:
    """Put nodes into the order in which they are tried for the next host.

    Args:
        nodes: Those that live.
        placement: As ``RayOptions.placement``.
        hosts: Node ids of its other hosts, with repetitions.
        avoided: Node ids that come last: a host there was lost.
    """
    if not isinstance(placement, str):
        wanted = list(placement)
        nodes = [node for node in nodes if node.id in wanted]
    sign = 1 if placement == "pack" else -1
    held = list(hosts)

    def rank(node: Node) -> Any:
        count = held.count(node.id)
        return node.id in avoided, -count if placement == "pack" else count, sign * node.free, node.id

    return sorted(nodes, key=rank)
