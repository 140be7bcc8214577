"""Envs that take long are dealt to more processes after their first steps, and nobody sees it in what they return."""

from __future__ import annotations

import copy
import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vector_pairs import beside_gymnasium, expect_same, run_side_by_side

from multienv import SubprocessVectorEnv
from multienv.errors import ClosedError
from multienv.testing import NondeterministicEnv, SlowEnv, SpaceEnv, example_spaces
from multienv.vector_dealing import STEPS, core_seconds, own_core_seconds, size_that_pays

MODES = ["NextStep", "SameStep", "Disabled"]
slow = partial(SlowEnv, step_seconds=0.005, horizon=3)


@pytest.fixture(autouse=True)
def on_two_cores(monkeypatch):
    monkeypatch.setattr("multienv.subprocess_vector_env.busy_cores", lambda: 2)


class SlowSpaceEnv(SpaceEnv):
    def step(self, action: Any) -> Any:
        time.sleep(0.005)
        return super().step(action)


class BusySpaceEnv(SpaceEnv):
    """Computes for a millisecond, on whichever machine."""

    def step(self, action: Any) -> Any:
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            pass
        return super().step(action)


class Uneven(NondeterministicEnv):
    def step(self, action: Any) -> Any:
        time.sleep(0.005)
        return super().step(action)


class ClosedBy(SlowEnv):
    """Says when it is built a second time, and takes its time then."""

    def __init__(self, mark: Path) -> None:
        super().__init__(step_seconds=0.005)
        if mark.exists():
            mark.with_suffix(".again").touch()
            time.sleep(0.2)
        mark.touch()


class OnlyOnce(SlowEnv):
    """The second of its name finds the first one's mark."""

    def __init__(self, mark: Path) -> None:
        super().__init__(step_seconds=0.005)
        mark.touch(exist_ok=False)


class FailsLater(SlowEnv):
    """In the second step of its second life."""

    def __init__(self, mark: Path, how: Callable[[], None]) -> None:
        super().__init__(step_seconds=0.005)
        self.second_life = mark.exists()
        self.how = how
        mark.touch()

    def step(self, action: np.int64) -> Any:
        if self.second_life and self.episode_step == 1:
            self.how()
        return super().step(action)


def an_exception() -> None:
    raise RuntimeError("not twice")


def its_death() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("largest", "seconds", "size"),
    [
        (16, 16 * 10e-6, 16),  # CartPole
        (4, 4 * 80e-6, 4),  # HalfCheetah
        (4, 4 * 400e-6, 2),
        (4, 4 * 700e-6, 1),
        (8, 8 * 10e-3, 1),
        (8, 8 * 100e-6, 8),
        (64, 64 * 100e-6, 10),
        (3, 3 * 500e-6, 3),  # three workers in the place of two make little difference
        (1, 1.0, 1),
    ],
)
def test_a_worker_has_a_millisecond_of_work_and_more(largest, seconds, size):
    assert size_that_pays(largest, seconds) == size


def test_computing_is_less_of_a_reason_than_waiting():
    assert size_that_pays(4, 0.0, 2e-3) == 4
    assert size_that_pays(4, 0.0, 20e-3) == 2
    assert size_that_pays(4, 0.0, 40e-3) == 1
    assert size_that_pays(4, 4e-3, 2e-3) == 1


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel keeps no account")
def test_how_long_a_process_has_computed():
    before, own, until = core_seconds(os.getpid()), own_core_seconds(), time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    assert own_core_seconds() - own >= 0.05
    time.sleep(0.001)
    assert core_seconds(os.getpid())[0] - before[0] >= 0.05
    assert core_seconds(None).tolist() == [0.0, 0.0]


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel keeps no account")
def test_those_that_compute_stay_on_the_cores_there_are():
    assert undisturbed([BusySpaceEnv] * 4) == [2, 2]


@pytest.mark.parametrize("mode", MODES)
def test_the_change_is_not_seen(mode):
    """Through ends of episodes before, at and after it, where they need no reset of the caller's."""
    env_fn = partial(slow, horizon=10 if mode == "Disabled" else 3)
    with beside_gymnasium(SubprocessVectorEnv, [env_fn] * 6, autoreset_mode=mode) as (ours, theirs):
        before = {one.pid for one in ours.statistics()}
        assert ours.envs_per_worker == [3, 3]
        assert run_side_by_side(ours, theirs, STEPS + 8) >= 6
        assert ours.envs_per_worker == [1] * 6
        after = {one.pid for one in ours.statistics()}
        assert len(after) == 6
        assert not before & after
        assert [one.losses for one in ours.statistics()] == [0] * 6


@pytest.mark.parametrize("kind", ["dict", "graph"])
@pytest.mark.parametrize("how", [{}, {"copy": False}, {"shared_memory": False}])
def test_whatever_the_space(kind, how):
    env_fns = [partial(SlowSpaceEnv, observation_space=example_spaces()[kind])] * 4
    with beside_gymnasium(SubprocessVectorEnv, env_fns, {**how}) as pair:
        run_side_by_side(*pair, STEPS + 4)
        assert pair[0].envs_per_worker == [1] * 4


def test_what_was_left_to_chance_is_the_same_there():
    """And nothing of the caller's is replaced: not the seeded action space, not what was given out as views."""
    with beside_gymnasium(SubprocessVectorEnv, [slow] * 4, own={"copy": False}) as (ours, theirs):
        actions = [np.full(4, step % 4) for step in range(STEPS + 2)]
        space, (first, _) = ours.action_space, ours.reset()
        seen = [copy.deepcopy((first, {})), *(copy.deepcopy(ours.step(one)) for one in actions)]
        assert ours.envs_per_worker == [1] * 4
        expected = [theirs.reset(seed=ours.np_random_seed), *map(theirs.step, actions)]
        expect_same([one[0] for one in seen], [one[0] for one in expected])
        assert ours.action_space is space
        assert first.shape == (4, 4)


