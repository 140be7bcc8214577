"""Invariant 3: what cannot be shown to be exact is not passed off as exact.

The broken step returns ``truncated=True``, the last observation, reward 0.0 and the reason; the next reset starts clean.
Each test makes exactness impossible, and then wants the truncation; or leaves it possible, and wants none.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from faces import AND_ASYNC, KINDS, REPLAY, Face, assert_as_without_losses, assert_honest_truncation, counts
from invariant_envs import FileEnv, HiddenGoalEnv

from kit import CounterEnv, ForkingPolicy, NondeterministicEnv, SpaceEnv, descendants, is_alive, kill_worker
from kit.limits import set_limit
from kit.replays import prefer_resets
from kit.trainer_process import becomes_true
from multienv import Recovery, Recycled, RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv.errors import UsageError, WorkerLostError

STAY = np.zeros(3, np.int64)


def unrepeatable(what: str, directory: Path) -> Any:
    """Return what builds an env that cannot do again what it did."""
    chance = partial(NondeterministicEnv, horizon=None)
    return {
        "file": partial(FileEnv, str(directory / "file")),
        "chance in the reward": partial(chance, since=2, shown_in="reward"),
    }[what]


# The snapshot is taken after the second step, so that two more are run again in it before the journal is tried.
RUNGS = {"journal": REPLAY, "snapshot": ForkingPolicy(snapshot_every=4)}


@pytest.mark.parametrize(
    ("what", "kind", "rung"),
    [
        *(("file", kind, "journal") for kind in KINDS),
        *(("file", kind, "snapshot") for kind in ("subprocess_env", "vector_env", "async_env")),
        ("chance in the reward", "subprocess_env", "journal"),
        ("chance in the reward", "vector_env", "journal"),
    ],
)
def test_an_env_that_does_otherwise_the_second_time_is_truncated(
    what: str, kind: str, rung: str, tmp_path: Path
) -> None:
    events: list[Any] = []
    env_fns = [unrepeatable(what, tmp_path), CounterEnv]
    with Face(kind, env_fns, restart=RUNGS[rung], hooks=[events.append]) as face:
        actions = counts(9, 2)
        records = face.record(actions, 3, lambda step: face.signal() if step == 4 else None)
        assert face.losses() == 1
        broken, begun = records[0][5], records[0][6]
        assert_honest_truncation(broken, records[0][4], "SIGKILL")
        (recovery,) = [event for event in events if isinstance(event, Recovery)]
        assert (recovery.outcome, recovery.reason) == ("truncated", broken.recovery["reason"])
        # The next episode starts clean, and goes on.
        assert begun.is_reset
        assert [int(one.observation[0]) for one in records[0][6:]] == [0, 1, 2, 3, 4]
        assert not any(one.recovery for one in records[0][6:])
        if face.num_envs == 2:  # whose process is the same one in the vector env
            assert_as_without_losses(face, records, actions, 3, envs=[1])


@pytest.mark.parametrize("kind", AND_ASYNC)
def test_a_snapshot_recovers_what_no_replay_could(kind: str) -> None:
    policy = ForkingPolicy(snapshot_every=1)
    events: list[Any] = []
    with Face(kind, [partial(NondeterministicEnv, horizon=None)] * 2, restart=policy, hooks=[events.append]) as face:

        def kill(step: int) -> None:
            if step == 4:
                # The fork follows the reply: wait until the one of the fourth step is there, and the one before is not.
                assert becomes_true(lambda: face.statistics()[0].snapshots == 4)
                assert becomes_true(lambda: sum(map(is_alive, descendants(face.pids()[0]))) == 1)
                face.signal()

        (record, *_) = face.record(counts(9, 2), 3, kill)
        (recovery,) = [event for event in events if isinstance(event, Recovery)]
        assert (recovery.outcome, recovery.method) == ("exact", "snapshot")
        assert [int(one.observation[0]) for one in record] == list(range(10))
        assert not any(one.recovery for one in record)


@pytest.mark.parametrize("kind", AND_ASYNC)
def test_an_episode_that_has_outgrown_its_journal_is_truncated(kind: str) -> None:
    """What else a journal without its beginning cannot prove: test_3_replayed_is_said, unit/test_journal."""
    policy = RestartPolicy(snapshots=False, journal_limit=2000)
    with Face(kind, [partial(CounterEnv, horizon=None)], restart=policy) as face:
        (record,) = face.record(counts(200, 1), 3, lambda step: face.signal() if step == 199 else None)
        assert face.losses() == 1
        assert_honest_truncation(record[-1], record[-2], "SIGKILL", "no longer recorded")
        lost_early = face.record(counts(9, 1), 4, lambda step: face.signal() if step == 5 else None)
        assert_as_without_losses(face, lost_early, counts(9, 1), 4)


@pytest.mark.parametrize("kind", ["vector_env", "async_env"])
def test_a_reset_of_an_env_that_is_lost_for_good_begins_a_clean_episode(kind: str, tmp_path: Path) -> None:
    events: list[Any] = []
    env_fn = partial(FileEnv, str(tmp_path / "file"))
    with Face(kind, [env_fn], restart=REPLAY, hooks=[events.append]) as face:
        face.record(counts(4, 1), 3)
        face.signal()
        (begun,) = face.reset(seed=3)
        assert [event.outcome for event in events if isinstance(event, Recovery)] == ["reset"]
        assert (begun.observation[0], begun.recovery) == (0, None)
        (after,) = face.step([1])
        assert (after.observation[0], after.truncated) == (1, False)


@pytest.mark.parametrize("kind", ["subprocess_env", "vector_env"])
def test_a_call_that_finds_the_episode_lost_raises_and_the_next_step_is_truncated(kind: str, tmp_path: Path) -> None:
    with Face(kind, [partial(FileEnv, str(tmp_path / "file"))], restart=REPLAY) as face:
        (record,) = face.record(counts(4, 1), 3)
        face.signal()
        with pytest.raises(WorkerLostError, match="SIGKILL"):
            face.call("poke", 1.0)
        assert_honest_truncation(face.step([1])[0], record[-1], "SIGKILL")
        face.reset()
        assert face.step([1])[0].observation[0] == 1


@pytest.mark.parametrize("way", ["killed", "recycled"])
def test_what_envs_draw_from_generators_that_they_share_is_never_taken_for_exact(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay in which some of them begin later draws otherwise; it shows at the end of the episode alone."""
    set_limit(monkeypatch, "SHARE", 1.0)
    set_limit(monkeypatch, "LARGE_SHARE", 1.0)
    env_fns = [partial(HiddenGoalEnv, horizon=horizon, count_episodes=False) for horizon in (60, 7, 9)]
    recycled = 70 if way == "recycled" else None
    policy = RestartPolicy(snapshots=False, journal_limit=12_000, recycle_after_steps=recycled)
    events: list[Any] = []
    twin = SubprocessVectorEnv(env_fns, envs_per_worker=3)
    with twin, SubprocessVectorEnv(env_fns, envs_per_worker=3, restart=policy, hooks=[events.append]) as envs:
        for one in (envs, twin):
            one.reset(seed=5)
        for step in range(400):
            if way == "killed" and step == 200:
                kill_worker(envs)
            (_, *told, infos), (_, *expected, _) = envs.step(STAY), twin.step(STAY)
            if told[2].any():
                assert (way, step) == ("killed", 200)
                assert told[2].all()
                assert "draw from random" in infos["multienv"]["reason"][0]
                return
            assert all(map(np.array_equal, told, expected)), step
    assert way == "recycled", "the loss was not noticed"
    outcomes = {event.outcome for event in events if isinstance(event, Recycled)}
    assert {"put off"} <= outcomes <= {"put off", "exact"}, events  # exact: from the construction


