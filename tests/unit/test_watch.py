"""Who has answered is seen in the words; a worker on the trainer's own core gets its turn before the trainer looks."""

from __future__ import annotations

import math
import os
import time
from types import SimpleNamespace

import pytest

from multienv._engine.processes import watch
from multienv._engine.processes.watch import Watch
from multienv._engine.threads import Bell
from multienv._engine.wire.segment import BOUND, REPLY, TRAINER_SLEEPS, Segment


class Worker:
    """Stands for the channel to a process."""

    answers_asleep = False

    def __init__(self, core: int) -> None:
        self.segment, self.pipe = Segment(-1), os.pipe()
        self.segment.words[BOUND] = 1 + core

    def descriptors(self) -> tuple[int, ...]:
        return (self.pipe[0],)

    def attend(self) -> bool:
        if self.answers_asleep and self.segment.words[TRAINER_SLEEPS]:
            self.segment.words[REPLY] = 7
        return False


@pytest.fixture
def trainer(monkeypatch):
    """Watch two workers, on the trainer's core and on another one, of which the first answers request 7 in its turn."""
    workers = [Worker(3), Worker(4)]
    turns: list[int] = []

    def give_way() -> None:
        turns.append(1)
        workers[0].segment.words[REPLY] = 7

    monkeypatch.setattr(watch, "current_core", lambda: 3)
    monkeypatch.setattr(watch, "give_way", give_way)
    here = SimpleNamespace(bell=Bell(), workers=workers, turns=turns)
    here.watch = Watch(here.bell)
    here.watch.add((member, worker, 7) for member, worker in enumerate(workers))
    yield here
    del here.watch, here.bell
    for worker in workers:
        for end in worker.pipe:
            os.close(end)


def test_worker_on_the_trainers_core_gets_its_turn_before_the_trainer_looks(trainer):
    assert trainer.watch.wait_for_answers(-math.inf, looks_for_ends=False) == ([0], [])
    assert trainer.turns == [1]
    assert not trainer.watch.has_waited
    assert trainer.watch.wait_for_answers(-math.inf, looks_for_ends=False) == (
        [],
        [],
    )  # the other one is on another core
    assert trainer.turns == [1]
    trainer.workers[1].segment.words[REPLY] = 7
    assert trainer.watch.wait_for_answers(-math.inf, looks_for_ends=False) == ([1], [])


@pytest.mark.parametrize("core", [-1, 5])
def test_core_is_not_given_away_where_no_worker_waits_for_it(trainer, monkeypatch, core):
    trainer.workers[0].segment.words[BOUND] = 0
    monkeypatch.setattr(watch, "current_core", lambda: core)
    assert trainer.watch.wait_for_answers(-math.inf, looks_for_ends=False) == ([], [])
    assert trainer.turns == []


def test_only_workers_that_were_asked_before_the_trainer_slept_send_wake_bytes(trainer, monkeypatch):
    words = [worker.segment.words for worker in trainer.workers]
    words[0][BOUND] = 0
    monkeypatch.setattr(watch, "SPINS", 0)
    os.write(trainer.workers[0].pipe[1], b"s")
    trainer.workers[0].answers_asleep = True
    assert trainer.watch.wait_for_answers(math.inf, looks_for_ends=False) == ([0], [])
    trainer.watch.add([(0, trainer.workers[0], 8)])
    assert [one[TRAINER_SLEEPS] for one in words] == [0, 1]


@pytest.mark.parametrize("moment", ["before the first look", "after it"])
def test_bell_that_is_rung_before_the_trainer_sleeps_ends_the_wait(trainer, monkeypatch, moment):
    trainer.workers[0].segment.words[BOUND] = 0
    monkeypatch.setattr(watch, "give_way", lambda: trainer.bell.ring())
    if moment == "before the first look":
        trainer.bell.ring()
    until = time.monotonic() + 60
    assert trainer.watch.wait_for_answers(until, looks_for_ends=False) == ([], [])
    assert time.monotonic() < until
