"""An env whose every reset ends its process, as it has come to be, can be had again: anew."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from multienv import MultiEnv, RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv.errors import EnvsFailedError, PoisonError, WorkerLostError
from multienv.testing import CounterEnv

NUM_ENVS, CULPRIT = 3, 1
OTHERS = [0, 2]
DOOM = 3  # the action after which no reset succeeds


class DoomedEnv(CounterEnv):
    """Shows in its infos what has been set, and how many resets it has had."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.doomed, self.level, self.resets = False, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self.doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        self.resets += 1
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self.doomed = self.doomed or action == DOOM
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"level": self.level, "resets": self.resets}


class DeadlyToBuild(DoomedEnv):
    """Can be built once."""

    def __init__(self, marker: str, **options: Any) -> None:
        super().__init__(**options)
        self.marker = Path(marker)

    def step(self, action: Any) -> Any:
        if action == DOOM:
            self.marker.touch()
        return super().step(action)


def build_once(marker: str) -> gymnasium.Env[Any, Any]:
    if Path(marker).exists() and "_build_anew" in [frame.name for frame in traceback.extract_stack()]:
        os.kill(os.getpid(), signal.SIGKILL)
    return DeadlyToBuild(marker, horizon=4)


def actions_of(step: int) -> np.ndarray[Any, Any]:
    """The culprit is doomed with its third step."""
    actions = np.random.default_rng(step).integers(0, 3, NUM_ENVS)
    if step == 2:
        actions[CULPRIT] = DOOM
    return actions


def vector(mode: AutoresetMode, policy: RestartPolicy, each: int = NUM_ENVS, env_fn: Any = None) -> SubprocessVectorEnv:
    fns: list[Callable[[], Any]] = [partial(DoomedEnv, horizon=20)] * NUM_ENVS
    fns[CULPRIT] = env_fn or partial(DoomedEnv, horizon=4)
    return SubprocessVectorEnv(fns, envs_per_worker=each, autoreset_mode=mode, restart=policy)


def kill(envs: Any, index: int) -> None:
    os.kill(envs.statistics()[index].pid, signal.SIGKILL)


def go_on(envs: SubprocessVectorEnv, mode: AutoresetMode, steps: int) -> list[Any]:
    """What comes back, failures as well."""
    seen: list[Any] = []
    ended = np.zeros(NUM_ENVS, np.bool_)
    for step in range(steps):
        if mode is AutoresetMode.DISABLED and ended.any():
            try:
                seen.append(envs.reset(options={"reset_mask": ended}))
                ended[:] = False
            except EnvsFailedError as error:
                seen.append(error)
                ended[:] = [index in error.failures for index in range(NUM_ENVS)]
                continue
        try:
            batch = envs.step(actions_of(step))
        except EnvsFailedError as error:
            seen.append(error)
        else:
            seen.append(batch)
            ended = batch[2] | batch[3]
    return seen


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("each", [1, NUM_ENVS])
@pytest.mark.parametrize("snapshots", [True, False])
def test_it_is_raised_once_and_then_begins_anew(mode, each, snapshots):
    policy = RestartPolicy(snapshots=snapshots, backoff=0)
    with contextlib.closing(vector(mode, policy, each)) as envs:
        envs.reset(seed=1)
        envs.set_attr("level", [5, 6, 7])
        seen = go_on(envs, mode, 8)
        (failed,) = [one for one in seen if isinstance(one, EnvsFailedError)]
        assert list(failed.failures) == [CULPRIT]
        assert isinstance(failed.failures[CULPRIT], PoisonError)
        assert "built anew" in str(failed.failures[CULPRIT])
        assert envs.call("get_wrapper_attr", "resets")[CULPRIT] == 1
        assert envs.call("get_wrapper_attr", "level") == (5, 6, 7)
        # Of the others no transition is missing.
        steps = int(seen[-1][0][0][0])
        assert steps == (8 if mode is not AutoresetMode.DISABLED else 7)
        for row in OTHERS:
            twin = DoomedEnv(horizon=20)
            twin.reset(seed=1 + row)
            for step in range(8):
                if mode is not AutoresetMode.DISABLED or step != 4:  # a reset that failed took its turn
                    last = twin.step(actions_of(step)[row])[0]
            assert seen[-1][0][row].tobytes() == last.tobytes()


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_loss_afterwards_is_made_good_by_a_replay_of_all_that(mode):
    policy = RestartPolicy(snapshots=False, backoff=0)
    with contextlib.closing(vector(mode, policy)) as envs:
        envs.reset(seed=1)
        envs.set_attr("level", [5, 6, 7])
        before = go_on(envs, mode, 7)[-1]
        recovered = envs.statistics()[0].exact_recoveries
        kill(envs, 0)
        batch = envs.step(np.array([1, 2, 1]))
        assert envs.statistics()[0].exact_recoveries == recovered + 1
        assert not batch[3].any()
        assert (batch[0][:, 0] == before[0][:, 0] + 1).all()
        assert batch[4]["level"].tolist() == [5, 6, 7]
        assert batch[4]["resets"].tolist() == [1, 1, 1]


