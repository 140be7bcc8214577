"""The trainer's own children, threads, signals and imports, and the envs' workers, leave each other alone.

A forked child has a copy of every descriptor of the trainer's and of every object that holds one.
"""

from __future__ import annotations

import os
import signal

import pytest
from lifecycle_trainers import ODDITIES
from trainer_process import Trainer, becomes_true, run

TRAINERS = "lifecycle_trainers"


@pytest.mark.parametrize("how", ["exits", "collects", "closes"])
def test_a_forked_child_does_not_disturb_the_workers(how: str) -> None:
    run(TRAINERS, "fork_a_child_that", how, "forkserver")


def test_a_forked_child_does_not_keep_the_workers_of_a_killed_trainer_alive() -> None:
    with Trainer(TRAINERS, "killed_despite_a_child", "forkserver") as trainer:
        child = int(trainer.expect("ready"))
        trainer.signal(signal.SIGKILL)
        trainer.process.kill()
        assert becomes_true(lambda: set(trainer.family()) == {child}), trainer.family()
        os.kill(child, signal.SIGKILL)
        trainer.assert_nothing_lives()


@pytest.mark.parametrize(
    "what",
    [
        "death_despite_a_child",
        "envs_in_a_forked_child",
        "step_in_a_forked_child",
        "reap_any_child",
        "watch_children",
        "ignore_children",
        "another_thread",
    ],
)
def test_the_trajectory_is_the_undisturbed_one_whatever_else_the_trainer_does(what: str) -> None:
    run(TRAINERS, what, "forkserver")


@pytest.mark.parametrize(
    ("oddity", "method"),
    [
        *((oddity, "forkserver") for oddity in ODDITIES),
        ("path_objects_in_sys_path", "spawn"),
    ],
)
def test_losses_leave_no_trace_in_an_odd_trainer(oddity: str, method: str) -> None:
    run(TRAINERS, "train", oddity, method)


def test_children_in_another_pid_namespace_are_refused() -> None:
    """As after ``unshare --pid`` without ``--fork``."""
    said = run(TRAINERS, "children_elsewhere", "forkserver")
    if "refused" not in said:
        pytest.skip(said[0])
