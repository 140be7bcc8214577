"""Forked snapshots: whatever the env is made of, it goes on from a frozen copy, the worker's or one that was asked for."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest
from fault_envs import Alarmed, CrashesByChance, DiesInSteps, FirstOneHangs, ForkShyEnv, Obstructed, filling

from invariants.faces import Face, assert_as_without_losses, counts
from kit import (
    CounterEnv,
    ForkingPolicy,
    NondeterministicEnv,
    SlowEnv,
    descendants,
    first_difference,
    is_alive,
    kill_worker,
    monitor_pid,
)
from kit.process_table import alive
from kit.side_by_side import run_side_by_side
from kit.trainer_process import becomes_true
from multienv import Deadlines, RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv._engine.processes.launcher import Launch
from multienv._engine.recovery import checkpoint
from multienv.errors import ClosedError, UsageError, WorkerLostError
from multienv.events import Event, Recovery

gymnasium.register_envs(ale_py)

ENDLESS = partial(CounterEnv, horizon=None)
OFTEN = ForkingPolicy(snapshot_every=3)


class Rungs:
    """A hook that keeps what recoveries were made of."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.recoveries: list[Recovery] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Recovery):
            self.seen.append(event.method or event.outcome)
            self.recoveries.append(event)


def pid_of(env: SubprocessEnv) -> int:
    return env.statistics().pid or 0


def settled(env: SubprocessEnv) -> int:
    """Wait until a snapshot that has just been begun is complete, and the one before it has ended; return its pid."""
    looks: list[list[int]] = []

    def is_alone() -> bool:  # twice: a list of processes that was read while they changed may miss one
        looks.append([pid for pid in descendants(pid_of(env)) if is_alive(pid)])
        return len(looks[-1]) == 1 and looks[-2:] == [looks[-1]] * 2

    assert becomes_true(is_alone)
    return looks[-1][0]


def steps(env: Any, count: int) -> list[Any]:
    return [env.step(np.int64(1 + index % 2))[:4] for index in range(count)]


# --- of the worker's own ---------------------------------------------------------------------------------


def test_handlers_and_timers_are_what_they_were() -> None:
    with SubprocessEnv(Alarmed, restart=OFTEN) as env:
        env.reset(seed=0)
        seen = steps(env, 10)
        for rung in ("snapshot", "restored"):
            kept = env.snapshot()
            if rung == "snapshot":
                kill_worker(env)
            else:
                env.restore(kept)
            seen += steps(env, 10)
        assert [int(one[0][0]) for one in seen] == list(range(1, 31))
        assert env.statistics().losses == 1
        assert env.statistics().last_recovery.method == "snapshot"  # type: ignore[union-attr]


def test_a_snapshot_that_nobody_wants_ends() -> None:
    """Of a lost process, when its policy is to raise, or the env is closed."""
    policy = ForkingPolicy(on_crash="raise", snapshot_every=3)
    with SubprocessEnv(ENDLESS, restart=policy) as env:
        env.reset(seed=0)
        steps(env, 7)
        snapshot = settled(env)
        kill_worker(env)
        with pytest.raises(Exception, match="SIGKILL"):
            env.step(np.int64(1))
        assert becomes_true(lambda: not is_alive(snapshot))


# --- an env that strays --------------------------------------------------------------------------------


def test_an_env_that_a_snapshot_does_not_recover_costs_the_others_of_its_process_nothing() -> None:
    """The journal recovers it, and the one that nothing recovers is truncated alone."""
    rungs, stray = Rungs(), partial(NondeterministicEnv, since=1, horizon=None)
    env_fns = [ENDLESS, partial(ForkShyEnv, horizon=None), stray]
    with Face("vector_env", env_fns, restart=OFTEN, hooks=[rungs]) as face:
        # A snapshot is taken after every third request; the kill comes when there has been another since, to hold it against.
        face.env_fns[1] = ENDLESS
        actions = counts(25)
        records = face.record(actions, 4, lambda step: face.signal() if step == 11 else None)
        assert_as_without_losses(face, records, actions, 4, envs=[0, 1])
    assert [one.outcome for one in rungs.recoveries] == ["truncated"]
    assert sum(one.recovery is not None for one in records[2]) == 1