def test_who_cannot_even_be_built_anew_costs_nobody_else_anything(tmp_path):
    policy = RestartPolicy(snapshots=False, backoff=0)
    env_fn = partial(build_once, str(tmp_path / "built"))
    with contextlib.closing(vector(AutoresetMode.NEXT_STEP, policy, env_fn=env_fn)) as envs:
        envs.reset(seed=1)
        failures = 0
        for step in range(8):
            try:
                observations = envs.step(actions_of(step))[0]
            except EnvsFailedError as error:
                failures += list(error.failures) == [CULPRIT]
                observations = [result and result[0] for result in error.results]
            assert [int(observations[row][0]) for row in OTHERS] == [step + 1] * 2
        assert failures == 4  # each step that would begin its next episode


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_nor_does_it_in_a_reset(mode, tmp_path):
    policy = RestartPolicy(snapshots=False, backoff=0, max_restarts=20)
    env_fn = partial(build_once, str(tmp_path / "built"))
    with contextlib.closing(vector(mode, policy, env_fn=env_fn)) as envs:
        envs.reset(seed=1)
        for step in range(4):
            batch = envs.step(actions_of(step))
        assert batch[2].tolist() == [False, True, False]
        for _ in range(2):
            with pytest.raises(EnvsFailedError) as caught:
                envs.reset(options={"reset_mask": np.array([False, True, False])})
            assert list(caught.value.failures) == [CULPRIT]
            assert isinstance(caught.value.failures[CULPRIT], PoisonError)
            assert [int(caught.value.results[row][0]) for row in OTHERS] == [4, 4]


class HeadstrongEnv(DoomedEnv):
    """What is called: ``tune`` before its first reset ends the process, ``boost`` that of the first env always."""

    def __init__(self, index: int) -> None:
        super().__init__(horizon=20 if index != CULPRIT else 4)
        self.index, self.boosts = index, 0

    def tune(self) -> int:
        if not self.resets:
            os.kill(os.getpid(), signal.SIGSEGV)
        return 1

    def boost(self, *others: Any) -> int:
        if self.index == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.boosts += 1
        return self.boosts

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {**info, "boosts": self.boosts}


def test_a_call_that_the_new_one_does_not_survive_is_left_out():
    policy = RestartPolicy(snapshots=False, backoff=0, max_restarts=20)
    envs = SubprocessVectorEnv([partial(HeadstrongEnv, row) for row in range(3)], envs_per_worker=3, restart=policy)
    with contextlib.closing(envs):
        envs.reset(seed=1)
        assert envs.call("tune") == (1, 1, 1)
        seen = go_on(envs, AutoresetMode.NEXT_STEP, 7)
        assert [list(one.failures) for one in seen if isinstance(one, EnvsFailedError)] == [[CULPRIT]]
        assert seen[-1][0][:, 0].tolist() == [7, 1, 7]


class Unreadable:
    """Cannot be unpickled in a worker."""

    def __init__(self) -> None:
        self.trainer = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if os.getpid() != state["trainer"]:
            raise ValueError("not here")
        self.__dict__.update(state)


