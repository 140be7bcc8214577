"""``"auto"``, the default: deadlines that nobody chose recover what hangs by chance, and end nothing that is slow."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_envs import HANGS, HANGS_ONCE, SLOW, UnevenEnv, hang_once

from kit import CounterEnv, Fault, FaultyEnv, ForkingPolicy, first_difference
from kit.limits import limit, set_limit
from kit.trainer_process import STUCK_AFTER, Trainer, becomes_true
from multienv import (
    AsyncEnv,
    AsyncSubprocessEnvManager,
    Deadlines,
    MultiEnv,
    RestartPolicy,
    SubprocessEnv,
    SubprocessVectorEnv,
    create_subprocess_envs,
)
from multienv._engine.recovery.state_machine import Kind, Request
from multienv.envs.subprocess_env import supervisor_of
from multienv.errors import UsageError, WaitTimeout, WorkerHungError


class ChanceAndUneven(UnevenEnv):
    """Cannot be recovered exactly, and is slow at times."""

    def _observe(self) -> Any:
        observation = super()._observe()
        observation[2] += int.from_bytes(os.urandom(2), "little")
        return observation


FORKS = ForkingPolicy(snapshot_every=20)
REPLAYS = RestartPolicy(snapshots=False)


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in life, but for a tenth of the time."""
    set_limit(monkeypatch, "LEAST", 0.3)
    set_limit(monkeypatch, "LONGER", 5.0)


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
    with face(tmp_path) as envs:
        envs.reset(seed=5)
        actions = [0] * 20 + [HANGS_ONCE, 0, 0]
        assert first_difference(steps(envs, actions), expected(tmp_path, actions)) is None
        assert losses(envs) >= 1  # more if the machine is so busy that another step takes 0.3 s, too


@pytest.mark.parametrize(("policy", "lost"), [(FORKS, 1), (REPLAYS, 0)], ids=["with snapshots", "without"])
@FACES
def test_an_env_that_is_merely_slow_is_waited_for_and_known_to_be_slow(
    face: Any, policy: RestartPolicy, lost: int, tmp_path: Path
) -> None:
    with face(tmp_path, restart=policy) as envs:
        envs.reset(seed=5)
        actions = [0] * 70 + [SLOW, 0, SLOW, SLOW]
        assert first_difference(steps(envs, actions), expected(tmp_path, actions)) is None
        # With a snapshot, it is lost the first time: it might have hung. If a busy machine is slow before, it is known.
        assert losses(envs) <= lost


@pytest.mark.parametrize("on_timeout", ["replay", "truncate", "raise"])
def test_an_env_that_is_merely_slow_and_cannot_be_recovered_keeps_its_episode(on_timeout: Any, tmp_path: Path) -> None:
    policy = ForkingPolicy(snapshots=on_timeout != "replay", snapshot_every=20, on_timeout=on_timeout)
    with SubprocessEnv(partial(ChanceAndUneven, tmp_path), restart=policy) as env:
        env.reset(seed=5)
        truncated = [env.step(action)[3] for action in [0] * 70 + [SLOW, 0, SLOW]]
        assert not any(truncated)
        assert env.statistics().losses == 0


def test_an_env_that_hangs_and_has_no_snapshot_is_ended_later(tmp_path: Path) -> None:
    with SubprocessEnv(partial(UnevenEnv, tmp_path), restart=RestartPolicy(snapshots=False, on_timeout="raise")) as env:
        env.reset(seed=5)
        for _ in range(70):
            env.step(0)
        began = time.monotonic()
        with pytest.raises(WorkerHungError):
            env.step(HANGS)
        assert time.monotonic() - began < 40.0
        assert env.statistics().last_loss.deadline >= 1.5


def test_a_rollout_has_such_a_deadline_for_each_step(tmp_path: Path) -> None:
    with vector_env(tmp_path, restart=FORKS) as envs:
        envs.reset(seed=5)
        envs.rollout(lambda observations: np.zeros(len(observations), np.int64), 25)
        began = time.monotonic()
        envs.rollout(hang_once, 25)
        assert time.monotonic() - began < 20.0, "not 25 steps and three envs together"
        assert losses(envs) >= 1  # more if the machine is so busy that the policy takes 0.3 s, too


def test_steps_of_a_rollout_say_what_is_slow(tmp_path: Path) -> None:
    with SubprocessEnv(partial(UnevenEnv, tmp_path), restart=REPLAYS) as env:
        env.reset(seed=5)
        env.set_attr("pause", 0.05)
        env.rollout(lambda observation: np.int64(0), 25)
        assert 0.5 <= limit_of(env) < 12.5, "not that of 25 steps together"


def limit_of(env: SubprocessEnv) -> Any:
    return supervisor_of(env).pending.step_limit


def test_time_for_which_the_trainer_and_its_worker_were_stopped_does_not_count(tmp_path: Path) -> None:
    with Trainer("auto_deadline_trainers", "step_slowly", tmp_path) as trainer:
        worker = int(trainer.expect("steps"))
        assert becomes_true((tmp_path / "slow").exists)
        time.sleep(0.3)  # the trainer's wait is no brief one any more
        for pid in (trainer.pid, worker):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(3.0)
        trainer.signal(signal.SIGCONT)
        time.sleep(0.5)
        os.kill(worker, signal.SIGCONT)
        assert trainer.expect("losses") == "0"
        trainer.wait()


