"""A recovery that fails for want of something of the trainer's own is no env's failure: the call can be made again."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from kit import CounterEnv, Fault, FaultyEnv
from multienv import MultiEnv, SubprocessEnv, SubprocessVectorEnv, create_subprocess_envs
from multienv.events import Event, Loss, Recovery

ENDLESS = partial(CounterEnv, horizon=None)


class One:
    """A single env, stepped as the others are."""

    size = 1

    def __init__(self) -> None:
        self.env: Any = SubprocessEnv(ENDLESS).initialize()
        self.close, self.reset, self.get_attr = self.env.close, self.env.reset, self.env.get_attr

    def step(self, action: int) -> Any:
        return self.env.step(action)

    def workers(self) -> list[Any]:
        return [self.env.statistics()]


class Several(One):
    """A MultiEnv."""

    size = 3

    def __init__(self) -> None:
        self.env = MultiEnv(create_subprocess_envs([ENDLESS] * 3))
        self.close, self.reset, self.get_attr = self.env.close, self.env.reset, self.env.get_attr

    def step(self, action: int) -> Any:
        return self.env.step([action] * 3)

    def workers(self) -> list[Any]:
        return self.env.statistics()  # type: ignore[no-any-return]


class Batch(Several):
    """A vector env of three processes."""

    def __init__(self, each: int = 1) -> None:
        self.env = SubprocessVectorEnv([ENDLESS] * 3, envs_per_worker=each)
        self.close, self.reset, self.get_attr = self.env.close, self.env.reset, self.env.get_attr


class Shared(Batch):
    """A vector env of one process."""

    def __init__(self) -> None:
        super().__init__(3)


faces = pytest.mark.parametrize("face", [One, Several, Batch, Shared])


@contextlib.contextmanager
def starved() -> Iterator[None]:
    """No descriptor is to be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
    filling = []
    try:
        with contextlib.suppress(OSError):
            while True:
                filling.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in filling:
            os.close(descriptor)


def counts(outcome: Any) -> list[int]:
    """The steps of their episodes that the envs show."""
    return np.atleast_2d(outcome[0])[:, 0].astype(int).tolist()  # type: ignore[no-any-return]


@contextlib.contextmanager
def bereaved(face: Any) -> Iterator[Any]:
    """Envs that have made a step, and whose processes have died since."""
    envs = face()
    with contextlib.closing(envs):
        envs.reset()
        envs.step(1)
        for worker in envs.workers():
            os.kill(worker.pid, signal.SIGKILL)
        yield envs


@faces
@pytest.mark.parametrize("tries", [1, 2])
def test_a_step_without_descriptors_is_completed_once_there_are_some(face, tries):
    with bereaved(face) as envs:
        with starved():
            for _ in range(tries):
                with pytest.raises(OSError, match="Too many open files"):
                    envs.step(2)
        resumed = envs.step(0)  # whatever its action: the one before is completed
        assert counts(resumed) == [2] * envs.size
        assert "resumed" in str(resumed[4])
        assert counts(envs.step(3)) == [3] * envs.size


@pytest.mark.parametrize("several", [False, True])
def test_a_resumed_step_that_is_truncated_says_why(several):
    deadly = partial(FaultyEnv, fault=Fault("exit", "step", at=2), horizon=None)
    envs: Any = MultiEnv(create_subprocess_envs([deadly])) if several else SubprocessEnv(deadly).initialize()
    action: Any = [1] if several else 1
    with contextlib.closing(envs):
        envs.reset()
        envs.step(action)
        with starved(), pytest.raises(OSError, match="Too many open files"):
            envs.step(action)
        *_, truncated, info = envs.step(action)
        assert truncated == ([True] if several else True)
        told = (info[0] if several else info)["multienv"]
        assert told["resumed"] is True
        assert "ended 2 processes" in told["reason"]


@faces
@pytest.mark.parametrize("command", ["reset", "get_attr"])
def test_a_reset_or_call_without_descriptors_can_be_made_again_and_the_envs_go_on(face, command):
    with bereaved(face) as envs:
        with starved(), pytest.raises(OSError, match="Too many open files"):
            envs.reset() if command == "reset" else envs.get_attr("horizon")
        if command == "get_attr":  # made again, as the error of any other call says
            assert "None" in str(envs.get_attr("horizon"))
        assert counts(envs.step(0)) == [1 if command == "reset" else 2] * envs.size
        assert counts(envs.reset()) == [0] * envs.size
        assert counts(envs.step(3)) == [1] * envs.size


@pytest.mark.parametrize("tries", [1, 3])
def test_a_death_is_counted_once_however_often_its_recovery_is_broken_off(tries, marker):
    """It takes two to be poison."""
    seen: list[Event] = []
    fns: list[Any] = [
        ENDLESS,
        partial(FaultyEnv, fault=Fault("kill", "step", at=2, once=marker), horizon=None),
        ENDLESS,
    ]
    envs = SubprocessVectorEnv(fns, envs_per_worker=3, hooks=[seen.append])
    with contextlib.closing(envs):
        envs.reset(seed=1)
        envs.step(np.zeros(3, int))
        with starved():
            for _ in range(tries):
                with pytest.raises(OSError, match="Too many open files"):
                    envs.step(np.zeros(3, int))
        batch = envs.step(np.zeros(3, int))
        assert counts(batch) == [2, 2, 2]
        assert not batch[3].any()
    assert [type(event) for event in seen] == [Loss, Recovery]


def test_a_constructor_that_runs_out_of_descriptors_keeps_none():
    """One more is free each time, until there are enough."""
    SubprocessVectorEnv([ENDLESS] * 2, envs_per_worker=1).close()  # starts what is for all
    for free in range(1, 60):
        before = set(os.listdir("/proc/self/fd"))
        envs = None
        with starved_but(free), contextlib.suppress(OSError):
            envs = SubprocessVectorEnv([ENDLESS] * 2, envs_per_worker=1)
        if envs is not None:
            envs.close()
        done = envs is not None
        del envs
        gc.collect()
        assert set(os.listdir("/proc/self/fd")) <= before
        if done:
            break
    assert free > 5


@contextlib.contextmanager
def starved_but(free: int) -> Iterator[None]:
    """So many are to be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    filling = [os.open(os.devnull, os.O_RDONLY) for number in range(max(used)) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(max(used), *filling, 0) + 1 + free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in filling:
            os.close(descriptor)
