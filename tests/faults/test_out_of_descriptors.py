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

import pytest

from invariants.faces import Face
from kit import CounterEnv
from multienv import SubprocessVectorEnv

ENDLESS = partial(CounterEnv, horizon=None)
# A kind of face and how many of its envs share a process.
FACES: list[Any] = [("subprocess_env", 1), ("multi_env", 1), ("vector_env", 3)]


@contextlib.contextmanager
def only_free(free: int) -> Iterator[None]:
    """So many descriptors are to be had."""
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


@contextlib.contextmanager
def bereaved(kind: str, together: int) -> Iterator[Face]:
    """Envs that have made a step, and whose processes have died since."""
    options = {"envs_per_worker": together} if kind == "vector_env" else {}
    with Face(kind, [ENDLESS] * 3, **options) as face:
        face.reset(0)
        face.step([1] * 3)
        for pid in face.pids():
            os.kill(pid, signal.SIGKILL)
        yield face
        assert [one.losses for one in face.statistics()] == [1] * len(face.statistics())


def steps_of(rows: list[Any]) -> set[int]:
    return {int(row.observation[0]) for row in rows}


@pytest.mark.parametrize(("kind", "together"), FACES)
def test_a_step_without_descriptors_is_completed_once_there_are_some(kind: str, together: int) -> None:
    with bereaved(kind, together) as face:
        with only_free(0):
            for _ in range(2):
                with pytest.raises(OSError, match="Too many open files"):
                    face.step([2] * 3)
        resumed = face.step([0] * 3)  # whatever its action: the one before is completed
        assert steps_of(resumed) == {2}
        assert all(row.info["multienv"] == {"resumed": True} for row in resumed)
        assert steps_of(face.step([3] * 3)) == {3}


def test_a_constructor_that_runs_out_of_descriptors_keeps_none() -> None:
    """One more is free each time, until there are enough."""
    make = partial(SubprocessVectorEnv, [ENDLESS] * 2, envs_per_worker=1)
    others = make()  # or the monitor ends, and the next one inherits the limit
    for free in range(1, 60):
        before = set(os.listdir("/proc/self/fd"))
        envs = None
        with only_free(free), contextlib.suppress(OSError):
            envs = make()
        if envs is not None:
            envs.close()
        done = envs is not None
        del envs
        gc.collect()
        assert set(os.listdir("/proc/self/fd")) <= before
        if done:
            break
    others.close()
    assert free > 5
