"""The env managers while their workers die: the same episodes, as many as asked for, and nothing lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from trainer_process import becomes_true

from kit import CounterEnv, Fault, FaultyEnv, NondeterministicEnv, SlowEnv, first_difference, is_alive
from multienv import AsyncSubprocessEnvManager, RestartPolicy, SyncSubprocessEnvManager
from multienv.errors import ClosedError, EnvsFailedError, WorkerDiedError, WorkerHungError
from multienv.managers.config import EnvState

sys.path.append(str(Path(__file__).parent.parent / "contract"))
from manager_envs import FailingResetEnv, GatedBuildEnv, opened_meanwhile

BOTH = [AsyncSubprocessEnvManager, pytest.param(SyncSubprocessEnvManager, marks=pytest.mark.soak)]
RAISE = RestartPolicy(on_crash="raise", on_timeout="raise")


@pytest.fixture(params=BOTH)
def manager_of(request: pytest.FixtureRequest) -> Any:
    return request.param


def kill(manager: Any, index: int, signal_number: int = signal.SIGKILL) -> int:
    pid = manager.statistics()[index].pid
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):  # it has been struck already, and nobody has noticed
            os.kill(pid, signal_number)
    return int(pid or 0)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2)]])
def test_random_subsets_with_kills_until_done(manager_of: Any, seed: int, inplace: bool) -> None:
    """Every env runs exactly its episodes, and each of its steps is delivered, with what it would have been."""
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


@pytest.mark.parametrize("how", ["thread", "signal"])
def test_close_ends_the_waiting_between_two_tries_of_a_reset(tmp_path: Path, how: str) -> None:
    errors = tmp_path / "errors"
    options: Any = {"max_retry": 3, "retry_waiting_time": 60.0}
    with AsyncSubprocessEnvManager([partial(FailingResetEnv, errors=str(errors), horizon=1)], **options) as manager:
        errors.write_text("once\ntwice")
        before = signal.signal(signal.SIGUSR1, lambda *_: manager.close())
        trainer = threading.get_ident()

        def close() -> None:
            assert becomes_true(lambda: errors.read_text() == "twice", 30.0)
            manager.close() if how == "thread" else signal.pthread_kill(trainer, signal.SIGUSR1)

        thread = threading.Thread(target=close)
        try:
            manager.step({0: 1})
            thread.start()
            with pytest.raises(ClosedError):
                _ = manager.ready_obs
        finally:
            thread.join()
            signal.signal(signal.SIGUSR1, before)
    assert becomes_true(lambda: not [one for one in threading.enumerate() if one.name.startswith("multienv-manager")])


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


def test_a_worker_lost_for_good_fails_alone(manager_of: Any) -> None:
    with manager_of([CounterEnv] * 3, restart=RAISE, wait_num=3) as manager:
        kill(manager, 1)
        with pytest.raises(WorkerDiedError) as caught:
            manager.step(dict.fromkeys(range(3), 1))
        error: Any = caught.value
        assert [result is None for result in error.results] == [False, True, False]
        assert manager.env_states[1] == EnvState.ERROR
        manager.reset({1: None})
        assert manager.env_states[1] == EnvState.RUN
        assert len(manager.step(dict.fromkeys(range(3), 1))) == 3


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


@pytest.mark.parametrize("what", ["construct", pytest.param("reset", marks=pytest.mark.soak)])
@pytest.mark.parametrize("how", ["thread", "signal"])
def test_close_ends_a_launch(tmp_path: Path, what: str, how: str) -> None:
    """While the envs are built, or reset, and never will be."""
    begun = tmp_path / "begun"
    manager = SyncSubprocessEnvManager([partial(NeverReadyEnv, str(begun), what)] * 2)
    trainer = threading.get_ident()
    before = signal.signal(signal.SIGUSR1, lambda *_: manager.close())

    def close() -> None:
        assert becomes_true(begun.exists, 30.0)
        manager.close() if how == "thread" else signal.pthread_kill(trainer, signal.SIGUSR1)

    thread = threading.Thread(target=close)
    thread.start()
    try:
        with pytest.raises(ClosedError):
            manager.launch()
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert manager.closed
    manager.close()


class NeverReadyEnv(CounterEnv):
    """Hangs when it is built, or reset; a file says that it does."""

    def __init__(self, begun: str, what: str) -> None:
        super().__init__()
        self.begun = begun
        if what == "construct":
            self.hang()

    def reset(self, **_: Any) -> Any:
        self.hang()

    def hang(self) -> None:
        Path(self.begun).touch()
        signal.pause()


def test_close_from_a_signal_handler_ends_a_step(manager_of: Any) -> None:
    with manager_of([partial(SlowEnv, step_seconds=60.0)] * 2) as manager:
        before = signal.signal(signal.SIGUSR1, lambda *_: manager.close())
        loop, trainer = manager._rollout, threading.get_ident()
        thread = threading.Thread(
            target=lambda: becomes_true(loop.stepping) and signal.pthread_kill(trainer, signal.SIGUSR1)
        )
        thread.start()
        try:
            with pytest.raises(ClosedError):
                manager.step({0: 1, 1: 1})
        finally:
            thread.join()
            signal.signal(signal.SIGUSR1, before)
        assert manager.closed
        manager.launch()
        assert len(manager.ready_obs) == 2


def test_launch_again_after_workers_died_for_good(manager_of: Any) -> None:
    manager = manager_of([CounterEnv] * 2, restart=RAISE)
    for _ in range(2):
        with manager:
            pid = kill(manager, 0)
            with pytest.raises(EnvsFailedError):
                manager.step({0: 1, 1: 1})
            becomes_true(lambda pid=pid: not is_alive(pid))
