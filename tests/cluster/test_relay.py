"""Relay, courier and channel without Ray: calls that fail or come late, and hosts that fall silent or die.

All but Ray is real: see ``lossy_host``.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from cluster.lossy_host import (
    HARMLESS,
    Clusters,
    diced,
    every,
    silent_from,
)
from cluster.relayed_envs import PictureEnv, WritingEnv
from kit import (
    CounterEnv,
    Fault,
    FaultyEnv,
    ForkingPolicy,
    SlowEnv,
    assert_same_trajectory,
    first_difference,
    is_alive,
    kill_worker,
    rollout,
)
from kit.gates import WAIT, GateEnv
from kit.interruption import Ledger, every_place
from kit.side_by_side import run_side_by_side
from kit.trainer_process import STUCK_AFTER, becomes_true
from multienv import (
    Deadlines,
    Recovery,
    RestartPolicy,
)
from multienv._engine.cluster import courier, fleet, frames, relay
from multienv._engine.cluster.courier import PULSE_PATIENCE, Courier
from multienv._engine.cluster.frames import Frame
from multienv._engine.cluster.relay import Relay
from multienv.envs.ray_env import RayEnv
from multienv.errors import ClosedError, NoCapacityError, WorkerHungError, WorkerLostError
from multienv.testing import worker_pids
from multienv.vector.ray_vector_env import RayVectorEnv

pytestmark = pytest.mark.usefixtures("monitor_stays")
HOLD = 0.1
# Seconds of silence after which a host that is silent for good is given up.
STRICT = 0.5
ACTIONS = [0, 1, 2, 1, 2, 0, 1, 1, 2, 0, 2, 2, 1, 0]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Have calls return after a tenth of a second, and no lost worker told of in the report."""
    monkeypatch.setattr(relay, "HOLD", HOLD)
    monkeypatch.setattr(courier, "HOLD", HOLD)
    with caplog.at_level("CRITICAL", "multienv"):
        yield


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clusters]:
    made = Clusters()
    monkeypatch.setattr(fleet, "Cluster", made)
    yield made
    gc.collect()
    made.assert_all_ended()
    made.forget()


def assert_as_if_local(env: Any, **counter: Any) -> None:
    """Fail unless the env does what a `CounterEnv` in this process does, to the bit."""
    assert_same_trajectory(rollout(env, ACTIONS, seed=5), rollout(CounterEnv(**counter), ACTIONS, seed=5))


def test_each_worker_on_a_node_has_its_own_variables_and_so_have_its_replacements(clusters: Clusters) -> None:
    def build() -> Any:
        env = CounterEnv()
        env.device = os.environ["DEVICE"]  # type: ignore[attr-defined]
        return env

    _, options = clusters.make()
    dealt = {"envs_per_worker": 1, "worker_env": lambda worker: {"DEVICE": str(worker)}}
    with RayVectorEnv([build] * 2, ray=options, restart=RestartPolicy(snapshots=False), **dealt) as envs:
        envs.reset(seed=0)
        for losses in range(2):
            if losses:
                kill_worker(envs, 1)
            envs.step([0, 0])
            assert envs.get_attr("device") == ("0", "1")
        assert [one.exact_recoveries for one in envs.statistics()] == [0, 1]


# --- calls ------------------------------------------------------------------------------


def test_pending_request_makes_about_one_call_in_the_time_that_a_call_waits(clusters: Clusters, tmp_path: Path) -> None:
    """No loop runs hot on either side while an env is slow."""
    cluster, options = clusters.make(every(4, "late"))
    with RayEnv(partial(GateEnv, tmp_path, horizon=10), ray=options) as env:
        env.reset(seed=1)
        before = cluster.hosts[0].calls
        env.step_async(WAIT)
        time.sleep(5 * HOLD)
        assert cluster.hosts[0].calls - before <= 20
        (tmp_path / "gate").touch()
        env.step_wait()


@pytest.mark.parametrize("fault", ["lost", "unanswered"])
def test_failed_call_loses_its_host_and_each_step_counts_once(clusters: Clusters, fault: str) -> None:
    events: list[Any] = []
    cluster, options = clusters.make(lambda host, call, sent: fault if (host, call) == (0, 7) else "")
    with RayEnv(partial(CounterEnv, horizon=5), ray=options, hooks=[events.append]) as env:
        assert_as_if_local(env, horizon=5)
    assert [host.name for host in cluster.hosts] == ["node 0", "node 1"]
    assert "lost (ConnectionError: " in events[0].detail


