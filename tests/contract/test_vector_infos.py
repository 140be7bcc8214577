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
from gymnasium.vector import AutoresetMode

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
