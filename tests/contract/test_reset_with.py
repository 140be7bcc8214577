"""Seed and options of each episode by its number: the same ones whatever processes are lost."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import pytest
from contract_envs import task_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from kit import kill_worker
from kit.replays import prefer_resets
from kit.side_by_side import run_side_by_side
from multienv import (
    AutoResetWrapper,
    MultiEnv,
    Recovery,
    RestartPolicy,
    SerialVectorEnv,
    SubprocessEnv,
    SubprocessVectorEnv,
)


@pytest.fixture(params=["from the construction", "from a reset"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "from a reset":
        prefer_resets(monkeypatch)
    return str(request.param)


def bare(mode: AutoresetMode) -> Any:
    """Return gymnasium's vector env of the same envs, which knows nothing of indices."""
    return closing(SyncVectorEnv([partial(task_env, index) for index in range(2)], autoreset_mode=mode))


@pytest.mark.parametrize(("mode", "envs_per_worker"), [(AutoresetMode.NEXT_STEP, 2), (AutoresetMode.SAME_STEP, 1)])
def test_episodes_of_a_batch_are_the_same_whatever_processes_are_lost(
    mode: Any, envs_per_worker: int, way: str
) -> None:
    events: list[Any] = []
    restart = RestartPolicy(snapshots=False, backoff=0.0, max_restarts=100)
    options: dict[str, Any] = {"autoreset_mode": mode, "restart": restart, "hooks": [events.append]}

    def kill(step: int) -> None:
        if step > 20 and step % 3 == 0:
            kill_worker(envs, step % (2 // envs_per_worker))

    with SubprocessVectorEnv([task_env] * 2, envs_per_worker=envs_per_worker, **options) as envs, bare(mode) as twin:
        assert run_side_by_side(envs, twin, 60, before_step=kill, infos=False) > 20, "episodes went on being numbered"
    with SerialVectorEnv([task_env] * 2, autoreset_mode=mode) as serial, bare(mode) as twin:
        run_side_by_side(serial, twin, 60, infos=False)
    outcomes = [event.outcome for event in events if isinstance(event, Recovery)]
    assert len(outcomes) == 13
    assert set(outcomes) == {"exact" if way == "from the construction" else "replayed"}


def test_resets_of_the_caller_count_and_keep_what_they_say(way: str) -> None:
    with SubprocessEnv(task_env, env_index=3, restart=RestartPolicy(snapshots=False, backoff=0.0)) as env:
        for episode in range(8):
            said = {"options": {"task": -5}} if episode == 4 else {}
            assert env.reset(**said)[0][0] == said.get("options", {}).get("task", 300 + episode)
            for _ in range(3):
                env.step(0)
            kill_worker(env)
        statistics = env.statistics()
        assert statistics.truncated_recoveries == 0


def test_it_works_in_lists_and_in_the_autoreset_wrapper() -> None:
    multi = MultiEnv([SubprocessEnv(task_env, env_index=index) for index in range(2)], autoreset_mode="SameStep")
    single = AutoResetWrapper(SubprocessEnv(task_env, env_index=1), "SameStep")
    plain = AutoResetWrapper(task_env(1), "SameStep")
    with multi:
        assert [observation[0] for observation in multi.reset()[0]] == [0, 100]
        single.env.initialize()  # type: ignore[attr-defined]
        assert single.reset()[0][0] == plain.reset()[0][0] == 100
        tasks = [[multi.step([0, 0])[0][1][0], single.step(0)[0][0], plain.step(0)[0][0]] for _ in range(20)]
    single.close()
    for seen in zip(*tasks, strict=True):
        assert list(dict.fromkeys(seen))[:4] == [100, 101, 102, 103]


def test_it_goes_on_in_a_new_process_for_each_episode() -> None:
    options: dict[str, Any] = {"restart": RestartPolicy(recycle_after_episodes=1), "autoreset_mode": "SameStep"}
    with (
        SubprocessVectorEnv([task_env] * 2, envs_per_worker=1, **options) as envs,
        bare(AutoresetMode.SAME_STEP) as twin,
    ):
        run_side_by_side(envs, twin, 30, infos=False)
        assert all(one.recycled > 3 for one in envs.statistics())
