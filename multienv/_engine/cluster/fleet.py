"""The hosts of one vector env or list: where they are, and which take the place of lost ones.

A *seat* is a place for a host, with its workers; the host on it changes. When a host is lost,
the next worker that is launched on the seat has a new one made, on another node; the seat's others follow it there.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from multienv._engine import interrupts
from multienv._engine.cluster import frames
from multienv._engine.cluster.cluster import AGAIN, WATCH_EVERY, Cluster, HeadWatch, Node, RayHost, in_order
from multienv._engine.cluster.courier import Courier, RelayChannel
from multienv._engine.processes.worker_process import run_uninterrupted
from multienv._engine.threads import Task
from multienv.config import RayOptions
from multienv.errors import ClosedError, ClusterError, NoCapacityError

# Seconds that a seat fails at once, after a host could not be made for it.
_STILL = 5.0


class Seat:
    """Has a host, and another one when that is lost.

    Args:
        fleet: That it belongs to.
        cpus: That its host reserves.
    """

    def __init__(self, fleet: Fleet, cpus: int) -> None:
        self.cpus = cpus
        self.courier: Courier | None = None
        self.node = ""  # id of the node that its host is on, or was last
        self.avoided: set[str] = set()  # nodes where a host was lost
        self.is_placing = False  # a host is being made on that node
        self._fleet = fleet
        self._lock = threading.Lock()
        self._failed_at = 0.0

    def present(self) -> Courier:
        """Return the courier of a host that lives, of a new one if need be; does not wait for it.

        Raises:
            ClusterError: None could be made just now.
        """
        with self._lock:
            courier = self.courier
            if courier is not None and courier.lost:
                if isinstance(courier.error, ClusterError) and time.monotonic() < self._failed_at + _STILL:
                    raise courier.error.with_traceback(None)
                if self.node:
                    self.avoided.add(self.node)
                courier = None
            if courier is None:
                fleet = self._fleet
                fleet.refuse_if_lost()
                suspect_after = fleet.options.suspect_after
                courier = self.courier = Courier(self.connect, fleet.trouble, suspect_after=suspect_after)
            return courier

    def connect(self, is_wanted: Callable[[], bool]) -> RayHost:
        """Make a host, and wait for it."""
        fleet = self._fleet
        try:
            return fleet.cluster.place(self.cpus, partial(fleet.pick, self), is_wanted)
        except ClusterError:
            self._failed_at = time.monotonic()
            raise
        finally:
            self.is_placing = False

    def vacate(self) -> Courier | None:
        """Give up the present host and return its courier; one that is being made in another thread is waited for."""
        with self._lock:
            courier, self.courier = self.courier, None
            return courier


class Fleet:
    """Has the hosts of a vector env, or of a list of envs.

    Args:
        options: How.
        envs: How many envs there will be, for the number of hosts.

    Attributes:
        cores: CPUs of all hosts together.

    Raises:
        UsageError: Ray is not installed.
        ClusterError: It cannot be reached, or has no CPU free.
    """

    def __init__(self, options: RayOptions, envs: int) -> None:
        self.options = options
        self.cluster = Cluster(options)
        self._users: set[int] = set()  # launchers that are not closed
        self._names = itertools.count()
        self._lost = ""
        self._ending = Task(self._end)
        self._picking = threading.Lock()
        try:
            self._seats = self._plan(envs)
        except BaseException:
            self.cluster.leave()
            raise
        self.cores = sum(seat.cpus for seat in self._seats)
        self._dealt = self._seats  # the seat of each worker
        self._watch = HeadWatch(self.cluster, self._ending.run)

    def _plan(self, envs: int) -> list[Seat]:
        options = self.options
        until = time.monotonic() + options.placement_timeout
        while True:  # the CPUs of envs that were closed just now are free some tenths of a second later
            known = in_order(self.cluster.nodes(), options.placement, (), ())
            nodes = [node for node in known if node.free > 0]
            if nodes or not known or time.monotonic() >= until:
                break
            interrupts.sleep(AGAIN)  # Ray tells nobody when a CPU gets free
        if options.placement == "pack" and options.hosts is None:
            totals = itertools.accumulate(node.free for node in nodes)
            nodes = nodes[: 1 + sum(total < envs for total in totals)]
        wanted = options.hosts or min(max(1, len(nodes)), envs)
        if not nodes:
            raise NoCapacityError("No node of the cluster has a CPU free. Add nodes, or end what has reserved them.")
        share = [sum(1 for host in range(wanted) if host % len(nodes) == index) for index in range(len(nodes))]
        free = [max(1, node.free // max(1, count)) for node, count in zip(nodes, share, strict=True)]
        return [Seat(self, options.cpus_per_host or free[host % len(nodes)]) for host in range(wanted)]

    def seat_workers(self, workers: int) -> None:
        """Deal so many workers to the seats, as even as their CPUs are; those that get none are given up."""
        bounds, total = [], 0
        for seat in self._seats:
            total += seat.cpus
            bounds.append(round(workers * total / self.cores))
        counts = [stop - start for start, stop in itertools.pairwise([0, *bounds])]
        self._dealt = [seat for seat, count in zip(self._seats, counts, strict=True) for _ in range(count)]
        if self.options.cpus_per_host is None:
            for seat, count in zip(self._seats, counts, strict=True):
                seat.cpus = max(1, min(seat.cpus, count))

    # --- hosts ----------------------------------------------------------------------------------------

    def pick(self, seat: Seat, nodes: Sequence[Node], tried: Collection[str]) -> Node | None:
        """Choose the node for the next host of a seat; ``None``: none has so many CPUs free."""
        with self._picking:
            others = [other for other in self._seats if other is not seat and other.courier is not None]
            promised: Counter[str] = Counter()
            for other in others:
                promised[other.node] += other.cpus * other.is_placing
            real = [replace(node, free=node.free - promised[node.id]) for node in nodes]
            order = in_order(real, self.options.placement, [other.node for other in others], seat.avoided)
            for node in order:
                if node.free >= seat.cpus and node.id not in tried:
                    seat.node, seat.is_placing = node.id, True
                    return node
            return None

    def trouble(self) -> str:
        """Return why the whole cluster is lost: its head has been silent for too long; ``""`` while it is not."""
        silent = self._watch.silence
        if not self._lost and silent > self.options.suspect_after + WATCH_EVERY:
            self._lost = (
                f"The head of the Ray cluster has been silent for {silent:.0f} s. Without it no host can be had: start "
                "the cluster again, and go on from your last checkpoint."
            )
            threading.Thread(target=self.cluster.disconnect, name="multienv-disconnect", daemon=True).start()
        return self._lost

    def refuse_if_lost(self) -> None:
        """Raise ClusterError if the head of the cluster is gone, ClosedError if this fleet has ended."""
        if self.trouble():
            raise ClusterError(self._lost)
        if self._watch.is_over:  # said before its thread looks at the seats: no later launch makes a host unseen
            raise ClosedError("Its hosts have ended: all envs of this cluster were closed.")

    # --- launchers ------------------------------------------------------------------------------------

    def launcher(self, index: int, method: str, native_threads: int | None, title: str) -> RelayLauncher:
        """Return what launches the processes of the worker with this index."""
        seat = self._dealt[index % len(self._dealt)]
        name = next(self._names)
        launcher = RelayLauncher(self, name, seat, (method, native_threads, title))
        weakref.finalize(launcher, self.drop, name).atexit = False
        self._users.add(name)  # last: Ctrl-C may come in between
        return launcher

    def drop(self, name: int) -> None:
        """Note that a launcher is not used any more; with the last one the hosts end. Finalizers call it: no locks."""
        self._users.discard(name)
        if not self._users:
            self._watch.close()

    def _end(self) -> None:
        """End the hosts, in the thread that has watched the nodes; then a local Ray."""
        couriers = list(filter(None, [seat.vacate() for seat in self._seats]))
        for courier in couriers:
            courier.close()
        for courier in couriers:
            courier.join(2.0)
        self.cluster.leave()

    def close(self) -> None:
        """End the hosts of envs that could not be made."""
        self.drop(-1)

    def wait(self, seconds: float) -> None:
        """Wait until a fleet that is over has ended; return at once while it is used."""
        if self._watch.is_over and not self._lost:
            self._ending.wait(seconds)


class RelayLauncher:
    """Launches the processes of one worker on the host of its seat.

    Args:
        fleet: Of its hosts.
        name: In the fleet.
        seat: Where.
        how: Start method, native threads and title.
    """

    def __init__(self, fleet: Fleet, name: int, seat: Seat, how: tuple[str, int | None, str]) -> None:
        self._fleet, self._name, self._seat, self._how = fleet, name, seat, how

    def start(self) -> RelayChannel:
        """Launch a process; does not wait for it."""
        self._fleet.refuse_if_lost()
        # Undisturbed: a courier that is made when Ctrl-C comes must be known to the seat, or nobody ends its host.
        return RelayChannel(run_uninterrupted(self._seat.present), lambda name: (frames.LAUNCH, name, *self._how))

    def wake_kept(self, token: int) -> RelayChannel | None:
        """Wake the snapshot kept under this token; ``None``: its host is lost."""
        courier = self._seat.courier
        if courier is None or not courier.is_up:
            return None
        return RelayChannel(courier, lambda name: (frames.WAKE_KEPT, name, token))

    def free(self, token: int) -> None:
        """End the snapshot kept under this token."""
        courier = self._seat.courier
        if courier is not None:
            courier.post((frames.FREE, token))

    def close(self) -> None:
        """Note that no process will be launched any more."""
        self._fleet.drop(self._name)
