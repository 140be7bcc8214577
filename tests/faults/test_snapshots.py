"""Forked snapshots: whatever the env is made of, it goes on from a frozen copy as if nothing had happened."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import socket
import subprocess
import threading
from functools import partial
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest
from trainer_process import becomes_true

from kit import (
    CounterEnv,
    descendants,
    is_alive,
)
from multienv import RestartPolicy, SubprocessEnv
from multienv.events import Event, Recovery

gymnasium.register_envs(ale_py)

ENDLESS = partial(CounterEnv, horizon=None)
OFTEN = RestartPolicy(snapshot_every=3)


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


# --- what else may die ----------------------------------------------------------------------------


def test_a_woken_snapshot_leaves_another_one_in_its_place_at_once() -> None:
    rungs = Rungs()
    with SubprocessEnv(ENDLESS, restart=RestartPolicy(snapshot_every=1000), hooks=[rungs]) as env:
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


# --- nothing left behind --------------------------------------------------------------------------


def test_a_snapshot_that_nobody_wants_ends() -> None:
    """Of a lost process, when its policy is to raise, or the env is closed."""
    policy = RestartPolicy(on_crash="raise", snapshot_every=3)
    with SubprocessEnv(ENDLESS, restart=policy) as env:
        env.reset(seed=0)
        steps(env, 7)
        settle(env)
        snapshot = snapshot_of(env)
        kill(pid_of(env))
        with pytest.raises(Exception, match="SIGKILL"):
            env.step(np.int64(1))
        assert becomes_true(lambda: not is_alive(snapshot))


class AllDescriptors(CounterEnv):
    """Leaves none for anybody else in its process."""

    def reset(self, **arguments: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        with contextlib.suppress(OSError):
            while True:
                os.open(os.devnull, os.O_RDONLY)
        return super().reset(**arguments)


def test_without_descriptors_there_is_none_and_nothing_is_lost() -> None:
    with SubprocessEnv(partial(AllDescriptors, horizon=None), restart=RestartPolicy(snapshot_every=5)) as env:
        env.reset(seed=0)
        for _ in range(20):
            env.step(np.int64(1))
        assert env.statistics().losses == 0
        assert env.statistics().no_snapshots == "the fork failed"
