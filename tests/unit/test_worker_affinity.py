"""A worker binds itself while its steps are short, and lets go when somebody else wants the core."""

from __future__ import annotations

import os
from typing import Any

import pytest

from multienv._engine.wire.segment import BOUND, CORE, SPINNERS, Segment
from multienv._engine.worker import affinity
from multienv._engine.worker.affinity import CROWDED, ENOUGH, LONG, REST, SHORT, Affinity

BRIEF, SLOW = SHORT / 2, LONG * 2


class Kernel:
    """Stands for the kernel: what was asked of it, the time, and the seconds this process had to wait for a core."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        self.cores, self.policy, self.now, self.waited = {0, 1}, os.SCHED_OTHER, 100.0, 0.0
        monkeypatch.setattr(affinity.os, "sched_getaffinity", lambda pid: self.cores)
        monkeypatch.setattr(affinity.os, "sched_setaffinity", lambda pid, cores: setattr(self, "cores", set(cores)))
        monkeypatch.setattr(affinity.os, "sched_getscheduler", lambda pid: self.policy)
        monkeypatch.setattr(affinity.os, "sched_setscheduler", lambda pid, policy, _: setattr(self, "policy", policy))
        monkeypatch.setattr(affinity.os, "pread", lambda *_: b"7 %d 3\n" % int(self.waited * 1e9))
        monkeypatch.setattr(affinity.time, "monotonic", lambda: self.now)
        self.words = Segment(-1).words
        self.words[CORE], self.words[SPINNERS] = 1 + 1, 1
        self.affinity = Affinity(self.words, tmp_path)

    def samples(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.affinity.consider(seconds, 64)

    @property
    def bound(self) -> bool:
        assert (self.cores == {1}) == (self.policy == os.SCHED_BATCH) == (self.words[BOUND] == 1 + 1)
        return self.cores == {1}


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    kernel = Kernel(monkeypatch, tmp_path)
    yield kernel
    kernel.affinity.end()


def test_several_short_steps_in_a_row_bind(kernel):
    kernel.samples(ENOUGH - 1, BRIEF)
    kernel.samples(1, 2 * SHORT)
    kernel.samples(ENOUGH - 1, BRIEF)
    assert not kernel.bound
    kernel.samples(1, BRIEF)
    assert kernel.bound


def test_nothing_is_bound_unless_the_trainer_names_a_core_that_there_is(kernel):
    for core in (0, 9 + 1):
        kernel.words[CORE] = core
        kernel.samples(100, BRIEF)
        assert kernel.cores == {0, 1}


@pytest.mark.parametrize("why", ["long steps", "waits for the core", "the trainer's word"])
def test_the_core_is_let_go_and_not_bound_again_for_a_while(kernel, why):
    kernel.samples(ENOUGH, BRIEF)
    if why == "waits for the core":
        kernel.waited += 64 * (1.1 * CROWDED + 2 * BRIEF)
    if why == "the trainer's word":
        kernel.words[CORE] = 0
    kernel.samples(1, SLOW if why == "long steps" else BRIEF)
    assert not kernel.bound
    assert kernel.affinity.is_crowded == (why == "waits for the core")
    kernel.words[CORE] = 2
    kernel.now += 0.99 * REST
    kernel.samples(100, BRIEF)
    assert not kernel.bound
    kernel.now += 0.02 * REST
    kernel.samples(1, BRIEF)
    assert kernel.bound
    assert not kernel.affinity.is_crowded


def test_the_end_undoes_what_was_done_and_nothing_is_bound_afterwards(kernel):
    kernel.samples(ENOUGH, BRIEF)
    kernel.affinity.end()
    kernel.samples(100, BRIEF)
    assert not kernel.bound


def test_cores_given_after_the_launch_are_those_that_a_worker_is_bound_within(kernel):
    kernel.cores = {1, 2}  # the trainer's, which come with the request to build the envs
    kernel.affinity.start()
    kernel.samples(ENOUGH, BRIEF)
    assert kernel.bound
    kernel.affinity.end()
    assert kernel.cores == {1, 2}
