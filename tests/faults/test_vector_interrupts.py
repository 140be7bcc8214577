"""Ctrl-C at every place of a call to several envs in each of several processes: see test_interrupts.py.

What is wanted: an interrupted step is completed by the next step(), which says so; an interrupted reset or call by
whatever is called next. No transition is lost or doubled, and the groups' places in memory go on alternating together.
"""

from __future__ import annotations

import pytest
from trainer_process import run

TRAINERS = "vector_interrupt_trainers"
MODES = ["NEXT_STEP", "SAME_STEP", "DISABLED"]
KINDS = ["base", "error"]
soak = pytest.mark.soak


@pytest.mark.parametrize(
    ("kind", "mode", "at_once"),
    [("base", "NEXT_STEP", 0), ("error", "DISABLED", 1)]
    + [pytest.param(kind, mode, many, marks=soak) for kind in KINDS for mode in MODES for many in (0, 1)],
)
def test_every_place_of_step(kind: str, mode: str, at_once: int) -> None:
    run(TRAINERS, "every_place_of_step", kind, mode, at_once)


@pytest.mark.parametrize(
    ("kind", "mode", "at_once", "stride"),
    [("base", "SAME_STEP", 0, 17)]
    + [pytest.param(kind, mode, many, 1, marks=soak) for kind in KINDS for mode in MODES for many in (0, 1)],
)
def test_every_place_of_a_step_that_recovers(kind: str, mode: str, at_once: int, stride: int) -> None:
    run(TRAINERS, "every_place_of_step", kind, mode, at_once, stride, within=100)


@pytest.mark.parametrize(("kind", "each"), [("base", 2), pytest.param("error", 1, marks=soak)])
def test_every_place_of_a_step_that_fails(kind: str, each: int) -> None:
    run(TRAINERS, "every_place_of_a_step_that_fails", kind, each, within=100)


@pytest.mark.parametrize("stride", [pytest.param(9, marks=soak), pytest.param(1, marks=soak)])
def test_every_pair_of_places_of_step(stride: int) -> None:
    run(TRAINERS, "every_two_places_of_step", "base", stride, within=100)


@pytest.mark.parametrize("kind", [pytest.param("error", marks=soak), "base"])
@pytest.mark.parametrize("then", ["step_wait", "step"])
@pytest.mark.parametrize("at_once", [0, pytest.param(1, marks=soak)])
def test_every_place_of_step_wait(kind: str, then: str, at_once: int) -> None:
    run(TRAINERS, "every_place_of_step_wait", kind, then, at_once)


@pytest.mark.parametrize("kind", KINDS)
def test_every_place_of_step_async(kind: str) -> None:
    run(TRAINERS, "every_place_of_step_async", kind)


@pytest.mark.parametrize(
    ("kind", "then", "mode", "stride"),
    [("base", "step", "DISABLED", 0), ("base", "reset", "NEXT_STEP", 61)]
    + [
        pytest.param(kind, then, mode, stride, marks=soak)
        for kind in KINDS
        for then in ("reset", "step", "call", "close")
        for mode in MODES
        for stride in (0, 3)
    ],
)
def test_every_place_of_reset(kind: str, then: str, mode: str, stride: int) -> None:
    run(TRAINERS, "every_place_of_reset", kind, then, mode, stride, within=100)


@pytest.mark.parametrize(("kind", "stride"), [("base", 23), *[pytest.param(kind, 1, marks=soak) for kind in KINDS]])
def test_every_place_of_call(kind: str, stride: int) -> None:
    run(TRAINERS, "every_place_of_call", kind, stride, within=100)
