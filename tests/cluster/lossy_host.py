"""Hosts in this process, real but for Ray: a real relay with real workers, and calls that fail, come late or are lost.

The real faces, fleet, couriers and channels run over them: only ``Cluster``, which is all that is asked of Ray, is
replaced. What becomes of each call is said by a *schedule*: a function of the host's index, the number of the call
(from 1) and the frames that it brings, that names one of `FAULTS`, or ``""``.
"""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kit.trainer_process import STUCK_AFTER
from multienv._engine.cluster import frames
from multienv._engine.cluster.cluster import Node
from multienv._engine.cluster.frames import Frame
from multienv._engine.cluster.relay import Relay
from multienv._engine.processes.launcher import Launch
from multienv._engine.wire.messages import KeepSnapshot
from multienv.config import RayOptions

FAULTS = {
    "lost": "not executed; the caller is told that the call has failed",
    "swallowed": "not executed; the caller never hears of it, but the host gives signs of life",
    "unanswered": "executed; the caller is told that the call has failed",
    "silent": "executed; the caller never hears of it, nor of the host",
    "late": "executed after the next call",
    "slow reply": "the reply comes after those of later calls",
    "dead": "the host dies, and the caller is told",
}
# Those after which the same host goes on, and no worker is lost.
HARMLESS = ("late", "slow reply")
# Seconds that a late call waits for another one.
LATE = 0.05

Schedule = Callable[[int, int, list[Frame]], str]


def faultless(host: int, call: int, sent: list[Frame]) -> str:
    """Have nothing go wrong."""
    return ""


def every(nth: int, fault: str) -> Schedule:
    """Have a fault strike every n-th call."""
    return lambda host, call, sent: fault if call % nth == 0 else ""


def silent_from(first: int, host: int = 0) -> Schedule:
    """Have a host that executes everything and answers nothing, from a call on."""
    return lambda index, call, sent: "silent" if index == host and call >= first else ""


def diced(seed: int, rate: float, faults: Collection[str] = HARMLESS) -> Schedule:
    """Have faults strike by chance: the same ones for the same seed, host and number of the call."""

    def schedule(host: int, call: int, sent: list[Frame]) -> str:
        dice = random.Random(f"{seed} {host} {call}")
        return dice.choice(sorted(faults)) if dice.random() < rate else ""

    return schedule


