"""Timeouts hold after an interruption anywhere in a call; and close() waits for nothing that cannot come."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from interruption import Interruption, every_place
from trainer_process import becomes_true

from kit import CounterEnv, is_alive
from multienv import Deadlines, SubprocessEnv
from multienv.errors import MultienvError, NothingPendingError, WaitTimeout


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class FarewellEnv(CounterEnv):
    """Leaves a file when it is closed."""

    def __init__(self, left: Path) -> None:
        super().__init__()
        self.left = left

    def close(self) -> None:
        self.left.touch()


def test_close_with_a_step_pending_waits_neither_for_the_step_nor_for_its_deadline(tmp_path: Path) -> None:
    # So long that a test that waited for it would be given up.
    env = SubprocessEnv(partial(FarewellEnv, tmp_path / "left"), deadlines=Deadlines(close=10_000.0)).initialize()
    env.reset(seed=0)
    pid = env.statistics().pid or 0
    os.kill(pid, signal.SIGSTOP)
    assert becomes_true(lambda: is_stopped(pid))
    env.step_async(1)
    env.close()
    assert becomes_true(lambda: not is_alive(pid))


def test_close_of_an_idle_worker_closes_its_env(tmp_path: Path) -> None:
    with SubprocessEnv(partial(FarewellEnv, tmp_path / "left")) as env:
        env.reset(seed=0)
        env.step(1)
    assert (tmp_path / "left").exists(), "the env was not closed but killed"


@pytest.mark.parametrize("impatient", [False, True])
def test_waiting_with_a_timeout_finds_the_reply_after_an_interruption(impatient: bool) -> None:
    with SubprocessEnv(CounterEnv) as env:
        place, fired = 0, True
        while fired:
            with Interruption(place) as interruption:
                env.reset_async(seed=3)
            place, fired = place + 1, interruption.fired
            if impatient:
                with contextlib.suppress(WaitTimeout, NothingPendingError):
                    env.reset_wait(timeout=0.0)
                    continue
            try:
                observation, _ = env.reset_wait(timeout=10.0)
            except NothingPendingError:  # it had not begun
                continue
            assert observation[0] == 0, interruption.where
        assert place > 10


def test_building_with_a_timeout_after_an_interruption_and_a_wrong_call() -> None:
    for interruption in every_place():
        env = SubprocessEnv(CounterEnv, deadlines=Deadlines(start=None)).start()
        with interruption:
            env.initialize()
        with pytest.raises(MultienvError):
            env.step(1)
        env.initialize(timeout=10.0)
        assert env.reset(seed=3)[0][0] == 0, interruption.where
        env.close()


class GatedEnv(CounterEnv):
    """Its step waits until a file is there."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self.gate = gate

    def step(self, action: Any) -> Any:
        becomes_true(self.gate.exists)
        return super().step(action)


def test_a_step_is_not_waited_for_longer_than_said_after_an_interruption(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    with SubprocessEnv(partial(GatedEnv, gate)) as env:
        for interruption in every_place():
            env.reset(seed=3)
            gate.unlink()
            with interruption:
                env.step_async(1)
            with contextlib.suppress(NothingPendingError):
                with pytest.raises(WaitTimeout):
                    env.step_wait(timeout=0.01)
                with pytest.raises(WaitTimeout):
                    env.step_wait(timeout=0.01)
            gate.touch()
            with contextlib.suppress(NothingPendingError):
                assert env.step_wait(timeout=10.0)[0][0] == 1, interruption.where