def test_what_was_called_is_so_again_and_no_more():
    """Also where one was spared a call that ends it; and what could not be read then cannot be now."""
    policy = RestartPolicy(snapshots=False, backoff=0)
    envs = SubprocessVectorEnv([partial(HeadstrongEnv, row) for row in range(3)], envs_per_worker=3, restart=policy)
    with contextlib.closing(envs):
        envs.reset(seed=1)
        with pytest.raises(EnvsFailedError) as caught:
            envs.call("boost")
        assert (list(caught.value.failures), caught.value.results) == ([0], [None, 1, 1])
        with pytest.raises(EnvsFailedError):
            envs.call("boost", Unreadable())
        envs.set_attr("level", [5, 6, 7])
        seen = go_on(envs, AutoresetMode.NEXT_STEP, 7)
        assert sum(isinstance(one, EnvsFailedError) for one in seen) == 1
        assert seen[-1][4]["boosts"].tolist() == [0, 1, 1]
        assert seen[-1][4]["level"].tolist() == [5, 6, 7]


class DyingHard(DoomedEnv):
    """Ends the process when it is let go of."""

    def __del__(self) -> None:
        if self.doomed:
            os.kill(os.getpid(), signal.SIGKILL)


def test_the_old_one_is_not_let_go_of():
    policy = RestartPolicy(snapshots=False, backoff=0)
    with contextlib.closing(vector(AutoresetMode.NEXT_STEP, policy, env_fn=partial(DyingHard, horizon=4))) as envs:
        envs.reset(seed=1)
        seen = go_on(envs, AutoresetMode.NEXT_STEP, 8)
        assert [list(one.failures) for one in seen if isinstance(one, EnvsFailedError)] == [[CULPRIT]]
        assert seen[-1][0][:, 0].tolist() == [8, 2, 8]


@pytest.mark.parametrize("on_crash", ["replay", "raise"])
def test_a_single_env_begins_in_a_new_process(on_crash):
    policy = RestartPolicy(backoff=0, on_crash=on_crash)
    with SubprocessEnv(partial(DoomedEnv, horizon=4), restart=policy) as env:
        env.reset(seed=1)
        env.set_attr("level", 5)
        env.step(DOOM)
        with pytest.raises(WorkerLostError, match=r"next reset\(\) starts a new process"):
            env.reset(seed=2)
        observation, _ = env.reset(seed=3)
        assert observation.tobytes() == CounterEnv(horizon=4).reset(seed=3)[0].tobytes()
        assert env.step(0)[4] == {"level": 5, "resets": 1}


def test_so_does_one_of_a_multi_env():
    envs = [SubprocessEnv(partial(DoomedEnv, horizon=4), restart=RestartPolicy(backoff=0)) for _ in range(NUM_ENVS)]
    with MultiEnv(envs) as m:
        m.reset(seed=1)
        failed = []
        for step in range(9):
            try:
                m.step(actions_of(step))
            except EnvsFailedError as error:
                failed.append((step, list(error.failures)))
        assert failed == [(4, [CULPRIT])]


class FatalDraws(gymnasium.Env[Any, Any]):
    """What it draws at a reset without a seed may be what it dies of."""

    def __init__(self, fatal: float) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._fatal = fatal

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        layout = self.np_random.random()
        if layout < self._fatal and seed is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.array([layout]), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1), 0.0, True, False, {}


@pytest.mark.parametrize(
    "mode", [AutoresetMode.NEXT_STEP, pytest.param(AutoresetMode.SAME_STEP, marks=pytest.mark.soak)]
)
def test_one_that_is_built_anew_draws_anew(mode: AutoresetMode) -> None:
    """It died of the same number, in each of its lives."""
    policy = RestartPolicy(backoff=0.001, max_backoff=0.01)
    envs = SubprocessVectorEnv(
        [partial(FatalDraws, 0.0), partial(FatalDraws, 0.25)], envs_per_worker=2, autoreset_mode=mode, restart=policy
    )
    with contextlib.closing(envs):
        for seed in range(3):
            envs.reset(seed=seed)
            in_a_row = 0
            for _ in range(60):
                try:
                    envs.step(np.zeros(2, int))
                    in_a_row = 0
                except EnvsFailedError:
                    in_a_row += 1
                assert in_a_row < 16, "a chance of 1 in 4 billion"