class LossyHost:
    """Is a host that a courier calls.

    Args:
        cluster: That it is part of.
        index: Which of its hosts, in the order in which they were made.
        node: Where it is said to be.

    Attributes:
        calls: Made so far.
        struck: The faults that have struck, with the numbers of their calls.
        ended: It was told to end, and has let go of its workers.
    """

    def __init__(self, cluster: LocalCluster, index: int, node: Node) -> None:
        self.name = node.name
        self.relay = Relay()
        self.calls = 0
        self.struck: list[tuple[int, str]] = []
        self.ended = threading.Event()
        self._cluster, self._index = cluster, index
        self._executed = 0
        self._is_dead = self._is_over = False
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._tokens: list[int] = []  # of kept snapshots
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="lossy-host")

    def call(self, serial: int, sent: list[Frame]) -> Future[list[Frame]]:
        """Carry a call to the relay, or what the schedule has in its place."""
        future: Future[Any] = Future()
        if self._is_dead or self._is_over:
            future.set_exception(RuntimeError("the actor has died"))
            return future
        data = pickle.dumps((serial, sent))  # what travels is a copy
        with self._lock:
            self.calls += 1
            number = self.calls
            self._open.add(future)
        for frame in sent:
            if frame[0] == frames.ASK and frame[-1] and isinstance(kept := pickle.loads(frame[-1]), KeepSnapshot):
                self._tokens.append(kept.token)
        fault = self._cluster.schedule(self._index, number, sent)
        if fault:
            self.struck.append((number, fault))
        self._pool.submit(self._carry, data, fault, future)
        return future

    def pulse(self) -> Future[None]:
        """Give a sign of life; a host that was silent to the last call gives none."""
        future: Future[None] = Future()
        if self._cluster.schedule(self._index, self.calls, []) != "silent":
            future.set_result(None)
        return future

    def end(self) -> None:
        """Let go of the workers, soon, as an actor that is killed does."""
        if not self._is_over:
            self._is_over = True
            threading.Thread(target=self._end, name="lossy-host-end", daemon=True).start()

    def _end(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for worker in self.relay._workers.values():
            worker.channel.release()
        for token in self._tokens:  # an actor's monitor, which is not shared with its trainer, ends with it
            Launch("forkserver").free(token)
        self._open.clear()  # each knows its courier
        self.ended.set()

    def _carry(self, data: bytes, fault: str, future: Future[Any]) -> None:
        with self._lock:
            before = self._executed
        try:
            if fault == "dead":
                self._die()
                return
            if fault == "lost":
                self._answer(future, ConnectionError("lost on its way"))
                return
            if fault == "swallowed":
                return
            if fault == "late":
                self._await_another(before)
            reply = self._execute(data)
            if fault == "slow reply":
                self._await_another(before + 1)
            if fault != "silent":
                self._answer(future, ConnectionError("its reply was lost") if fault == "unanswered" else reply)
        except Exception as error:  # a defect of the relay
            self._answer(future, error)

    def _execute(self, data: bytes) -> Any:
        reply = pickle.dumps(self.relay.exchange(*pickle.loads(data)))
        with self._lock:
            self._executed += 1
        return pickle.loads(reply)

    def _await_another(self, before: int) -> None:
        """Wait, but not for long, until more than this number of calls has been executed."""
        until = time.monotonic() + LATE
        while self._executed <= before and time.monotonic() < until:
            time.sleep(0.001)

    def _answer(self, future: Future[Any], outcome: Any) -> None:
        with self._lock:
            if future not in self._open:
                return
            self._open.discard(future)
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _die(self) -> None:
        self._is_dead = True
        with self._lock:
            pending, self._open = self._open, set()
        for future in pending:
            future.set_exception(RuntimeError("the actor has died"))


@dataclass
class LocalCluster:
    """Stands in for ``Cluster``: its hosts are in this process.

    Attributes:
        schedule: What goes wrong.
        nodes_free: CPUs of each node.
        hosts: Those that were made, in order.
        has_left: Its fleet has let go of it.
    """

    schedule: Schedule = faultless
    nodes_free: tuple[int, ...] = (64, 64)
    hosts: list[LossyHost] = field(default_factory=list)
    has_left: bool = False

    def nodes(self) -> list[Node]:
        return [Node(f"id {index}", f"node {index}", free) for index, free in enumerate(self.nodes_free)]

    def place(self, cpus: int, pick: Callable[..., Node | None], is_wanted: Callable[[], bool]) -> LossyHost:
        node = pick(self.nodes(), set())
        assert node is not None
        host = LossyHost(self, len(self.hosts), node)
        self.hosts.append(host)
        return host

    def leave(self) -> None:
        self.has_left = True

    def disconnect(self) -> None:
        pass

    @property
    def struck(self) -> list[str]:
        """Return the faults that have struck, of all hosts."""
        return [fault for host in self.hosts for _, fault in host.struck]


class Clusters:
    """Has clusters by address: ``RayOptions(address=…)`` says which."""

    def __init__(self) -> None:
        self._known: dict[str, LocalCluster] = {}

    def __call__(self, options: RayOptions) -> LocalCluster:
        """Stand in for the class ``Cluster``."""
        return self._known[str(options.address)]

    def make(
        self, schedule: Schedule = faultless, *, suspect_after: float = 30.0, hosts: int = 1, **options: Any
    ) -> Any:
        """Return a cluster and the options of faces that are to run on it."""
        address = f"cluster {len(self._known)}"
        ours = {name: options.pop(name) for name in ("nodes_free",) if name in options}
        cluster = self._known[address] = LocalCluster(schedule, **ours)
        return cluster, RayOptions(address=address, suspect_after=suspect_after, hosts=hosts, **options)

    def forget(self) -> None:
        """Let go of all hosts, and of the bells of theirs."""
        for cluster in self._known.values():
            cluster.hosts.clear()
        self._known.clear()

    def assert_all_ended(self) -> None:
        """Fail unless each fleet has ended its hosts, and let go of its cluster."""
        until = time.monotonic() + STUCK_AFTER
        for address, cluster in self._known.items():
            for host in cluster.hosts:
                assert host.ended.wait(max(0.0, until - time.monotonic())), f"{address}: a host was not ended"
            while cluster.hosts and not cluster.has_left:
                assert time.monotonic() < until, f"{address}: its fleet has not ended"
                time.sleep(0.01)
