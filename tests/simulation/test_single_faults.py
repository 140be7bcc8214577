"""Every single fault at every request of a program, in all faces; see ``simulation`` and ``programs``."""

from __future__ import annotations

import pytest

from simulation.programs import Case
from simulation.schedules import bases, check_each_single_fault, name_of

BASES = list(bases())


@pytest.mark.parametrize("base", BASES, ids=name_of)
def test_single_fault_leaves_the_trajectory_whole(base: Case) -> None:
    """By default some of the faults; each is met with some of the policies and timings."""
    check_each_single_fault(base, first=BASES.index(base) % 17, stride=17)


@pytest.mark.soak
@pytest.mark.parametrize("base", BASES, ids=name_of)
def test_each_single_fault_leaves_the_trajectory_whole(base: Case) -> None:
    check_each_single_fault(base)
