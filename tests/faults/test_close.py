"""close() ends everything, whatever state the env is in, and restarts leave nothing: DESIGN, invariants 5 and 7."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from gymnasium.spaces import Box

from kit import (
    CounterEnv,
    Fault,
    FaultyEnv,
    SlowEnv,
    SpaceEnv,
    is_alive,
    monitor_itself,
    no_leaks,
)
from kit.trainer_process import becomes_true
from multienv import Deadlines, RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv.errors import ClosedError, WorkerLostError

# close() asks for this long, then kills: stack (none), SIGTERM and SIGKILL within a second; doubled for a slow machine.
ASKS = 0.1
BOUND = 2 * (ASKS + 2.0)
QUICK = Deadlines(close=ASKS)
NO_LIMIT = Deadlines(recovery=None)
RAISE = RestartPolicy(on_crash="raise")
HANG_IN_C = Fault("hang_c", "step", ignore_sigterm=True)


def no_leaks_of_ours() -> Any:
    """Stricter than the fixture of all tests: threads too."""
    return no_leaks(timeout=5.0, ignore=monitor_itself, threads=True)


@pytest.fixture(scope="module", autouse=True)
def companion() -> Iterator[None]:
    """Have the monitor up, and every import done, before anything is counted."""
    with SubprocessEnv(CounterEnv):
        yield


def close_twice(env: Any) -> None:
    began = time.monotonic()
    env.close()
    env.close()
    assert time.monotonic() - began < BOUND


def faulty(fault: Fault, **options: Any) -> SubprocessEnv:
    return SubprocessEnv(partial(FaultyEnv, fault=fault), deadlines=QUICK, **options)


STATES = [
    "new",
    "started",
    "dead, a step pending",
    "stopped",
    "hung in C",
    "hung in initialize",
    "lost",
]


@pytest.mark.parametrize("state", STATES)
def test_close_ends_an_env_in_any_state(state: str) -> None:
    with no_leaks_of_ours():
        env = env_in_state(state)
        close_twice(env)
        assert env.statistics().state == "closed"
        for call in (partial(env.step, 0), env.reset, env.initialize, partial(env.call, "poke"), env.step_wait):
            with pytest.raises(ClosedError):
                call()
        del env, call
        gc.collect()


def env_in_state(state: str) -> SubprocessEnv:
    if state == "hung in initialize":
        return faulty(Fault("hang_c", "construct", ignore_sigterm=True)).start()
    fault = Fault("kill", "step") if state == "lost" else HANG_IN_C
    env = faulty(replace(fault, at=1 if state in ("lost", "hung in C") else 99), restart=RAISE)
    if state == "new":
        return env
    env.start()
    if state == "started":
        return env
    env.initialize().reset(seed=0)
    if state == "lost":
        with pytest.raises(WorkerLostError):
            env.step(0)
    if "pending" in state or state == "hung in C":
        env.step_async(0)
    if state in ("dead, a step pending", "stopped"):
        os.kill(env.statistics().pid or 0, signal.SIGSTOP if state == "stopped" else signal.SIGKILL)
    return env


@pytest.mark.parametrize("manner", ["raise", "segv", "hang_c"])
def test_close_never_raises_whatever_the_env_does_in_its_close(manner: Any) -> None:
    env = faulty(Fault(manner, "close")).initialize()
    env.reset(seed=0)
    close_twice(env)
    with pytest.raises(ClosedError):
        env.step(0)


# --- in the middle of another call, which says so or returns -----------------------------------------

ENDLESS = partial(CounterEnv, horizon=None)


@contextlib.contextmanager
def closing(env: Any, seconds: float) -> Iterator[None]:
    """Have the env closed so many seconds from now by another thread; by a handler: invariants/test_8."""
    closer = threading.Timer(seconds, env.close)
    closer.start()
    yield
    closer.join()


def test_close_in_the_middle_of_a_step() -> None:
    moments = random.Random(2)
    for _ in range(6):
        env = SubprocessEnv(ENDLESS).initialize()
        env.reset(seed=0)
        pid = env.statistics().pid or 0
        with closing(env, moments.uniform(5e-4, 3e-3)), pytest.raises(ClosedError):
            for expected in count(1):  # each that returns is the one after the last
                observation, _, _, truncated, _ = env.step(1)
                assert (observation[0], truncated) == (expected, False)
        assert env.statistics().state == "closed"
        with pytest.raises(ClosedError):
            env.reset()
        assert not is_alive(pid)


def slow_the_second_time(path: str) -> CounterEnv:
    time.sleep(60.0 if Path(path).exists() else 0.0)
    Path(path).touch()
    return CounterEnv()


def test_close_while_one_of_several_workers_is_brought_back(marker: str) -> None:
    fns = [partial(slow_the_second_time, marker), CounterEnv]
    policy = RestartPolicy(snapshots=False)
    envs = SubprocessVectorEnv(fns, envs_per_worker=1, deadlines=Deadlines(close=1000), restart=policy)
    envs.reset(seed=1)
    os.kill(envs.statistics()[0].pid or 0, signal.SIGKILL)
    with closing(envs, 0.3), pytest.raises(ClosedError):
        envs.step([1, 1])


def test_close_ends_the_back_off_before_a_restart() -> None:
    patient = RestartPolicy(backoff=1000.0, max_backoff=1000.0, poison_after=9, snapshots=False)
    # The second restart for the same step waits: for longer than the limit on tests.
    env = SubprocessEnv(partial(FaultyEnv, fault=Fault("exit", "step")), restart=patient, deadlines=NO_LIMIT)
    env.initialize()
    env.reset(seed=0)
    with closing(env, 0.5), pytest.raises(ClosedError):
        env.step(1)


# --- nothing is left ----------------------------------------------------------------------------


def test_ten_restarts_leave_no_descriptor_map_or_thread() -> None:
    with SubprocessEnv(partial(SpaceEnv, observation_space=Box(0, 255, (128, 128, 3), "uint8"), horizon=99)) as env:
        env.reset(seed=0)
        counts = []
        for _ in range(11):
            os.kill(env.statistics().pid or 0, signal.SIGKILL)
            env.step(env.action_space.sample())
            gc.collect()
            counts.append(open_things())
        assert becomes_true(lambda: all(map(int.__le__, open_things(), counts[0]))), counts
        assert env.statistics().exact_recoveries == env.statistics().restarts == 11


def open_things() -> list[int]:
    """Count descriptors, memory maps and threads; those of the processes are the fixture's to find."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    memory = sum("memfd" in line or "/dev/shm" in line for line in maps)
    return [len(os.listdir("/proc/self/fd")), memory, len(os.listdir("/proc/self/task"))]


def test_close_waits_for_a_slow_env_close(tmp_path: Path) -> None:
    """An env that needs time to save its work gets it, within Deadlines.close."""
    env = SubprocessEnv(partial(SlowEnv, close_seconds=0.2), deadlines=Deadlines(close=10)).initialize()
    env.reset(seed=0)
    began = time.monotonic()
    env.close()
    assert time.monotonic() - began >= 0.2