# --- hosts that are lost ------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [1, 7])
def test_silent_host_is_given_up_and_its_env_brought_back_on_the_next_one(clusters: Clusters, first: int) -> None:
    events: list[Any] = []
    cluster, options = clusters.make(silent_from(first), suspect_after=STRICT)
    began = time.monotonic()
    with RayEnv(partial(CounterEnv, horizon=5), ray=options, hooks=[events.append]) as env:
        assert_as_if_local(env, horizon=5)
    assert time.monotonic() - began < 25.0
    assert [host.name for host in cluster.hosts[:2]] == ["node 0", "node 1"]
    assert "has been silent for" in events[0].detail
    assert "node 0" in events[0].detail


@pytest.mark.ci
def test_host_without_a_sign_of_life_is_lost_long_before_one_that_only_owes_an_answer(clusters: Clusters) -> None:
    """A call may be long under way because much is carried: silence alone says little."""
    waited, told = {}, {}
    for fault in ("silent", "swallowed"):
        events: list[Any] = []
        schedule = (
            silent_from(7) if fault == "silent" else lambda host, call, _: "swallowed" if host + call == 7 else ""
        )
        _, options = clusters.make(schedule, suspect_after=6.0)
        with RayEnv(partial(CounterEnv, horizon=5), ray=options, hooks=[events.append]) as env:
            began = time.monotonic()
            assert_as_if_local(env, horizon=5)
            waited[fault] = time.monotonic() - began
        detail = events[0].detail
        assert ("gave no sign of life" in detail) is (fault == "silent")
        told[fault] = float(detail.partition("silent for ")[2].split()[0])
    assert told["silent"] < PULSE_PATIENCE + 2.0  # what recovery takes then is the machine's
    assert waited["silent"] < 6.0 < waited["swallowed"]


def test_trainer_that_was_stopped_takes_neither_host_nor_head_for_silent(clusters: Clusters, tmp_path: Path) -> None:
    """As Ctrl-Z and ``fg`` have it."""
    cluster, options = clusters.make(suspect_after=1.5)
    with RayEnv(partial(GateEnv, tmp_path, horizon=10), ray=options) as env:
        env.reset(seed=5)
        env.step_async(WAIT)
        me = os.getpid()
        subprocess.run(["sh", "-c", f"(sleep 2.5; kill -CONT {me}) & kill -STOP {me}"], check=True)
        time.sleep(3 * HOLD)
        (tmp_path / "gate").touch()
        env.step_wait()
        assert_as_if_local(env)
        assert env.statistics().losses == 0
    assert len(cluster.hosts) == 1


def test_new_face_waits_for_the_cpus_of_one_that_was_closed_just_now(clusters: Clusters) -> None:
    cluster, options = clusters.make(nodes_free=(0, 0))
    threading.Timer(0.3, setattr, (cluster, "nodes_free", (0, 2))).start()
    with RayEnv(CounterEnv, ray=options) as env:
        assert_as_if_local(env)
    _, options = clusters.make(nodes_free=(0, 0), placement_timeout=0.1)
    with pytest.raises(NoCapacityError):
        RayEnv(CounterEnv, ray=options)


def test_host_that_cannot_be_made_for_a_reason_without_words_ends_its_channels(clusters: Clusters) -> None:
    def connect(is_wanted: Any) -> Any:
        raise TimeoutError

    carrier = Courier(connect, suspect_after=1.0)
    carrier.join(STUCK_AFTER)
    assert "TimeoutError" in carrier.lost


# --- workers that are lost ------------------------------------------------------------------------------


def test_replay_is_bounded_by_the_time_of_resets_and_begins_where_the_worker_told_the_generators(
    clusters: Clusters,
) -> None:
    events: list[Any] = []
    _, options = clusters.make()
    policy = RestartPolicy(snapshots=False, replay_limit=2.0)  # on a busy machine, two resets take longer, too
    twin = CounterEnv(horizon=4, count_episodes=False)
    env_fn = partial(SlowEnv, reset_seconds=0.2, horizon=4, count_episodes=False)
    with RayEnv(env_fn, ray=options, restart=policy, hooks=[events.append]) as env:
        env.reset(seed=5)
        twin.reset(seed=5)
        for episode in range(14):
            if episode:
                assert np.array_equal(env.reset()[0], twin.reset()[0])
            for step in range(4):
                if (episode, step) == (13, 2):
                    kill_worker(env)
                assert first_difference(env.step(step)[:4], twin.step(step)[:4]) is None
    (recovery,) = [event for event in events if isinstance(event, Recovery)]
    assert recovery.outcome == "replayed"
    assert recovery.replayed <= 2 * 5


