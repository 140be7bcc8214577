"""Forked snapshots: whatever the env is made of, it goes on from a frozen copy as if nothing had happened."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from interruption import every_place
from trainer_process import Trainer, becomes_true

from kit import (
    CounterEnv,
    Fault,
    FaultyEnv,
    GlobalRandomEnv,
    StickyStateEnv,
    assert_same_trajectory,
    descendants,
    is_alive,
    monitor_pid,
    rollout,
)
from multienv import Deadlines, RestartPolicy, SubprocessEnv
from multienv.events import Event, Recovery
from multienv.recovery.state_machine import LOSSES

gymnasium.register_envs(ale_py)

ENDLESS = partial(CounterEnv, horizon=None)
OFTEN = RestartPolicy(snapshot_every=3)


@pytest.fixture(params=["forkserver", pytest.param("spawn", marks=pytest.mark.soak)])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Rungs:
    """A hook that keeps what recoveries were made of."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.recoveries: list[Recovery] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Recovery):
            self.seen.append(event.rung or event.outcome)
            self.recoveries.append(event)


def pid_of(env: SubprocessEnv) -> int:
    return env.statistics().pid or 0


def kill(*pids: int, number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        os.kill(pid, number)


def snapshot_of(env: SubprocessEnv) -> int:
    """The process of its newest snapshot; there always is one, though it may be another by now."""
    alive: list[int] = []

    def found() -> bool:
        alive[:] = [pid for pid in descendants(pid_of(env)) if is_alive(pid)]
        return bool(alive)

    assert becomes_true(found)
    return max(alive)


def settle(env: SubprocessEnv) -> None:
    """Wait until a snapshot that has just been begun is complete: one at a time."""
    assert becomes_true(lambda: sum(map(is_alive, descendants(pid_of(env)))) == 1)


def steps(env: Any, count: int) -> list[Any]:
    return [env.step(np.int64(1 + index % 2))[:2] for index in range(count)]


# --- any env --------------------------------------------------------------------------------------


def actions_for(env_fn: Any, count: int) -> list[Any]:
    env = env_fn()
    env.action_space.seed(3)
    actions = [env.action_space.sample() for _ in range(count)]
    env.close()
    return actions


STICKY = {"repeat_action_probability": 0.25}
REAL = {
    "CartPole-v1": {},
    "LunarLander-v3": {},
    "BipedalWalker-v3": {},
    "CarRacing-v3": {"lap_complete_percent": 0.95},
    "HalfCheetah-v5": {},
    "ALE/Pong-v5": STICKY,
    "ALE/Breakout-v5": STICKY,
}


QUICK = {"CartPole-v1", "BipedalWalker-v3", "ALE/Breakout-v5"}


@pytest.mark.parametrize("together", [False, True], ids=["alone", "some with their snapshot"])
@pytest.mark.parametrize(
    ("kills", "env_id"),
    [
        pytest.param(kills, env_id, marks=[] if kills == 8 and env_id in QUICK else pytest.mark.soak)
        for env_id in REAL
        for kills in (8, 75)
    ],
)
def test_kills_leave_no_trace(env_id: str, together: bool, kills: int) -> None:
    env_fn = partial(gymnasium.make, env_id, max_episode_steps=60, **REAL[env_id])
    actions = actions_for(env_fn, 25 * kills)
    dice = random.Random(5)
    moments = set(dice.sample(range(5, len(actions)), kills))
    rungs = Rungs()
    numbers = [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP]
    policy, deadlines = RestartPolicy(snapshot_every=4), Deadlines(step=0.5)
    with SubprocessEnv(env_fn, restart=policy, deadlines=deadlines, hooks=[rungs]) as env:

        def strike(step: int) -> None:
            if step in moments:
                both = together and dice.random() < 0.4
                number = dice.choice(numbers[: 2 if both else 3])
                if both:
                    with contextlib.suppress(ProcessLookupError):  # a newer one has just taken its place
                        kill(snapshot_of(env), number=number)
                kill(pid_of(env), number=number)

        seen = rollout(env, actions, seed=5, before_step=strike)
        assert env.statistics().exact_recoveries == kills == env.statistics().losses
    plain = env_fn()
    assert_same_trajectory(seen, rollout(plain, actions, seed=5))
    plain.close()
    assert rungs.seen.count("snapshot") >= kills * (0.3 if together else 0.9)


def test_state_that_no_journal_holds_any_more_is_kept(method: str) -> None:
    """The journal reaches back to the last reset or two, and this env remembers more."""
    policy = RestartPolicy(snapshot_every=3, journal_limit=2000)
    env_fn = partial(StickyStateEnv, horizon=20, visible_after=2)
    actions = [np.int64(1 + index % 3) for index in range(300)]
    rungs = Rungs()
    with SubprocessEnv(env_fn, restart=policy, context=method, hooks=[rungs]) as env:
        seen = rollout(env, actions, seed=5, before_step=lambda step: step % 11 == 7 and kill(pid_of(env)))
    assert_same_trajectory(seen, rollout(env_fn(), actions, seed=5))
    assert set(rungs.seen) == {"snapshot"}


def test_global_generators_are_as_they_were(method: str) -> None:
    """Python seeds ``random`` anew in each forked child."""
    trajectories = []
    for interval in (0, 5):
        with SubprocessEnv(partial(Seeded, 3), restart=OFTEN, context=method) as env:
            env.reset(seed=0)
            seen = []
            for step in range(40):
                if interval and step % interval == 4:
                    kill(pid_of(env))
                seen.append([*env.step(np.int64(1))[0], env.call("draws")])
            trajectories.append(seen)
    assert trajectories[0] == trajectories[1]


class Seeded(GlobalRandomEnv):
    """Whatever the process was seeded with."""

    def __init__(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        super().__init__(horizon=None)


class PictureEnv(gymnasium.Env[Any, Any]):
    """Observations too large to travel inline."""

    observation_space = spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = spaces.Discrete(200)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.sum = 0
        return np.zeros((64, 64, 3), np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.sum = (self.sum + int(action)) % 256
        return np.full((64, 64, 3), self.sum, np.uint8), 0.0, False, False, {}


@pytest.mark.parametrize("since", range(4))
def test_large_observations_lie_in_new_memory(since: int) -> None:
    rungs = Rungs()
    with SubprocessEnv(PictureEnv, restart=RestartPolicy(snapshot_every=4), hooks=[rungs]) as env:
        env.reset(seed=0)
        seen, number = [], env._supervisor.number
        while (number - 1) % 4 != since or len(seen) < 12:
            seen.append(env.step(7)[0])
            number += 1
        before = seen[-1].copy()
        kill(pid_of(env))
        after = env.step(1)[0]
        assert (seen[-1] == before).all()
        assert (after == (7 * len(seen) + 1) % 256).all()
    assert rungs.seen == ["snapshot"]


# --- what else may die ----------------------------------------------------------------------------


def test_the_group_dies(method: str) -> None:
    """A snapshot leads a group of its own."""
    rungs = Rungs()
    with SubprocessEnv(ENDLESS, restart=OFTEN, context=method, hooks=[rungs]) as env:
        env.reset(seed=0)
        expected = CounterEnv(horizon=None)
        expected.reset(seed=0)
        seen = steps(env, 7)
        settle(env)
        os.killpg(pid_of(env), signal.SIGKILL)
        seen += steps(env, 7)
    for one, other in zip(seen, steps(expected, 7) + steps(expected, 7), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
    assert rungs.seen == ["snapshot"]


@pytest.mark.parametrize("which", ["snapshot", "both", "snapshot, later the worker"])
def test_the_snapshot_dies(method: str, which: str) -> None:
    rungs = Rungs()
    with SubprocessEnv(ENDLESS, restart=OFTEN, context=method, hooks=[rungs]) as env:
        env.reset(seed=0)
        seen = steps(env, 7)
        settle(env)
        first = snapshot_of(env)
        kill(first)
        if which == "both":
            kill(pid_of(env))
        seen += steps(env, 7)
        settle(env)
        assert snapshot_of(env) != first, "the worker, or what replaces it, takes snapshots again"
        if which.endswith("worker"):
            kill(pid_of(env))
        seen += steps(env, 1)
        assert [int(one[0][0]) for one in seen] == list(range(1, 16))
    assert rungs.seen == {"snapshot": [], "both": ["journal"]}.get(which, ["snapshot"])


def test_a_woken_snapshot_leaves_another_one_in_its_place_at_once(method: str) -> None:
    rungs = Rungs()
    with SubprocessEnv(ENDLESS, restart=RestartPolicy(snapshot_every=1000), context=method, hooks=[rungs]) as env:
        env.reset(seed=0)
        seen = steps(env, 1100)  # one in 64 is looked at
        pids = set()
        for _ in range(5):
            settle(env)
            pids.add(pid_of(env))
            kill(pid_of(env))
            seen += steps(env, 1)
        assert [int(one[0][0]) for one in seen] == list(range(1, 1106))
        assert len(pids) == 5
    assert rungs.seen == ["snapshot"] * 5
    assert [one.loss.exit_code for one in rungs.recoveries] == [-9] * 5


@pytest.mark.parametrize("manner", ["kill", "segv", "exit", "hang", "hang_c"])
def test_a_poisonous_step_is_truncated_just_before(method: str, manner: Any) -> None:
    fault = Fault(manner, "step", at=10, per="episode")
    rungs = Rungs()
    env_fn = partial(FaultyEnv, fault=fault, horizon=None)
    policy = RestartPolicy(snapshot_every=3, backoff=0.01)
    with SubprocessEnv(env_fn, restart=policy, context=method, hooks=[rungs], deadlines=Deadlines(step=0.5)) as env:
        env.reset(seed=0)
        steps(env, 9)
        _, _, _, truncated, info = env.step(np.int64(1))
        assert truncated
        assert "not tried again" in info["multienv"]["reason"]
        assert env.get_attr("episode_step") == 9
        env.reset(seed=1)
        assert env.step(np.int64(1))[0][0] == 1
    processes = LOSSES if manner == "kill" else 2  # SIGKILL may have come from anywhere
    assert rungs.seen == ["snapshot"] * (processes - 1) + ["truncated"]


def test_a_step_that_hangs_once_is_made_good(method: str, tmp_path: Path) -> None:
    fault = Fault("hang_c", "step", at=10, once=tmp_path / "struck")
    rungs = Rungs()
    env_fn = partial(FaultyEnv, fault=fault, horizon=None)
    with SubprocessEnv(env_fn, restart=OFTEN, context=method, hooks=[rungs], deadlines=Deadlines(step=0.5)) as env:
        env.reset(seed=0)
        assert [int(one[0][0]) for one in steps(env, 20)] == list(range(1, 21))
    assert rungs.seen == ["snapshot"]
    assert "step" in rungs.recoveries[0].loss.stack


def test_it_can_be_interrupted_anywhere() -> None:
    policy = RestartPolicy(snapshot_every=3, journal_limit=4000)
    with SubprocessEnv(ENDLESS, restart=policy) as env:
        for interruption in every_place(stride=5):
            env.reset(seed=0)
            steps(env, 5)
            kill(pid_of(env))
            with interruption:
                env.step(np.int64(1))
            if interruption.fired:
                observation, _, _, truncated, _ = env.step(np.int64(1))
                assert (int(observation[0]), truncated) == (6, False), interruption.where


# --- signals --------------------------------------------------------------------------------------


class Alarmed(CounterEnv):
    """Goes by a timer, which it sets once, and whose signal it takes."""

    def __init__(self) -> None:
        super().__init__(horizon=None)
        self.rung = 0
        signal.signal(signal.SIGALRM, self.ring)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)

    def ring(self, *_: Any) -> None:
        self.rung += 1

    def step(self, action: Any) -> Any:
        before = self.rung
        while self.rung == before:
            signal.pause()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        return super().step(action)


def test_handlers_and_timers_are_what_they_were() -> None:
    with SubprocessEnv(Alarmed, restart=OFTEN) as env:
        env.reset(seed=0)
        seen = steps(env, 10)
        for rung in ("snapshot", "restored"):
            kept = env.snapshot()
            if rung == "snapshot":
                kill(pid_of(env))
            else:
                env.restore(kept)
            seen += steps(env, 10)
        assert [int(one[0][0]) for one in seen] == list(range(1, 31))
        assert env.statistics().losses == 1
        assert env.statistics().last_recovery.rung == "snapshot"  # type: ignore[union-attr]


# --- when there is none ---------------------------------------------------------------------------


class Obstructed(CounterEnv):
    """Has what would not survive a fork, from its first reset on."""

    def __init__(self, obstacle: str) -> None:
        super().__init__(horizon=None)
        self.obstacle = obstacle
        self.held: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self.obstacle == "threads":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        elif self.obstacle == "child processes":
            self.held = subprocess.Popen(["sleep", "1000"])
        elif self.obstacle == "sockets":
            self.held = socket.socketpair()
        elif self.obstacle == "shared memory":
            self.held = mmap.mmap(-1, 4096)
        return super().reset(seed=seed, options=options)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("obstacle", ["threads", "child processes", "sockets", "shared memory"])
def test_an_env_that_cannot_be_forked_has_none(obstacle: str) -> None:
    rungs = Rungs()
    with SubprocessEnv(partial(Obstructed, obstacle), restart=OFTEN, hooks=[rungs]) as env:
        env.reset(seed=0)
        seen = steps(env, 10)
        assert env.statistics().no_snapshots == obstacle
        assert env.statistics().snapshots == 0
        kill(pid_of(env))
        seen += steps(env, 10)
        assert [int(one[0][0]) for one in seen] == list(range(1, 21))
    assert rungs.seen == ["journal"]


def test_none_are_taken_where_the_policy_says_so() -> None:
    with SubprocessEnv(ENDLESS, restart=RestartPolicy(snapshots=False)) as env:
        env.reset(seed=0)
        steps(env, 200)
        assert env.statistics().snapshots == 0
        assert not descendants(pid_of(env))


def test_they_are_taken_as_it_is_good_for_the_env() -> None:
    """By default; the steps are long enough for a few."""
    with SubprocessEnv(partial(Busy, 0.004)) as env:
        env.reset(seed=0)
        steps(env, 200)
        assert 1 <= env.statistics().snapshots <= 16


class Busy(CounterEnv):
    """Its steps take a while."""

    def __init__(self, seconds: float) -> None:
        super().__init__(horizon=None)
        self.seconds = seconds

    def step(self, action: Any) -> Any:
        threading.Event().wait(self.seconds)
        return super().step(action)


# --- nothing left behind --------------------------------------------------------------------------


def test_a_snapshot_holds_no_descriptor_that_would_hide_the_death_of_its_worker() -> None:
    with SubprocessEnv(ENDLESS, restart=OFTEN) as env:
        env.reset(seed=0)
        steps(env, 7)
        settle(env)
        pid, snapshot = pid_of(env), snapshot_of(env)
        stderr = {os.readlink(f"/proc/{snapshot}/fd/2")}
        assert becomes_true(lambda: connections(snapshot) & connections(pid) <= stderr)
        assert os.getpgid(snapshot) == snapshot


def connections(pid: int) -> set[str]:
    """The pipes and sockets that a process holds."""
    targets = {str(descriptor.readlink()) for descriptor in Path(f"/proc/{pid}/fd").iterdir()}
    return {target for target in targets if target.startswith(("pipe:", "socket:"))}


def test_there_is_one_at_a_time(method: str) -> None:
    with SubprocessEnv(ENDLESS, restart=OFTEN, context=method) as env:
        env.reset(seed=0)
        for _ in range(10):
            steps(env, 10)
            settle(env)
            # Ten steps take four at most, and the first of these reaps what has ended before, all but one.
            assert len(descendants(pid_of(env))) <= 5, "it, and those that wait to be reaped"
        settle(env)
        pid, snapshot = pid_of(env), snapshot_of(env)
    assert becomes_true(lambda: not is_alive(pid) and not is_alive(snapshot))


@pytest.mark.parametrize("moment", ["alive", "bereaved"])
def test_the_trainer_dies(method: str, moment: str) -> None:
    with Trainer("lifecycle_trainers", "hold_snapshots", method, moment) as trainer:
        trainer.expect("ready")
        trainer.signal(signal.SIGKILL)
        trainer.wait()
        trainer.assert_nothing_lives()


def test_a_snapshot_that_nobody_wants_ends(method: str) -> None:
    """Of a lost process, when its policy is to raise, or the env is closed."""
    policy = RestartPolicy(on_crash="raise", snapshot_every=3)
    with SubprocessEnv(ENDLESS, restart=policy, context=method) as env:
        env.reset(seed=0)
        steps(env, 7)
        settle(env)
        snapshot = snapshot_of(env)
        kill(pid_of(env))
        with pytest.raises(Exception, match="SIGKILL"):
            env.step(np.int64(1))
        assert becomes_true(lambda: not is_alive(snapshot))


@pytest.fixture(autouse=True)
def no_snapshot_left() -> Iterator[None]:
    before = set(descendants(os.getpid()))
    yield
    assert becomes_true(lambda: not [pid for pid in set(descendants(os.getpid())) - before if forked_worker(pid)])


def forked_worker(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"multienv.processes.monitor" in command and os.getpgid(pid) == pid != monitor_pid()
    except (FileNotFoundError, ProcessLookupError):
        return False


class AllDescriptors(CounterEnv):
    """Leaves none for anybody else in its process."""

    def reset(self, **arguments: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        self.held = []
        with contextlib.suppress(OSError):
            while True:
                self.held.append(os.open(os.devnull, os.O_RDONLY))
        for descriptor in self.held[len(self.held) - self.left :]:
            os.close(descriptor)
        return super().reset(**arguments)

    left = 0


class AllButOne(AllDescriptors):
    left = 1


@pytest.mark.parametrize("env_fn", [AllDescriptors, AllButOne])
def test_without_descriptors_there_is_none_and_nothing_is_lost(env_fn: Any) -> None:
    with SubprocessEnv(partial(env_fn, horizon=None), restart=RestartPolicy(snapshot_every=5)) as env:
        env.reset(seed=0)
        for _ in range(20):
            env.step(np.int64(1))
        assert env.statistics().losses == 0
        assert env.statistics().no_snapshots == "the fork failed"
