"""Invariant 8: Ctrl-C is the trainer's. Workers ignore SIGINT, and a handler can still step and close. A call that is
interrupted while it waits is completed by the next one. One in which another handler raises while it sends was never
made, and the workers that it had asked are recovered. Nothing is lost or doubled.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faces import KINDS, Face

from kit import CounterEnv, is_alive
from kit.ctrl_c import GateEnv, ctrl_c, raise_in_the_library
from kit.trainer_process import Trainer
from multienv.errors import ClosedError


def seen(rows: list[Any]) -> list[list[float]]:
    return [row.observation[[0, 3]].tolist() for row in rows]


@pytest.mark.parametrize("then", ["step", "reset", "close"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_step_is_completed_by_the_next_one_or_dropped(kind: str, then: str, tmp_path: Path) -> None:
    with Face(kind, [CounterEnv, partial(GateEnv, tmp_path)][kind == "subprocess_env" :]) as face:
        everyone = slice(face.num_envs)
        face.reset(0)
        face.step([0, 0])
        pids = face.pids()
        with ctrl_c(tmp_path, pids), pytest.raises(KeyboardInterrupt):
            face.step([1, 2])
        if then == "close":
            return
        if then == "step":
            rows = face.step([3, 3])
            assert seen(rows) == [[2, 1], [2, 2]][everyone]
            assert all(row.info["multienv"] == {"resumed": True} for row in rows)
            rows = face.step([3, 0])
            assert seen(rows) == [[3, 3], [3, 0]][everyone]
            assert not any("multienv" in row.info for row in rows)
        else:
            assert seen(face.reset(0)) == [[0, -1], [0, -1]][everyone]
            assert seen(face.step([3, 0])) == [[1, 3], [1, 0]][everyone]
        assert face.pids() == pids
        assert face.losses() == 0


@pytest.fixture
def handle() -> Iterator[Callable[[Any], Any]]:
    """Set a handler of SIGINT for this test."""
    before = signal.getsignal(signal.SIGINT)
    yield partial(signal.signal, signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_may_close_under_the_step(kind: str, tmp_path: Path, handle: Any) -> None:
    with Face(kind, [CounterEnv, partial(GateEnv, tmp_path)][kind == "subprocess_env" :]) as face:
        face.reset(0)
        face.step([0, 0])
        handle(lambda *_: face.close())
        with ctrl_c(tmp_path), pytest.raises(ClosedError):
            face.step([1, 1])
        with pytest.raises(ClosedError):
            face.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_may_step_other_envs_and_the_interrupted_step_goes_on(kind: str, tmp_path: Path, handle: Any) -> None:
    """A handler that saves something and returns: the step does not notice."""
    with (
        Face(kind, [CounterEnv, partial(GateEnv, tmp_path)][kind == "subprocess_env" :]) as face,
        Face(kind, [CounterEnv] * 2) as other,
    ):
        for one in (face, other):
            one.reset(0)
            one.step([0, 0])
        handled: list[Any] = []

        def handler(*_: object) -> None:
            handled.extend(seen(other.step([3, 3])))
            (tmp_path / "gate").touch()

        handle(handler)
        with ctrl_c(tmp_path):
            rows = face.step([1, 2])
        assert handled == [[2, 3]] * other.num_envs
        assert seen(rows) == [[2, 1], [2, 2]][: face.num_envs]
        assert face.losses() == 0


# --- again and again: a program in a process group of its own, as a terminal has one ---------------


def step_through_ctrl_c(kind: str, context: str, enough: str) -> None:
    """Step until told by SIGUSR1; tell by a file when some steps have been interrupted.

    The env tells in each observation which step it is, and which action it took.
    """
    ending: list[int] = []
    face = Face(kind, [partial(CounterEnv, horizon=None)] * 2, context=context)
    face.reset(0)
    steps, interrupted, offered = 0, 0, []
    signal.signal(signal.SIGUSR1, lambda *_: ending.append(1))
    signal.signal(signal.SIGINT, raise_in_the_library)
    print("ready", *face.pids(), flush=True)
    while not ending or offered:
        action = random.randrange(4)
        offered.append(action)
        result = None
        try:
            result = face.envs.step(action if kind == "subprocess_env" else [action] * 2)
        except KeyboardInterrupt:
            interrupted += 1
            if interrupted == 11:
                Path(enough).touch()
        if result is None:
            continue
        steps += 1
        observation, info = (result[0], result[4]) if kind == "subprocess_env" else (result[0][0], result[4])
        # One step further, with this action, or, if it says so, with one that was interrupted.
        assert observation[0] == steps, (result, steps)
        resumed = "multienv" in (info[0] if kind == "multi_env" else info)
        assert observation[3] in offered if resumed else observation[3] == action, (result, offered)
        offered.clear()
    statistics = [one for one in face.statistics() if one is not None]
    assert [one.exact_recoveries for one in statistics] == [one.losses for one in statistics]
    face.close()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="3.10 runs signal handlers when a function returns: limits.md")
@pytest.mark.parametrize(("kind", "context"), [*zip(KINDS, ["forkserver", "forkserver", "spawn"], strict=True)])
def test_a_run_goes_on_through_one_ctrl_c_after_the_other(kind: str, context: str, tmp_path: Path) -> None:
    dice, presses, enough = random.Random(kind), 0, tmp_path / "enough"
    with Trainer("test_8_ctrl_c_is_the_trainers", "step_through_ctrl_c", kind, context, enough) as trainer:
        workers = [int(word) for word in trainer.expect("ready").split()]
        while presses < 60 or not enough.exists():  # several that come at once are one
            if trainer.process.poll() is not None:
                break  # succeed() tells why
            presses += 1
            trainer.signal_group(signal.SIGINT)
            for pid in filter(is_alive, workers):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)
            time.sleep(dice.uniform(0.0, 0.01))
        else:
            trainer.signal(signal.SIGUSR1)
        trainer.succeed()