def test_stale_answer_of_a_woken_snapshot_is_not_taken_for_that_to_a_later_request(clusters: Clusters) -> None:
    """It arrives twice, the second time after the snapshot was asked for more."""
    told: list[Any] = []
    _cluster, options = clusters.make()
    with RayEnv(partial(CounterEnv, horizon=None), ray=options, restart=ForkingPolicy(snapshot_every=1)) as env:
        env.reset(seed=5)
        env.step(1)
        env.step(1)
        kill_worker(env)
        env.step(1)
        channel = env._supervisor.channel
        assert channel is not None
        before = channel.segment.words[8]
        words = bytes(8 * 8)
        channel.hear_answer(before - 1, words, bytes(16), b"", b"")  # type: ignore[attr-defined]
        assert channel.segment.words[8] == before
        told.append(env.step(1)[0][0])
    assert told == [4]


def test_trainer_learns_that_an_env_has_asked_outside_after_its_snapshot(clusters: Clusters) -> None:
    events: list[Any] = []
    _, options = clusters.make()
    env_fn = partial(WritingEnv, horizon=None)
    with RayEnv(env_fn, ray=options, restart=ForkingPolicy(snapshot_every=4), hooks=[events.append]) as env:
        env.reset(seed=5)
        for step in range(6):
            if step == 5:
                told = env.statistics()
                assert (told.snapshots, told.no_snapshots) == (1, ""), "no snapshot was due since the env asked"
                kill_worker(env)
            assert env.step(1)[0][0] == step + 1
    (recovery,) = [event for event in events if isinstance(event, Recovery)]
    assert (recovery.outcome, recovery.method) == ("exact", "journal")


def test_kill_at_a_deadline_is_always_told_as_a_hang(clusters: Clusters) -> None:
    """The thread that waits for answers sees the end of the process, too: it must not tell it as a death."""
    _, options = clusters.make()
    for _ in range(4):
        hang = partial(FaultyEnv, fault=Fault("hang", "step"))
        policy = RestartPolicy(on_timeout="raise")
        with RayEnv(hang, ray=options, deadlines=Deadlines(step=0.4), restart=policy) as env:
            env.reset(seed=1)
            with pytest.raises(WorkerLostError, match="_end_or_hang") as caught:
                env.step(1)
            assert isinstance(caught.value, WorkerHungError)
            del caught


# --- much data ----------------------------------------------------------------------------------------


