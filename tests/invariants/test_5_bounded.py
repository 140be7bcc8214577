"""Invariant 5: with a deadline every call returns or raises within it plus a short grace; ``close()`` always does.

What hangs here hangs in C with the GIL held and SIGTERM ignored, unless the test says otherwise.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faces import AND_ASYNC, RAISE, REPLAY, Face
from invariant_envs import MarksTheSecondLife, WaitsForTheSecondLife, hangs_in_its_second_life

from kit import CounterEnv, FailsNthTime, Fault, FaultyEnv, SlowEnv, is_alive, monitor_pid
from kit.gates import gated_from_the_second_time
from kit.limits import set_limit
from kit.trainer_process import becomes_true
from multienv import Deadlines
from multienv.errors import ClosedError, WaitTimeout, WorkerHungError

# To take a stack, to end the process and to launch another, on a machine that is busy with other things.
GRACE = 4.0


@contextmanager
def within(seconds: float, *, at_least: float = 0.0) -> Iterator[None]:
    """Fail unless the block takes no longer, with the grace, and no less."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert at_least <= took <= seconds + GRACE, f"took {took:.2f} s"


def hanging(moment: Any, **fault: Any) -> Any:
    return partial(FaultyEnv, fault=Fault("hang_c", moment, ignore_sigterm=True, **fault))


def test_a_worker_that_fell_asleep_is_woken_by_a_step() -> None:
    with Face("subprocess_env", [CounterEnv], deadlines=Deadlines(step=5.0), restart=RAISE) as face:
        face.reset(0)
        for _ in range(3):
            time.sleep(0.1)  # after a few milliseconds it sleeps until it is woken
            face.step([1])


@pytest.mark.parametrize("kind", ["multi_env", "vector_env"])
def test_the_deadline_of_a_reset_does_not_end_a_slower_step(kind: str) -> None:
    env_fns = [partial(SlowEnv, step_seconds=1.1), CounterEnv]
    with Face(kind, env_fns, deadlines=Deadlines(reset=1.0), restart=RAISE) as face:
        face.reset(0)
        face.step([1, 1])


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        *((kind, "step") for kind in AND_ASYNC),
        ("subprocess_env", "reset"),
        ("vector_env", "call"),
    ],
)
def test_a_request_that_hangs_is_given_up_at_its_deadline(kind: str, moment: str) -> None:
    env_fns = [hanging(moment, at=2 if moment == "reset" else 1), CounterEnv]
    limits = Deadlines(**{moment: 0.8}, close=0.8)  # type: ignore[arg-type]
    requests = {
        "step": lambda face: face.step([1, 1]),
        "reset": lambda face: face.reset(0),
        "call": lambda face: face.call("poke"),
    }
    events: list[Any] = []
    with Face(kind, env_fns, deadlines=limits, restart=RAISE, hooks=[events.append]) as face:
        face.reset(0)
        hung = face.pids()[0]
        with within(0.8, at_least=0.8), pytest.raises(WorkerHungError, match="deadline of 0.8 s"):
            requests[moment](face)
        assert becomes_true(lambda: not is_alive(hung))
        assert face.losses() == 1
    assert events[0].exit_code == -signal.SIGKILL, "SIGTERM is ignored: it was not ended in time"


def test_each_env_of_a_process_has_the_whole_deadline_for_itself() -> None:
    """Four envs in a process take longer than the deadline together; the last but one hangs after two of them."""
    slow = partial(SlowEnv, step_seconds=0.5)
    env_fns = [slow, slow, partial(FaultyEnv, fault=Fault("hang", "step", action=3), step_seconds=0.5), slow]
    events: list[Any] = []
    options: dict[str, Any] = {"deadlines": Deadlines(step=1.5), "restart": RAISE, "hooks": [events.append]}
    with Face("vector_env", env_fns, **options) as face:
        face.reset(0)
        for _ in range(2):
            with within(2.0, at_least=2.0):
                face.step([1, 1, 1, 1])
        assert face.losses() == 0
        with within(1.0 + 1.5 * 9 / 8, at_least=1.0 + 1.5), pytest.raises(WorkerHungError, match="env 2 .*of 1.5 s"):
            face.step([1, 1, 3, 1])
    assert (events[0].env_index, events[0].deadline) == (2, 1.5)


def test_an_env_that_hangs_while_it_is_built_is_given_up() -> None:
    with (
        Face("vector_env", [CounterEnv]),  # so that the monitor is there: its launch is not what is measured
        within(2 * 0.5),  # two processes: the first may have been unlucky
        pytest.raises(WorkerHungError),
    ):
        Face("vector_env", [hanging("construct"), hanging("construct")], deadlines=Deadlines(start=0.5))


def test_the_process_that_is_asked_again_after_a_hang_has_the_whole_deadline(marker: str) -> None:
    env_fn = partial(FaultyEnv, fault=Fault("hang", "step", once=marker), step_seconds=0.1)
    with Face("subprocess_env", [env_fn], deadlines=Deadlines(step=1.2), restart=REPLAY) as face:
        face.reset(0)
        (row,) = face.step([1])
        assert (int(row.observation[0]), row.truncated) == (1, False)
        assert face.losses() == 1


def test_a_recovery_that_hangs_ends_in_a_truncation(tmp_path: Path) -> None:
    """The second process is never built: only the deadline of the recovery ends that."""
    env_fn = FailsNthTime(env_fn=CounterEnv, counter=tmp_path / "built", nth=range(2, 9), manner="hang_c")
    limits = Deadlines(recovery=1.5, start=None, close=0.5)
    with Face("vector_env", [env_fn], deadlines=limits, restart=REPLAY) as face:
        face.reset(0)
        face.step([1])
        face.signal()
        with within(1.5, at_least=1.5):
            (row,) = face.step([1])
        assert row.truncated
        assert (tmp_path / "built").stat().st_size >= 2


