"""Every single fault, and pairs of faults, in the env managers; see ``managers`` for the oracle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simulation.managers import ENVS, MANAGERS, ManagerCase, ManagerRun, manager_bases, manager_name, with_fault
from simulation.schedules import faults_of

BASES = list(manager_bases())
# Half of those of each policy, lazy and eager, are CI's.
HALVED = [pytest.param(base, marks=pytest.mark.ci if number % 4 in (1, 2) else ()) for number, base in enumerate(BASES)]


def singles(base: ManagerCase) -> Iterator[ManagerCase]:
    for fault in faults_of(ManagerRun(base).play(), range(ENVS)):
        yield with_fault(base, fault)


@pytest.mark.parametrize("stride", [101, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("base", HALVED, ids=manager_name)
def test_single_fault_leaves_what_a_manager_hands_out_whole(base: ManagerCase, stride: int) -> None:
    cases = list(singles(base))
    assert len(cases) > 50
    for case in cases[BASES.index(base) % stride :: stride]:
        assert set(ManagerRun(case).play().struck) == set(case.faults), case


@pytest.mark.parametrize("stride", [19937, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("manager", MANAGERS)
def test_interrupted_call_of_a_manager_loses_and_doubles_nothing(manager: str, stride: int) -> None:
    """Ctrl-C at places of the trainer's own code, one after the other."""
    place = list(MANAGERS).index(manager) * 31
    while True:
        run = ManagerRun(ManagerCase(manager, "journal", interrupted=place))
        run.play()
        if not run.interruption.fired:
            break
        place += stride
    assert place > 5000, "little was interrupted"
