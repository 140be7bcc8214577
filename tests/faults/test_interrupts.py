"""Ctrl-C is the trainer's, and so is every exception of a signal handler of its own: DESIGN, invariant 8.

Two ways to look for races. *Every place*: an exception is raised at each place within multienv where CPython looks for
signals, one after the other (interruption.py). *At random*: real signals, some microseconds from now. In both the caller
goes on as the documentation says, and what it sees must be, to the bit, what a quiet `CounterEnv` shows: no transition
lost, none doubled, and no worker either. The trainers are real processes, see interrupt_trainers.py.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest
from trainer_process import Trainer, run

from kit import is_alive

TRAINERS = "interrupt_trainers"
# Hundreds of trainers, each broken off at another place, take minutes; the whole of it: pytest -m ""
SOAK = pytest.mark.soak
METHODS = ["forkserver", pytest.param("spawn", marks=SOAK)]
MODES = ["NEXT_STEP", "SAME_STEP", "DISABLED"]
# Exceptions that are no Exception, as KeyboardInterrupt; those that are, as the TimeoutError of a SIGALRM recipe.
KINDS = ["base", pytest.param("error", marks=SOAK)]
BOTH = ["base", "error"]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("env", ["plain", *(pytest.param(one, marks=SOAK) for one in ("with_ends", "ends", "info"))])
def test_every_place_of_step(kind: str, env: str) -> None:
    run(TRAINERS, "every_place_of_step", kind, env)


@pytest.mark.parametrize("kind", KINDS)
def test_every_place_of_a_step_that_recovers(kind: str) -> None:
    run(TRAINERS, "every_place_of_step", kind, "plain", 37)


@pytest.mark.soak
@pytest.mark.parametrize("kind", BOTH)
def test_every_pair_of_places_of_step(kind: str) -> None:
    run(TRAINERS, "every_two_places_of_step", kind, within=100)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("then", ["step_wait", "step"])
def test_every_place_of_step_wait(kind: str, then: str) -> None:
    run(TRAINERS, "every_place_of_step_wait", kind, then)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("then", ["reset", "step", pytest.param("close", marks=SOAK)])
def test_every_place_of_reset(kind: str, then: str) -> None:
    run(TRAINERS, "every_place_of_reset", kind, then, within=100)


@pytest.mark.soak
@pytest.mark.parametrize("kind", BOTH)
def test_every_place_of_call(kind: str) -> None:
    run(TRAINERS, "every_place_of_call", kind, within=100)


@pytest.mark.parametrize(("kind", "stride"), [("base", 7), *(pytest.param(one, 1, marks=SOAK) for one in BOTH)])
def test_every_place_of_initialize(kind: str, stride: int) -> None:
    run(TRAINERS, "every_place_of_initialize", kind, stride, within=100)


@pytest.mark.parametrize("face", ["list", "vector"])
@pytest.mark.parametrize(("kind", "stride"), [("base", 29), *(pytest.param(one, 3, marks=SOAK) for one in BOTH)])
def test_every_place_of_building_several_leaves_no_descriptor(face: str, kind: str, stride: int) -> None:
    run(TRAINERS, "every_place_of_building_several", kind, face, stride, within=100)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kind", "workers", "members"),
    [("base", 0, "hosted"), *(pytest.param(*one, "mixed", marks=SOAK) for one in (("error", 0), ("base", 2)))],
)
def test_every_place_of_a_step_of_several(kind: str, mode: str, workers: int, members: str) -> None:
    run(TRAINERS, "every_place_of_multi_step", kind, mode, workers, members, within=100)


@pytest.mark.parametrize("mode", ["NEXT_STEP", *(pytest.param(one, marks=SOAK) for one in MODES[1:])])
def test_every_place_of_a_step_of_several_that_recovers(mode: str) -> None:
    run(TRAINERS, "every_place_of_multi_step", "base", mode, 0, "hosted", 41)


@pytest.mark.parametrize(
    ("kind", "workers", "members"),
    [
        ("base", 0, "hosted"),
        pytest.param("error", 0, "mixed", marks=SOAK),
        pytest.param("base", 2, "mixed", marks=SOAK),
    ],
)
def test_every_place_of_a_reset_of_several(kind: str, workers: int, members: str) -> None:
    run(TRAINERS, "every_place_of_multi_reset", kind, workers, members)


@pytest.mark.parametrize("source", ["alarm", "alarm_error", "interrupt_main", "raise_signal"])
def test_steps_and_resets_at_random(source: str) -> None:
    run(TRAINERS, "random_steps", "forkserver", source, 2000, 1)


@pytest.mark.soak
def test_steps_and_resets_at_random_in_spawned_workers() -> None:
    run(TRAINERS, "random_steps", "spawn", "alarm", 1000, 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("source", "workers"),
    [("alarm", 0)]
    + [pytest.param(*one, marks=SOAK) for one in (("alarm_error", 0), ("interrupt_main", 0), ("alarm", 2))],
)
def test_steps_of_several_at_random(source: str, mode: str, workers: int) -> None:
    run(TRAINERS, "random_multi_steps", "forkserver", source, mode, workers, 1000, 3)


@pytest.mark.parametrize("method", METHODS)
def test_building_at_random(method: str) -> None:
    run(TRAINERS, "random_initialize", method, 8 if method == "spawn" else 24, 4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["one", "multi"])
def test_ctrl_c_pressed_again_and_again(method: str, kind: str) -> None:
    """SIGINT to the whole process group, as a terminal sends it: the workers do not even notice."""
    press(method, kind, presses=150)


def press(method: str, kind: str, presses: int) -> None:
    dice = random.Random(f"{method} {kind}")
    with Trainer(TRAINERS, "press_ctrl_c", method, kind) as trainer:
        workers = [int(word) for word in trainer.expect("ready").split()]
        for _ in range(presses):
            trainer.signal_group(signal.SIGINT)
            for pid in workers:  # Ctrl-C on a terminal whose foreground group they are in, for once
                os.kill(pid, signal.SIGINT)
            time.sleep(dice.uniform(0.0, 0.01))
        assert all(map(is_alive, workers))
        trainer.signal(signal.SIGUSR1)
        said = dict(line.split() for line in trainer.succeed() if line.count(" ") == 1)
        assert int(said["interrupted"]) > presses // 10
        assert int(said["steps"]) > presses // 10


# --- for long ---------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("source", ["alarm", "alarm_error", "interrupt_main", "raise_signal"])
def test_steps_and_resets_at_random_for_long(source: str, method: str, seed: int) -> None:
    run(TRAINERS, "random_steps", method, source, 20_000, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_steps_of_several_at_random_for_long(mode: str, workers: int, seed: int) -> None:
    run(TRAINERS, "random_multi_steps", "forkserver", "alarm", mode, workers, 10_000, seed)


@pytest.mark.soak
def test_every_single_place_of_a_recovery() -> None:
    run(TRAINERS, "every_place_of_step", "base", "plain", 1, within=100)


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
def test_every_single_place_of_a_recovery_of_several(mode: Any) -> None:
    run(TRAINERS, "every_place_of_multi_step", "base", mode, 0, "hosted", 1, within=100)
