"""What holds after an interruption at any place: one state or the other, deadlines, descriptors, recoveries.

As in test_interrupts.py, but in this process, and for what a ledger of transitions does not see. By default every so
many-th place is tried; all of them with pytest -m soak.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_process import becomes_true

from kit import CounterEnv, NondeterministicEnv, descendants, is_alive, monitor_pid
from kit.interruption import Ledger, every_place
from multienv import Deadlines, MultiEnv, RestartPolicy, SubprocessEnv, SubprocessVectorEnv, create_subprocess_envs
from multienv.errors import (
    MultienvError,
    NothingPendingError,
    ResetNeededError,
    WaitTimeout,
)

ENDLESS = partial(CounterEnv, horizon=None)
UNREPEATABLE = partial(NondeterministicEnv, horizon=None)
NO_SNAPSHOTS = RestartPolicy(snapshots=False, state_anchors=False)
STEP = np.int64(1)


def strides(quick: int, long: int) -> Any:
    return pytest.mark.parametrize("stride", [quick, pytest.param(long, marks=pytest.mark.soak)])


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def alive() -> set[int]:
    return {pid for pid in descendants(os.getpid()) if is_alive(pid)}


# --- another life, another state ----------------------------------------------------------------------


@strides(151, 7)
def test_nothing_is_written_to_descriptors_that_are_somebody_elses(stride: int, tmp_path: Path) -> None:
    """A reset in a new process is interrupted: a file opened then may have the number that the lost one's pipe had."""
    fired = 0
    for interruption in every_place(stride=stride):
        with SubprocessEnv(UNREPEATABLE, restart=NO_SNAPSHOTS) as env:
            env.reset(seed=0)
            env.step(STEP)
            kill(env.statistics().pid)
            with interruption:
                env.reset(seed=3)
            fired += interruption.fired
            with contextlib.ExitStack() as files:
                mine = [files.enter_context((tmp_path / str(number)).open("wb")) for number in range(8)]
                with contextlib.suppress(ResetNeededError):
                    env.step(STEP)
                assert [os.fstat(file.fileno()).st_size for file in mine] == [0] * 8, interruption.where
            env.reset(seed=3)
            assert env.step(STEP)[0][0] == 1, interruption.where
    assert fired > 2


@strides(173, 7)
def test_an_interrupted_load_state_dict_leaves_the_one_state_or_the_other(stride: int) -> None:
    with SubprocessEnv(ENDLESS) as env:
        env.reset(seed=5)
        for _ in range(40):
            env.step(STEP)
        saved = env.state_dict()
    policy, fired = RestartPolicy(snapshots=False), 0
    for interruption in every_place(stride=stride):
        with SubprocessEnv(ENDLESS, restart=policy) as env:
            env.reset(seed=1)
            for _ in range(10):
                env.step(STEP)
            with interruption:
                env.load_state_dict(saved)
            fired += interruption.fired
            pid = env.statistics().pid
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):  # interrupted when it had been given up
                    kill(pid)
            try:
                observation, _, _, truncated, _ = env.step(STEP)
            except ResetNeededError:
                assert env.reset(seed=1)[0][0] == 0
            else:
                assert (int(observation[0]), truncated) in ((11, False), (41, False)), interruption.where
    assert fired > 2


@strides(37, 3)
def test_a_recovery_is_exact_after_an_interruption_of_it(stride: int) -> None:
    """By a snapshot, which is there at nearly any time, and the few steps since."""
    fired = 0
    with SubprocessEnv(ENDLESS, restart=RestartPolicy(snapshot_every=3, journal_limit=4000)) as env:
        for interruption in every_place(stride=stride):
            env.reset(seed=0)
            for _ in range(5):
                env.step(STEP)
            kill(env.statistics().pid)
            with interruption:
                env.step(STEP)
            fired += interruption.fired
            if interruption.fired:
                observation, _, _, truncated, _ = env.step(STEP)
                assert (int(observation[0]), truncated) == (6, False), interruption.where
    assert fired > 5


