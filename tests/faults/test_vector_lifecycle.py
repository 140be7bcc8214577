"""However a trainer with a vector env ends, nothing of it lives on: as test_lifecycle.py, for groups of envs."""

from __future__ import annotations

import signal

import pytest
from trainer_process import Trainer


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.soak)])
@pytest.mark.parametrize("where", ["inside", "between"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["sigkill", "sigint"])
def test_nothing_outlives_a_trainer_with_a_vector_env(method: str, where: str, number: signal.Signals) -> None:
    with Trainer("lifecycle_trainers", "block_vector", method, where) as trainer:
        trainer.expect("ready")
        trainer.signal_group(number)
        assert trainer.wait() == -number
        trainer.assert_nothing_lives()