# --- when there is none ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("envs", "restart"),
    [pytest.param(3, RestartPolicy(), marks=pytest.mark.ci), (1, OFTEN), (3, RestartPolicy(snapshots=False))],
    ids=str,
)
def test_a_process_that_its_past_has_made_fail_is_replaced_by_one_without_that_past(
    envs: int, restart: RestartPolicy
) -> None:
    """A snapshot, and a replay of the whole past, would end in the same step again, and so would each later step."""
    plain = gymnasium.vector.SyncVectorEnv([partial(gymnasium.make, "CartPole-v1")] * envs)
    with SubprocessVectorEnv([filling] * envs, envs_per_worker=envs, restart=restart, reports="") as ours:
        run_side_by_side(ours, plain, 300)
        told = ours.statistics()[0]
    assert told.truncated_recoveries == 0
    assert told.losses > 0


def test_a_hang_that_a_copy_repeats_is_not_poison_before_a_new_process_was_tried(tmp_path: Path) -> None:
    rungs, env_fn = Rungs(), partial(FirstOneHangs, str(tmp_path / "mark"))
    with SubprocessEnv(env_fn, restart=OFTEN, deadlines=Deadlines(step=2.0), hooks=[rungs], reports="") as env:
        env.reset(seed=0)
        found, told = steps(env, 40), env.statistics()
    plain = ENDLESS()
    plain.reset(seed=0)
    assert first_difference(found, steps(plain, 40)) is None
    assert told.losses == 2
    assert rungs.seen == ["snapshot", "journal"]
    assert rungs.recoveries[-1].outcome == "exact"


@pytest.mark.parametrize(("crashes", "method"), [((25, 28, 30), "snapshot"), ((25, 26, 27), "journal")])
def test_a_crash_by_chance_in_repeated_steps_does_not_use_up_the_snapshot(tmp_path, crashes, method) -> None:
    """Two crashes in the same repeated step are no chance: then the journal is tried."""
    rungs, path = Rungs(), tmp_path / "executions"
    with SubprocessEnv(
        partial(CrashesByChance, str(path), crashes),
        restart=ForkingPolicy(snapshot_every=20),
        hooks=[rungs],
        reports="",
    ) as env:
        env.reset(seed=0)
        found = steps(env, 40)
    plain = ENDLESS()
    plain.reset(seed=0)
    assert first_difference(found, steps(plain, 40)) is None
    assert rungs.seen == [method]
    assert rungs.recoveries[0].outcome == "exact"


def test_a_stretch_in_which_each_replay_crashes_is_passed(tmp_path: Path) -> None:
    """Forty steps lie between two snapshots, and 5 to 14 between two crashes."""
    dice, crashes, recoveries = random.Random(3), [50], list[Recovery]()
    while crashes[-1] < 1000:
        crashes.append(crashes[-1] + dice.randint(5, 14))
    env_fn = partial(CrashesByChance, str(tmp_path / "executions"), tuple(crashes))
    restart = ForkingPolicy(snapshot_every=40, backoff=0.0)
    hook = lambda event: recoveries.append(event) if isinstance(event, Recovery) else None  # noqa: E731
    with SubprocessEnv(env_fn, restart=restart, hooks=[hook], reports="") as env:
        env.reset(seed=0)
        found = steps(env, 90)
    plain = ENDLESS()
    plain.reset(seed=0)
    assert first_difference(found, steps(plain, 90)) is None
    assert {(one.outcome, one.method) for one in recoveries} == {("exact", "snapshot")}
    assert max(one.attempts for one in recoveries) > 2


@pytest.mark.parametrize(
    ("deaths", "truncated"),
    [({12: 3}, True), ({5: 1, 8: 1, 12: 3}, False), ({5: 1, 8: 1, 12: 9}, True)],
    ids=["the first of its kind", "chance is known", "poison all the same"],
)
def test_poison_is_told_from_chance(tmp_path: Path, deaths: dict[int, int], truncated: bool) -> None:
    restart = ForkingPolicy(snapshot_every=1, backoff=0.0)
    with SubprocessEnv(partial(DiesInSteps, str(tmp_path / "deaths"), deaths), restart=restart, reports="") as env:
        env.reset(seed=0)
        found = steps(env, 12)
        losses = env.statistics().losses
    plain = ENDLESS()
    plain.reset(seed=0)
    assert (first_difference(found, steps(plain, 12)) is not None) == truncated
    assert found[-1][3] == truncated
    assert losses == {9: 2 + 5, 3: (3 if truncated else 2 + 3)}[deaths[12]]


