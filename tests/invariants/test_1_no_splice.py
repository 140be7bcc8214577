"""Invariant 1: two transitions in a row belong to one episode, unless the first ends it or the caller reset.

The envs show episode and step in each observation. Those that draw from ``os.urandom`` cannot be recovered without a
snapshot, so each kill must end their episode; the others must go on as if nothing had been.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from faces import KINDS, RAISE, REPLAY, Face, assert_as_without_losses, counts
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation

from kit import CounterEnv, Fault, FaultyEnv, NondeterministicEnv, assert_no_splice
from kit.side_by_side import info_of
from multienv import (
    RestartPolicy,
)
from multienv.errors import MultienvError, ResetNeededError

KILLS = {3, 11, 12}


def in_text(env_fn: Any) -> Any:
    return TransformObservation(env_fn(), lambda seen: f"{seen[0]:.0f}", spaces.Text(9, charset="0123456789"))


def steps_seen(observation: Any) -> int:
    return int(observation if isinstance(observation, str) else observation[0])


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


@pytest.mark.parametrize("way", ["step", "rollout"])
@pytest.mark.parametrize("kind", ["multi_env", "vector_env", "vector_env without rows"])
@pytest.mark.parametrize("policy", [REPLAY, RestartPolicy(on_crash="truncate")], ids=["replayed", "policy truncate"])
def test_an_env_that_is_lost_between_two_episodes_begins_the_next_and_no_episode_is_without_a_step(
    kind: str, policy: RestartPolicy, way: str
) -> None:
    """It cannot be recovered; the env beside it, whose episode goes on, is truncated in the same step."""
    env_fns: list[Any] = [partial(NondeterministicEnv, horizon=horizon, count_episodes=False) for horizon in (3, 8)]
    if kind.endswith("without rows"):
        env_fns = [partial(in_text, env_fn) for env_fn in env_fns]
    events: list[Any] = []
    options = {"restart": policy, "hooks": [events.append]} | ({} if kind == "multi_env" else {"envs_per_worker": 2})
    with Face(kind.split()[0], env_fns, "NEXT_STEP", **options) as face:
        face.reset(seed=0)
        *_, last = [face.step([0, 0]) for _ in range(3)]
        assert [row.terminated for row in last] == [True, False]
        for worker in range(len(face.pids())):
            face.signal(worker=worker)
        if way == "step" or kind == "multi_env":
            begun, broken = face.step([2, 3])
            assert (begun.reward, begun.terminated, begun.truncated) == (0.0, False, False)
            assert begun.info.get("multienv", {"recovery": "reset"}) == {"recovery": "reset"}
            assert steps_seen(begun.observation) == 0
            assert (broken.truncated, steps_seen(broken.observation)) == (True, 3)
            assert broken.recovery["recovery"] == "truncated"
            following = face.step([2, 3])
            assert [steps_seen(row.observation) for row in following] == [1, 0]
        else:
            told = face.envs.rollout(lambda batch: [1, 1], 2)
            assert told.truncations.tolist() == [[False, True], [False, False]]
            assert info_of(told.infos[0], 0)["multienv"] == {"recovery": "reset"}
            assert [[steps_seen(one) for one in after] for after in told.observations[1:]] == [[0, 3]]
            assert [steps_seen(one) for one in told.final_observations] == [1, 0]
    outcomes = [one.outcome for one in events if hasattr(one, "outcome")]
    assert sorted(outcomes) == (["reset", "truncated"] if kind == "multi_env" else ["truncated"])


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