def test_it_is_the_default_and_none_turns_it_off(tmp_path: Path) -> None:
    assert (Deadlines().step, Deadlines().reset) == ("auto", "auto")
    with SubprocessEnv(partial(UnevenEnv, tmp_path), restart=FORKS, deadlines=Deadlines(step=None)) as env:
        env.reset(seed=5)
        for action in [0] * 70 + [SLOW]:
            env.step(action)
        assert env.statistics().losses == 0
    env = AsyncEnv(partial(UnevenEnv, tmp_path))
    assert supervisor_of(env._env).pending.limit_of(Kind.STEP) is None
    assert not supervisor_of(env._env).pending._limits.is_finding


def test_a_silent_hang_is_told_of_before_it_is_ended_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_limit(monkeypatch, "SILENCE", 0.4)
    with SubprocessEnv(partial(UnevenEnv, tmp_path), restart=REPLAYS) as env:
        env.reset(seed=5)
        for action in [0] * 70 + [SLOW]:
            env.step(action)
    silent = [record.getMessage() for record in caplog.records if "has not returned" in record.getMessage()]
    assert "It counts as hung after" in silent[-1]
    assert "Deadlines(step=seconds)" in silent[-1]


def test_the_first_steps_have_no_deadline_and_say_what_is_slow(tmp_path: Path) -> None:
    with vector_env(tmp_path) as envs:
        envs.reset(seed=5)
        actions = [SLOW] + [0] * 70 + [SLOW]
        assert first_difference(steps(envs, actions), expected(tmp_path, actions)) is None
        assert losses(envs) == 0


@FACES
def test_an_env_that_hangs_each_time_is_truncated_after_its_second_chance(face: Any, tmp_path: Path) -> None:
    with face(tmp_path) as envs:
        envs.reset(seed=5)
        steps(envs, [0] * 70)
        began = time.monotonic()
        truncated = envs.step([0, HANGS, 0])[3]
        took = time.monotonic() - began
        assert list(truncated) == [False, True, False]
        assert losses(envs) in (2, 3)  # a hang of a woken snapshot is not counted
        assert 0.3 + 1.5 < took < 20.0


def test_time_that_the_trainer_takes_is_not_the_envs(tmp_path: Path) -> None:
    with multi_env(tmp_path) as envs:
        envs.reset(seed=5)
        steps(envs, [0] * 70)
        envs.set_attr("pause", 0.05)
        envs.send([0, 0, 0])
        with suppress(WaitTimeout):
            came = envs.recv(3, timeout=0.0)[-1]
            envs.send([0] * len(came), came)  # the machine is so busy that some were ready
        time.sleep(1.0)
        envs.recv()
        began = time.monotonic()
        envs.step([0, HANGS_ONCE, 0])
        assert time.monotonic() - began < 8.0, "ten times the pause, not ten times what the trainer took"


@pytest.mark.parametrize(("face", "asked"), [(multi_env, [0, 1, 2]), (vector_env, [0])], ids=["alone", "shared worker"])
def test_an_env_that_is_slow_at_its_own_pace_is_waited_for(face: Any, asked: list[int], tmp_path: Path) -> None:
    """A step may take ten times as long as those that were seen, which is more than the shortest deadline."""
    with face(tmp_path, restart=FORKS) as envs:
        envs.reset(seed=5)
        envs.set_attr("pause", 0.1)
        for _ in range(limit("STEPS")):
            envs.send([0] * len(asked), asked)
            envs.recv()
        envs.set_attr("pause", 0.4)
        envs.send([0] * len(asked), asked)
        envs.recv()
        assert losses(envs) == 0


def test_a_hang_ends_although_the_trainer_learns_for_long_between_two_calls(tmp_path: Path) -> None:
    with multi_env(tmp_path, restart=FORKS) as envs:
        envs.reset(seed=5)
        steps(envs, [0] * 70)
        envs.send([0, HANGS_ONCE, 0])
        until, came = time.monotonic() + STUCK_AFTER, ()
        while 1 not in came and time.monotonic() < until:
            time.sleep(0.2)
            *_, came = envs.recv(1, at_most=3, timeout=5.0)
            envs.send([0] * len(came), came)
        assert 1 in came
        envs.recv()


def test_a_deadline_that_is_given_with_a_step_is_kept(tmp_path: Path) -> None:
    """Also if it is as long as the one that was found."""
    with SubprocessEnv(partial(UnevenEnv, tmp_path), restart=RestartPolicy(snapshots=False, on_timeout="raise")) as env:
        env.reset(seed=5)
        for _ in range(70):
            env.step(0)
        env.step_async(HANGS)
        supervisor_of(env).set_deadline(limit("LEAST"))
        with pytest.raises(WorkerHungError):
            env.step_wait()
        assert env.statistics().last_loss.deadline == limit("LEAST")


def test_a_deadline_in_seconds_is_looked_at_from_the_first_moment_on(tmp_path: Path) -> None:
    with SubprocessEnv(partial(UnevenEnv, tmp_path), deadlines=Deadlines(step=30.0)) as env:
        env.reset(seed=5)
        worker = supervisor_of(env)
        assert worker.pending.brief_wait(Request(Kind.RESET, "reset"), worker.position.number + 1) > 0.0
        env.step_async(0)
        assert worker.pending.brief_wait(worker.state.request, worker.position.number + 1) == 0.0
        env.step_wait()


def test_resets_have_such_a_deadline_after_three(tmp_path: Path) -> None:
    hangs = partial(FaultyEnv, fault=Fault("hang", "reset", at=4, once=tmp_path / "hung"))
    with MultiEnv(create_subprocess_envs([hangs])) as envs:
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
