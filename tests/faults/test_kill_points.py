"""Killed or stopped at any system call, of a worker, a snapshot, the monitor or the trainer: nothing is lost or left.

Each point is a run of its own: a short rollout beside an undisturbed twin, in which one process gets its signal before
or after its n-th system call, see kit/kill_points.py. A sweep takes n from 1 to the last call that there is; by default
only a few of them.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kill_point_trainers import STEPS, Play, digest, kill_worker, open_face, open_twin, statistics_of

from kit import CounterEnv, first_difference, is_alive, monitor_pid
from kit.kill_points import KillPoint, why_not
from kit.trainer_process import Trainer, becomes_true
from multienv import Deadlines, SubprocessEnv
from multienv._engine.native import native
from multienv.events import Recovery

pytestmark = pytest.mark.ci

SOAK = [pytest.mark.soak, pytest.mark.timeout(6 * 3600)]
METHODS = ("forkserver", "spawn")


@pytest.fixture(autouse=True, scope="module")
def ptrace() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def companion() -> Iterator[SubprocessEnv]:
    """An env beside, which keeps the monitor up."""
    with SubprocessEnv(CounterEnv) as env:
        yield env


def sweep(strike: Callable[[int, str], KillPoint], hows: str, stride: int) -> None:
    """Strike at every ``stride``-th system call, in each of these ways in turn.

    With stride 1 until there are no more calls. How many there are differs from run to run: five runs in a row must
    have had fewer. With another stride three times, if there are so many. All failures are told together, each with
    its place.
    """
    struck, misses, failures = 0, 0, []
    for nth, how in zip(itertools.count(stride, stride), itertools.cycle(hows.split(", ")), strict=False):
        try:
            point = strike(nth, how)
        except Exception as error:
            failures.append(f"{how} {nth}: {type(error).__name__}: {error}")
            continue
        struck += point.struck
        # A call that ends the process is not struck after it.
        misses = 0 if point.struck or point.calls >= nth else misses + 1
        if misses == 5 if stride == 1 else misses or struck == 3:
            break
    assert not failures, "\n".join([f"{len(failures)} points:", *failures])
    assert struck >= 2


def rows(*quick: tuple[Any, ...], **options: tuple[Any, ...]) -> list[Any]:
    """Return quick rows, and all combinations of the options as soak rows with stride 1."""
    return [*quick, *(pytest.param(*values, 1, marks=SOAK) for values in itertools.product(*options.values()))]


def deadlines(how: str, method: str) -> Deadlines:
    """Return those that find a stopped process; none but the defaults where a process is killed."""
    if how != "stop":
        return Deadlines()
    start = 2.0 if method == "forkserver" else 10.0
    return Deadlines(start=start, reset=0.8, step=0.8, call=0.8, close=0.3, recovery=4 * start)


def expect_same(play: Play, face: str, env_name: str) -> None:
    twin = open_twin(face, env_name)
    difference = first_difference(play.seen, Play(twin).go(play.steps).seen)
    twin.close()
    assert difference is None, difference


def go_until_noticed(play: Play, point: KillPoint, *, is_resumed: bool = False) -> bool:
    """Take steps until one of them was begun after the strike, or there was none; whether there was one.

    With ``is_resumed`` the library may have resumed the process already.
    """
    while True:
        is_due = point.is_due
        if is_due:
            point.await_strike()
            assert becomes_true(lambda: is_resumed or state_of(point.pid) in ("", "T", "Z"))
        play.go(1)
        if is_due or not point.is_due:
            return is_due


def state_of(pid: int) -> str:
    """Return the letter that /proc has for the state of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


# --- the tracer itself ------------------------------------------------------------------------------

WRITER = """
import os
os.write(1, b"!")
os.read(0, 1)
for _ in range(5):
    for _ in range(9):
        os.sched_yield()
    os.write(1, b".")
"""


