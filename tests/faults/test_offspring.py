"""An env forks, and its child comes back out of the env's method: nobody takes it for the worker."""

from __future__ import annotations

import os
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_process import becomes_true

from kit import CounterEnv, descendants, is_alive
from multienv import RestartPolicy, SubprocessEnv, SubprocessVectorEnv

METHODS = ["forkserver", pytest.param("spawn", marks=pytest.mark.soak)]
WAYS = ["return", "raise", "exit", "fork again"]


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Forking(CounterEnv):
    """Forks in each step and in each call of `fork`, and may wait for the end of the child."""

    def __init__(self, way: str, *, waits: bool = False) -> None:
        super().__init__(horizon=7)
        self.way = way
        self.waits = waits

    def step(self, action: Any) -> Any:
        result = super().step(action)
        return self.fork(result)

    def fork(self, result: Any) -> Any:
        pid = os.fork()
        if pid == 0:
            if self.way == "raise":
                raise ValueError("in the child")
            if self.way == "exit":
                raise SystemExit(3)
            if self.way == "fork again":
                os.fork()
            return np.zeros(4, np.float32), -1.0, False, False, {"child": True}
        if self.waits:
            os.waitpid(pid, 0)
        return result


def alone() -> CounterEnv:
    env = CounterEnv(horizon=7)
    env.reset(seed=0)
    return env


def no_child_is_left(*pids: int | None) -> bool:
    """Those that it does not wait for are zombies until it ends."""
    return not any(is_alive(child) for pid in pids for child in descendants(pid or 0))


@pytest.mark.parametrize("way", WAYS)
def test_a_child_that_comes_back_answers_nothing(method: str, way: str) -> None:
    plain = alone()
    with SubprocessEnv(partial(Forking, way), context=method) as env:
        env.reset(seed=0)
        for _ in range(6):
            mine, theirs = env.step(1), plain.step(1)
            assert mine[0].tolist() == theirs[0].tolist()
            assert mine[1:] == theirs[1:]
            assert env.call("fork", 5) == 5
        assert env.statistics().losses == 0
        assert becomes_true(lambda: no_child_is_left(env.statistics().pid))


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_child_that_comes_back_writes_over_no_other_env(method: str, way: str, copy: bool) -> None:
    fns = [partial(CounterEnv, horizon=7), partial(Forking, way), partial(CounterEnv, horizon=7)]
    plain = [alone() for _ in fns]
    with closing(SubprocessVectorEnv(fns, envs_per_worker=3, context=method, copy=copy)) as envs:
        envs.reset(seed=[0, 0, 0])
        for _ in range(6):
            mine = envs.step(np.ones(3, int))
            theirs = [env.step(1) for env in plain]
            assert mine[0].tolist() == [one[0].tolist() for one in theirs]
            assert mine[1].tolist() == [one[1] for one in theirs]
            assert mine[3].tolist() == [one[3] for one in theirs]
            assert "child" not in mine[4]
        assert sum(one.losses for one in envs.statistics()) == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_forks_is_brought_back(way: str) -> None:
    """Its snapshots are children of it too, and have everything."""
    plain = alone()
    with SubprocessEnv(partial(Forking, way, waits=True), restart=RestartPolicy(snapshot_every=2)) as env:
        env.reset(seed=0)
        for number in range(6):
            if number == 4:
                os.kill(env.statistics().pid or 0, 9)
            mine, theirs = env.step(1), plain.step(1)
            assert mine[0].tolist() == theirs[0].tolist()
            assert mine[1:] == theirs[1:]
        assert env.statistics().last_recovery.rung == "snapshot"  # type: ignore[union-attr]


class Counting(Forking):
    """Counts its steps where all can see it."""

    def __init__(self, way: str, path: str) -> None:
        super().__init__(way, waits=True)
        self.path = path

    def step(self, action: Any) -> Any:
        with open(self.path, "a") as file:  # noqa: PTH123
            file.write(".")
        return super().step(action)

    def close(self) -> None:
        with open(self.path, "a") as file:  # noqa: PTH123
            file.write("closed")


@pytest.mark.parametrize("way", WAYS)
def test_a_child_that_comes_back_steps_no_env_in_the_worker_s_place(way: str, tmp_path: Path) -> None:
    """Neither those beside it, nor what is left of a replay; and it closes none."""
    counts = tmp_path / "counts"
    envs = SubprocessVectorEnv(
        [partial(Counting, way, str(counts))] * 4, envs_per_worker=4, restart=RestartPolicy(snapshots=False)
    )
    with closing(envs):
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(np.ones(4, int))
        os.kill(envs.statistics()[0].pid or 0, 9)
        envs.step(np.ones(4, int))
        assert counts.read_text() == "." * 4 * (3 + 3 + 1)
    assert counts.read_text() == "." * 4 * (3 + 3 + 1) + "closed" * 4


class Greedy(Forking):
    """Leaves no descriptor to its child."""

    def fork(self, result: Any) -> Any:
        held = []
        try:
            while True:
                held.append(os.dup(0))
        except OSError:
            return super().fork(result)
        finally:
            for descriptor in held:
                with suppress(OSError):
                    os.close(descriptor)


def test_a_child_without_a_descriptor_to_open(method: str) -> None:
    plain = alone()
    with SubprocessEnv(partial(Greedy, "return", waits=True), context=method) as env:
        env.reset(seed=0)
        for _ in range(6):
            assert env.step(1)[0].tolist() == plain.step(1)[0].tolist()
        assert env.statistics().losses == 0


class Nesting(CounterEnv):
    """Uses multienv itself."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.inner = SubprocessEnv(CounterEnv, context=method).initialize()

    def reset(self, **options: Any) -> Any:
        self.inner.reset(seed=0)
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        observation, *others = super().step(action)
        return observation + self.inner.step(action)[0], *others

    def close(self) -> None:
        self.inner.close()


def test_an_env_may_have_subprocess_envs_of_its_own(method: str) -> None:
    with SubprocessEnv(partial(Nesting, "forkserver"), context=method) as env:
        env.reset(seed=0)
        assert [env.step(1)[0][0] for _ in range(5)] == [2, 4, 6, 8, 10]
        assert env.statistics().losses == 0
