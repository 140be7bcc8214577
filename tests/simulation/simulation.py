"""A world without processes: real faces, supervisors, journals, codecs and hosts over simulated channels.

A :class:`Simulation` takes the place of the monitor. Each of its processes is a real ``Host`` in this one, which
executes a request when the trainer waits for it, and dies, hangs or answers nonsense where the schedule of faults says
so. A forked snapshot is a second host that executes the same requests up to the fork. The clock is virtual: a hang
takes the time of its deadline, and no more than a line of Python.

Runs are deterministic: the same program with the same faults sees the same to the bit.
"""

from __future__ import annotations

import contextlib
import errno
import math
import pickle
import random
import select
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kit import CounterEnv
from multienv._engine import cores
from multienv._engine.asking import fanout, in_flight, members
from multienv._engine.building import building
from multienv._engine.interrupts import interruptible
from multienv._engine.processes import launcher
from multienv._engine.processes.channel import Channel, Fate, Gone
from multienv._engine.processes.watch import Watched
from multienv._engine.recovery import hot_path
from multienv._engine.threads import Bell, Pool
from multienv._engine.wire.banks import STEP, STEPPED, split_entries
from multienv._engine.wire.messages import Build
from multienv._engine.wire.segment import (
    ASKED_OUTSIDE,
    BUSY,
    PID,
    REPLAYING,
    REPLY,
    REPLY_PAYLOAD,
    REQUEST,
    SLOT,
    SNAPSHOT,
    WORKER_SLEEPS,
    Segment,
)
from multienv._engine.worker import env_group, host
from multienv._engine.worker import rollouts as worker_rollouts
from multienv._engine.worker.host import Host
from multienv.events import LossCause

KILLED, CRASHED = -9, -11
# What happens where an env is called.
IN_ENV = ("in the env", "raises")
# What may happen at each kind of event.
POINTS: dict[str, tuple[str, ...]] = {
    "launch": ("no descriptors", "stillborn", "monitor ends"),
    "build": ("in the env", "raises", "edited", "hang", "garbage"),
    "request": (
        "before",
        "in the env",
        "executed",
        "torn",
        "garbage",
        "replied",
        "hang",
        "late",
        "interrupted before",
        "interrupted after",
    ),
    "ask": ("before", "executed", "garbage", "hang"),
    "replay": ("in the env", "raises"),
    "wake": ("skipped", "no descriptors", "dead", "mute"),
}


class Fork(NamedTuple):
    """A copy of a process: the last request executed in it, how many there were, and entries of a replay after them."""

    number: int
    past: int
    entries: int = 0


