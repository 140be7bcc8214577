"""An info that cannot be read in the trainer costs its env that step, and the others of its process nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from kit import CounterEnv, SpaceEnv
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


def of_the_workers_own() -> Any:
    """An object whose class can be imported there alone."""
    module = sys.modules.setdefault("workers_own", types.ModuleType("workers_own"))
    if not hasattr(module, "Token"):
        module.Token = type("Token", (), {"__module__": "workers_own"})  # type: ignore[attr-defined]
    return module.Token()


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


@pytest.mark.parametrize("special", [Defiant, of_the_workers_own])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_it_fails_alone_and_its_episode_goes_on_with_the_next_step(special, mode):
    policy = RestartPolicy(snapshots=False)
    envs = SubprocessVectorEnv(fns(special), envs_per_worker=3, autoreset_mode=mode, restart=policy)
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


@pytest.mark.parametrize("face", [SerialVectorEnv, SubprocessVectorEnv])
def test_both_faces_do_the_same(face):
    with face(fns()) as envs:
        envs.reset(seed=1)
        for step in range(2):
            envs.step(actions_of(step))
        with pytest.raises(EnvsFailedError) as caught:
            envs.step(actions_of(2))
        assert list(caught.value.failures) == [CULPRIT]
        batch = envs.step(actions_of(3))
        assert batch[0][:, 0].tolist() == [4, 4, 4]
        assert not batch[3].any()


def test_what_is_told_with_the_last_step_of_an_episode():
    """It has ended then; the next one begins as ever."""
    envs = SubprocessVectorEnv(fns(at=6), envs_per_worker=3)
    with contextlib.closing(envs):
        envs.reset(seed=1)
        for step in range(5):
            envs.step(actions_of(step))
        with pytest.raises(ResultNotPicklableError):
            envs.step(actions_of(5))
        batch = envs.step(actions_of(6))
        assert batch[0][:, 0].tolist() == [0, 0, 0]
        assert not batch[3].any()


def test_told_to_end_episodes_where_envs_raise_it_raises_all_the_same():
    """The env has raised nothing."""
    with SubprocessVectorEnv(fns(), envs_per_worker=3, restart=RestartPolicy(on_error="truncate")) as envs:
        envs.reset(seed=1)
        for step in range(2):
            envs.step(actions_of(step))
        with pytest.raises(ResultNotPicklableError):
            envs.step(actions_of(2))
        assert envs.statistics()[0].losses == 0
        assert not envs.step(actions_of(3))[3].any()


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


def test_where_resets_are_asked_for_it_wants_one():
    envs = SubprocessVectorEnv(fns(), envs_per_worker=3, autoreset_mode=AutoresetMode.DISABLED)
    with contextlib.closing(envs):
        envs.reset(seed=1)
        for step in range(2):
            envs.step(actions_of(step))
        with pytest.raises(ResultNotPicklableError):
            envs.step(actions_of(2))
        assert envs.reset(options={"reset_mask": np.arange(3) == CULPRIT})[0][:, 0].tolist() == [3, 0, 3]
        batch = envs.step(actions_of(3))
        assert batch[0][:, 0].tolist() == [4, 1, 4]
        assert not batch[3].any()


def test_observations_without_arrays():
    class TextEnv(SpaceEnv):
        def step(self, action: Any) -> Any:
            *rest, info = super().step(action)
            return (*rest, {"special": Defiant()} if action == 1 else info)

    made: Fns = [partial(TextEnv, observation_space=spaces.Text(12), horizon=9)] * 2
    envs, twin = SubprocessVectorEnv(made, envs_per_worker=2), SerialVectorEnv(made)
    with contextlib.closing(envs), contextlib.closing(twin):
        envs.reset(seed=1)
        twin.reset(seed=1)
        with pytest.raises(ResultNotPicklableError) as caught:
            envs.step(np.array([1, 0]))
        expected = twin.step(np.array([0, 0]))
        assert caught.value.results[1][0] == expected[0][1]
        assert envs.step(np.array([0, 0]))[0] == twin.step(np.array([0, 0]))[0]


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


@pytest.mark.parametrize("special", [Defiant, of_the_workers_own, threading.Lock])
@pytest.mark.parametrize("face", [partial(SubprocessVectorEnv, envs_per_worker=3), SerialVectorEnv])
def test_an_answer_to_a_call_that_cannot_be_read_fails_alone(special, face):
    if face is SerialVectorEnv and special is of_the_workers_own:
        pytest.skip("here its class can be imported")
    with contextlib.closing(face([Asked, partial(Asked, special), Asked])) as envs:
        envs.reset(seed=1)
        for _ in range(2):
            with pytest.raises(EnvsFailedError) as caught:
                envs.call("ask")
            assert list(caught.value.failures) == [CULPRIT]
            assert isinstance(caught.value.failures[CULPRIT], ResultNotPicklableError)
            assert caught.value.results == ["", None, ""]
        assert envs.step(actions_of(0))[0][:, 0].tolist() == [1, 1, 1]


def test_interrupted_while_an_answer_is_read_the_episodes_go_on():
    Interrupting.come = False
    with contextlib.closing(SubprocessVectorEnv([Asked, partial(Asked, Interrupting)], envs_per_worker=2)) as envs:
        envs.reset(seed=1)
        with pytest.raises(KeyboardInterrupt):
            envs.call("ask")
        assert envs.step(np.zeros(2, np.int64))[0][:, 0].tolist() == [1, 1]
        first, second = envs.call("ask")
        assert (first, type(second)) == ("", Interrupting)


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


@pytest.mark.parametrize("mode", AutoresetMode)
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
