"""Invariant 1: two transitions in a row belong to one episode, unless the first ends it or the caller reset.

The envs show episode and step in each observation. Those that draw from ``os.urandom`` cannot be recovered without a
snapshot, so each kill must end their episode; the others must go on as if nothing had been.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from faces import KINDS, RAISE, REPLAY, Face, assert_as_without_losses, counts

from kit import CounterEnv, Fault, FaultyEnv, NondeterministicEnv, assert_no_splice
from multienv import (
    RestartPolicy,
)
from multienv.errors import MultienvError, ResetNeededError

KILLS = {3, 11, 12}
# Begins its episodes at the same place whatever was before, so that a fresh process shows the same.
UNREPEATABLE = partial(NondeterministicEnv, horizon=8, count_episodes=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("env_fn", "policy", "exact"),
    [
        (partial(CounterEnv, horizon=8), REPLAY, True),
        (UNREPEATABLE, REPLAY, False),
        (partial(CounterEnv, horizon=8), RestartPolicy(on_crash="truncate"), False),
    ],
    ids=["replayed", "cannot be replayed", "policy truncate"],
)
def test_a_killed_worker_splices_no_episodes(kind: str, env_fn: Any, policy: RestartPolicy, exact: bool) -> None:
    with Face(kind, [env_fn] * 2, restart=policy) as face:

        def kill(step: int) -> None:
            for worker in range(len(face.pids())) if step in KILLS else ():
                face.signal(worker=worker)

        actions = counts(20, 2)
        records = face.record(actions, 4, kill)
        assert face.losses() == len(KILLS)
        for record in records:
            assert_no_splice(record, clock=lambda seen: (0, int(seen[0])))
            given_up = [number for number, one in enumerate(t for t in record if not t.is_reset) if one.recovery]
            assert given_up == ([] if exact else sorted(KILLS))
        if exact:
            assert_as_without_losses(face, records, actions, 4)


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
@pytest.mark.parametrize("kind", ["multi_env", "vector_env"])
def test_a_lost_episode_ends_before_the_autoreset_begins_the_next(kind: str, mode: str) -> None:
    with Face(kind, [UNREPEATABLE] * 2, mode, envs_per_worker=1, restart=REPLAY) as face:
        face.reset(seed=0)
        last = [[row.observation for row in face.step([0, 1])] for _ in range(3)][-1]
        face.signal(worker=0)
        (broken, other) = face.step([2, 3])
        assert other.observation[0] == 4
        assert other.recovery is None
        assert (broken.truncated, broken.reward) == (True, 0.0)
        if mode == "SAME_STEP":
            # The last observation of the old episode, and the first one of the new.
            assert broken.info["final_obs"].tolist() == last[0].tolist()
            assert "recovery" in broken.info["final_info"]["multienv"]
            assert broken.observation[[0, 3]].tolist() == [0, -1]
        else:
            assert broken.recovery is not None
            assert broken.observation.tolist() == last[0].tolist()
            (begun, other) = face.step([2, 3])
            assert (begun.reward, begun.terminated, begun.truncated) == (0.0, False, False)
            assert begun.observation[[0, 3]].tolist() == [0, -1]
        assert face.step([2, 3])[0].observation[[0, 3]].tolist() == [1, 2]


@pytest.mark.parametrize("envs_per_worker", [1, 2])
@pytest.mark.parametrize("kind", ["multi_env", "vector_env"])
def test_after_a_first_step_that_ends_processes_the_next_episode_goes_on(kind: str, envs_per_worker: int) -> None:
    """With SAME_STEP that step is no reset, though the step before it told of an end."""
    env_fn = partial(FaultyEnv, fault=Fault("exit", "step", action=3), horizon=2)
    with Face(kind, [env_fn] * 2, "SAME_STEP", envs_per_worker=envs_per_worker, restart=REPLAY) as face:
        face.reset(seed=0)
        face.step([0, 1])
        assert face.step([0, 1])[1].terminated
        assert face.step([0, 3])[1].truncated
        for steps in (1, 0):
            (_, other) = face.step([0, 1])
            assert (other.observation[0], other.terminated, other.truncated) == (steps, not steps, False)


@pytest.mark.parametrize("kind", KINDS)
def test_after_an_error_only_a_reset_goes_on(kind: str) -> None:
    with Face(kind, [CounterEnv] * 3, restart=RAISE) as face:
        face.reset(seed=1)
        face.step([1, 1, 1])
        face.signal()
        for error in (MultienvError, ResetNeededError):
            with pytest.raises(error):
                face.step([2, 2, 2])
        (first, *_) = face.reset(seed=1)
        assert first.observation[[0, 3]].tolist() == [0, -1]
        assert face.step([3, 3, 3])[0].observation[[0, 3]].tolist() == [1, 3]
        assert face.losses() == 1
