"""Every single fault at every request of a program, in all faces; see ``simulation`` and ``programs``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multienv._engine.native import native
from simulation.programs import Case
from simulation.schedules import bases, check_each_single_fault, name_of

BASES = list(bases())


@pytest.mark.parametrize("stride", [149, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("base", BASES, ids=name_of)
def test_single_fault_leaves_the_trajectory_whole(base: Case, stride: int) -> None:
    """By default some of the faults, with constants drawn anew for each program; in the soak run all, with those of life.

    Without the extension they are others.
    """
    place = BASES.index(base) + (74 if native is None else 0)
    check_each_single_fault(replace(base, rare=place + 1 if stride > 1 else 0), first=place % stride, stride=stride)
