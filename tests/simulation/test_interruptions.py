"""Ctrl-C at every place of the trainer's own code, with and without a worker that dies; see ``simulation``, ``programs``."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType

import pytest

from kit.interruption import Interruption
from multienv._engine.native import native
from multienv._engine.recovery import answers
from simulation.programs import Case, Run
from simulation.schedules import bases, name_of
from simulation.simulation import Fault

BASES = [base for base in bases() if base.policy == "snapshot" and not base.eager]
FAULTS = {
    "no loss": (),
    "a loss": (Fault(0, "request", 4, "executed"),),
    "a loss in a loss": (Fault(0, "request", 4, "executed"), Fault(0, "wake", 1, "dead")),
    "a loss between two calls": (Fault(0, "request", 2, "replied"),),
}


def check_each_place(base: Case, first: int, stride: int) -> None:
    """Interrupt a program at each place in turn, until one finds no place any more."""
    place = first
    while True:
        run = Run(replace(base, interrupted=place))
        run.play()
        if not run.interruption.fired:
            break
        place += stride
    assert place > 1000, "nothing was interrupted"


@pytest.mark.parametrize("stride", [6469, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("base", "losses"),
    [
        pytest.param(base, losses, marks=[] if (number + which) % 2 else pytest.mark.ci, id=f"{name_of(base)}-{losses}")
        for number, base in enumerate(BASES)
        for which, losses in enumerate(FAULTS)
    ],
)
def test_interrupted_call_loses_no_transition(base: Case, losses: str, stride: int) -> None:
    """By default at some places; those with and without losses are not the same, nor those without the extension."""
    first = BASES.index(base) * 7 + list(FAULTS).index(losses) * 403 + (1613 if native is None else 0)
    check_each_place(replace(base, faults=FAULTS[losses]), first % stride, stride)


@pytest.mark.parametrize("policy", ["journal", "starts"])
def test_interrupted_reset_of_some_envs_is_replayed_as_it_was(policy: str) -> None:
    """What is laid over the rows of a reply is no part of the record, wherever the call is left."""
    ops = (("reset", 7), *(("step", number) for number in range(9)))
    last = Fault(0, "request", Run(Case("DISABLED", policy, ops)).play().events[0, "request"], "executed")
    check_each_place(Case("DISABLED", policy, ops, (last,)), first=3, stride=401)


@pytest.mark.parametrize("policy", ["journal", "starts"])
def test_interrupted_steps_of_some_envs_are_replayed_as_they_were(policy: str) -> None:
    """The same for envs at their own pace, where the rows of those that are left alone are laid over."""
    ops = (("reset", 7), *(("some", number) for number in range(7)))
    last = Fault(0, "request", Run(Case("NEXT_STEP", policy, ops)).play().events[0, "request"], "executed")
    check_each_place(Case("NEXT_STEP", policy, ops, (last,)), first=3, stride=409)


def test_interruption_where_rows_of_some_envs_are_laid_over_is_a_loss() -> None:
    """Of the places of the test above those that change what is recorded."""
    ops = (("reset", 7), *((("some", "pace")[number % 2], number) for number in range(5)))
    last = Fault(0, "request", Run(Case("NEXT_STEP", "journal", ops)).play().events[0, "request"], "executed")
    place, stride = 0, 47
    while True:
        run = Run(Case("NEXT_STEP", "journal", ops, (last,), interrupted=place))
        run.interruption = Interruption(place, skips=is_not_in_answers)
        run.play()
        if not run.interruption.fired:
            break
        place += stride
    assert place > 200, "nothing was interrupted"


def is_not_in_answers() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != answers.__file__:
        frame = frame.f_back
    return frame is None
