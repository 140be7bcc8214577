"""Interrupted anywhere while an env is given up for another life or another state: it is the one, the other, or lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interruption import Interrupted, every_place, interrupted_after
from trainer_process import becomes_true

from kit import CounterEnv, descendants, is_alive
from multienv import Deadlines, MultiEnv, RestartPolicy, SubprocessEnv, SubprocessVectorEnv, create_subprocess_envs
from multienv.errors import EnvsFailedError, ResetNeededError, WorkerLostError
from multienv.recovery.journal import Journal

ENDLESS = partial(CounterEnv, horizon=None)
STEP = np.int64(1)


class Unrepeatable(CounterEnv):
    """No replay shows what was seen."""

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        observation[1] = int.from_bytes(os.urandom(2), "little") / 65536
        return observation, *rest


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def discarded(env: SubprocessEnv) -> None:
    env.set_attr("offset", 2.0)
    env._supervisor.discard()
    env.reset(seed=3)


def reset_in_a_new_process(env: SubprocessEnv) -> None:
    env._supervisor.maintenance.recycling_due = "the test wants it"
    env.reset(seed=3)


@pytest.mark.parametrize("change", [discarded, reset_in_a_new_process])
def test_nothing_is_written_to_descriptors_that_are_somebody_elses(
    change: Callable[[SubprocessEnv], None], tmp_path: Path
) -> None:
    """Opened by whoever was interrupted, a checkpoint's may have the number that the pipe's end had."""
    env_fn = partial(Unrepeatable, horizon=None)
    for interruption in every_place(stride=131):
        with SubprocessEnv(env_fn, restart=RestartPolicy(snapshots=False, state_anchors=False)) as env:
            env.reset(seed=0)
            env.step(STEP)
            with interruption:
                change(env)
            with contextlib.ExitStack() as files:
                mine = [files.enter_context((tmp_path / str(number)).open("wb")) for number in range(8)]
                with contextlib.suppress(ResetNeededError):
                    env.step(STEP)
                assert [os.fstat(file.fileno()).st_size for file in mine] == [0] * 8, interruption.where
            env.reset(seed=3)
            assert env.step(STEP)[0][0] == 1, interruption.where


def test_an_interrupted_load_state_dict_leaves_the_one_state_or_the_other() -> None:
    with SubprocessEnv(ENDLESS) as env:
        env.reset(seed=5)
        for _ in range(40):
            env.step(STEP)
        saved = env.state_dict()
    policy = RestartPolicy(snapshots=False)
    for interruption in every_place(stride=29):
        with SubprocessEnv(ENDLESS, restart=policy) as env:
            env.reset(seed=1)
            for _ in range(10):
                env.step(STEP)
            with interruption:
                env.load_state_dict(saved)
            pid = env.statistics().pid
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):  # interrupted when it had been given up
                    kill(pid)
            try:
                observation, _, _, truncated, _ = env.step(STEP)
            except ResetNeededError:
                assert env.reset(seed=1)[0][0] == 0
            else:
                assert (int(observation[0]), truncated) in ((11, False), (41, False)), interruption.where


def test_an_interrupted_load_does_not_take_half_a_journal_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = RestartPolicy(snapshots=False, state_anchors=False)
    with SubprocessEnv(ENDLESS, restart=policy) as env:
        env.reset(seed=5)
        for _ in range(40):
            env.step(STEP)
        saved = env.state_dict()
    load = Journal.load

    def interrupted(self: Journal, *arguments: Any) -> None:
        load(self, *arguments)
        del self.entries[len(self.entries) // 2 :]
        raise Interrupted

    with SubprocessEnv(ENDLESS, restart=policy) as env:
        env.reset(seed=1)
        env.step(STEP)
        its_own = env._supervisor.ladder.build.seeds
        monkeypatch.setattr(Journal, "load", interrupted)
        with pytest.raises(Interrupted):
            env.load_state_dict(saved)
        kill(env.statistics().pid)
        seeds = env._supervisor.ladder.build.seeds
        assert env.step(STEP)[0][0] == 2
        assert seeds == its_own


class Napping(Unrepeatable):
    def nap(self) -> None:
        time.sleep(0.5)


@pytest.mark.parametrize("face", ["one", "batch"])
@pytest.mark.parametrize(
    "after", [pytest.param(0.1, marks=pytest.mark.soak), 0.3, pytest.param(0.6, marks=pytest.mark.soak)]
)
def test_what_was_set_is_not_forgotten_when_a_new_life_is_interrupted(face: str, after: float) -> None:
    policy = RestartPolicy(snapshots=False, state_anchors=False, on_crash="truncate" if face == "one" else "replay")
    make: Any = SubprocessEnv if face == "one" else lambda env_fn, **options: SubprocessVectorEnv([env_fn], **options)
    env = make(partial(Napping, horizon=None), restart=policy)
    with contextlib.closing(env):
        if face == "one":
            env.initialize()
        env.call("nap")
        env.set_attr("offset", 5.0)
        env.reset(seed=0)
        env.step(STEP if face == "one" else [1])
        statistics = env.statistics()
        kill((statistics if face == "one" else statistics[0]).pid)
        with contextlib.suppress(Interrupted), interrupted_after(after):
            env.step(STEP if face == "one" else [1])
            env.reset(seed=1)
            time.sleep(1)
        env.reset(seed=1)
        assert env.get_attr("offset") == (5.0 if face == "one" else (5.0,))


SOAK = pytest.mark.soak


@pytest.mark.parametrize("on_timeout", ["raise", *(pytest.param(one, marks=SOAK) for one in ("replay", "truncate"))])
def test_an_interrupted_step_has_no_deadline_while_nobody_waits(on_timeout: Any) -> None:
    """Wherever it was interrupted, before it was sent or after it was answered; nor has it one when it is resumed."""
    make = partial(SubprocessEnv, ENDLESS, deadlines=Deadlines(step=0.2), restart=RestartPolicy(on_timeout=on_timeout))
    with make() as env:
        env.reset(seed=0)
        for interruption in every_place(stride=3):
            with interruption:
                env.step(STEP)
            if interruption.fired and interruption.place % 30 == 0:
                time.sleep(0.3)
            assert not env.step(STEP)[3], interruption.where
            if interruption.place % 30 == 3:
                time.sleep(0.3)
        assert env.statistics().losses == 0


@pytest.mark.parametrize("several", ["batch", "MultiEnv"])
def test_a_batch_has_no_deadline_either_while_nobody_waits(several: str) -> None:
    deadlines = Deadlines(step=0.2)
    with contextlib.ExitStack() as stack:
        if several == "batch":
            batch = SubprocessVectorEnv([ENDLESS] * 2, envs_per_worker=1, deadlines=deadlines)
            envs: Any = stack.enter_context(contextlib.closing(batch))
        else:
            envs = stack.enter_context(MultiEnv(create_subprocess_envs([ENDLESS] * 2, deadlines=deadlines)))
        envs.reset(seed=0)
        for interruption in every_place(stride=3):
            with interruption:
                envs.step([1, 1])
            if interruption.fired and interruption.place % 12 == 0:
                time.sleep(0.3)
            assert not any(envs.step([1, 1])[3]), interruption.where
        assert [one.losses for one in envs.statistics()] == [0, 0]


class HangsTheSecondTime(CounterEnv):
    """Told to, the first process dies in a reset, and the next one hangs there."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if options:
            marker = Path(options["marker"])
            if marker.exists():
                time.sleep(3600)
            marker.touch()
            os._exit(1)
        return super().reset(seed=seed)


