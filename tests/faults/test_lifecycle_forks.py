"""Children of the trainer's own, forked or started, and the envs' workers leave each other alone.

A forked child has a copy of every descriptor of the trainer's and of every object that holds one.
"""

from __future__ import annotations

import os
import signal

import pytest
from trainer_process import Trainer, becomes_true, run

TRAINERS = "lifecycle_trainers"
METHODS = ["forkserver", pytest.param("spawn", marks=pytest.mark.soak)]


@pytest.mark.parametrize("how", ["exits", "os_exits", "raises", "collects", "closes"])
def test_a_forked_child_does_not_disturb_the_workers(how: str) -> None:
    run(TRAINERS, "fork_a_child_that", how, "forkserver")


def test_a_multiprocessing_child_does_not_disturb_the_workers() -> None:
    run(TRAINERS, "fork_by_multiprocessing", "forkserver")


@pytest.mark.parametrize("method", METHODS)
def test_a_forked_child_does_not_hide_a_death(method: str) -> None:
    run(TRAINERS, "death_despite_a_child", method)


@pytest.mark.parametrize("method", METHODS)
def test_a_forked_child_does_not_keep_a_collected_env_alive(method: str) -> None:
    run(TRAINERS, "collected_despite_a_child", method)


@pytest.mark.parametrize("method", METHODS)
def test_a_forked_child_does_not_keep_the_workers_of_a_killed_trainer_alive(method: str) -> None:
    with Trainer(TRAINERS, "killed_despite_a_child", method) as trainer:
        child = int(trainer.expect("ready"))
        trainer.signal(signal.SIGKILL)
        trainer.process.kill()
        assert becomes_true(lambda: set(trainer.family()) == {child}), trainer.family()
        os.kill(child, signal.SIGKILL)
        trainer.assert_nothing_lives()


def test_a_forked_child_can_have_envs_of_its_own() -> None:
    run(TRAINERS, "envs_in_a_forked_child", "forkserver")


@pytest.mark.parametrize("method", METHODS)
def test_a_trainer_may_reap_whichever_child_comes_first(method: str) -> None:
    run(TRAINERS, "reap_any_child", method)


@pytest.mark.parametrize("method", METHODS)
def test_handlers_and_subprocesses_of_the_trainer_are_undisturbed(method: str) -> None:
    run(TRAINERS, "watch_children", method)


@pytest.mark.parametrize("method", METHODS)
def test_a_trainer_may_ignore_its_children(method: str) -> None:
    run(TRAINERS, "ignore_children", method)


@pytest.mark.parametrize("method", METHODS)
def test_siblings_hold_no_end_of_each_other(method: str) -> None:
    run(TRAINERS, "siblings_hold_nothing", method)


@pytest.mark.parametrize("method", METHODS)
def test_an_env_outlives_the_thread_it_was_made_in(method: str) -> None:
    run(TRAINERS, "another_thread", method)


@pytest.mark.parametrize("method", METHODS)
def test_two_multi_envs_leave_each_other_alone(method: str) -> None:
    run(TRAINERS, "two_multi_envs", method)