@pytest.mark.parametrize(("how", "written"), [("before", 2), ("after", 3), ("stop", 3)])
def test_tracer_strikes_before_or_after_the_call_that_is_asked_for(how: str, written: int) -> None:
    command = [sys.executable, "-I", "-S", "-c", WRITER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.read(1) == b"!"
        # Once the tracer has attached: the read, then yields and a write in turn.
        with KillPoint(process.pid, 7, how) as point:
            process.stdin.write(b".")
            process.stdin.flush()
            point.await_strike()
            assert becomes_true(lambda: state_of(process.pid) == ("T" if how == "stop" else "Z"))
        process.kill()
        assert process.stdout.read() == b"." * written


# --- a worker ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("companion")
@pytest.mark.parametrize(
    ("face", "env_name", "method", "hows", "stride"),
    rows(
        ("env", "counter", "forkserver", "before, after", 97),
        ("vector", "counter", "forkserver", "before, after, stop", 110),
        face=("env", "vector"),
        env_name=("counter", "cart_pole"),
        method=METHODS,
        hows=("before", "after", "stop"),
    ),
)
def test_worker_killed_or_stopped_at_any_system_call_is_brought_back_exactly(
    face: str, env_name: str, method: str, hows: str, stride: int
) -> None:
    """From the first call after the fork that makes it."""

    def strike(nth: int, how: str) -> KillPoint:
        events: list[Any] = []
        with KillPoint(monitor_pid(), nth, how, newborn=True) as point:
            env = open_face(face, env_name, method, hooks=[events.append], deadlines=deadlines(how, method))
            with contextlib.closing(env):
                play = Play(env).go(STEPS)
                is_noticed = go_until_noticed(play, point)
                statistics = statistics_of(env)
            point.await_end()
        expect_same(play, face, env_name)
        assert statistics.losses == statistics.exact_recoveries == is_noticed
        assert [event.outcome for event in events if isinstance(event, Recovery)] == ["exact"] * is_noticed
        return point

    sweep(strike, hows, stride)


@pytest.mark.skipif(native is None, reason="there is no native extension, or it is not wanted")
@pytest.mark.parametrize(
    ("face", "stride"),
    [("vector", 283), *(pytest.param(face, 1, marks=SOAK) for face in ("env", "vector"))],
)
def test_worker_killed_between_any_two_instructions_of_the_extension_is_brought_back_exactly(
    face: str, stride: int
) -> None:
    """So also between any two of its stores into shared memory, in a plain step."""

    def strike(nth: int, how: str) -> KillPoint:
        env = open_face(face, "counter", "forkserver")
        with contextlib.closing(env):
            play = Play(env).go(4)  # so that the next one is a plain step, without a snapshot
            with KillPoint(statistics_of(env).pid, nth, how) as point:
                is_noticed = go_until_noticed(play, point)
                statistics = statistics_of(env)
                env.close()
                point.await_end()
        expect_same(play, face, "counter")
        assert statistics.losses == statistics.exact_recoveries == is_noticed
        return point

    sweep(strike, "inside", stride)


# --- a snapshot -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("companion")
@pytest.mark.parametrize(
    ("face", "method", "hows", "stride"),
    rows(
        ("env", "forkserver", "before, after, stop", 89),
        ("vector", "forkserver", "before, after", 97),
        face=("env", "vector"),
        method=METHODS,
        hows=("before", "after", "stop"),
    ),
)
def test_snapshot_killed_or_stopped_at_any_system_call_leaves_an_exact_recovery(
    face: str, method: str, hows: str, stride: int
) -> None:
    """From the fork on: while it freezes, waits, wakes when the worker is killed, and is the worker."""

    def strike(nth: int, how: str) -> KillPoint:
        events: list[Any] = []
        env = open_face(face, "counter", method, hooks=[events.append], deadlines=deadlines(how, method))
        with contextlib.closing(env), KillPoint(statistics_of(env).pid, nth, how, newborn=True) as point:
            play = Play(env).go(4)  # build and reset are requests too: the next snapshot is taken after the eighth
            point.await_newborn()
            was_frozen = point.is_due
            kill_worker(env)
            play.go(STEPS - 4)
            is_noticed = go_until_noticed(play, point)
            statistics = statistics_of(env)
            env.close()
            point.await_end()
        expect_same(play, face, "counter")
        outcomes = [event.outcome for event in events if isinstance(event, Recovery)]
        assert outcomes == ["exact"] * statistics.losses
        # Struck while it woke it is a second process of the same recovery, struck later a second loss.
        assert statistics.losses in ({1, 2} if is_noticed and not was_frozen else {1})
        return point

    sweep(strike, hows, stride)


# --- the monitor ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("face", "method", "hows", "stride"),
    rows(
        ("vector", "forkserver", "before, after, stop", 61),
        face=("env", "vector"),
        method=METHODS,
        hows=("before", "after", "stop"),
    ),
)
def test_monitor_killed_or_stopped_at_any_system_call_loses_no_step(
    face: str, method: str, hows: str, stride: int
) -> None:
    """While it launches a worker, hears of snapshots, reaps the worker, wakes a snapshot and ends it all."""

    def strike(nth: int, how: str) -> KillPoint:
        with contextlib.ExitStack() as stack:
            other = stack.enter_context(contextlib.closing(open_face("env", "counter", method)))
            others = Play(other).go(1)
            point = stack.enter_context(KillPoint(monitor_pid(), nth, how))
            env = stack.enter_context(contextlib.closing(open_face(face, "counter", method)))
            play = Play(env).go(STEPS // 2)
            kill_worker(env)
            play.go(STEPS // 2)
            is_noticed = go_until_noticed(others, point, is_resumed=how == "stop")
            play.go(1)
            statistics = statistics_of(env)
            env.close()
            losses = others.env.statistics().losses
            other.close()
            if point.is_due:
                point.await_strike()
        expect_same(play, face, "counter")
        expect_same(others, "env", "counter")
        assert statistics.truncated_recoveries == 0
        if how == "stop" or not is_noticed:
            assert (losses, statistics.losses) == (0, 1)
        else:
            assert not is_alive(point.pid)
            assert losses == 1
            assert statistics.losses in (1, 2)  # one if it had no worker at that moment
        return point

    sweep(strike, hows, stride)


# --- the trainer ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("face", "method", "hows", "stride"),
    rows(
        ("env", "forkserver", "before, after, stop", 130),
        face=("env", "vector"),
        method=METHODS,
        hows=("before", "after", "stop"),
    ),
)
def test_nothing_is_left_of_a_trainer_killed_at_any_system_call_and_a_stopped_one_goes_on(
    face: str, method: str, hows: str, stride: int
) -> None:
    """From before its first env to its exit, in whichever of its threads."""
    twin = open_twin(face, "counter")
    expected = digest(Play(twin).go(STEPS))
    twin.close()

    def strike(nth: int, how: str) -> KillPoint:
        with Trainer("kill_point_trainers", "train", face, method) as trainer:
            trainer.expect("ready")
            assert becomes_true(lambda: state_of(trainer.pid) == "T")
            with KillPoint(trainer.pid, nth, how) as point:
                trainer.signal(signal.SIGCONT)
                point.await_end()
                if how == "stop" and point.struck:
                    assert becomes_true(lambda: state_of(trainer.pid) == "T")
                    time.sleep(0.05)  # its processes go on meanwhile
                    trainer.signal(signal.SIGCONT)
                if how == "stop" or not point.struck:
                    assert f"seen {expected}" in trainer.succeed()
                else:
                    assert trainer.wait() == -signal.SIGKILL
                    trainer.assert_nothing_lives()
        return point

    sweep(strike, hows, stride)
