"""A worker binds itself while its steps are short, and lets go when somebody else wants the core."""

from __future__ import annotations

import os

import pytest

from multienv.wire.memory import CORE, STEP_SECONDS
from multienv.worker.affinity import _ENOUGH, _PATIENCE, SAMPLE, Affinity, Scheduler

SHORT, LONG = 10e-6, 5e-3


class Kernel(Scheduler):
    """Lets the test say what the kernel accounts; notes what it is asked for."""

    def __init__(self, permits: bool = True) -> None:
        self.permits, self.seconds_waited = permits, 0.0
        self.asked: list[int | None] = []

    def waited(self) -> float:
        return self.seconds_waited

    def bind(self, core: int) -> bool:
        self.asked.append(core)
        return self.permits

    def free(self) -> None:
        self.asked.append(None)


class Worker:
    """Takes steps of a given length, by a clock of its own."""

    def __init__(self, kernel: Kernel | None, core: int | None = 1) -> None:
        self.now, self.duration = 0.0, SHORT
        self.kernel = kernel
        self.words, self.times = [0] * 8, [0.0] * 8
        self.words[CORE] = 0 if core is None else core + 1
        self.affinity = Affinity(self.words, self.times, kernel, lambda: self.now)

    def handle(self, seq: int, kind: int, frame: bytes) -> bytes:
        self.now += self.duration
        return b"%d %d " % (seq, kind) + frame

    def samples(self, number: int, duration: float, waits: float = 0.0) -> None:
        self.duration = duration
        for _ in range(number):
            if self.kernel is not None:
                self.kernel.seconds_waited += waits * (SAMPLE + 1)
            assert self.affinity.timed(self.handle, 5, 2, b"frame") == b"5 2 frame"


def test_short_steps_bind() -> None:
    worker = Worker(kernel := Kernel())
    worker.samples(_ENOUGH - 1, SHORT)
    assert kernel.asked == []
    worker.samples(100, SHORT)
    assert kernel.asked == [1]


def test_the_time_of_a_step_is_told() -> None:
    worker = Worker(None)
    worker.samples(1, SHORT)
    assert worker.times[STEP_SECONDS] == pytest.approx(SHORT)
    worker.samples(1, LONG)
    assert SHORT < worker.times[STEP_SECONDS] < LONG / 2
    worker.samples(200, LONG)
    assert worker.times[STEP_SECONDS] == pytest.approx(LONG, rel=1e-3)


def test_long_steps_do_not() -> None:
    worker = Worker(kernel := Kernel())
    worker.samples(1000, LONG)
    assert kernel.asked == []


def test_nothing_without_a_preference() -> None:
    worker = Worker(kernel := Kernel(), core=None)
    worker.samples(1000, SHORT)
    assert kernel.asked == []


def test_nothing_without_a_scheduler() -> None:
    Worker(None).samples(100, SHORT)


def test_waiting_for_the_core_frees_and_patience_grows() -> None:
    worker = Worker(kernel := Kernel())
    worker.samples(_ENOUGH, SHORT)
    for rest in (_PATIENCE, 4 * _PATIENCE):
        kernel.asked.clear()
        freed_at = worker.now
        worker.samples(1, SHORT, waits=LONG)
        assert kernel.asked == [None]
        worker.samples(100, SHORT)
        worker.now = freed_at + 0.99 * rest
        worker.samples(100, SHORT)
        assert kernel.asked == [None]
        worker.now = freed_at + 1.01 * rest
        worker.samples(_ENOUGH, SHORT)
        assert kernel.asked == [None, 1]


def test_waiting_a_little_too_long_frees_if_it_lasts() -> None:
    worker = Worker(kernel := Kernel())
    worker.samples(_ENOUGH, SHORT)
    worker.samples(_ENOUGH - 1, SHORT, waits=0.9e-3)
    assert kernel.asked == [1]
    worker.samples(1, SHORT, waits=0.9e-3)
    assert kernel.asked == [1, None]


def test_a_worker_that_has_just_bound_itself_looks_more_often() -> None:
    worker = Worker(kernel := Kernel())
    assert worker.affinity.unseen == SAMPLE
    worker.samples(_ENOUGH, SHORT)
    masks = []
    for _ in range(6):
        masks.append(worker.affinity.unseen)
        worker.samples(1, SHORT)
    assert masks == [3, 7, 15, 31, 63, 63]
    worker.samples(1, SHORT, waits=LONG)
    assert kernel.asked == [1, None]
    assert worker.affinity.unseen == SAMPLE


def test_longer_steps_are_looked_at_more_often() -> None:
    worker = Worker(Kernel())
    worker.samples(100, 150e-6)
    assert worker.affinity.unseen == 3
    worker = Worker(Kernel())
    worker.samples(100, 40e-6)
    assert worker.affinity.unseen == 15


def test_steps_that_become_long_free() -> None:
    worker = Worker(kernel := Kernel())
    worker.samples(_ENOUGH, SHORT)
    worker.samples(_ENOUGH, LONG)
    assert kernel.asked == [1, None]


def test_one_slow_step_does_not() -> None:
    worker = Worker(kernel := Kernel())
    worker.samples(_ENOUGH, SHORT)
    for _ in range(50):
        worker.samples(1, LONG)
        worker.samples(2, SHORT)
    assert kernel.asked == [1]


def test_a_refusal_is_final() -> None:
    worker = Worker(kernel := Kernel(permits=False))
    worker.samples(1000, SHORT)
    assert kernel.asked == [1]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
def test_the_kernel_does_as_asked() -> None:
    cores, policy = os.sched_getaffinity(0), os.sched_getscheduler(0)
    scheduler = Scheduler.of_this_process()
    assert scheduler is not None
    assert scheduler.waited() >= 0
    assert not scheduler.bind(max(cores) + 1)  # not ours to run on
    core = min(cores)
    try:
        assert scheduler.bind(core)
        assert (os.sched_getaffinity(0), os.sched_getscheduler(0)) == ({core}, os.SCHED_BATCH)
        assert not scheduler.bind(core)  # somebody has made arrangements
    finally:
        scheduler.free()
        os.close(scheduler._account)  # a worker keeps it to its end
    assert (os.sched_getaffinity(0), os.sched_getscheduler(0)) == (cores, policy)