def test_an_env_that_a_thread_waits_for_keeps_its_deadline(tmp_path: Path) -> None:
    options = {"marker": str(tmp_path / "died")}
    with MultiEnv(create_subprocess_envs([HangsTheSecondTime] * 2, deadlines=Deadlines(reset=2.0))) as envs:
        envs.reset(seed=0)
        with pytest.raises(Interrupted), interrupted_after(1.0):
            envs.reset(options=[options, None])
        with contextlib.suppress(WorkerLostError, EnvsFailedError):
            envs.reset(seed=0)
        assert envs.reset(seed=0)[0][0][0] == 0


class SlowToFork(CounterEnv):
    def __init__(self) -> None:
        super().__init__(horizon=None)
        os.register_at_fork(before=lambda: time.sleep(0.6))


def test_closing_twice_frees_a_snapshot_that_is_still_being_taken() -> None:
    env = SubprocessEnv(SlowToFork, restart=RestartPolicy(snapshots=False)).initialize()
    env.reset(seed=0)
    with pytest.raises(Interrupted), interrupted_after(0.2):
        env.snapshot()
    alive = set(descendants(os.getpid()))
    thread = threading.Thread(target=env.close)
    thread.start()
    time.sleep(0.1)
    env.close()
    thread.join()
    assert becomes_true(lambda: not [pid for pid in set(descendants(os.getpid())) - alive if is_alive(pid)])
