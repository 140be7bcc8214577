"""``Deadlines(step="auto", reset="auto")``: deadlines that nobody chose recover what hangs by chance, and end nothing that is slow."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from contract_envs import HANGS, HANGS_ONCE, SLOW, UnevenEnv

from kit import CounterEnv, Fault, FaultyEnv, first_difference
from multienv import AsyncSubprocessEnvManager, Deadlines, MultiEnv, SubprocessVectorEnv, create_subprocess_envs
from multienv.errors import UsageError, WaitTimeout
from multienv.recovery import deadlines as limits
from multienv.recovery import pending

AUTO = Deadlines(step="auto", reset="auto")


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in life, but for a tenth of the time."""
    monkeypatch.setattr(limits, "LEAST", 0.3)
    monkeypatch.setattr(pending, "SECOND_CHANCE", 5.0)


def multi_env(directory: Path, **options: Any) -> Any:
    return MultiEnv(create_subprocess_envs([partial(UnevenEnv, directory)] * 3, **options))


def vector_env(directory: Path, **options: Any) -> Any:
    return SubprocessVectorEnv([partial(UnevenEnv, directory)] * 3, envs_per_worker=3, **options)


FACES = pytest.mark.parametrize("face", [multi_env, vector_env])


def steps(envs: Any, actions: list[int]) -> list[Any]:
    return [[one.copy() for one in envs.step([0, action, 0])[0]] for action in actions]


def expected(directory: Path, actions: list[int]) -> list[Any]:
    envs = [CounterEnv(horizon=None) for _ in range(3)]
    for index, env in enumerate(envs):
        env.reset(seed=5 + index)
    return [[env.step(one)[0] for env, one in zip(envs, (0, action, 0), strict=True)] for action in actions]


def losses(envs: Any) -> int:
    return sum(one.losses for one in envs.statistics())


@FACES
def test_an_env_that_hangs_by_chance_after_twenty_steps_is_recovered(face: Any, tmp_path: Path) -> None:
    with face(tmp_path, deadlines=AUTO) as envs:
        envs.reset(seed=5)
        actions = [0] * 20 + [HANGS_ONCE, 0, 0]
        assert first_difference(steps(envs, actions), expected(tmp_path, actions)) is None
        assert losses(envs) == 1


@FACES
def test_an_env_that_is_merely_slow_is_waited_for_and_known_to_be_slow(face: Any, tmp_path: Path) -> None:
    with face(tmp_path, deadlines=AUTO) as envs:
        envs.reset(seed=5)
        actions = [0] * 70 + [SLOW, 0, SLOW, SLOW]
        assert first_difference(steps(envs, actions), expected(tmp_path, actions)) is None
        assert losses(envs) == 1, "the first time it might have hung"


def test_the_first_steps_have_no_deadline_and_say_what_is_slow(tmp_path: Path) -> None:
    with vector_env(tmp_path, deadlines=AUTO) as envs:
        envs.reset(seed=5)
        actions = [SLOW] + [0] * 70 + [SLOW]
        assert first_difference(steps(envs, actions), expected(tmp_path, actions)) is None
        assert losses(envs) == 0


@FACES
def test_an_env_that_hangs_each_time_is_truncated_after_its_second_chance(face: Any, tmp_path: Path) -> None:
    with face(tmp_path, deadlines=AUTO) as envs:
        envs.reset(seed=5)
        steps(envs, [0] * 70)
        began = time.monotonic()
        truncated = envs.step([0, HANGS, 0])[3]
        took = time.monotonic() - began
        assert list(truncated) == [False, True, False]
        assert losses(envs) == 2
        assert 0.3 + 1.5 < took < 10.0


def test_time_that_the_trainer_takes_is_not_the_envs(tmp_path: Path) -> None:
    with multi_env(tmp_path, deadlines=AUTO) as envs:
        envs.reset(seed=5)
        steps(envs, [0] * 70)
        envs.set_attr("pause", 0.05)
        envs.send([0, 0, 0])
        with pytest.raises(WaitTimeout):
            envs.recv(3, timeout=0.0)
        time.sleep(1.0)
        envs.recv()
        began = time.monotonic()
        envs.step([0, HANGS_ONCE, 0])
        assert time.monotonic() - began < 5.0, "ten times the pause"


def test_an_env_that_is_slow_at_its_own_pace_is_waited_for(tmp_path: Path) -> None:
    """A step may take ten times as long as those that were seen, which is more than the shortest deadline."""
    with multi_env(tmp_path, deadlines=AUTO) as envs:
        envs.reset(seed=5)
        envs.set_attr("pause", 0.08)
        for _ in range(22):
            envs.send([0, 0, 0])
            envs.recv()
        envs.set_attr("pause", 0.6)
        envs.send([0, 0, 0])
        envs.recv()
        assert losses(envs) == 0


def test_resets_have_such_a_deadline_after_three(tmp_path: Path) -> None:
    hangs = partial(FaultyEnv, fault=Fault("hang", "reset", at=4, once=tmp_path / "hung"))
    with MultiEnv(create_subprocess_envs([hangs], deadlines=AUTO)) as envs:
        for seed in range(3):
            envs.reset(seed=seed)
        steps_before = envs.step([0])[0]
        observation = envs.reset(seed=0)[0][0]
        assert observation[0] == 0
        assert steps_before[0][0] == 1
        assert losses(envs) == 1


def test_a_manager_has_them_too(tmp_path: Path) -> None:
    env_fns = [partial(UnevenEnv, tmp_path)] * 2
    with AsyncSubprocessEnvManager(env_fns, step_timeout="auto", reset_timeout="auto", wait_num=2) as manager:
        for _ in range(70):
            manager.step(dict.fromkeys(manager.ready_obs, 0))
        while len(manager.ready_obs) < 2:
            manager.step({})
        manager.step({0: HANGS_ONCE})
        assert manager.statistics()[0].losses == 1


def test_nothing_else_than_auto_is_taken_for_a_deadline() -> None:
    for wrong in ("automatic", "10", ""):
        with pytest.raises(UsageError, match="number of seconds, 'auto'"):
            Deadlines(step=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="number of seconds, or None"):
        Deadlines(call="auto")  # type: ignore[arg-type]
    assert repr(AUTO) == "Deadlines(reset='auto', step='auto')"
