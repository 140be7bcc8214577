"""The env managers while their workers die: the same episodes, as many as asked for, and nothing lost."""

from __future__ import annotations

import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from manager_envs import FailingResetEnv

from kit import CounterEnv, Fault, FaultyEnv, NondeterministicEnv, kill_worker
from kit.gates import gated_from_the_second_time, opened_meanwhile
from kit.trainer_process import STUCK_AFTER, becomes_true
from multienv import AsyncSubprocessEnvManager, RestartPolicy
from multienv.errors import ClosedError

RAISE = RestartPolicy(on_crash="raise", on_timeout="raise")


def test_one_envs_recovery_holds_up_no_other(tmp_path: Path) -> None:
    """Env 0 cannot be built again until the other one has gone on for a while."""
    fns = [partial(gated_from_the_second_time, tmp_path), partial(CounterEnv, horizon=None)]
    options: Any = {"wait_num": 1, "step_wait_timeout": 0.0, "restart": RestartPolicy(snapshots=False)}
    with AsyncSubprocessEnvManager(fns, **options) as manager:
        kill_worker(manager, 0)
        seen = dict(manager.step({0: 1, 1: 1}))
        for _ in range(50):
            assert 0 not in seen
            assert list(manager.ready_obs) == [1]
            seen = manager.step({1: 1})
        with opened_meanwhile(tmp_path):  # that it is lost is noticed here at the latest
            while 0 not in seen:
                seen = manager.step(dict.fromkeys(manager.ready_obs, 1))
        assert seen[0].observation[0] == 1
        assert manager.statistics()[0].exact_recoveries == 1


def test_an_episode_that_cannot_be_brought_back_is_not_counted(manager_of: Any) -> None:
    options: Any = {"episode_num": 1, "restart": RestartPolicy(snapshots=False)}
    with manager_of([partial(NondeterministicEnv, horizon=4)], **options) as manager:
        manager.step({0: 1})
        kill_worker(manager, 0)
        assert manager.step({0: 1})[0].info["abnormal"]
        steps = 0
        while not manager.done:
            steps += len(manager.step(dict.fromkeys(manager.ready_obs, 1)))
        assert steps == 4


@pytest.mark.parametrize(
    ("what", "how"),
    [("launch", "thread"), ("launch", "signal handler"), ("step", "signal handler"), ("retry", "thread")],
)
def test_close_ends_what_a_manager_waits_for(manager_of: Any, what: str, how: str, tmp_path: Path) -> None:
    """The building of an env, its step, or the pause between two tries of a reset: none would ever end."""
    begun, errors = tmp_path / "begun", tmp_path / "errors"
    if what == "retry":
        failing = partial(FailingResetEnv, errors=str(errors), horizon=1)
        manager = manager_of([failing], max_retry=3, retry_waiting_time=3600.0)
    else:
        moment: Any = "construct" if what == "launch" else what
        manager = manager_of([partial(FaultyEnv, fault=Fault("hang", moment, once=begun))])
    is_waiting = begun.exists if what != "retry" else lambda: errors.exists() and errors.read_text() == "twice"
    trainer = threading.get_ident()
    before = signal.signal(signal.SIGUSR1, lambda *_: manager.close())

    def close() -> None:
        assert becomes_true(is_waiting, STUCK_AFTER)
        manager.close() if how == "thread" else signal.pthread_kill(trainer, signal.SIGUSR1)

    thread = threading.Thread(target=close)
    thread.start()
    try:
        with pytest.raises(ClosedError):
            manager.launch()
            errors.write_text("once\ntwice")
            manager.step(dict.fromkeys(range(manager.env_num), 1))
            _ = manager.ready_obs
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert manager.closed
    assert becomes_true(lambda: not [one for one in threading.enumerate() if one.name.startswith("multienv-manager")])