NO_FORK = Fork(0, 0)


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Args:
        worker: Index of the worker.
        event: A key of :data:`POINTS`. A *request* is the caller's, an *ask* is the trainer's own (a replay, a
            snapshot to keep), a *replay* is one request inside a replay.
        nth: Which of them, from 1. A request that is asked again in another process is the same one.
        point: What happens, one of ``POINTS[event]``.
        slot: Of the env in which it happens, for those of ``IN_ENV``.
        code: Exit code.
        times: How many processes it strikes.
    """

    worker: int
    event: str
    nth: int
    point: str
    slot: int = 0
    code: int = KILLED
    times: int = 1


class SimulatedDeath(BaseException):
    """Ends a simulated process from inside an env."""


_running = threading.local()


class SimulatedEnv(CounterEnv):
    """Counts, draws, and says in its infos who it is, so that another env's reply shows.

    Args:
        who: Its index.
        chance: Draw from what no process has in common with another: it cannot be replayed.
        horizon: Steps in an episode.
        forgets: Remember nothing of earlier episodes.
        shows_after: From this number of steps on, counted since the construction, what it draws depends on that number:
            it remembers something across resets, seeded ones too. ``None``: that never shows.
        asks_after: From the step after so many steps of an episode on, each asks a server, which counts them; only the
            reward of the last step shows the count. ``None``: it asks nothing.
    """

    def __init__(
        self,
        who: int,
        chance: bool = False,
        horizon: int = 5,
        forgets: bool = False,
        shows_after: int | None = None,
        asks_after: int | None = None,
    ) -> None:
        super().__init__(horizon=horizon, count_episodes=not forgets)
        self.asks_after, self.own_server = asks_after, Server()
        self.shows_after, self.steps_ever = shows_after, 0
        self.who = who
        _strike()
        process = getattr(_running, "process", None)
        # No generator, which a replay would put back.
        self._chance = process.nonce * 0.1234567 if chance and process is not None else 0.0

    def step(self, action: Any) -> Any:
        _strike()
        self.steps_ever += 1
        observation, reward, terminated, truncated, info = super().step(action)
        if self.asks_after is not None and self.episode_step > self.asks_after:
            asked = self._ask_server("step")
            reward += 100.0 * asked * (terminated or truncated)
        return observation, reward, terminated, truncated, info

    def reset(self, **options: Any) -> Any:
        _strike()
        self.first_draw = -1.0
        if self.asks_after is not None:
            self._ask_server("reset")
        return super().reset(**options)

    def poke(self, amount: float = 0.0) -> int:
        _strike()
        return super().poke(amount)

    def ask(self) -> int:
        """Return who this is: a call that changes nothing."""
        _strike()
        return self.who

    def _ask_server(self, what: str) -> int:
        process = getattr(_running, "process", None)
        return self.own_server.answer(self.who, what) if process is None else process.ask_server(self.who, what)

    def _next_draw(self) -> float:
        shown = 0.01 * self.steps_ever if self.shows_after is not None and self.steps_ever >= self.shows_after else 0.0
        return (super()._next_draw() + self._chance + shown) % 1

    def _info(self) -> dict[str, Any]:
        if self.first_draw < 0:
            self.first_draw = self._draw
        episode = self.episode_number if self.count_episodes else int(1e6 * self.first_draw)
        info: dict[str, Any] = {"who": self.who, "nonce": self.episode_step + 100 * episode}
        return info if self.episode_step != 2 else {**info, "words": f"env {self.who}"}


class Server:
    """Counts, for each env, what it was asked since a reset: no process that dies or is woken takes that back."""

    def __init__(self) -> None:
        self._asked: Counter[int] = Counter()

    def answer(self, who: int, what: str) -> int:
        """Return how often an env has asked since its reset."""
        self._asked[who] = 0 if what == "reset" else self._asked[who] + 1
        return self._asked[who]


def is_in_process() -> bool:
    """Tell whether this thread does what a process of its own would do: no Ctrl-C can come in there."""
    return bool(getattr(_running, "depth", 0))


@contextlib.contextmanager
def in_process(simulation: Simulation) -> Iterator[None]:
    """Execute a block as a process would, one at a time."""
    with simulation.lock:
        _running.depth = getattr(_running, "depth", 0) + 1
        try:
            yield
        finally:
            _running.depth -= 1


def _strike() -> None:
    process = getattr(_running, "process", None)
    if process is not None:
        process.call_env()


@dataclass
class Simulation:
    """The processes, the clock and the schedule of a run.

    Args:
        faults: What goes wrong.
        eager: A request is executed when it is rung for, not only when it is waited for.
        rates: How often an env crashes and how often it hangs by itself, by chance, of all its calls.
        dice: Say when.

    Attributes:
        struck: The faults that happened, in order, with repetitions.
        events: How often each event came: (worker, event) → number.
        in_threads: Requests that a thread of the trainer waits for, where no Ctrl-C can come: worker, which one.
        called: Events in which an env was called: worker, event, which one, slot.
        live: Channels that are not released, and not forgotten, which releases them.
        edited: Of each worker, for each process that was asked to build: the code was edited for it.
        server: What envs ask.
    """

    faults: tuple[Fault, ...] = ()
    eager: bool = False
    rates: tuple[float, float] = (0.0, 0.0)
    dice: random.Random = field(default_factory=random.Random)
    now: float = 1000.0
    struck: list[Fault] = field(default_factory=list)
    events: Counter[tuple[int, str]] = field(default_factory=Counter)
    in_threads: set[tuple[int, int]] = field(default_factory=set)
    called: set[tuple[int, str, int, int]] = field(default_factory=set)
    live: weakref.WeakSet[SimulatedChannel] = field(default_factory=weakref.WeakSet)
    kept: dict[int, tuple[SimulatedProcess, Fork]] = field(default_factory=dict)
    edited: dict[int, list[bool]] = field(default_factory=lambda: defaultdict(list))
    server: Server = field(default_factory=Server)
    lock: Any = field(default_factory=threading.RLock)
    workers: int = 0
    processes: int = 0
    waits: int = 0

    def clock(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def launcher(self, method: str, native_threads: Any, title: str, shared: Any, preload: Any) -> SimulatedLauncher:
        """Stand in for ``Launch``, of which there is one for each worker."""
        self.workers += 1
        return SimulatedLauncher(self, self.workers - 1)

    def count(self, worker: int, event: str) -> Fault | None:
        """Count an event; return the fault that strikes there."""
        self.events[worker, event] += 1
        return self.fault_at(worker, event)

    def fault_at(self, worker: int, event: str, slot: int | None = None) -> Fault | None:
        """Return the fault for the newest event of this kind, and note that it strikes."""
        nth = self.events[worker, event]
        for fault in self.faults:
            if (fault.worker, fault.event, fault.nth) == (worker, event, nth) and slot in (None, fault.slot):
                if (slot is None) == (fault.point in IN_ENV):
                    continue
                if fault.point.startswith("interrupted") and threading.current_thread() is not threading.main_thread():
                    continue
                if self.struck.count(fault) < fault.times:
                    self.struck.append(fault)
                    return fault
        return None

    def own_loss(self, worker: int, event: str, slot: int) -> Fault | None:
        """Return the crash or hang of the env's own that chance has struck with, if it has."""
        if not any(self.rates):
            return None
        die, (crashes, hangs) = self.dice.random(), self.rates
        if die >= crashes + hangs:
            return None
        point, code = ("in the env", CRASHED) if die < crashes else ("hang", KILLED)
        self.struck.append(Fault(worker, event, self.events[worker, event], point, slot, code))
        return self.struck[-1]

    @interruptible
    def wait_any(
        self,
        waiting: Sequence[tuple[SimulatedChannel, int]],
        until: float,
        bell: Bell | None = None,
        watched: Sequence[tuple[SimulatedChannel, int]] = (),
    ) -> list[int]:
        """Stand in for ``multienv._engine.processes.channel.wait_any``: let the first process that does not hang answer or die."""
        for index, (channel, number) in enumerate([*waiting, *watched]):
            channel.execute(number)
            if channel.answered(number) or channel.attend():
                return [index]
        assert until < math.inf, "a wait without an end for processes that hang"
        self.now = max(self.now, until)
        return []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Have faces that are made meanwhile use this simulation, and its clock."""
        kept = building.Launch, fanout.wait_any, time.monotonic, random.getstate(), np.random.get_state()
        processes = launcher._monitor, launcher._ordered, time.sleep, cores.current_core
        # Threads take their turns: what one worker's recovery shows of an env is known to the next one.
        pools = members.Pool, building.Pool
        watch, in_flight.Watch = in_flight.Watch, partial(SimulatedWatch, self)  # type: ignore[assignment, misc]
        members.Pool = building.Pool = OneByOne  # type: ignore[assignment, misc]
        stopwatch = time.perf_counter
        cores.current_core = partial(int, -1)  # workers are asked in their order, wherever this process runs
        building.Launch = self.launcher  # type: ignore[assignment, misc]
        fanout.wait_any = self.wait_any
        launcher._monitor = lambda ended=None: self  # type: ignore[assignment, misc]
        launcher._ordered = lambda client, order, shared: order.launch()  # type: ignore[assignment]
        time.sleep = self.sleep  # type: ignore[assignment]
        for module in (time, fanout, in_flight, hot_path):
            module.monotonic = self.clock  # type: ignore[attr-defined]
        for module in (time, env_group, host, worker_rollouts):
            module.perf_counter = self.clock  # type: ignore[attr-defined]
        try:
            yield
        finally:
            building.Launch, fanout.wait_any, clock, generator, legacy = kept  # type: ignore[misc]
            launcher._monitor, launcher._ordered, time.sleep, cores.current_core = processes
            members.Pool, building.Pool = pools  # type: ignore[misc]
            in_flight.Watch = watch  # type: ignore[misc]
            for module in (time, fanout, in_flight, hot_path):
                module.monotonic = clock  # type: ignore[attr-defined]
            for module in (time, env_group, host, worker_rollouts):
                module.perf_counter = stopwatch  # type: ignore[attr-defined]
            random.setstate(generator)
            np.random.set_state(legacy)


class OneByOne(Pool):
    """Makes the calls of all threads in the order in which they were begun."""

    busy = 0  # calls that have not ended, of all pools

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(1, name)

    def submit(self, call: Any, *args: Any) -> Any:  # type: ignore[override]
        OneByOne.busy += 1
        return super().submit(self._made, call, *args)

    @staticmethod
    def _made(call: Any, *args: Any) -> None:
        try:
            call(*args)
        finally:
            OneByOne.busy -= 1


class SimulatedWatch:
    """Stands in for ``multienv._engine.processes.watch.Watch``: while it waits, one process after the other answers or dies."""

    def __init__(self, simulation: Simulation, bell: Bell) -> None:
        self.simulation, self.bell, self.has_waited = simulation, bell, True
        self.channels: dict[int, SimulatedChannel] = {}
        self.known: dict[int, Any] = {}
        self.asked: dict[int, tuple[Any, int]] = {}

    def watched(self, members: Iterable[int]) -> Watched:
        return Watched(self.known, self.asked, False)

    def add(self, asked: Iterable[tuple[int, SimulatedChannel, int]]) -> None:
        for member, channel, number in asked:
            self.channels[member], self.known[member] = channel, channel.segment.words
            self.asked[member] = self.known[member], number

    def remove(self, member: int) -> None:
        self.asked.pop(member, None)
        self.known.pop(member, None)

    @interruptible
    def wait_for_answers(self, until: float, *, looks_for_ends: bool) -> tuple[list[int], list[int]]:
        answered, ended = self._sorted(self.asked)
        if answered or ended or until <= self.simulation.now:
            return answered, ended
        self.simulation.waits += 1
        members = list(self.asked)
        for turn in range(len(members)):
            member = members[(self.simulation.waits + turn) % len(members)]
            self.channels[member].execute(self.asked[member][1])
            answered, ended = self._sorted([member])
            if answered or ended:
                return answered, ended
        while OneByOne.busy:  # a thread recovers another env, in true time
            if select.select([self.bell.descriptor], [], [], 0.01)[0]:
                self.bell.silence()
                return [], []
        self.simulation.now = max(self.simulation.now, until)  # they hang
        return [], []

    def _sorted(self, members: Iterable[int]) -> tuple[list[int], list[int]]:
        answered, ended = [], []
        for member in list(members):
            channel, (_, number) = self.channels[member], self.asked[member]
            if channel.answered(number):
                answered.append(member)
            elif channel.attend():
                ended.append(member)
                del self.known[member]
            else:
                continue
            del self.asked[member]
        return answered, ended

    def end(self) -> None:
        pass


class SimulatedLauncher:
    """Makes the processes of one worker."""

    def __init__(self, simulation: Simulation, worker: int) -> None:
        self.simulation, self.worker = simulation, worker
        self.number = 0  # of the caller's newest request, in whatever process
        self.is_answered = True

    def start(self) -> Channel:
        self.simulation.events[self.worker, "launch"] += 1
        return launcher._launched(self)  # type: ignore[arg-type, return-value]

    def launch(self) -> Channel:
        """Launch a process, as the present monitor does it."""
        simulation = self.simulation
        with in_process(simulation):
            fault = simulation.fault_at(self.worker, "launch")
            if fault is not None and fault.point == "monitor ends":
                raise OSError(errno.EPIPE, "Broken pipe")
            if fault is not None and fault.point == "no descriptors":
                raise OSError(errno.EMFILE, "Too many open files")
            process = SimulatedProcess(self)
            if fault is not None:
                process.end(fault.code)
            return SimulatedChannel(process)

    def wake_kept(self, token: int) -> Channel | None:
        kept = self.simulation.kept.get(token)
        with contextlib.suppress(OSError):
            return None if kept is None else self.wake(*kept)
        return None

    def free(self, token: int) -> None:
        self.simulation.kept.pop(token, None)

    def close(self) -> None:
        pass

    def wake(self, parent: SimulatedProcess, fork: Fork) -> Channel | None:
        """Return a process that has executed what its parent had when it forked."""
        simulation = self.simulation
        with in_process(simulation):
            fault = simulation.count(self.worker, "wake")
            point = "" if fault is None else fault.point
            if point == "skipped":
                return None
            if point == "no descriptors":
                raise OSError(errno.EMFILE, "Too many open files")
            process = SimulatedProcess(self, parent, fork)
            if point == "dead":
                process.end(KILLED)
            if point == "mute":
                process.segment.words[REPLY] = 0
                process.is_mute = True
            return SimulatedChannel(process)


class SimulatedProcess:
    """A host, what it was asked, and how it ends.

    Args:
        launcher: Of its worker.
        parent: The process that this one is a forked copy of.
        fork: When the copy was made.
    """

    def __init__(
        self, launcher: SimulatedLauncher, parent: SimulatedProcess | None = None, fork: Fork = NO_FORK
    ) -> None:
        simulation = self.simulation = launcher.simulation
        self.launcher = launcher
        simulation.processes += 1
        self.pid = 5_000_000 + simulation.processes
        self.nonce = simulation.processes if parent is None else parent.nonce
        self.segment = Segment(-1)
        self.segment.words[PID] = self.pid
        self.segment.words[WORKER_SLEEPS] = int(simulation.eager)
        self.host = Host(self.segment, on_build=self._note_build, on_keep=self._keep, code=self._code)
        self.past: list[tuple[int, bytes, bytes]] = []  # requests executed: number, bank, payload
        self.answers: list[int] = []  # of the server
        self.begun: int | None = None
        self.snapshot: Fork | None = None
        self.every = -1
        self.tried = 0  # the last request when a snapshot was due
        self.has_asked = False  # the server, since then
        self.code: int | None = None
        self.is_mute = False
        self.is_late = False  # mute, and writes its reply when it has been given up
        self.is_copied = False
        if parent is not None:
            self.is_copied = True  # no fault strikes while the past is repeated, and the server is not asked again
            self.known = iter(parent.answers)
            for past in parent.past[: fork.past]:
                self._repeat(*past)
            if fork.entries:  # it was made in a replay
                number, bank, payload = parent.past[fork.past]
                whole = pickle.loads(payload)
                entries = list(split_entries(whole.entries, self.segment.layout.end))[: fork.entries]
                first = b"".join(entry.packed() for entry in entries)
                self._repeat(number, bank, pickle.dumps(replace(whole, entries=first, every=0)))
                came = pickle.loads(self.segment.read_reply_payload(number))
                self.host.came = [entry.packed() for entry in split_entries(came, self.segment.layout.end)]
            self.is_copied = self.has_asked = False
            # A woken copy takes another snapshot in its place.
            self.tried, self.snapshot = fork.number, Fork(fork.number, len(self.past))
            self.segment.words[REPLY] = self.segment.words[REQUEST] = fork.number
            self.segment.words[SNAPSHOT] = fork.number if self.every > 0 else 0

    def end(self, code: int) -> None:
        """Be dead from now on."""
        if self.code is None:
            self.code = code

    def _note_build(self, build: Build) -> None:
        self.every = build.snapshots

    def _code(self, began: int) -> bytes:
        is_edited = self.simulation.edited[self.launcher.worker][-1]
        return pickle.dumps(("here", {"env.py": (int(is_edited), 1)}))

    def _keep(self, number: int, token: int) -> str:
        fork = Fork(number, len(self.past) - 1, self.segment.words[REPLAYING])  # without the request to keep it
        if token and not self.is_copied:
            self.simulation.kept[token] = self, fork
        elif not self.is_copied:
            self.tried, self.snapshot, self.segment.words[SNAPSHOT] = number, fork, number
        return ""

    def _repeat(self, number: int, bank: bytes, payload: bytes) -> None:
        side = self.segment.banks[number & 1]
        side.view[: len(bank)] = bank
        self.segment.write_request_payload(number, payload)
        self._handle(number)
        self.past.append((number, bank, payload))

    def execute(self, number: int) -> None:
        """Execute a request, or what the schedule has in its place. Raises KeyboardInterrupt where it says so."""
        words, launcher = self.segment.words, self.launcher
        if self.code is not None or self.is_mute or self.begun == number or words[REPLY] == number:
            return
        fault = self._fault_of(number)
        point = "" if fault is None else fault.point
        if point == "interrupted before":
            raise KeyboardInterrupt
        self.begun = number
        if point in ("hang", "late"):
            self.is_mute = True
            self.is_late = point == "late"
            return
        if fault is not None and point == "before":
            self.end(fault.code)
            return
        side = self.segment.banks[number & 1]
        self.past.append((number, bytes(side.view), self.segment.read_request_payload(number)))
        try:
            rolled = self._handle(number)
        except SimulatedDeath:
            return
        if fault is not None and point == "torn" and side.view[2] == STEPPED:
            side.view[side.layout.rewards :] = bytes([0xA5]) * (len(side.view) - side.layout.rewards)
        is_row = side.view[2] == STEPPED
        if fault is not None and (point in ("executed", "torn") or (point == "garbage" and is_row)):
            self.end(fault.code)
            return
        if fault is not None and point == "garbage":
            side.view[2], words[REPLY_PAYLOAD + (number & 1)] = 0x7F, 0
            self.segment.write_reply_payload(number, b"\x80garbage")
        words[REPLY] = number
        if number > 0:
            launcher.is_answered = launcher.is_answered or point != "garbage"
            last = number if rolled is None else rolled[0]
            if 0 < self.every <= last - self.tried and (side.view[0] == STEP or rolled is not None):
                self.snapshot = None if self.has_asked else Fork(last, len(self.past))
                words[SNAPSHOT] = 0 if self.has_asked else last
                self.tried, self.has_asked = last, False
        if fault is not None and point == "replied":
            self.end(fault.code)
        if point == "interrupted after":
            raise KeyboardInterrupt

    def run_late(self) -> None:
        """Write the reply after the process has been given up."""
        if self.is_late and self.begun is not None:
            self.is_late = False
            with contextlib.suppress(SimulatedDeath):
                self._handle(self.begun)
                self.segment.words[REPLY] = self.begun

    def _fault_of(self, number: int) -> Fault | None:
        launcher, simulation = self.launcher, self.simulation
        worker = launcher.worker
        if number < 0:
            is_build = not any(one[0] < 0 for one in self.past)
            fault = simulation.count(worker, "build" if is_build else "ask")
            if is_build:
                simulation.edited[worker].append(fault is not None and fault.point == "edited")
            return fault
        if number != launcher.number or launcher.is_answered:
            launcher.number, launcher.is_answered = number, False
            fault = simulation.count(worker, "request")
            if threading.current_thread() is not threading.main_thread():
                simulation.in_threads.add((worker, simulation.events[worker, "request"]))
        else:
            fault = simulation.fault_at(worker, "request")
        if fault is None or fault.point in ("interrupted before", "interrupted after", "replied"):
            launcher.is_answered = fault is None or fault.point != "interrupted before"
        return fault

    def call_env(self) -> None:
        """Note that an env is being called; end here if the schedule says so."""
        if self.is_copied:
            return
        words, worker, simulation = self.segment.words, self.launcher.worker, self.simulation
        slot, fault = words[SLOT] - 1, None
        event = "request" if words[BUSY] > 0 else "build" if self.host.handle == self.host._handle else "ask"
        if words[REPLAYING]:
            event = "replay"
            if slot == 0:
                simulation.events[worker, event] += 1
        if IN_ENV[0] in POINTS[event]:
            simulation.called.add((worker, event, simulation.events[worker, event], slot))
            fault = simulation.fault_at(worker, event, slot) or simulation.own_loss(worker, event, slot)
        if fault is not None and fault.point == "raises":
            raise RuntimeError("this env raises now and then")
        if fault is not None:
            if not words[REPLAYING]:
                self.launcher.is_answered = False
            if fault.point == "hang":
                self.is_mute = True
            else:
                self.end(fault.code)
            raise SimulatedDeath

    def ask_server(self, who: int, what: str) -> int:
        """Ask the server, and note that as the audit hook of a worker does; a copy has the answers in its memory."""
        if self.segment.words[BUSY] > 0:
            self.segment.words[ASKED_OUTSIDE], self.has_asked = self.segment.words[BUSY], True
        self.answers.append(next(self.known) if self.is_copied else self.simulation.server.answer(who, what))
        return self.answers[-1]

    def _handle(self, number: int) -> Any:
        outer, _running.process = getattr(_running, "process", None), self
        try:
            return self.host.handle(number)
        finally:
            _running.process = outer


class SimulatedChannel(Channel):
    """The trainer's end of a simulated process."""

    def __init__(self, process: SimulatedProcess) -> None:
        self.spins = int(process.simulation.eager)  # a request is executed in wait(), or before
        self.process = process
        self.segment = process.segment
        self._gone: Callable[[], Gone] | None = None
        process.simulation.live.add(self)

    @property
    def pid(self) -> int | None:
        return self.process.pid

    def ring(self, number: int) -> None:
        self.segment.words[REQUEST] = number
        if self.process.simulation.eager:
            self.execute(number)

    def execute(self, number: int) -> None:
        """Have the process do what it was asked."""
        with in_process(self.process.simulation):
            self.process.execute(number)

    @interruptible
    def wait(self, number: int, until: float | None) -> bool:
        if self._gone is None:
            self.execute(number)
        words, process = self.segment.words, self.process
        if words[REPLY] == number:
            return True
        if self._gone is not None or process.code is not None:
            raise self._lose("died", "")
        assert process.is_mute, f"request {number} was waited for and not published: {words[REQUEST]}"
        assert until is not None, "a wait without an end for a process that hangs"
        process.simulation.now = max(process.simulation.now, until)
        return False

    def descriptors(self) -> tuple[int, ...]:
        return ()

    def attend(self) -> bool:
        return self._gone is not None or self.process.code is not None

    def stack(self) -> str:
        return "stack of a simulated process" if self.process.code is None else ""

    def _lose(self, cause: LossCause, detail: str) -> Gone:
        if self._gone is None:
            words, process = self.segment.words, self.process
            fate = Fate(process.code, snapshot=None if process.snapshot is None else process.snapshot.number)
            known = words[BUSY], words[SLOT] - 1, words[REPLAYING] - 1
            self._gone = lambda: Gone(
                cause, fate, process.pid, number=known[0], slot=known[1], replaying=known[2], detail=detail
            )
        return self._gone()

    def kill(self, *, cause: LossCause = "died", stack: bool = False, detail: str = "") -> Gone:
        self.process.end(KILLED)
        gone = self._lose(cause, detail)
        with in_process(self.process.simulation):
            self.process.run_late()
        return gone

    def wake(self) -> Channel | None:
        process = self.process
        return None if process.snapshot is None else process.launcher.wake(process, process.snapshot)

    def close(self, timeout: float, *, keep_memory: bool = False) -> bool:
        self.kill()
        self.release(keep_memory=keep_memory)
        return False

    def release(self, *, keep_memory: bool = False) -> None:
        self.process.end(KILLED)
        self.process.simulation.live.discard(self)
