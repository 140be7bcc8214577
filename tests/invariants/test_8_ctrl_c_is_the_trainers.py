"""Invariant 8: Ctrl-C is the trainer's. Workers ignore SIGINT, and a handler can still step and close. A call that is
interrupted while it waits is completed by the next one. One in which another handler raises while it sends was never
made, and the workers that it had asked are recovered. Nothing is lost or doubled. At every place, one after the other:
``tests/simulation/test_interruptions.py`` and ``tests/faults/test_interruptions.py``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faces import KINDS, Face

from kit import CounterEnv
from kit.ctrl_c import ctrl_c
from kit.gates import WAIT, GateEnv
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
            face.step([WAIT, WAIT])
        if then == "close":
            return
        if then == "step":
            rows = face.step([2, 2])
            assert seen(rows) == [[2, WAIT], [2, WAIT]][everyone]
            assert all(row.info["multienv"] == {"resumed": True} for row in rows)
            rows = face.step([1, 0])
            assert seen(rows) == [[3, 1], [3, 0]][everyone]
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
            face.step([WAIT, WAIT])
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
            rows = face.step([WAIT, WAIT])
        assert handled == [[2, 3]] * other.num_envs
        assert seen(rows) == [[2, WAIT], [2, WAIT]][: face.num_envs]
        assert face.losses() == 0
