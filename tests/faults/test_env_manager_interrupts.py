"""Exceptions of signal handlers at each place of a manager's calls: nothing is lost, doubled or left locked."""

from __future__ import annotations

import pytest
from trainer_process import run

ROWS = [
    pytest.param(
        f"{how}SubprocessEnvManager",
        inplace,
        kind,
        marks=[] if (how, inplace, kind) in {("Async", 0, "base"), ("Sync", 1, "error")} else pytest.mark.soak,
    )
    for how in ("Async", "Sync")
    for inplace in (0, 1)
    for kind in ("base", "error")
]


@pytest.mark.parametrize(("manager", "inplace", "kind"), ROWS)
def test_every_place_of_step_and_ready_obs(manager: str, inplace: int, kind: str) -> None:
    run("manager_trainers", "every_place_of_a_managers_step", manager, kind, inplace)


def test_every_place_of_a_stacked_step() -> None:
    run("manager_trainers", "every_place_of_a_stacked_step", "base")


@pytest.mark.parametrize(
    "manager", ["AsyncSubprocessEnvManager", pytest.param("SyncSubprocessEnvManager", marks=pytest.mark.soak)]
)
def test_every_place_of_reset(manager: str) -> None:
    run("manager_trainers", "every_place_of_a_managers_reset", manager, "base")


def test_every_place_of_a_call_of_the_envs() -> None:
    run("manager_trainers", "every_place_of_a_managers_call", "AsyncSubprocessEnvManager", "base")


@pytest.mark.soak
@pytest.mark.parametrize("inplace", [0, 1])
@pytest.mark.parametrize("manager", ["AsyncSubprocessEnvManager", "SyncSubprocessEnvManager"])
def test_every_place_of_a_step_that_recovers(manager: str, inplace: int) -> None:
    run("manager_trainers", "every_place_of_a_managers_step", manager, "base", inplace, 3, within=100)
