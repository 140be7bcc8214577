"""Who has answered is seen in the words; a worker on the trainer's own core gets its turn before the trainer looks."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest

from multienv.processes import watch
from multienv.processes.watch import Watch
from multienv.threads import Bell
from multienv.wire.segment import BOUND, REPLY, TRAINER_SLEEPS, Segment


class Worker:
    """Stands for the channel to a process that answers as soon as it is given the core; it sends no wake bytes."""

    def __init__(self, core: int) -> None:
        self.segment, self.pipe = Segment(-1), os.pipe()
        self.segment.words[BOUND] = 1 + core

    def descriptors(self) -> tuple[int, ...]:
        return (self.pipe[0],)

    def attend(self) -> bool:
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
    found: Any = Watch(Bell())
    assert found.add((member, worker, 7) for member, worker in enumerate(workers)) == []
    yield found, workers, turns
    for worker in workers:
        for end in worker.pipe:
            os.close(end)


def test_worker_on_the_trainers_core_gets_its_turn_before_the_trainer_looks(trainer):
    found, workers, turns = trainer
    assert found.heard(-math.inf, looks_for_ends=False) == ([0], [])
    assert turns == [1]
    assert not found.has_waited
    assert found.heard(-math.inf, looks_for_ends=False) == ([], [])  # the other one is on another core
    assert turns == [1]
    workers[1].segment.words[REPLY] = 7
    assert found.heard(-math.inf, looks_for_ends=False) == ([1], [])


@pytest.mark.parametrize("core", [-1, 5])
def test_core_is_not_given_away_where_no_worker_waits_for_it(trainer, monkeypatch, core):
    found, workers, turns = trainer
    workers[0].segment.words[BOUND] = 0
    monkeypatch.setattr(watch, "current_core", lambda: core)
    assert found.heard(-math.inf, looks_for_ends=False) == ([], [])
    assert turns == []


def test_only_workers_that_were_asked_before_the_trainer_slept_send_wake_bytes(trainer, monkeypatch):
    found, workers, _ = trainer
    sleeping = [worker.segment.words for worker in workers]
    sleeping[0][BOUND] = 0
    monkeypatch.setattr(watch, "SPINS", 0)

    def answer(self: Any, seconds: float) -> list[int]:
        if not seconds:  # a look
            return []
        assert [words[TRAINER_SLEEPS] for words in sleeping] == [1, 1]
        sleeping[0][REPLY] = 7
        return [workers[0].pipe[0]]

    monkeypatch.setattr(Watch, "_poll", answer)
    assert found.heard(math.inf, looks_for_ends=False) == ([0], [])
    found.add([(0, workers[0], 8)])
    assert [words[TRAINER_SLEEPS] for words in sleeping] == [0, 1]
