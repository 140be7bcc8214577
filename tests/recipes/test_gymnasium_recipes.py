"""CleanRL's way to make envs, and where gymnasium's wrappers belong: what a loss does to each."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import cleanrl_script
import gymnasium
import gymnasium_wrappers
import numpy as np
import pytest
from gymnasium.wrappers import NormalizeObservation, RecordEpisodeStatistics, RecordVideo
from gymnasium.wrappers import vector as outside
from striking import Striking, assert_all_exact

from kit import ForkingPolicy
from kit.replays import prefer_resets
from multienv import RestartPolicy, SubprocessEnv, SubprocessVectorEnv
from multienv.testing import Killer, worker_pids

with contextlib.suppress(ImportError):  # moviepy's bars of progress: a lock for all processes, never released
    from tqdm import tqdm

    tqdm.get_lock()

TRUNCATE = RestartPolicy(on_crash="truncate")


@pytest.mark.parametrize(
    ("env_id", "steps"), [("CartPole-v1", 600), pytest.param("Pendulum-v1", 900, marks=pytest.mark.ci)]
)
def test_a_cleanrl_script_counts_the_same_episodes_while_its_workers_are_killed(env_id, steps):
    calm = gymnasium.vector.SyncVectorEnv([cleanrl_script.make_env(env_id) for _ in range(4)])
    struck = cleanrl_script.make_envs(env_id, 4)
    with contextlib.closing(calm), contextlib.closing(struck):
        found, expected = cleanrl_script.run(Striking(struck), steps, 3), cleanrl_script.run(calm, steps, 3)
        assert_all_exact(struck, deaths=10)
    assert found == expected
    assert len(found) >= 4 * 4


def test_videos_are_recorded_in_the_worker_and_a_replay_records_them_again(tmp_path):
    videos = []
    for name in ("calm", "struck"):
        env_fn = partial(gymnasium_wrappers.make_env, "CartPole-v1", tmp_path / name)
        envs, _ = gymnasium_wrappers.make_envs([env_fn])
        with envs:
            envs.reset(seed=2)
            for step in range(60):
                if name == "struck" and step in (10, 50):
                    assert Killer(envs).strike()
                envs.step(np.array([step % 2]))
            assert sum(one.exact_recoveries for one in envs.statistics()) == (2 if name == "struck" else 0)
        videos.append({path.name: path.read_bytes() for path in (tmp_path / name).glob("*.mp4")})
    calm, struck = videos
    assert len(calm) >= 1
    assert calm == struck


# Of no function of this file: it would be imported in the worker, and tqdm's lock keeps that from being forked.
DRAWING = partial(gymnasium.make, "CartPole-v1", render_mode="rgb_array")


def run_of_one(where: str, videos: Path, restart: RestartPolicy, kills: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    """Step one env, and return what it returned but for times, and names and contents of the videos."""
    returned: list[Any] = []
    inside = partial(gymnasium_wrappers.make_env, "CartPole-v1", videos)
    with SubprocessEnv(inside if where == "inside" else DRAWING, restart=restart, reports="") as struck:
        env: Any = struck
        if where == "around":
            env = RecordVideo(env, str(videos), episode_trigger=lambda episode: episode % 2 == 0)
        env = RecordEpisodeStatistics(env, stats_key="around")
        rng = np.random.default_rng(1)
        env.reset(seed=2)
        for step in range(120):
            if step in kills:
                assert Killer(struck).strike()
            observation, reward, terminated, truncated, info = env.step(int(rng.integers(2)))
            told = [[info[name][key] for key in "rl"] for name in ("episode", "around") if name in info]
            returned.append((observation.tolist(), reward, terminated, truncated, told))
            if terminated or truncated:
                assert told[0] == told[-1]
                env.reset()
        assert restart.snapshots == (struck.statistics().snapshots > 0)
        told = struck.statistics()
        assert (told.losses, told.truncated_recoveries) == (len(kills), 0)
        env.close()
    return returned, sorted((path.name, path.read_bytes()) for path in videos.glob("*"))


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*Overwriting existing videos")
@pytest.mark.parametrize("where", ["inside", "around"])
def test_recorders_of_one_env_return_and_write_the_same_but_for_videos_in_the_worker_after_a_replay_from_a_reset(
    where, tmp_path, monkeypatch
):
    forked, replayed = ForkingPolicy(snapshot_every=5), RestartPolicy(snapshots=False)
    expected, calm = run_of_one(where, tmp_path / "calm", replayed, ())
    assert len(calm) > 2
    if where == "inside":
        assert run_of_one(where, tmp_path / "forked", forked, (30, 110)) == (expected, calm)
    assert run_of_one(where, tmp_path / "replayed", replayed, (30, 110)) == (expected, calm)
    prefer_resets(monkeypatch)
    found, videos = run_of_one(where, tmp_path / "anew", replayed, (30, 110))
    assert found == expected
    if where == "around":
        assert videos == calm
    else:  # it has counted from 0 again, and written over its earlier files
        assert {name for name, _ in videos} < {name for name, _ in calm}
        assert videos[0] != calm[0]


@pytest.mark.ci
def test_recorders_around_a_batch_return_and_write_the_same(tmp_path):
    runs = []
    for name, kills in (("calm", ()), ("struck", (30, 60))):
        restart = RestartPolicy(snapshots=False)
        with SubprocessVectorEnv([DRAWING] * 2, envs_per_worker=1, restart=restart, reports="") as envs:
            videos = outside.RecordVideo(envs, str(tmp_path / name), episode_trigger=lambda number: number % 2 == 0)
            recorded = outside.RecordEpisodeStatistics(videos)
            rng, ended = np.random.default_rng(1), []
            recorded.reset(seed=2)
            for step in range(80):
                if step in kills:
                    assert Killer(envs).strike()
                observations, _, _, _, infos = recorded.step(rng.integers(0, 2, 2))
                told = [infos.get(name, {}) for name in ("episode", "outside")]
                ended.append(
                    (observations.tolist(), [[one[key].tolist() for key in "rl" if key in one] for one in told])
                )
            assert_all_exact(envs, deaths=len(kills))
            recorded.close()
        runs.append((ended, sorted((path.name, path.read_bytes()) for path in (tmp_path / name).glob("*"))))
    assert runs[0] == runs[1]
    assert len(runs[0][1]) == 2
    assert any(stats for _, stats in runs[0][0])


def test_the_last_frame_of_a_lost_episode_is_recorded_once_more(tmp_path):
    with SubprocessEnv(DRAWING, restart=TRUNCATE, reports="") as struck:
        env = RecordVideo(struck, str(tmp_path / "videos"), episode_trigger=lambda number: True)
        env.reset(seed=2)
        env.step(0)
        frame = struck.render()
        assert Killer(struck).strike()
        assert env.step(0)[3]
        assert struck.render() is frame
        env.reset(seed=2)
        assert struck.render() is not frame
        env.step(0)
        env.close()
        assert [path.stat().st_size > 0 for path in (tmp_path / "videos").glob("*.mp4")] == [True, True]


def test_the_last_frames_of_lost_episodes_of_a_batch_are_drawn_once_more():
    options = {"envs_per_worker": 1, "restart": TRUNCATE, "reports": "", "autoreset_mode": "Disabled"}
    with SubprocessVectorEnv([DRAWING] * 3, **options) as envs:
        envs.reset(seed=2)
        before = envs.render()
        os.kill(worker_pids(envs)[1], signal.SIGKILL)
        assert envs.step(np.array([0, 0, 0]))[3].tolist() == [False, True, False]
        after = envs.render()
        assert [one is other for one, other in zip(before, after, strict=True)] == [False, True, False]
        envs.reset(options={"reset_mask": np.array([False, True, False])})
        assert envs.render()[1] is not before[1]


def test_statistics_in_the_worker_leave_out_a_lost_episode_and_outside_they_count_it():
    env_fn = partial(gymnasium_wrappers.make_env, "CartPole-v1")
    with SubprocessVectorEnv([env_fn] * 2, envs_per_worker=1, restart=TRUNCATE, reports="") as envs:
        counted = outside.RecordEpisodeStatistics(envs, stats_key="outside")
        counted.reset(seed=0)
        for _ in range(3):
            counted.step(np.zeros(2, int))
        assert Killer(lambda: [envs.statistics()[1].pid]).strike()
        _, _, _, truncated, infos = counted.step(np.zeros(2, int))
        assert truncated.tolist() == [False, True]
        assert infos["multienv"]["_reason"].tolist() == [False, True]
        assert "episode" not in infos
        assert infos["outside"]["l"].tolist() == [0, 4]  # the step that was lost is one of them
        while "episode" not in infos:
            infos = counted.step(np.zeros(2, int))[4]
        assert infos["_episode"].tolist() == [True, False]  # the first one's: it was not disturbed


def test_normalisation_in_the_worker_is_forgotten_with_a_lost_episode_and_outside_it_is_not():
    def inside() -> Any:
        return NormalizeObservation(gymnasium.make("CartPole-v1"))

    with SubprocessVectorEnv([inside], restart=TRUNCATE, reports="") as envs:
        wrapped = outside.NormalizeObservation(envs)
        wrapped.reset(seed=0)
        for _ in range(5):
            wrapped.step(np.zeros(1, int))
        before = envs.get_attr("obs_rms")[0].count, wrapped.obs_rms.count
        assert Killer(envs).strike()
        assert wrapped.step(np.zeros(1, int))[3].tolist() == [True]
        wrapped.step(np.zeros(1, int))
        assert envs.get_attr("obs_rms")[0].count < before[0]
        assert wrapped.obs_rms.count > before[1]
