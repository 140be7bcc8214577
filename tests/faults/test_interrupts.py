"""Ctrl-C is the trainer's, and so is every exception of a signal handler of its own: DESIGN, invariant 8.

Two ways to look for races. *Every place*: an exception is raised at each place within multienv where CPython looks for
signals, one after the other (kit.interruption). *At random*: real signals, some microseconds from now. In both the caller
goes on as the documentation says, and what it sees must be, to the bit, what a quiet `CounterEnv` shows: no transition
lost, none doubled, and no worker either. The trainers are real processes, see interrupt_trainers.py.

By default only every so many-th place is tried, in a few faces and modes; the whole of it takes minutes: pytest -m soak.
"""

from __future__ import annotations

from typing import Any

import pytest
from trainer_process import run

TRAINERS = "interrupt_trainers"
SOAK = pytest.mark.soak
FACES = ["one", "multi", "vector", "vector of one"]
MODES = ["NEXT_STEP", "SAME_STEP", "DISABLED"]
# An exception that is no Exception, as KeyboardInterrupt; one that is, as the TimeoutError of a SIGALRM recipe.
KINDS = ["base", "error"]


def soak(*rows: Any) -> list[Any]:
    return [pytest.param(*row, marks=SOAK) for row in rows]


def modes_of(face: str) -> list[str]:
    return ["DISABLED"] if face == "one" else MODES


@pytest.mark.parametrize(
    ("face", "kind", "then", "stride"),
    [
        ("one", "base", "step", 2),
        ("vector", "error", "step_wait", 5),
        *soak(
            *((face, kind, then, 1) for face in ("one", "vector") for kind in KINDS for then in ("step", "step_wait"))
        ),
    ],
)
def test_every_place_of_the_halves_of_step(face: str, kind: str, then: str, stride: int) -> None:
    run(TRAINERS, "every_place_of_the_halves_of_step", face, kind, then, stride, within=100)


@pytest.mark.parametrize(("kind", "stride"), [("base", 7), *soak(("base", 1), ("error", 1))])
def test_every_place_of_a_step_that_fails(kind: str, stride: int) -> None:
    run(TRAINERS, "every_place_of_a_step_that_fails", kind, stride, within=100)


@pytest.mark.parametrize(("kind", "stride"), [("base", 37), *soak(("base", 1), ("error", 1))])
def test_every_place_of_initialize(kind: str, stride: int) -> None:
    run(TRAINERS, "every_place_of_initialize", kind, stride, within=100)


@pytest.mark.parametrize(
    ("face", "kind", "stride"),
    [("multi", "base", 127), ("vector", "base", 83), *soak(*((face, "base", 3) for face in ("multi", "vector")))],
)
def test_every_place_of_building_several_leaves_no_descriptor(face: str, kind: str, stride: int) -> None:
    run(TRAINERS, "every_place_of_building_several", kind, face, stride, within=100)


SOURCES = ["alarm", "alarm_error", "interrupt_main", "raise_signal"]


@pytest.mark.parametrize(
    ("face", "mode", "source", "rounds"),
    [
        ("one", "DISABLED", "alarm", 1000),
        ("one", "DISABLED", "interrupt_main", 1000),
        ("multi", "NEXT_STEP", "alarm_error", 500),
        ("vector", "SAME_STEP", "raise_signal", 500),
        *soak(*((face, mode, source, 10000) for face in FACES for mode in modes_of(face) for source in SOURCES)),
    ],
)
def test_steps_and_resets_at_random(face: str, mode: str, source: str, rounds: int) -> None:
    run(TRAINERS, "random_steps", face, mode, "forkserver", source, rounds, 1, within=100)


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=SOAK)])
def test_building_at_random(method: str) -> None:
    run(TRAINERS, "random_initialize", method, 8 if method == "spawn" else 16, 4)
