"""Every single fault at every request of a program, in batches; see ``simulation`` and ``programs``."""

from __future__ import annotations

import pytest

from simulation.schedules import bases, check_each_single_fault, name_of

BATCHES = [base for base in bases() if base.face.isupper()]


@pytest.mark.parametrize("base", BATCHES, ids=name_of)
def test_single_fault_leaves_the_trajectory_of_a_batch_whole(base):
    check_each_single_fault(base)