def test_large_observations_are_right_though_calls_come_late(clusters: Clusters) -> None:
    cluster, options = clusters.make(lambda host, call, sent: HARMLESS[call // 2 % 2] if call % 2 else "")
    env_fns = [partial(PictureEnv, side=1000, horizon=4)] * 4
    with RayVectorEnv(env_fns, ray=options, envs_per_worker=2) as envs, closing(SyncVectorEnv(env_fns)) as twin:
        run_side_by_side(envs, twin, 20)
        assert [one.restarts for one in envs.statistics()] == [0] * 2
    assert {*cluster.struck} == {*HARMLESS}
    assert len(cluster.hosts) == 1


# --- Ctrl-C ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["", "late"])
def test_interrupted_step_loses_nothing(clusters: Clusters, fault: str) -> None:
    """At places of the trainer's own code, one after the other, in a step and in the next one."""
    cluster, options = clusters.make(every(5, fault))
    ledger, fired = Ledger(horizon=None), 0
    with RayEnv(partial(CounterEnv, horizon=None), ray=options) as env:
        ledger.reset(env.reset(seed=3), 3)
        for interruption in every_place(stride=3):
            given = interruption.place % 3
            with interruption:
                ledger.step(env.step(given), [given])
            fired += interruption.fired
            if interruption.fired:
                # Whether it was asked or not: this call has its outcome, or takes the step.
                ledger.step(env.step(1), [given, 1])
        statistics = env.statistics()
        assert statistics.exact_recoveries == statistics.losses < fired, "only where it was being sent"
    assert fired > 8
    assert len(cluster.hosts) == 1


def test_interrupted_launch_leaves_no_host(clusters: Clusters) -> None:
    """At places of the trainer's thread, one after the other, while the host is made that it launches a worker on."""
    fired = 0
    for interruption in every_place(stride=2):
        _, options = clusters.make()
        shared = fleet.Fleet(options, 1)
        launcher = shared.launcher(0, "forkserver", 1, "")
        with interruption:
            launcher.start()
        fired += interruption.fired
        launcher.close()
    assert fired > 5


def test_launch_that_comes_after_the_hosts_were_told_to_end_makes_none(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the thread that told them gets no CPU after that: Ctrl-C may leave a launch that is still under way."""
    cluster, options = clusters.make()
    shared = fleet.Fleet(options, 1)
    launcher = shared.launcher(0, "forkserver", 1, "")

    def close_and_launch(close: Callable[[], None] = shared._watch.close) -> None:
        close()
        assert becomes_true(lambda: cluster.has_left)
        with contextlib.suppress(ClosedError):
            launcher.start()

    monkeypatch.setattr(shared._watch, "close", close_and_launch)
    launcher.close()
    assert not cluster.hosts


def test_interrupted_start_leaves_no_host(clusters: Clusters) -> None:
    """While a host is made, it is not yet known to those that would end it."""
    fired = 0
    for interruption in every_place(stride=257):
        _cluster, options = clusters.make()
        with interruption:
            env = RayEnv(CounterEnv, ray=options)
            env.close()
        fired += interruption.fired
        env = None  # type: ignore[assignment]
    assert fired > 2
    gc.collect()


# --- the end --------------------------------------------------------------------------------------------


def test_close_while_a_step_is_under_way(clusters: Clusters, tmp_path: Path) -> None:
    cluster, options = clusters.make()
    env = RayEnv(partial(GateEnv, tmp_path, horizon=10), ray=options).initialize()
    env.reset(seed=1)
    env.step_async(WAIT)
    began = time.monotonic()
    env.close()
    assert time.monotonic() - began < 20.0
    assert becomes_true(cluster.hosts[0].ended.is_set)


def test_close_of_an_env_whose_host_is_silent_is_bounded(clusters: Clusters) -> None:
    is_silent = threading.Event()
    schedule = lambda host, call, sent: "silent" if is_silent.is_set() else ""  # noqa: E731
    cluster, options = clusters.make(schedule, suspect_after=1.0)
    env = RayEnv(CounterEnv, ray=options, deadlines=Deadlines(close=1.0)).initialize()
    env.reset(seed=1)
    is_silent.set()
    env.step_async(1)
    began = time.monotonic()
    env.close()
    assert time.monotonic() - began < 20.0
    assert len(cluster.hosts) == 1


def test_dropped_envs_leave_no_process(clusters: Clusters) -> None:
    _, options = clusters.make()
    env = RayEnv(CounterEnv, ray=options).initialize()
    envs = RayVectorEnv([CounterEnv] * 2, ray=options, envs_per_worker=1)
    env.reset(seed=1)
    envs.reset(seed=1)
    envs.step_async(np.array([1, 1]))
    pids = [*worker_pids(env), *worker_pids(envs)]
    assert len(pids) == 3
    del env, envs
    gc.collect()
    assert becomes_true(lambda: not any(map(is_alive, pids)))


def test_closed_env_needs_no_collection_to_close_its_descriptors(clusters: Clusters) -> None:
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        cluster, options = clusters.make()
        with RayEnv(CounterEnv, ray=options) as env:
            env.reset(seed=1)
            env.step(1)
        assert cluster.hosts[0].ended.wait(STUCK_AFTER)
        cluster.hosts.clear()  # they have bells, too
        del env
        assert becomes_true(lambda: len(os.listdir("/proc/self/fd")) <= before)
    finally:
        gc.enable()


@pytest.mark.parametrize("close", [True, False])
def test_one_env_that_ends_while_it_answers_does_not_disturb_the_others(clusters: Clusters, close: bool) -> None:
    """Envs come and go on a host whose other env steps on; their memory is let go of while an answer arrives."""
    cluster, options = clusters.make()
    shared = fleet.Fleet(options, 2)
    shared.seat_workers(2)
    with RayEnv(partial(CounterEnv, horizon=None), ray=shared, env_index=0) as lasting:
        lasting.reset(seed=1)
        for turn in range(8):
            env = RayEnv(CounterEnv, ray=shared, env_index=1).initialize()
            env.reset(seed=1)
            env.step_async(1)
            if turn % 3:
                time.sleep(0.001 * turn)
            if close:
                env.close()
            del env
            assert lasting.step(1)[0][0] == turn + 1
        assert lasting.statistics().restarts == 0
    assert len(cluster.hosts) == 1


# --- chance ---------------------------------------------------------------------------------------------

PROGRAMS, LENGTH, THREADS = 48, 8, 8
RANDOM_FAULTS = (*HARMLESS, "lost", "swallowed", "unanswered", "silent")  # and workers are killed, and hosts die


class Played:
    """Plays programs, by seed, on one env at a time, against a `CounterEnv` in this process.

    Args:
        clusters: Where hosts come from.
        seed: Of the first program.
        programs: How many, one after the other, on one env.
    """

    def __init__(self, clusters: Clusters, seed: int, programs: int) -> None:
        self.seeds = range(seed, seed + programs)
        self.truncated = self.steps = 0
        self.kinds: set[str] = set()  # of requests, and of faults that struck
        self._clusters = clusters
        self.error: BaseException | None = None
        self.env: Any = None
        self.is_doomed = False

    def play(self) -> None:
        dice = random.Random(self.seeds[0])
        self.schedule = diced(self.seeds[0], 0.1, RANDOM_FAULTS)
        cluster, options = self._clusters.make(self._fault, suspect_after=1.5)
        seed = self.seeds[0]
        policy = ForkingPolicy(snapshot_every=dice.choice([0, 1, 3]), backoff=0.0)
        try:
            with RayEnv(partial(CounterEnv, horizon=7), ray=options, restart=policy) as env:
                self.env, self.twin = env, CounterEnv(horizon=7)
                for seed in self.seeds:
                    self._program(random.Random(seed))
        except BaseException as error:
            struck = [host.struck for host in cluster.hosts]
            self.error = AssertionError(f"program {seed} of {self.seeds}: {error!r}; faults: {struck}")
            self.error.__cause__ = error
        finally:
            self.kinds.update(cluster.struck)
            self.env = None  # the fleet knows the schedule, and its finalizer knows the fleet

    def _fault(self, host: int, call: int, sent: list[Frame]) -> str:
        if self.is_doomed:
            self.is_doomed = False
            return "dead"
        return self.schedule(host, call, sent)

    def _program(self, dice: random.Random) -> None:
        env, twin = self.env, self.twin
        kept: Any = None
        self._reset(dice.randrange(100))
        for _ in range(LENGTH):
            op = dice.choices(["step", "reset", "call", "kill", "keep", "restore", "die"], [12, 1, 2, 2, 1, 2, 0.3])[0]
            self.kinds.add(op)
            if op == "kill":
                with contextlib.suppress(ProcessLookupError):
                    kill_worker(env)
            elif op == "die":
                self.is_doomed = True
            elif op == "call":
                amount = dice.random()
                assert env.call("poke", amount) == twin.poke(amount)
            elif op == "keep":
                kept = env.snapshot(), copy.deepcopy(twin)
            elif op == "restore" and kept is not None:
                env.restore(kept[0])
                twin = self.twin = copy.deepcopy(kept[1])
            elif op == "reset" or not twin._running:
                self._reset(dice.choice([None, dice.randrange(100)]))
            else:
                self._step(dice.randrange(4))

    def _reset(self, seed: int | None) -> None:
        assert first_difference(self.env.reset(seed=seed)[0], self.twin.reset(seed=seed)[0]) is None

    def _step(self, action: int) -> None:
        seen = self.env.step(np.int64(action))
        self.steps += 1
        if seen[3] and "multienv" in seen[4] and "truncat" in str(seen[4]["multienv"]):  # honest: it says so
            self.truncated += 1
            self._reset(self.steps)
            return
        assert first_difference(tuple(seen[:4]), tuple(self.twin.step(np.int64(action))[:4])) is None


def play(clusters: Clusters, first: int, programs: int) -> list[Played]:
    each = programs // THREADS
    played = [Played(clusters, first + turn * each, each) for turn in range(THREADS)]
    threads = [threading.Thread(target=one.play) for one in played]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in played:
        if one.error is not None:
            raise one.error
    return played


def test_random_programs_on_random_hosts_are_exact(clusters: Clusters) -> None:
    played = play(clusters, 200, PROGRAMS)  # in these programs each fault strikes five times or more
    assert sum(one.truncated for one in played) <= sum(one.steps for one in played) // 100
    ops = {"step", "reset", "call", "kill", "keep", "restore", "die"}
    assert set.union(*[one.kinds for one in played]) >= {*ops, *RANDOM_FAULTS}


@pytest.mark.soak
@pytest.mark.parametrize("first", range(10_000, 20_000, 1_000))
def test_many_random_programs_on_random_hosts_are_exact(clusters: Clusters, first: int) -> None:
    play(clusters, first, 1_000)


def test_what_fails_in_a_relay_for_one_worker_is_that_workers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, *_: object) -> None:
            raise MemoryError("no room")

    monkeypatch.setattr(relay, "Launch", Failing)
    here = Relay()
    (told,) = here.exchange(1, [(frames.LAUNCH, 1, "spawn", None, "")])
    assert told[:2] == (frames.GONE, 1)
    assert "no room" in told[2]["detail"]
    assert here.exchange(2, [(frames.RELEASE, 1)]) == []
