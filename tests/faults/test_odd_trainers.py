"""What the state of the trainer's process has to do with its envs: nothing."""

from __future__ import annotations

import pytest
from odd_trainers import ODDITIES
from trainer_process import run

QUICK = {("path_objects_in_sys_path", "spawn")}


@pytest.mark.parametrize(
    ("oddity", "method"),
    [
        pytest.param(
            oddity, method, marks=[] if method == "forkserver" or (oddity, method) in QUICK else pytest.mark.soak
        )
        for oddity in ODDITIES
        for method in ("forkserver", "spawn")
    ],
)
def test_losses_leave_no_trace_in_an_odd_trainer(oddity: str, method: str) -> None:
    run("odd_trainers", "train", oddity, method)


def test_children_in_another_pid_namespace_are_refused() -> None:
    """As after ``unshare --pid`` without ``--fork``."""
    said = run("odd_trainers", "children_elsewhere", "forkserver")
    if "refused" not in said:
        pytest.skip(said[0])
