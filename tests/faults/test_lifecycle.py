"""However a trainer ends, nothing of it lives on: DESIGN, invariants 5 and 7. See invariants/test_7 for the short of it.

The trainers are real processes, see lifecycle_trainers.py. ``/dev/shm`` and pytest's own descriptors and children are
looked at around every test, by the fixture ``nothing_left``.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from trainer_process import Trainer

TRAINERS = "lifecycle_trainers"
SIGNALS = {"sigkill": signal.SIGKILL, "sigterm": signal.SIGTERM, "sigint": signal.SIGINT}


@pytest.mark.parametrize(
    ("how", "method"),
    [
        ("sigkill", "forkserver"),
        ("exception", "forkserver"),
        *(pytest.param(how, "spawn", marks=SOAK) for how in ("sigkill", "sigterm", "sigint", "return", "os_exit")),
    ],
)
def test_nothing_outlives_a_trainer_that_holds_envs_in_all_states(how: str, method: str, tmp_path: Path) -> None:
    with Trainer(TRAINERS, "hold_everything", method, how, tmp_path) as trainer:
        trainer.expect("ready")
        if how in SIGNALS:
            assert len(trainer.family()) >= 14  # 11 workers, the monitor, two children of envs
            trainer.signal(SIGNALS[how])
        code = trainer.wait()
        trainer.assert_nothing_lives()
        assert code == {"return": 0, "exception": 1, "os_exit": 4}.get(how, -SIGNALS.get(how, 0))


INSIDE += [
    pytest.param(how, state, marks=SOAK)
    for how in SIGNALS
    for state in ("hang_in_python", "hang_in_reset", "long_step", "recovery", "step of several", "step of a batch")
    if (how, state) not in INSIDE
]


def test_nothing_outlives_a_trainer_whose_group_is_told_to_stop() -> None:
    """SIGTERM to the group, as a batch system does it: the monitor is outside of it, and does its work."""
    with Trainer(TRAINERS, "crowd", "forkserver") as trainer:
        trainer.expect("ready")
        trainer.signal_group(signal.SIGTERM)
        trainer.wait()
        trainer.assert_nothing_lives()
