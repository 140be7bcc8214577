"""The env managers while their workers die: the same episodes, as many as asked for, and nothing lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from manager_envs import FailingResetEnv, GatedBuildEnv, opened_meanwhile

from kit import CounterEnv, Fault, FaultyEnv, NondeterministicEnv, first_difference
from kit.trainer_process import STUCK_AFTER, becomes_true
from multienv import AsyncSubprocessEnvManager, RestartPolicy
from multienv.errors import ClosedError, WorkerHungError
from multienv.managers.config import EnvState

RAISE = RestartPolicy(on_crash="raise", on_timeout="raise")


def kill(manager: Any, index: int, signal_number: int = signal.SIGKILL) -> int:
    pid = manager.statistics()[index].pid
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):  # it has been struck already, and nobody has noticed
            os.kill(pid, signal_number)
    return int(pid or 0)


@pytest.mark.parametrize("inplace", [False, True])
def test_every_step_of_every_episode_is_delivered_once_though_workers_are_killed(
    manager_of: Any, inplace: bool
) -> None:
    seed = 1
    dice = random.Random(seed)
    horizons = [dice.randrange(1, 6) for _ in range(5)]
    fns = [partial(CounterEnv, horizon=horizon) for horizon in horizons]
    manager = manager_of(
        fns, episode_num=4, wait_num=dice.randrange(1, 5), step_wait_timeout=0.0, reset_inplace=inplace
    )
    manager.seed(seed)
    taken: dict[int, list[Any]] = {index: [] for index in range(5)}
    given: dict[int, list[int]] = {index: [] for index in range(5)}
    with manager:
        while not manager.done:
            ready = list(manager.ready_obs)
            actions = {index: dice.randrange(4) for index in ready if dice.random() < 0.7}
            if actions and dice.random() < 0.4:
                kill(manager, dice.choice(list(actions)))
            if dice.random() < 0.2:
                kill(manager, dice.randrange(5))  # it may be stepping, or being reset, or done
            if not actions and not any(index not in ready for index in manager.active_env):
                continue
            for index, action in actions.items():
                given[index].append(action)
            for index, timestep in manager.step(actions).items():
                taken[index].append(tuple(timestep))
        statistics = manager.statistics()
    for index, (fn, horizon) in enumerate(zip(fns, horizons, strict=True)):
        twin, expected = fn(), []
        for episode in range(4):
            twin.reset(seed=manager._seed_of(index, episode))
            for step in range(horizon):
                transition = twin.step(given[index][episode * horizon + step])
                if step == horizon - 1 and inplace:
                    last = twin.step.__self__._observe()
                    transition = (transition[0], *transition[1:4], {"final_obs": last})
                    if episode < 3:
                        first = fn().reset(seed=manager._seed_of(index, episode + 1))[0]
                        transition = (first, *transition[1:])
                expected.append(transition)
        assert first_difference(taken[index], expected) is None
        assert statistics[index].steps == len(expected) == horizon * 4
    assert sum(one.losses for one in statistics) > 0
    assert sum(one.truncated_recoveries for one in statistics) == 0


def test_one_envs_recovery_holds_up_no_other(tmp_path: Path) -> None:
    """Env 0 cannot be built again until the other one has gone on for a while."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    fns = [partial(GatedBuildEnv, gate=str(gate), horizon=None), partial(CounterEnv, horizon=None)]
    options: Any = {"wait_num": 1, "step_wait_timeout": 0.0, "restart": RestartPolicy(snapshots=False)}
    with AsyncSubprocessEnvManager(fns, **options) as manager:
        kill(manager, 0)
        seen = dict(manager.step({0: 1, 1: 1}))
        for _ in range(50):
            assert 0 not in seen
            assert list(manager.ready_obs) == [1]
            seen = manager.step({1: 1})
        with opened_meanwhile(gate):  # that it is lost is noticed here at the latest
            while 0 not in seen:
                seen = manager.step(dict.fromkeys(manager.ready_obs, 1))
        assert seen[0].observation[0] == 1
        assert manager.statistics()[0].exact_recoveries == 1


def test_an_episode_that_cannot_be_brought_back_is_abnormal_and_not_counted(manager_of: Any) -> None:
    fns = [partial(NondeterministicEnv, horizon=4), partial(CounterEnv, horizon=4)]
    restart = RestartPolicy(snapshots=False)
    with manager_of(fns, episode_num=2, restart=restart) as manager:
        episodes: dict[int, list[list[Any]]] = {0: [[]], 1: [[]]}
        strikes = iter([2])
        strike = next(strikes)
        while not manager.done:
            if len(episodes[0][-1]) == strike:
                kill(manager, 0)
                strike = next(strikes, -1)
            for index, timestep in manager.step(dict.fromkeys(manager.ready_obs, 1)).items():
                episodes[index][-1].append(timestep)
                if timestep.done:
                    episodes[index].append([])
    ends = [episode[-1].info.get("abnormal", False) for episode in episodes[0] if episode]
    assert ends == [True, False, False]
    broken = episodes[0][0][-1]
    assert (broken.truncated, broken.reward) == (True, 0.0)
    assert [len(episode) for episode in episodes[0] if episode][1:] == [4, 4]
    assert [len(episode) for episode in episodes[1] if episode] == [4, 4]


def test_a_hung_reset_in_the_background_surfaces(manager_of: Any) -> None:
    fault = Fault("hang", "reset", at=2)
    fns = [partial(FaultyEnv, fault=fault, horizon=1), partial(CounterEnv, horizon=None)]
    with manager_of(fns, reset_timeout=0.3, restart=RAISE) as manager:
        with pytest.raises(WorkerHungError) as caught:
            while True:
                manager.step(dict.fromkeys(manager.ready_obs, 1))
        assert list(caught.value.failures) == [0]  # type: ignore[attr-defined]
        assert manager.env_states == {0: EnvState.ERROR, 1: EnvState.RUN}
        assert not manager.closed


class NeverReadyEnv(CounterEnv):
    """Hangs when it is built, or stepped; a file says that it does."""

    def __init__(self, begun: Path, what: str) -> None:
        super().__init__()
        self.begun = begun
        if what == "launch":
            self.hang()

    def step(self, action: Any) -> Any:
        self.hang()

    def hang(self) -> None:
        self.begun.touch()
        signal.pause()


@pytest.mark.parametrize("how", ["thread", "signal handler"])
@pytest.mark.parametrize("what", ["launch", "step", "retry"])
def test_close_ends_what_a_manager_waits_for(manager_of: Any, what: str, how: str, tmp_path: Path) -> None:
    """The building of an env, its step, or the pause between two tries of a reset: none would ever end."""
    begun, errors = tmp_path / "begun", tmp_path / "errors"
    if what == "retry":
        failing = partial(FailingResetEnv, errors=str(errors), horizon=1)
        manager = manager_of([failing], max_retry=3, retry_waiting_time=3600.0)
    else:
        manager = manager_of([partial(NeverReadyEnv, begun, what)] * 2)
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