@pytest.mark.parametrize(
    ("second", "limits"),
    [
        ({"moment": "step", "at": 3}, Deadlines(step=1.0, reset=20.0)),
        # The trainer looks first while the reset runs, which may take as long as it likes.
        ({"moment": "step", "at": 3, "reset_seconds": 0.3}, Deadlines(step=1.0)),
        ({"moment": "reset", "at": 1}, Deadlines(reset=1.0)),
    ],
    ids=["a step", "a step after a slow reset", "a reset"],
)
def test_a_replay_that_hangs_is_given_up_by_the_deadline_of_its_kind(
    second: dict[str, Any], limits: Deadlines, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then another process is tried: the whole of Deadlines.recovery, two minutes, is not waited for."""
    set_limit(monkeypatch, "REPLAY_GRACE", 0.2)
    env_fn = partial(hangs_in_its_second_life, marker, **second)
    with Face("vector_env", [env_fn], deadlines=limits, restart=REPLAY) as face:
        face.reset(0)
        for _ in range(4):
            face.step([1])
        face.signal()
        with within(10.0):
            (row,) = face.step([1])
        assert (int(row.observation[0]), row.truncated) == (5, False)
        assert Path(marker).stat().st_size == 3


def test_workers_that_hang_are_killed_side_by_side() -> None:
    """One that is stopped takes half a second: first its stack is asked for, then it has some time after SIGTERM."""
    workers = 32
    options: dict[str, Any] = {"deadlines": Deadlines(step=0.5), "restart": RAISE, "reports": ""}
    with Face("multi_env", [CounterEnv] * workers, **options) as face:
        face.reset(0)
        for worker in range(workers):
            face.signal(signal.SIGSTOP, worker)
        with within(0.45 * workers - GRACE, at_least=0.5), pytest.raises(WorkerHungError):
            face.step([1] * workers)
        assert [one.losses for one in face.statistics()] == [1] * workers


@pytest.mark.parametrize("then", ["wait", "close"])
@pytest.mark.parametrize("kind", ["subprocess_env", "vector_env"])
def test_a_wait_is_bounded_while_a_worker_is_brought_back(kind: str, then: str, tmp_path: Path) -> None:
    with Face(kind, [partial(gated_from_the_second_time, tmp_path)], restart=REPLAY) as face:
        face.reset(0)
        face.signal()
        face.envs.step_async(1 if kind == "subprocess_env" else [1])
        with within(0.1, at_least=0.1), pytest.raises(WaitTimeout):
            face.envs.step_wait(timeout=0.1)
        if then == "wait":
            (tmp_path / "gate").touch()
            row = face.envs.step_wait()
            assert (row[0][..., 0], row[3]) == (1, False)
            assert face.losses() == 1
        else:
            with warnings.catch_warnings():  # that an answer is pending
                warnings.simplefilter("ignore")
                face.close()


@pytest.mark.parametrize(
    ("kind", "lost", "dies"),
    [
        ("multi_env", 0, "in the call"),
        ("multi_env", 1, "before the call"),
        ("vector_env", 0, "before the call"),
        ("vector_env", 1, "in the call"),
    ],
)
def test_lost_worker_is_brought_back_while_another_still_steps(kind: str, lost: int, dies: str, tmp_path: Path) -> None:
    """The step of the other one ends only when that has begun."""
    env_fns: list[Any] = [partial(WaitsForTheSecondLife, tmp_path)] * 2
    env_fns[lost] = partial(MarksTheSecondLife, tmp_path, dies=dies == "in the call")
    options = {"envs_per_worker": 1} if kind == "vector_env" else {}
    with Face(kind, env_fns, deadlines=Deadlines(step=10.0), restart=REPLAY, **options) as face:
        face.reset(0)
        face.step([1, 1])
        if dies == "before the call":
            face.signal(worker=lost)
        assert [row.observation[0] for row in face.step([1, 1])] == [2, 2]
        assert [one.losses for one in face.statistics()] == [lost == 0, lost == 1]


@pytest.mark.parametrize(("kind", "monitor"), [*((kind, "alive") for kind in AND_ASYNC), ("multi_env", "stopped")])
def test_close_is_bounded_with_envs_that_hang(kind: str, monitor: str) -> None:
    """No deadline but that of close(). Three at once take as long as one."""
    face = Face(kind, [hanging("close"), hanging("step"), hanging("close")], deadlines=Deadlines(close=0.5))
    face.reset(0)
    pending = kind == "vector_env"
    if pending:
        face.envs.step_async([1, 1, 1])
    if monitor == "stopped":
        os.kill(monitor_pid(), signal.SIGSTOP)
    with (
        within(0.5, at_least=0.0 if pending else 0.4),
        pytest.warns(match="pending call") if pending else nullcontext(),
    ):
        face.close()
    with pytest.raises(ClosedError):
        face.reset()


def test_a_deadline_holds_though_the_monitor_is_stopped() -> None:
    with Face(
        "vector_env", [hanging("step", action=3), CounterEnv], deadlines=Deadlines(step=0.5), restart=RAISE
    ) as face:
        face.reset(0)
        os.kill(monitor_pid(), signal.SIGSTOP)
        with within(0.5, at_least=0.5), pytest.raises(WorkerHungError):
            face.step([3, 1])
        with within(5.0):
            assert face.reset(0)[0].observation[0] == 0
