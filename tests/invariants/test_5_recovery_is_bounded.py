"""Invariant 5, of recoveries: what is replayed, kept and leaked again does not grow with the length of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from invariant_envs import CrashesLater, FailsInNewProcesses, HangsInLongReplays, Leaking

from kit import CounterEnv, NondeterministicEnv, SlowEnv, kill_worker
from kit.limits import set_limit
from kit.replays import prefer_resets
from kit.side_by_side import run_side_by_side
from multienv import Deadlines, Recovery, Recycled, RestartPolicy, SubprocessEnv, SubprocessVectorEnv

gymnasium.register_envs(ale_py)

HORIZONS = (23, 31, 37)
MIB = 2**20


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have replays begin at resets: the envs of a test are fast."""
    prefer_resets(monkeypatch)


def envs_of(kind: type[CounterEnv]) -> list[Any]:
    """Episodes of different lengths: no reset is one of all envs."""
    return [partial(kind, horizon=horizon, count_episodes=False) for horizon in HORIZONS]


def undisturbed(mode: str) -> Any:
    return closing(SyncVectorEnv(envs_of(CounterEnv), autoreset_mode=AutoresetMode[mode]))


def play(env: Any, episodes: int, steps: int, *, killed_in: int, after_step: Callable[[], object] = bool) -> Recovery:
    """Play episodes; the worker is killed before this step of the last one. Return the only recovery."""
    for episode in range(episodes):
        env.reset(seed=episode)
        for step in range(steps):
            if (episode, step) == (episodes - 1, killed_in):
                kill_worker(env)
            assert env.step(step % 4)[0][0] == step + 1
            after_step()
    told = env.statistics()
    assert (told.losses, told.truncated_recoveries) == (1, 0)
    return told.last_recovery


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_a_replay_of_a_batch_is_two_episodes_long_whatever_the_length_of_the_run(mode: str, brief: None) -> None:
    events: list[Any] = []
    restart = RestartPolicy(snapshots=False, journal_limit=50_000)
    options: dict[str, Any] = {"restart": restart, "hooks": [events.append]}
    with (
        SubprocessVectorEnv(envs_of(CounterEnv), envs_per_worker=3, autoreset_mode=mode, **options) as envs,
        undisturbed(mode) as twin,
    ):
        run_side_by_side(envs, twin, 1000, before_step=lambda step: step % 150 == 149 and kill_worker(envs))
        held = envs.statistics()[0].journal_bytes
    recoveries = [one for one in events if isinstance(one, Recovery)]
    assert [one.outcome for one in recoveries] == ["replayed"] * 6
    assert max(one.replayed for one in recoveries) <= 3 * max(HORIZONS)
    assert held < 200_000


@pytest.mark.parametrize("mode", [pytest.param("NEXT_STEP", marks=pytest.mark.soak), "SAME_STEP"])
def test_a_leak_in_a_batch_is_bounded_by_max_rss_and_leaves_no_trace(mode: str) -> None:
    events: list[Any] = []
    limit = 250 * MIB
    sizes: list[int] = []
    options: dict[str, Any] = {
        "restart": RestartPolicy(max_rss=limit, snapshots=False),
        "hooks": [events.append],
    }
    with (
        SubprocessVectorEnv(envs_of(Leaking), envs_per_worker=3, autoreset_mode=mode, **options) as envs,
        undisturbed(mode) as twin,
    ):
        run_side_by_side(envs, twin, 400, before_step=lambda _: sizes.append(envs.statistics()[0].rss or 0))
    replaced = [one for one in events if isinstance(one, Recycled)]
    assert len(replaced) >= 3
    assert {one.outcome for one in replaced} <= {"exact", "replayed"}
    # 64 steps may pass between two looks at it.
    assert max(sizes) < limit + 64 * 3 * MIB + 50 * MIB