def test_snapshots_of_all_workers_come_closer_once_one_is_lost() -> None:
    with SubprocessVectorEnv([partial(SlowEnv, step_seconds=0.002, horizon=None)] * 2, envs_per_worker=1) as envs:
        envs.reset(seed=0)
        intervals = []
        for step in range(192):
            if step == 96:
                intervals.append(envs.statistics()[1].snapshot_seconds)
                kill_worker(envs)
            envs.step([0, 0])
        intervals.append(envs.statistics()[1].snapshot_seconds)
    assert intervals[0] is not None
    assert intervals[1] is not None
    assert 0 < intervals[1] < intervals[0] / 2


def test_a_process_that_replaces_another_by_plan_takes_its_first_snapshot_at_once() -> None:
    rungs = Rungs()
    with SubprocessEnv(ENDLESS, restart=RestartPolicy(recycle_after_steps=70), hooks=[rungs]) as env:
        env.reset(seed=0)
        while not env.statistics().recycled:
            env.step(0)
        env.step(0)
        kill_worker(env)
        env.step(0)
        assert env.statistics().recycled == 1
    assert rungs.seen == ["snapshot"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    "obstacle", ["threads", "child processes", "sockets", "pipes", "shared memory", "the fork failed"]
)
def test_an_env_that_cannot_be_forked_has_none(obstacle: str) -> None:
    rungs = Rungs()
    with SubprocessEnv(partial(Obstructed, obstacle), restart=OFTEN, hooks=[rungs]) as env:
        env.reset(seed=0)
        seen = steps(env, 10)
        assert env.statistics().no_snapshots == obstacle
        assert env.statistics().snapshots == 0
        kill_worker(env)
        seen += steps(env, 10)
        assert [int(one[0][0]) for one in seen] == list(range(1, 21))
    assert rungs.seen == ["journal"]


# --- of the caller's: any state can be come back to, any number of times -------------------------------------


@pytest.mark.parametrize(
    ("env_id", "options", "kills"),
    [("LunarLander-v3", {}, True), ("ALE/Breakout-v5", {"repeat_action_probability": 0.25}, False)],
)
def test_each_branch_is_the_trajectory_that_leads_there(env_id: str, options: Any, kills: bool) -> None:
    """A tree of random depth, with kills, held against envs that take the same actions from the start."""
    env_fn = partial(gymnasium.make, env_id, **options)
    dice = random.Random(4)
    space = env_fn().action_space
    space.seed(1)
    with SubprocessEnv(env_fn, restart=ForkingPolicy(snapshot_every=10)) as env:
        env.reset(seed=3)
        tree = [(env.snapshot(), list[Any]())]
        for _ in range(4):
            token, path = dice.choice(tree)
            env.restore(token)
            branch = [space.sample() for _ in range(dice.randint(1, 6))]
            for action in branch[:-1]:
                env.step(action)
                if kills and dice.random() < 0.3:
                    kill_worker(env)
            seen = env.step(branch[-1])
            path = path + branch
            bare = env_fn()  # a new one: its state may outlive an episode
            bare.reset(seed=3)
            expected = [bare.step(action)[:4] for action in path][-1]
            bare.close()
            assert first_difference(seen[:4], expected) is None
            tree.append((env.snapshot(), path))
        assert bool(env.statistics().losses) == kills
        assert env.statistics().truncated_recoveries == 0


def test_a_snapshot_from_before_the_first_reset_is_restored() -> None:
    with SubprocessEnv(ENDLESS) as env:
        kept = env.snapshot()
        first = env.reset(seed=3)[0]
        env.step(1)
        env.restore(kept)
        np.testing.assert_array_equal(env.reset(seed=3)[0], first)


