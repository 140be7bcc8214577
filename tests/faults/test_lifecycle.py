"""However a trainer ends, nothing of it lives on: DESIGN, invariants 5 and 7.

The trainers are real processes, see lifecycle_trainers.py. ``/dev/shm`` and pytest's own descriptors and children are
looked at around every test, by the fixture ``nothing_left``.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from trainer_process import Trainer, run

# Every state of a trainer under every start method takes minutes; the whole of it: pytest -m ""
SOAK = pytest.mark.soak
TRAINERS = "lifecycle_trainers"
METHODS = ["forkserver", pytest.param("spawn", marks=SOAK)]
SIGNALS = {
    "sigkill": signal.SIGKILL,
    "sigterm": signal.SIGTERM,
    "sigint": signal.SIGINT,
    "sighup": signal.SIGHUP,
    "sigsegv": signal.SIGSEGV,
}
STATES = ["hang_in_python", "hang_in_c", "hang_in_initialize", "hang_in_reset", "recovery", "long_step"]
QUICK = {("hang_in_c", "sigkill"), ("recovery", "sigkill"), ("hang_in_c", "sigint"), ("hang_in_initialize", "sigint")}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "how",
    ["sigkill", "exception", *(pytest.param(one, marks=SOAK) for one in ("sigterm", "sigint", "return"))]
    + [pytest.param(one, marks=SOAK) for one in ("sys_exit", "os_exit")],
)
def test_nothing_outlives_a_trainer_that_holds_envs_in_all_states(method: str, how: str, tmp_path: Path) -> None:
    with Trainer(TRAINERS, "hold_everything", method, how, tmp_path) as trainer:
        trainer.expect("ready")
        if how in SIGNALS:
            assert len(trainer.family()) >= 14  # 11 workers, the monitor, two children of envs
            trainer.signal(SIGNALS[how])
        code = trainer.wait()
        trainer.assert_nothing_lives()
        expected = {"return": 0, "sys_exit": 3, "exception": 1, "os_exit": 4, "sigint": -signal.SIGINT}
        assert code == expected.get(how, -SIGNALS.get(how, 0))


@pytest.mark.parametrize(
    ("state", "how"),
    [
        pytest.param(state, how, marks=[] if (state, how) in QUICK else SOAK)
        for state in STATES
        for how in ("sigkill", "sigterm", "sigint")
    ],
)
def test_nothing_outlives_a_trainer_that_is_inside_a_call(state: str, how: str, tmp_path: Path) -> None:
    with Trainer(TRAINERS, "block_in", state, "forkserver", tmp_path) as trainer:
        trainer.expect("ready")
        trainer.signal_group(SIGNALS[how])
        assert trainer.wait() == -SIGNALS[how]
        trainer.assert_nothing_lives()


@pytest.mark.soak
@pytest.mark.parametrize("state", ["hang_in_c", "recovery"])
def test_nothing_outlives_a_trainer_that_is_killed_inside_a_call_to_a_spawned_worker(
    state: str, tmp_path: Path
) -> None:
    with Trainer(TRAINERS, "block_in", state, "spawn", tmp_path) as trainer:
        trainer.expect("ready")
        trainer.signal_group(signal.SIGKILL)
        trainer.wait()
        trainer.assert_nothing_lives()


@pytest.mark.parametrize(
    ("method", "how"),
    [("forkserver", "sigkill"), ("forkserver", "sigint"), pytest.param("spawn", "sigint", marks=SOAK)],
)
def test_nothing_outlives_a_trainer_inside_a_step_of_several(method: str, how: str) -> None:
    with Trainer(TRAINERS, "block_multi", method) as trainer:
        trainer.expect("ready")
        trainer.signal_group(SIGNALS[how])
        trainer.wait()
        trainer.assert_nothing_lives()


@pytest.mark.parametrize("method", METHODS)
def test_nothing_outlives_a_trainer_whose_group_is_told_to_stop(method: str) -> None:
    """SIGTERM to the group, as a batch system does it: the monitor is outside of it, and does its work."""
    with Trainer(TRAINERS, "crowd", method) as trainer:
        trainer.expect("ready")
        trainer.signal_group(signal.SIGTERM)
        trainer.wait()
        trainer.assert_nothing_lives()


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_monitor_takes_no_trajectory_with_it(method: str) -> None:
    run(TRAINERS, "kill_monitor", method)


@pytest.mark.parametrize("method", METHODS)
def test_envs_that_are_collected_without_close_end(method: str) -> None:
    run(TRAINERS, "collect", method)


@pytest.mark.parametrize("method", METHODS)
def test_close_in_a_signal_handler_ends_the_step_that_blocks(method: str) -> None:
    assert "raised ClosedError" in run(TRAINERS, "close_from_handler", method)


def test_close_in_a_signal_handler_ends_the_step_of_several() -> None:
    assert "raised ClosedError" in run(TRAINERS, "close_multi_from_handler", "forkserver")


@pytest.mark.parametrize("method", METHODS)
def test_close_in_another_thread_ends_the_step_that_blocks(method: str) -> None:
    assert "raised ClosedError" in run(TRAINERS, "close_from_thread", method)


@pytest.mark.parametrize("method", METHODS)
def test_close_in_another_thread_ends_a_recovery(method: str, tmp_path: Path) -> None:
    run(TRAINERS, "close_during_recovery", method, tmp_path)