@pytest.mark.parametrize("hangs", [False, True])
def test_a_replacement_by_plan_whose_replay_fails_is_put_off_at_once(
    hangs: bool, brief: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that is to be replaced is well: the run waits for one replay, which has no other deadline."""
    set_limit(monkeypatch, "_SLOWER", math.inf)  # a busy machine may build envs for longer than the replay may take
    events: list[Any] = []
    limits: dict[str, Any] = {"replay_limit": 0.3} if hangs else {}
    policy = RestartPolicy(snapshots=False, recycle_after_steps=60, **limits)
    env_fn = partial(FailsInNewProcesses, tmp_path, hangs=hangs)
    with SubprocessEnv(env_fn, restart=policy, hooks=[events.append]) as env:
        env.reset(seed=5)
        for step in range(79):
            assert env.step(step % 4)[0][0] == step % 40 + 1
            if step == 39:
                env.reset()
        assert env.statistics().losses == 0
    assert [(type(one), one.outcome) for one in events] == [(Recycled, "put off")]
    assert events[0].seconds < 60
    assert ("replay_limit" in events[0].reason) == hangs


def test_what_came_before_a_replacement_is_not_replayed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the envs are young: or what a replacement had got rid of would leak again."""
    set_limit(monkeypatch, "LARGE_SHARE", math.inf)  # every reset is told of
    events: list[Any] = []
    # The look after 64 requests finds it due, in the middle of an episode.
    policy = RestartPolicy(snapshots=False, recycle_after_steps=55)
    env_fn = partial(CounterEnv, horizon=10, count_episodes=False)
    with SubprocessEnv(env_fn, restart=policy, hooks=[events.append]) as env:
        recovery = play(env, 16, 10, killed_in=5)
    assert [event.outcome for event in events if isinstance(event, Recycled)] == ["replayed"] * 2
    assert recovery.outcome == "replayed"
    assert recovery.replayed <= 9 * 11


def test_the_chance_of_an_atari_emulator_is_put_back_at_a_reset(brief: None) -> None:
    """Its "sticky" actions draw from a generator in C."""
    env_fns = [partial(gymnasium.make, "ALE/Pong-v5", obs_type="ram", max_episode_steps=most) for most in (40, 50)]
    with (
        SubprocessVectorEnv(env_fns, envs_per_worker=2, restart=RestartPolicy(snapshots=False)) as envs,
        closing(SyncVectorEnv(env_fns)) as twin,
    ):
        run_side_by_side(
            envs,
            twin,
            170,
            actions=lambda step: np.full(2, step // 5 % 6),
            before_step=lambda step: step in (110, 160) and kill_worker(envs),
        )
        (told,) = envs.statistics()
        assert told.replayed_recoveries == 2
        assert told.replayed_steps < 300


@pytest.mark.parametrize("slow", ["reset", "render"])
def test_resets_and_renderings_count_among_the_seconds_that_a_replay_may_take(slow: str) -> None:
    """Steps take next to nothing here: by their time alone the whole run would be replayed."""
    kind = {"reset": partial(SlowEnv, reset_seconds=0.05), "render": partial(SlowEnv, render_seconds=0.012)}[slow]
    requests = {"reset": 5, "render": 9}[slow]  # of an episode
    policy = RestartPolicy(snapshots=False, replay_limit=0.25)
    with SubprocessEnv(partial(kind, horizon=4, count_episodes=False), restart=policy) as env:
        recovery = play(env, 14, 4, killed_in=2, after_step=env.render if slow == "render" else bool)
    assert recovery.outcome == "replayed"
    assert recovery.replayed <= 4 * requests  # of 14; a busy worker does not save its generators before each reset


def test_a_replay_that_hangs_leaves_time_for_a_shorter_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one begins at the construction, because so little was done since; it has no deadline of its own."""
    set_limit(monkeypatch, "SHARE", math.inf)  # every reset is told of
    env_fn = partial(HangsInLongReplays, tmp_path / "marker")
    with SubprocessEnv(env_fn, restart=RestartPolicy(snapshots=False), deadlines=Deadlines(recovery=5.0)) as env:
        recovery = play(env, 8, 5, killed_in=2)
    assert recovery.outcome == "replayed"
    assert recovery.replayed <= 2 * 6


def test_a_replay_in_which_the_env_crashes_again_and_again_is_given_up_for_a_shorter_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it crashes: an env that does so at random hardly comes to the end of a long one."""
    set_limit(monkeypatch, "SHARE", math.inf)  # every reset is told of
    with SubprocessEnv(
        partial(CrashesLater, tmp_path / "builds"), restart=RestartPolicy(snapshots=False, backoff=0.0)
    ) as env:
        recovery = play(env, 12, 5, killed_in=2)
    assert recovery.outcome == "replayed"
    assert recovery.replayed <= 2 * 6
    assert (tmp_path / "builds").stat().st_size == 1 + 6 + 1


def test_large_requests_leave_a_start_in_the_journal() -> None:
    """By the time of the env alone one would be told of after many megabytes, more than the journal takes."""
    options = {"large": bytes(2**20)}
    with SubprocessEnv(
        partial(CounterEnv, horizon=3, count_episodes=False), restart=RestartPolicy(snapshots=False)
    ) as env:
        for episode in range(40):
            env.reset(seed=episode, options=options)
            for _ in range(3):
                if episode == 39:
                    kill_worker(env)
                assert not env.step(np.int64(1))[3]
        assert env.statistics().replayed_recoveries == 3


def test_an_env_whose_episode_has_outgrown_its_journal_is_truncated_alone() -> None:
    """The other two envs of its worker have resets to begin at."""
    horizons = (20, None, 25)
    env_fns = [partial(CounterEnv, horizon=horizon, count_episodes=False) for horizon in horizons]
    policy = RestartPolicy(snapshots=False, journal_limit=80 * 1024, max_rss=2**40)
    twin = gymnasium.vector.SyncVectorEnv(env_fns)
    with SubprocessVectorEnv(env_fns, envs_per_worker=3, restart=policy) as envs:
        for one in (envs, twin):
            one.reset(seed=5)
        for _ in range(3000):
            for one in (envs, twin):
                one.step(np.ones(3, np.int64))
        kill_worker(envs)
        (told, rewards, *flags, infos), expected = envs.step(np.ones(3, np.int64)), twin.step(np.ones(3, np.int64))
        assert flags[1].tolist() == [False, True, False]
        assert "no longer recorded" in infos["multienv"]["reason"][1]
        for part, other in zip((told, rewards), expected[:2], strict=True):
            assert np.array_equal(part[[0, 2]], other[[0, 2]])
    twin.close()


def test_an_env_that_no_replay_matches_costs_its_neighbours_nothing_in_their_first_episode() -> None:
    """They have no reset to begin at yet: they begin at their construction, at the second loss as well."""
    env_fns = [partial(NondeterministicEnv, since=1), CounterEnv, partial(CounterEnv, horizon=None)]
    twin = gymnasium.vector.SyncVectorEnv(env_fns[1:])
    with SubprocessVectorEnv(env_fns, envs_per_worker=3, restart=RestartPolicy(snapshots=False)) as envs:
        assert np.array_equal(envs.reset(seed=[5, 6, 7])[0][1:], twin.reset(seed=[6, 7])[0])
        for step in range(9):
            if step in (2, 6):
                kill_worker(envs)
            told, expected = envs.step(np.ones(3, np.int64)), twin.step(np.ones(2, np.int64))
            assert told[3].tolist() == [step in (2, 6), False, False]
            for part, other in zip(told[:4], expected[:4], strict=True):
                assert np.array_equal(part[1:], other)
        (worker,) = envs._workers
        assert [history.is_whole for history in worker.position.journal.histories] == [False, True, True]
    twin.close()


def test_think_time_does_not_shorten_the_journal() -> None:
    """An env of microseconds, a learner that takes its time between sending and receiving."""
    with SubprocessEnv(partial(CounterEnv, horizon=None), restart=RestartPolicy(replay_limit=2.0)) as env:
        env.reset(seed=0)
        for t in range(1100):
            env.step_async(1)
            if t % 64 > 60 or t % 64 < 3:
                time.sleep(0.005)  # the learner
            env.step_wait()
        kill_worker(env)
        assert env.step(1)[0][0] == 1101
        assert env.statistics().exact_recoveries == 1