def test_a_step_that_is_taken_once_more_after_an_interruption_is_replayed_once() -> None:
    """It ends the episode: the interruption may come when it is recorded already, and not yet handed over."""
    fired = 0
    with SubprocessEnv(partial(CounterEnv, horizon=2), restart=NO_SNAPSHOTS) as env:
        for interruption in every_place():
            env.reset(seed=0)
            env.step(STEP)
            with interruption:
                env.step(STEP)
            fired += interruption.fired
            if interruption.fired:
                assert env.step(STEP)[0][0] == 2, interruption.where
            env.reset()
            kill(env.statistics().pid)
            observation, _, _, truncated, _ = env.step(STEP)
            assert (int(observation[0]), truncated) == (1, False), interruption.where
        assert env.statistics().exact_recoveries == fired + 1
    assert fired > 5


# --- snapshot() and restore() -------------------------------------------------------------------------


@strides(31, 3)
def test_restore_can_be_called_again(stride: int) -> None:
    fired = 0
    with SubprocessEnv(ENDLESS) as env:
        env.reset(seed=1)
        for _ in range(3):
            env.step(STEP)
        token = env.snapshot()
        for interruption in every_place(stride=stride):
            env.step(STEP)
            with interruption:
                env.restore(token)
            fired += interruption.fired
            env.restore(token)
            assert env.step(STEP)[0][0] == 4, interruption.where
    assert fired > 5


@strides(13, 1)
def test_the_frozen_process_of_an_interrupted_snapshot_call_is_freed(stride: int) -> None:
    """With the next one, or with the env at the latest."""
    fired = 0
    for interruption in every_place(stride=stride):
        with SubprocessEnv(ENDLESS) as env:
            env.reset(seed=1)
            env.step(STEP)
            before = alive()
            with interruption:
                env.snapshot().free()
            fired += interruption.fired
            if interruption.place % 2:
                env.step(STEP)
                env.snapshot().free()
                assert becomes_true(lambda before=before: not alive() - before), interruption.where  # type: ignore[misc]
        assert becomes_true(lambda: alive() <= {monitor_pid()}), interruption.where
    assert fired > 5


# --- a step that asks for a state of the env too --------------------------------------------------------


@pytest.mark.parametrize("then", ["step", "call", "reset"])
@pytest.mark.parametrize(
    ("dies", "stride"),
    [(False, 29), *[pytest.param(dies, 61 if dies else 1, marks=pytest.mark.soak) for dies in (False, True)]],
)
def test_every_place_of_a_step_that_asks(then: str, dies: bool, stride: int) -> None:
    policy = RestartPolicy(snapshots=False, max_restarts=10**6)
    with SubprocessEnv(ENDLESS, restart=policy) as env:
        supervisor, ledger, fired = env._supervisor, Ledger(horizon=None), 0
        ledger.reset(env.reset(seed=0), 0)
        for interruption in every_place(stride=stride):
            supervisor.maintenance.state_due = supervisor.maintenance.is_due = True
            before = supervisor.maintenance.pacing.taken
            if dies:
                kill(env.statistics().pid)
            with interruption:
                ledger.step(env.step(STEP), [1])
            if not interruption.fired:
                assert dies or supervisor.maintenance.pacing.taken > before
                break
            fired += 1
            if then == "call":
                with contextlib.suppress(Exception):
                    assert env.call("poke", 0.0) > 0
            if then == "reset":
                ledger.reset(env.reset(seed=0), 0)
            else:
                ledger.step(env.step(np.int64(2)), [1, 2])
            if dies:  # or the journal grows with each
                ledger.reset(env.reset(seed=0), 0)
        assert fired > 2
        assert env.statistics().truncated_recoveries == 0