def undisturbed(env_fns: Any, prepare: Any = lambda envs: None) -> list[int]:
    """How the envs are dealt after the first steps, between which ``prepare`` is called."""
    with closing(SubprocessVectorEnv(env_fns)) as envs:
        envs.reset(seed=1)
        for step in range(STEPS + 4):
            if step == 2:
                prepare(envs)
            envs.step(np.zeros(len(env_fns), int))
        return envs.envs_per_worker


def test_what_differs_when_it_is_built_again_stays():
    assert undisturbed([partial(Uneven, since=2)] * 4) == [2, 2]


def test_what_can_be_had_once_only_stays(tmp_path):
    assert undisturbed([partial(OnlyOnce, tmp_path / str(index)) for index in range(4)]) == [2, 2]


@pytest.mark.parametrize("how", [an_exception, its_death])
def test_what_fails_when_it_is_built_again_stays(tmp_path, how):
    assert undisturbed([partial(FailsLater, tmp_path / str(index), how) for index in range(4)]) == [2, 2]


def test_closed_by_another_thread_meanwhile(tmp_path):
    """Nothing is left of the envs that it knew nothing of: the fixture of all tests looks."""
    envs = SubprocessVectorEnv([partial(ClosedBy, tmp_path / str(index)) for index in range(4)])
    envs.reset(seed=1)
    for _ in range(STEPS):
        envs.step(np.zeros(4, int))

    def close_in_the_second_life() -> None:
        while not (tmp_path / "0.again").exists():
            time.sleep(0.001)
        envs.close()

    thread = threading.Thread(target=close_in_the_second_life)
    thread.start()
    with pytest.raises(ClosedError):
        envs.step(np.zeros(4, int))
    thread.join()


def test_interrupted_as_the_others_take_over(monkeypatch):
    """Nothing is left of the first workers: the fixture of all tests looks."""
    with closing(SubprocessVectorEnv([slow] * 4)) as envs:
        envs.reset(seed=1)
        for _ in range(STEPS):
            envs.step(np.zeros(4, int))

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        for group in envs._groups:
            monkeypatch.setattr(type(group), "close", interrupt)
        with pytest.raises(KeyboardInterrupt):
            envs.step(np.zeros(4, int))
        monkeypatch.undo()
        assert envs.envs_per_worker == [1] * 4


def lose_one(envs: SubprocessVectorEnv) -> None:
    os.kill(envs.statistics()[0].pid or 0, signal.SIGKILL)


def refuse(envs: SubprocessVectorEnv) -> None:
    with pytest.raises(ValueError, match="shape"):
        envs.step(np.zeros(3, int))


@pytest.mark.parametrize(
    "prepare",
    [
        lambda envs: envs.get_attr("episode_step"),
        lambda envs: envs.set_attr("step_seconds", 0.004),
        lambda envs: envs.reset(seed=5),
        lambda envs: envs.reset(options={"reset_mask": np.array([True, False, False, False])}),
        lambda envs: (envs.step_async(np.zeros(4, int)), envs.step_wait()),
        refuse,
        lose_one,
    ],
    ids=["get_attr", "set_attr", "reset", "reset_mask", "step_async", "a refusal", "a loss"],
)
def test_after_anything_but_steps_all_stays(prepare):
    assert undisturbed([slow] * 4, prepare) == [2, 2]


class Mine(SubprocessVectorEnv):
    """Takes arguments of its own."""

    def __init__(self, num_envs: int) -> None:
        super().__init__([slow] * num_envs)


def test_a_subclass_with_other_arguments():
    with closing(Mine(4)) as envs:
        envs.reset(seed=1)
        for _ in range(STEPS + 1):
            envs.step(np.zeros(4, int))
        assert envs.envs_per_worker == [1] * 4


def test_where_there_are_not_so_many_descriptors():
    """The step says nothing of it, and goes on with what there is."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(SubprocessVectorEnv([slow] * 12)) as envs:
        envs.reset(seed=1)
        for _ in range(STEPS):
            envs.step(np.zeros(12, int))
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
        try:
            envs.step(np.zeros(12, int))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert envs.envs_per_worker == [6, 6]
    gc.collect()


def test_a_number_that_is_given_is_kept():
    with closing(SubprocessVectorEnv([slow] * 4, envs_per_worker=2)) as envs:
        envs.reset(seed=1)
        for _ in range(STEPS + 2):
            envs.step(np.zeros(4, int))
        assert envs.envs_per_worker == [2, 2]


def test_parts_keep_what_they_have():
    with closing(SubprocessVectorEnv([slow] * 4)) as envs:
        one, other = envs.split()
        for part in (one, other):
            part.reset(seed=1)
            for _ in range(STEPS + 2):
                part.step(np.zeros(2, int))
        assert envs.envs_per_worker == [2, 2]


def test_those_that_are_killed_afterwards_come_back():
    with beside_gymnasium(SubprocessVectorEnv, [slow] * 4) as (ours, theirs):
        expect_same(ours.reset(seed=4), theirs.reset(seed=4))
        for step in range(STEPS + 12):
            if step > STEPS:
                os.kill(ours.statistics()[step % 4].pid, signal.SIGKILL)
            actions = np.full(4, step % 4)
            expect_same(ours.step(actions), theirs.step(actions), step)
        assert sum(one.exact_recoveries for one in ours.statistics()) >= 8
