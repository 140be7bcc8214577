"""A result that cannot be read in the trainer costs its env that step, and the others of its process nothing."""

from __future__ import annotations

import contextlib
import os
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from contract_envs import MadeInTheWorker, Reading, ReadingEnv, SpecialInfoEnv

from kit import kill_worker
from multienv import RestartPolicy, SerialVectorEnv, SubprocessEnv, SubprocessVectorEnv
from multienv.errors import EnvsFailedError, ResultNotPicklableError

CULPRIT, AT = 1, 3
OTHERS = [0, 2]


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
            kill_worker(envs)

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


@pytest.mark.parametrize("special", [partial(Reading, 0, legible=False), threading.Lock])
@pytest.mark.parametrize("face", [partial(SubprocessVectorEnv, envs_per_worker=3), SerialVectorEnv])
def test_infos_of_resets_and_answers_to_calls_fail_alone(face, special):
    with contextlib.closing(face([SpecialInfoEnv, partial(SpecialInfoEnv, special), SpecialInfoEnv])) as envs:
        for call in (partial(envs.reset, seed=1), partial(envs.call, "ask")):
            with pytest.raises(EnvsFailedError) as caught:
                call()
            assert list(caught.value.failures) == [CULPRIT]
            assert isinstance(caught.value.failures[CULPRIT], ResultNotPicklableError)
            assert [caught.value.results[row] is None for row in range(3)] == [False, True, False]
        envs.reset(options={"reset_mask": np.arange(3) != CULPRIT})


@pytest.mark.parametrize("build", [SubprocessEnv, lambda env_fn: SubprocessVectorEnv([env_fn, env_fn])])
def test_space_of_a_class_that_the_trainer_does_not_know_is_named_with_the_remedy(build: Any) -> None:
    with pytest.raises((ResultNotPicklableError, EnvsFailedError), match="MadeAtRunTime") as raised:
        build(MadeInTheWorker).initialize()
    assert "wrap the env in env_fn, so that its spaces are gymnasium's" in str(raised.value)
