"""Exceptions of signal handlers at the places of a manager's calls: nothing is lost, doubled or left locked."""

from __future__ import annotations

import pytest
from trainer_process import run

# With a stride only every so many-th place is tried; the first of all rows, and a soak run, try every place.
STRIDES = [7, pytest.param(1, marks=pytest.mark.soak)]
ROWS = [
    pytest.param(
        f"{how}SubprocessEnvManager",
        inplace,
        kind,
        stride,
        marks=[]
        if (how, inplace, kind, stride) in {("Async", 0, "base", 5), ("Sync", 1, "error", 3)}
        else pytest.mark.soak,
    )
    for how in ("Async", "Sync")
    for inplace in (0, 1)
    for kind in ("base", "error")
    for stride in ((1, 3) if how == "Sync" else (1, 5))
]


@pytest.mark.parametrize(("manager", "inplace", "kind", "stride"), ROWS)
def test_places_of_step_and_ready_obs(manager: str, inplace: int, kind: str, stride: int) -> None:
    run("manager_trainers", "places_of_a_managers_step", manager, kind, inplace, 0, stride)


@pytest.mark.parametrize("stride", STRIDES)
def test_places_of_a_stacked_step(stride: int) -> None:
    run("manager_trainers", "places_of_a_stacked_step", "base", stride)


@pytest.mark.parametrize("stride", STRIDES)
def test_places_of_reset(stride: int) -> None:
    run("manager_trainers", "places_of_a_managers_reset", "AsyncSubprocessEnvManager", "base", stride)


@pytest.mark.parametrize("stride", STRIDES)
def test_places_of_a_call_of_the_envs(stride: int) -> None:
    run("manager_trainers", "places_of_a_managers_call", "AsyncSubprocessEnvManager", "base", stride)


@pytest.mark.soak
@pytest.mark.parametrize("inplace", [0, 1])
@pytest.mark.parametrize("manager", ["AsyncSubprocessEnvManager", "SyncSubprocessEnvManager"])
def test_places_of_a_step_that_recovers(manager: str, inplace: int) -> None:
    run("manager_trainers", "places_of_a_managers_step", manager, "base", inplace, 3, within=100)
