"""Every single fault at every request of a program, in single envs and lists; see ``simulation`` and ``programs``."""

from __future__ import annotations

import pytest

from simulation.programs import Case
from simulation.schedules import bases, check_each_single_fault, name_of

LISTS = [base for base in bases() if not base.face.isupper()]


@pytest.mark.parametrize("base", LISTS, ids=name_of)
def test_single_fault_leaves_the_trajectory_of_a_list_whole(base: Case) -> None:
    """By default a ninth of the faults; each is met with some of the policies and timings."""
    check_each_single_fault(base, first=LISTS.index(base) % 9, stride=9)


@pytest.mark.soak
@pytest.mark.parametrize("base", LISTS, ids=name_of)
def test_each_single_fault_leaves_the_trajectory_of_a_list_whole(base: Case) -> None:
    check_each_single_fault(base)