# --- deadlines and timeouts -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "on_timeout", ["raise", *(pytest.param(one, marks=pytest.mark.soak) for one in ("replay", "truncate"))]
)
def test_an_interrupted_step_has_no_deadline_while_nobody_waits(on_timeout: Any) -> None:
    """Wherever it was interrupted, before it was sent or after it was answered; nor has it one when it is resumed."""
    make = partial(SubprocessEnv, ENDLESS, deadlines=Deadlines(step=0.2), restart=RestartPolicy(on_timeout=on_timeout))
    with make() as env:
        env.reset(seed=0)
        for interruption in every_place(stride=3):
            with interruption:
                env.step(STEP)
            if interruption.fired and interruption.place % 30 == 0:
                time.sleep(0.3)
            assert not env.step(STEP)[3], interruption.where
            if interruption.place % 30 == 3:
                time.sleep(0.3)
        assert env.statistics().losses == 0


@pytest.mark.parametrize("several", ["batch", pytest.param("MultiEnv", marks=pytest.mark.soak)])
def test_a_batch_has_no_deadline_either_while_nobody_waits(several: str) -> None:
    deadlines = Deadlines(step=0.2)
    with contextlib.ExitStack() as stack:
        if several == "batch":
            batch = SubprocessVectorEnv([ENDLESS] * 2, envs_per_worker=1, deadlines=deadlines)
            envs: Any = stack.enter_context(contextlib.closing(batch))
        else:
            envs = stack.enter_context(MultiEnv(create_subprocess_envs([ENDLESS] * 2, deadlines=deadlines)))
        envs.reset(seed=0)
        for interruption in every_place(stride=9):
            with interruption:
                envs.step([1, 1])
            if interruption.fired and interruption.place % 36 == 0:
                time.sleep(0.3)
            assert not any(envs.step([1, 1])[3]), interruption.where
        assert [one.losses for one in envs.statistics()] == [0, 0]


def test_waiting_with_a_timeout_finds_the_reply_after_an_interruption() -> None:
    fired = found = 0
    with SubprocessEnv(CounterEnv) as env:
        for interruption in every_place(stride=2):
            with interruption:
                env.reset_async(seed=3)
            fired += interruption.fired
            try:
                observation = env.reset_wait(timeout=10.0 * (found % 2))[0]
            except NothingPendingError:  # it had not begun
                continue
            except WaitTimeout:
                observation = env.reset_wait(timeout=10.0)[0]
            found += 1
            assert observation[0] == 0, interruption.where
    assert min(fired, found) > 5


@strides(67, 5)
def test_building_with_a_timeout_after_an_interruption_and_a_wrong_call(stride: int) -> None:
    fired = 0
    for interruption in every_place(stride=stride):
        env = SubprocessEnv(CounterEnv, deadlines=Deadlines(start=None)).start()
        with interruption:
            env.initialize()
        fired += interruption.fired
        with pytest.raises(MultienvError):
            env.step(1)
        env.initialize(timeout=10.0)
        assert env.reset(seed=3)[0][0] == 0, interruption.where
        env.close()
    assert fired > 2


class GatedEnv(CounterEnv):
    """Its step waits until a file is there."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self.gate = gate

    def step(self, action: Any) -> Any:
        becomes_true(self.gate.exists)
        return super().step(action)


def test_a_step_is_not_waited_for_longer_than_said_after_an_interruption(tmp_path: Path) -> None:
    gate, fired, found = tmp_path / "gate", 0, 0
    gate.touch()
    with SubprocessEnv(partial(GatedEnv, gate)) as env:
        for interruption in every_place(stride=3):
            env.reset(seed=3)
            gate.unlink()
            with interruption:
                env.step_async(1)
            fired += interruption.fired
            for _ in range(2):
                with pytest.raises((WaitTimeout, NothingPendingError)) as caught:
                    env.step_wait(timeout=0.01)
            gate.touch()
            if not isinstance(caught.value, NothingPendingError):  # it had begun
                assert env.step_wait(timeout=10.0)[0][0] == 1, interruption.where
                found += 1
    assert fired > 5
    assert found
