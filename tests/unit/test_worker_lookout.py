"""A worker looks out for its next request only where that pays, and no longer than it takes to find out."""

from __future__ import annotations

import os

from multienv.wire.memory import LOOKS, WORDS
from multienv.worker.lookout import COST, PATIENCE, Lookout


class Trainer:
    """Comes back after so many seconds, by a clock that each look moves on."""

    LOOK = 1e-6

    def __init__(self, looks: bool = True, able: bool = True) -> None:
        self.now, self.comes_at = 0.0, 0.0
        self.looks = self.gave_way = 0
        words = [0] * WORDS
        words[LOOKS] = looks
        give_way = self.give_way if able else None
        self.lookout = Lookout(self.ready, give_way, words, lambda: self.now)

    def ready(self, timeout: int) -> bool:
        assert timeout == 0
        self.looks += 1
        self.now += self.LOOK
        return self.now >= self.comes_at

    def give_way(self) -> None:
        self.gave_way += 1

    def look(self, away: float) -> bool:
        self.comes_at = self.now + away
        return self.lookout.look()


def test_a_trainer_that_is_back_soon_is_looked_for():
    trainer = Trainer()
    look = trainer.lookout.after(PATIENCE / 2)
    assert look is not None
    trainer.comes_at = PATIENCE / 2
    assert look()
    assert trainer.now < PATIENCE
    assert trainer.gave_way == trainer.looks - 1  # others may have the core at each look


def test_one_that_stays_away_is_not():
    assert Trainer().lookout.after(2 * PATIENCE) is None


def test_a_worker_that_is_not_told_to_does_not_look():
    assert Trainer(looks=False).lookout.after(0.0) is None


def test_nor_where_the_core_cannot_be_given_away():
    assert Trainer(able=False).lookout.after(0.0) is None


def test_in_vain_it_looks_no_longer_than_its_patience():
    trainer = Trainer()
    trainer.lookout.after(0.0)
    trainer.look(1.0)
    assert trainer.now < PATIENCE + 3 * trainer.LOOK


def test_once_in_vain_at_first_is_enough():
    trainer = Trainer()
    trainer.lookout.after(0.0)
    assert not trainer.look(1.0)


def test_a_pause_now_and_then_is_forgiven():
    """An update of the policy after every sixteen steps."""
    trainer = Trainer()
    trainer.lookout.after(0.0)
    for _ in range(10):
        assert all(trainer.look(PATIENCE / 2) for _ in range(16))
        assert trainer.look(1.0)


def test_in_vain_more_often_than_it_pays_it_stops():
    trainer = Trainer()
    trainer.lookout.after(0.0)
    goes_on = [trainer.look(1.0 if turn % 2 else 0.0) for turn in range(100)]
    assert goes_on.index(False) <= 2 * COST


def test_on_a_pipe():
    requests, ours = os.pipe()
    words = [0] * WORDS
    words[LOOKS] = 1
    lookout = Lookout.over(requests, words)
    look = lookout.after(0.0)
    assert look is not None
    os.write(ours, b"a request")
    assert look()
    assert os.read(requests, 100) == b"a request"
    lookout.after(0.0)
    assert not look()
    os.close(ours)
    lookout.after(0.0)
    assert look()  # the end is something to read
    os.close(requests)
