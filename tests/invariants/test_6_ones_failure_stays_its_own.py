"""Invariant 6: one env's failure stays its own, wherever the culprit is known.

In a vector env all envs of these tests live in one process: what ends it takes the neighbours' memory with it. They go
on, to the bit, all the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from faces import REPLAY, Face, assert_as_without_losses, assert_honest_truncation, counts

from kit import CounterEnv, Fault, FaultError, FaultyEnv, Transition
from multienv import Deadlines
from multienv.errors import EnvsFailedError, ResultNotPicklableError, WorkerLostError

KINDS = ["multi_env", "vector_env"]
CULPRIT = 1


def three(fault: Fault, **counter: Any) -> list[Any]:
    return [CounterEnv, partial(FaultyEnv, fault=fault, **counter), CounterEnv]


def failure_of(error: EnvsFailedError) -> BaseException:
    assert list(error.failures) == [CULPRIT]
    return error.failures[CULPRIT]


@pytest.mark.parametrize(("kind", "manner"), [*((kind, "segv") for kind in KINDS), ("vector_env", "hang")])
def test_a_step_that_is_poison_ends_the_episode_of_its_env_alone(kind: str, manner: Any) -> None:
    """The culprit strikes whenever it takes its fifth step; the episodes of the others end elsewhere."""
    env_fns = three(Fault(manner, "step", at=5, per="episode"), horizon=None)
    with Face(kind, env_fns, restart=REPLAY, deadlines=Deadlines(step=1.0 if manner == "hang" else 60.0)) as face:
        actions = counts(8)
        records = face.record(actions, 2)
        assert face.losses() == 2
        assert_as_without_losses(face, records, actions, 2, envs=[0, 2])
        assert_honest_truncation(records[CULPRIT][5], records[CULPRIT][4])
        assert sum(one.recovery is not None for one in records[CULPRIT]) == 1


@pytest.mark.parametrize("manner", ["custom_exception", "unpicklable"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_of_one_delivers_the_steps_of_the_others(kind: str, manner: Any) -> None:
    env_fns = three(Fault(manner, "step", at=4), horizon=None)
    with Face(kind, env_fns, restart=REPLAY) as face:
        actions = counts(8)
        records = face.record(actions[:3], 2)
        with pytest.raises(EnvsFailedError) as caught:
            face.step(actions[3])
        if manner == "unpicklable":
            assert isinstance(failure_of(caught.value), ResultNotPicklableError)
        else:
            assert "fault at step 4" in str(failure_of(caught.value))
        assert caught.value.results[CULPRIT] is None
        for env in (0, 2):
            observation, reward, terminated, truncated = caught.value.results[env][:4]
            flags = bool(terminated), bool(truncated)
            records[env].append(Transition(observation, float(reward), *flags, action=actions[3][env]))
        face.reset(mask=[False, True, False])
        for row in actions[4:]:
            for record, one in zip(records, face.step(row), strict=True):
                record.append(one)
        assert_as_without_losses(face, records, actions, 2, envs=[0, 2])
        assert face.losses() == 0
        assert records[CULPRIT][-1].observation[0] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_calls_and_resets_that_fail_in_one_env_leave_the_others_be(kind: str) -> None:
    faults = [Fault("raise", "call", at=2), Fault("segv", "call", at=3), Fault("exit", "reset", at=2)]
    with Face(kind, [CounterEnv, partial(FaultyEnv, fault=faults), CounterEnv], restart=REPLAY) as face:
        face.reset(2)
        face.step([1, 1, 1])
        assert face.call("poke", 1.0) == [1, 1, 1]
        with pytest.raises(EnvsFailedError) as caught:
            face.call("poke", 1.0)
        assert isinstance(failure_of(caught.value), FaultError)
        assert [caught.value.results[env] for env in (0, 2)] == [2, 2]
        with pytest.raises(
            WorkerLostError, match="process after process"
        ):  # for all envs of its process; no episode has ended
            face.call("poke", 0.0)
        assert face.losses() == 2
        assert [int(row.observation[0]) for row in face.step([1, 1, 1])] == [2, 2, 2]
        with pytest.raises(EnvsFailedError) as caught:
            face.reset(9)
        assert isinstance(failure_of(caught.value), WorkerLostError)
        for env in (0, 2):
            bare = CounterEnv()
            bare.offset = 2.0
            assert caught.value.results[env][0].tolist() == bare.reset(seed=9 + env)[0].tolist()
