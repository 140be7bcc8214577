"""An info that cannot be read in the trainer costs its env that step, and the others of its process nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from kit import CounterEnv
from multienv import RestartPolicy, SerialVectorEnv, SubprocessVectorEnv
from multienv.errors import EnvsFailedError, ResultNotPicklableError

CULPRIT = 1
OTHERS = [0, 2]
AT = 3
Fns = list[Callable[[], gymnasium.Env[Any, Any]]]


class Defiant:
    """Cannot be unpickled."""

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("not here")

    def __getstate__(self) -> Any:
        return {"some": "state"}


class Interrupting:
    """Ctrl-C comes while it is unpickled, once in this process."""

    come = False

    def __setstate__(self, state: Any) -> None:
        if not Interrupting.come:
            Interrupting.come = True
            raise KeyboardInterrupt

    def __getstate__(self) -> Any:
        return {"some": "state"}


class TellingEnv(CounterEnv):
    """Tells something special in the infos of some step of its episodes; in the others its step."""

    def __init__(self, special: Callable[[], Any], *, at: int = AT, **counter: Any) -> None:
        super().__init__(**counter)
        self.special, self.at = special, at

    def _info(self) -> dict[str, Any]:
        return {"special": self.special()} if self.episode_step == self.at else {"step": self.episode_step}


def fns(special: Callable[[], Any] = Defiant, *, at: int = AT, **others: Callable[[], Any]) -> Fns:
    made: Fns = [partial(TellingEnv, others.get(f"env{index}", dict), at=AT, horizon=6) for index in range(3)]
    made[CULPRIT] = partial(TellingEnv, special, at=at, horizon=6)
    return made


def actions_of(step: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(step).integers(0, 4, 3)


def expect_others(batch: Any, expected: Any, rows: Any = OTHERS) -> None:
    for mine, own in zip(batch[:4], expected[:4], strict=True):
        assert mine[rows].tobytes() == own[rows].tobytes()


def expect_failure(error: EnvsFailedError, expected: Any) -> None:
    failures, results = error.failures, error.results
    assert list(failures) == [CULPRIT]
    assert isinstance(failures[CULPRIT], ResultNotPicklableError)
    assert failures[CULPRIT].env_index == CULPRIT
    assert "cannot be unpickled here" in str(failures[CULPRIT])
    assert results[CULPRIT] is None
    for row in OTHERS:
        assert all(np.array_equal(mine, own[row]) for mine, own in zip(results[row], expected[:4], strict=True))


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_it_fails_alone_and_its_episode_goes_on_with_the_next_step(mode):
    policy = RestartPolicy(snapshots=False)
    envs = SubprocessVectorEnv(fns(), envs_per_worker=3, autoreset_mode=mode, restart=policy)
    twin = SerialVectorEnv(fns(dict), autoreset_mode=mode)
    with envs, twin:
        expect_others((envs.reset(seed=1)[0],), (twin.reset(seed=1)[0],), [0, 1, 2])
        failed = []
        for step in range(16):
            if step in (1, 3, 10):  # before the failure, right after it, and long after
                os.kill(envs.statistics()[0].pid or os.getpid(), signal.SIGKILL)
            expected = twin.step(actions_of(step))
            try:
                batch = envs.step(actions_of(step))
            except EnvsFailedError as error:
                failed.append(step)
                expect_failure(error, expected)
                continue
            expect_others(batch, expected, [0, 1, 2])
        period = 7 if mode is AutoresetMode.NEXT_STEP else 6  # six steps, and perhaps the reset
        assert failed == list(range(2, 16, period))
        assert envs.statistics()[0].exact_recoveries == 3


def test_in_a_reset():
    envs = SubprocessVectorEnv(fns(at=0), envs_per_worker=3)
    twin = SerialVectorEnv(fns(dict, at=0))
    with contextlib.closing(envs), contextlib.closing(twin):
        first, _ = twin.reset(seed=1)
        with pytest.raises(ResultNotPicklableError) as caught:
            envs.reset(seed=1)
        for row in OTHERS:
            assert caught.value.results[row].tobytes() == first[row].tobytes()
        expect_others(envs.step(actions_of(0)), twin.step(actions_of(0)), [0, 1, 2])


def test_interrupted_while_it_is_read_the_step_is_completed():
    Interrupting.come = False
    envs = SubprocessVectorEnv(fns(env2=Interrupting), envs_per_worker=3)
    with contextlib.closing(envs):
        envs.reset(seed=1)
        for step in range(2):
            envs.step(actions_of(step))
        with pytest.raises(KeyboardInterrupt):
            envs.step(actions_of(2))
        with pytest.raises(EnvsFailedError) as caught:
            envs.step(actions_of(3))
        assert list(caught.value.failures) == [CULPRIT]
        assert [result and result[0][0] for result in caught.value.results] == [3, None, 3]
        assert envs.step(actions_of(3))[0][:, 0].tolist() == [4, 4, 4]


class Asked(CounterEnv):
    """Answers with something special when it is asked."""

    def __init__(self, special: Callable[[], Any] = str) -> None:
        super().__init__()
        self.special = special

    def ask(self) -> Any:
        return self.special()


@pytest.mark.parametrize("special", [Defiant, threading.Lock])
@pytest.mark.parametrize("face", [partial(SubprocessVectorEnv, envs_per_worker=3), SerialVectorEnv])
def test_an_answer_to_a_call_that_cannot_be_read_fails_alone(special, face):
    with contextlib.closing(face([Asked, partial(Asked, special), Asked])) as envs:
        envs.reset(seed=1)
        for _ in range(2):
            with pytest.raises(EnvsFailedError) as caught:
                envs.call("ask")
            assert list(caught.value.failures) == [CULPRIT]
            assert isinstance(caught.value.failures[CULPRIT], ResultNotPicklableError)
            assert caught.value.results == ["", None, ""]
        assert envs.step(actions_of(0))[0][:, 0].tolist() == [1, 1, 1]


class SharingEnv(CounterEnv):
    """All envs of a process tell of the same things, which change with each step."""

    shared: dict[str, Any] = {"array": np.zeros(2), "nested": {"number": 0, "array": np.zeros(1)}}  # noqa: RUF012

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = super().step(action)
        number = int(observation.sum())
        self.shared["array"][:] = number
        self.shared["nested"]["number"] = number
        self.shared["nested"]["array"][:] = number
        return observation, reward, terminated, truncated, self.shared


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("face", [SerialVectorEnv, partial(SubprocessVectorEnv, envs_per_worker=3)])
def test_what_envs_share_is_told_as_it_was_at_each(face, mode):
    sharing = [partial(SharingEnv, horizon=3 + index) for index in range(3)]
    envs, twin = face(sharing, autoreset_mode=mode), SyncVectorEnv(sharing, autoreset_mode=mode)
    with contextlib.closing(envs), contextlib.closing(twin):
        envs.reset(seed=1)
        twin.reset(seed=1)
        for step in range(12):
            batch, expected = envs.step(actions_of(step)), twin.step(actions_of(step))
            assert str(batch[4]) == str(expected[4]), step
            ended = batch[2] | batch[3]
            if mode is AutoresetMode.DISABLED and ended.any():
                envs.reset(options={"reset_mask": ended})
                twin.reset(options={"reset_mask": ended})
