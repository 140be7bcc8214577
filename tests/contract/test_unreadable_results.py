"""A result that cannot be read in the trainer costs its env that step, and the others of its process nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from kit import CounterEnv
from multienv import RestartPolicy, SerialVectorEnv, SubprocessEnv, SubprocessVectorEnv
from multienv.errors import EnvsFailedError, ResultNotPicklableError

CULPRIT, AT = 1, 3
OTHERS = [0, 2]


class Reading:
    """What the envs observe; some cannot be unpickled, in the process ``where`` or, if that is 0, in any."""

    def __init__(self, count: int, *, legible: bool, where: int = 0) -> None:
        self.count, self.legible, self.where = count, legible, where

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not state["legible"] and state["where"] in (0, os.getpid()):
            raise RuntimeError("smudged")
        self.__dict__.update(state)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reading) and self.count == other.count

    def __hash__(self) -> int:
        return self.count


class Readings(spaces.Space[Any]):
    """A space of a user's own."""

    def sample(self, mask: Any = None, probability: Any = None) -> Reading:
        return Reading(0, legible=True)

    def contains(self, x: Any) -> bool:
        return isinstance(x, Reading)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Readings)

    def __hash__(self) -> int:
        return 0


class ReadingEnv(gymnasium.Env[Any, Any]):
    """Counts its steps; that of step ``at`` cannot be read."""

    action_space = spaces.Discrete(2)

    def __init__(self, at: int = 0, where: int = 0) -> None:
        self.observation_space = Readings()
        self.at, self.where = at, where
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.count = 0
        return Reading(0, legible=True), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        reading = Reading(self.count, legible=self.count != self.at, where=self.where)
        return reading, float(self.count), False, False, {}


def fns(**culprit: Any) -> list[Any]:
    return [partial(ReadingEnv, **culprit) if index == CULPRIT else ReadingEnv for index in range(3)]


def counts(observations: Any) -> list[int]:
    return [one.count for one in observations]


@pytest.mark.parametrize(
    ("face", "kills"), [(SerialVectorEnv, False), (SubprocessVectorEnv, False), (SubprocessVectorEnv, True)]
)
def test_it_fails_alone_and_its_episode_goes_on_with_the_next_step(face, kills):
    policy = RestartPolicy(snapshots=False)
    options: dict[str, Any] = {"envs_per_worker": 3, "restart": policy} if face is SubprocessVectorEnv else {}
    envs = face(fns(at=AT), **options)

    def strike() -> None:
        if kills:
            os.kill(envs.statistics()[0].pid, signal.SIGKILL)

    with contextlib.closing(envs):
        assert counts(envs.reset(seed=1)[0]) == [0, 0, 0]
        for step in range(1, AT):
            assert counts(envs.step(np.zeros(3, int))[0]) == [step] * 3
        strike()
        with pytest.raises(EnvsFailedError) as caught:
            envs.step(np.zeros(3, int))
        failures, results = caught.value.failures, caught.value.results
        assert list(failures) == [CULPRIT]
        assert isinstance(failures[CULPRIT], ResultNotPicklableError)
        assert "smudged" in str(failures[CULPRIT])
        assert [(results[row][0].count, results[row][1]) for row in OTHERS] == [(AT, AT)] * 2
        strike()
        batch = envs.step(np.zeros(3, int))
        assert counts(batch[0]) == [AT + 1] * 3
        assert not batch[3].any()
        strike()
        assert counts(envs.step(np.zeros(3, int))[0]) == [AT + 2] * 3


def zeros(observations: Any) -> Any:
    return np.zeros(len(observations), int) if isinstance(observations, tuple) else 0


def test_a_rollout_that_only_the_worker_can_read_is_done_and_has_no_fragment() -> None:
    with SubprocessVectorEnv(fns(at=AT, where=os.getpid()), envs_per_worker=3) as envs:
        envs.reset(seed=1)
        with pytest.raises(EnvsFailedError) as caught:
            envs.rollout(zeros, 5)
        assert list(caught.value.failures) == [CULPRIT]
        assert "smudged" in str(caught.value.failures[CULPRIT])
        assert caught.value.results == [None] * 3
        assert counts(envs.step(np.zeros(3, int))[0]) == [6] * 3
        assert len(envs.rollout(zeros, 5)) == 5
    with SubprocessEnv(partial(ReadingEnv, at=AT, where=os.getpid())) as env:
        env.reset(seed=1)
        with pytest.raises(ResultNotPicklableError, match="smudged") as alone:
            env.rollout(zeros, 5)
        assert alone.value.fragment is None
        assert env.step(0)[0].count == 6
        assert [one.count for one in env.rollout(zeros, 5).observations] == [6, 7, 8, 9, 10]


class TellingEnv(CounterEnv):
    """Tells what it is given in the info of each reset, and when it is asked."""

    def __init__(self, special: Any = str) -> None:
        super().__init__()
        self.special = special

    def _info(self) -> dict[str, Any]:
        return {} if self.episode_step else {"special": self.special()}

    def ask(self) -> Any:
        return self.special()


@pytest.mark.parametrize("special", [partial(Reading, 0, legible=False), threading.Lock])
@pytest.mark.parametrize("face", [partial(SubprocessVectorEnv, envs_per_worker=3), SerialVectorEnv])
def test_infos_of_resets_and_answers_to_calls_fail_alone(face, special):
    with contextlib.closing(face([TellingEnv, partial(TellingEnv, special), TellingEnv])) as envs:
        for call in (partial(envs.reset, seed=1), partial(envs.call, "ask")):
            with pytest.raises(EnvsFailedError) as caught:
                call()
            assert list(caught.value.failures) == [CULPRIT]
            assert isinstance(caught.value.failures[CULPRIT], ResultNotPicklableError)
            assert [caught.value.results[row] is None for row in range(3)] == [False, True, False]
        envs.reset(options={"reset_mask": np.arange(3) != CULPRIT})


class MadeInTheWorker(ReadingEnv):
    """Has a space of a class that it makes when it is built, as grid2op does: no other process knows it."""

    def __init__(self) -> None:
        super().__init__()
        kind = type("MadeAtRunTime", (spaces.Discrete,), {"__module__": __name__})
        globals()["MadeAtRunTime"] = kind
        self.action_space = kind(2)


@pytest.mark.parametrize("build", [SubprocessEnv, lambda env_fn: SubprocessVectorEnv([env_fn, env_fn])])
def test_space_of_a_class_that_the_trainer_does_not_know_is_named_with_the_remedy(build: Any) -> None:
    with pytest.raises((ResultNotPicklableError, EnvsFailedError), match="MadeAtRunTime") as raised:
        build(MadeInTheWorker).initialize()
    assert "wrap the env in env_fn, so that its spaces are gymnasium's" in str(raised.value)
