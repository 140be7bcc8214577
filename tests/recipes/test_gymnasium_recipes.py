"""CleanRL's way to make envs, and where gymnasium's wrappers belong: what a loss does to each."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import cleanrl_script
import gymnasium
import gymnasium_wrappers
import numpy as np
import pytest
from gymnasium.wrappers import NormalizeObservation
from gymnasium.wrappers import vector as outside
from striking import Striking, assert_all_exact

from multienv import RestartPolicy, SubprocessVectorEnv
from multienv.testing import Killer

with contextlib.suppress(ImportError):  # moviepy's bars of progress: a lock for all processes, never released
    from tqdm import tqdm

    tqdm.get_lock()

TRUNCATE = RestartPolicy(on_crash="truncate")


@pytest.mark.parametrize(("env_id", "steps"), [("CartPole-v1", 600), ("Pendulum-v1", 900)])
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
            for step in range(100):
                if name == "struck" and step in (10, 50):
                    assert Killer(envs).strike()
                envs.step(np.array([step % 2]))
            assert sum(one.exact_recoveries for one in envs.statistics()) == (2 if name == "struck" else 0)
        videos.append({path.name: path.read_bytes() for path in (tmp_path / name).glob("*.mp4")})
    calm, struck = videos
    assert len(calm) >= 1
    assert calm == struck


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