@pytest.mark.parametrize("case", ["one draws", "all begin together"])
def test_a_replay_in_which_envs_draw_what_they_drew_from_shared_generators_is_taken(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer_resets(monkeypatch)
    horizons = (60, 7, 9) if case == "one draws" else (9, 9, 9)
    kinds = [HiddenGoalEnv if case != "one draws" or place == 1 else CounterEnv for place in range(3)]
    env_fns = [partial(kind, horizon=most, count_episodes=False) for kind, most in zip(kinds, horizons, strict=True)]
    twin, policy = SubprocessVectorEnv(env_fns, envs_per_worker=3), RestartPolicy(snapshots=False)
    with twin, SubprocessVectorEnv(env_fns, envs_per_worker=3, restart=policy) as envs:
        for one in (envs, twin):
            one.reset(seed=5)
        for step in range(400):
            if step in (200, 333):
                kill_worker(envs)
            assert all(map(np.array_equal, envs.step(STAY)[:4], twin.step(STAY)[:4])), step
        assert envs.statistics()[0].replayed_recoveries == 2


def test_a_truncated_step_shows_the_last_large_observation_that_the_caller_saw() -> None:
    env_fn = partial(SpaceEnv, observation_space=gymnasium.spaces.Box(0, 1, (5000,), np.float64), horizon=99)
    policy = RestartPolicy(on_crash="truncate", on_timeout="truncate")
    with SubprocessEnv(env_fn, restart=policy) as env:
        env.reset(seed=0)
        action = env.action_space.sample()
        for _ in range(4):
            seen = env.step(action)[0]
            env.get_attr("spec")
            with pytest.raises(UsageError):
                env.step([1, 2, 3])
        kill_worker(env)
        observation, _, _, truncated, _ = env.step(action)
        assert truncated
        np.testing.assert_array_equal(observation, seen)