def test_they_are_freed() -> None:
    with SubprocessEnv(ENDLESS, restart=RestartPolicy(snapshots=False)) as env:
        env.reset(seed=1)
        before = alive()
        tokens = [env.snapshot() for _ in range(4)]
        assert becomes_true(lambda: len(alive() - before) == 4)
        tokens.pop().free()
        assert becomes_true(lambda: len(alive() - before) == 3)
        tokens.pop()
        env.get_attr("horizon")  # one of the next calls ends it
        assert becomes_true(lambda: len(alive() - before) == 2)
        with pytest.raises(UsageError, match="freed"):
            tokens[0].free()
            env.restore(tokens[0])
        env.restore(tokens[1])
        assert env.step(np.int64(1))[0][0] == 1
    assert becomes_true(lambda: not alive() - before)
    with pytest.raises(ClosedError):
        env.restore(tokens[1])
    with pytest.raises(ClosedError):
        env.snapshot()


def test_one_that_is_freed_after_many_others_ends_though_the_monitor_is_stopped() -> None:
    with SubprocessEnv(ENDLESS, restart=RestartPolicy(snapshots=False)) as env:
        before = alive()
        token = env.snapshot()
        os.kill(monitor_pid(), signal.SIGSTOP)
        for number in range(400):  # more than its socket takes; each of a snapshot that there is not
            Launch("forkserver").free(10**9 + number)
        token.free()
        assert becomes_true(lambda: alive() <= before)


def test_one_that_has_been_stopped_ends_when_it_is_freed_or_its_env_closed() -> None:
    """The one that is kept and the worker's own; another env keeps the monitor busy."""
    with SubprocessEnv(ENDLESS) as other, SubprocessEnv(ENDLESS, restart=ForkingPolicy(snapshot_every=2)) as env:
        other.reset(seed=0)
        env.reset(seed=0)
        before = alive()
        for _ in range(3):
            env.step(np.int64(1))
        token = env.snapshot()
        assert becomes_true(lambda: len(alive() - before) == 2)
        for pid in alive() - before:
            os.kill(pid, signal.SIGSTOP)
        token.free()
        assert becomes_true(lambda: len(alive() - before) == 1)
        env.close()
        assert becomes_true(lambda: not alive() - before)


def test_wrong_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MOST_SNAPSHOTS", 2)
    with SubprocessEnv(ENDLESS) as env, SubprocessEnv(ENDLESS) as other:
        token = env.snapshot()
        with pytest.raises(UsageError, match="is no snapshot of this env"):
            other.restore(token)
        with pytest.raises(UsageError, match="is no snapshot of this env"):
            env.restore("token")  # type: ignore[arg-type]
        kept = env.snapshot()
        with pytest.raises(UsageError, match="2 are kept"):
            env.snapshot()
        kept.free()
        env.snapshot()
        env.reset(seed=0)
        env.step_async(np.int64(1))
        with pytest.raises(UsageError, match="pending"):
            env.snapshot()
        with pytest.raises(UsageError, match="pending"):
            env.restore(token)
        assert env.step_wait()[0][0] == 1


@pytest.mark.parametrize("on_crash", ["raise", "truncate"])
def test_snapshot_of_a_dead_worker_that_is_not_to_be_recovered_says_so(on_crash: Any) -> None:
    with SubprocessEnv(partial(CounterEnv, horizon=None), restart=RestartPolicy(on_crash=on_crash)) as env:
        env.reset(seed=0)
        kill_worker(env)
        with pytest.raises(WorkerLostError, match="SIGKILL"):
            env.snapshot()
        if on_crash == "truncate":
            assert env.step(1)[3]
        assert env.reset(seed=0)[0][0] == 0


def test_a_snapshot_tells_what_it_is_of() -> None:
    with SubprocessEnv(ENDLESS, env_index=3) as env:
        env.reset(seed=1)
        for _ in range(2):
            env.step(np.int64(1))
        kept = env.snapshot()
        assert repr(kept) == "<Snapshot of env 3 after 2 steps>"
        kept.free()
        assert repr(kept) == "<Snapshot of env 3 after 2 steps, freed>"
    with SubprocessVectorEnv([ENDLESS] * 4, envs_per_worker=2) as envs:
        envs.reset(seed=1)
        workers = "<Snapshot of envs 0–1 after 0 steps>, <Snapshot of envs 2–3 after 0 steps>"
        assert repr(envs.snapshot()) == f"({workers})"
