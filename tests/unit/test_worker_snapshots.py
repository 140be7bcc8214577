"""When a worker takes a snapshot; the rest is in tests/faults/test_snapshots.py, with real ones."""

from __future__ import annotations

import pytest

from multienv.wire.memory import WORDS
from multienv.worker.ends import Ends
from multienv.worker.snapshots import Snapshots

ENDS = Ends(requests=-1, replies=-1, memory=-1, stack=-1, announcements=99)
STEP_SECONDS = 1e-4  # the interval of 50 ms is 500 of these


def taken(monkeypatch: pytest.MonkeyPatch, numbers: range, every: int = 0, begun: int = 0) -> list[int]:
    """The numbers of the steps after which one is taken."""
    found: list[int] = []
    snapshots = Snapshots([0] * WORDS, ENDS)

    def take(seq: int, token: int) -> int:
        found.append(seq)
        snapshots._seq = seq
        return 0

    monkeypatch.setattr(snapshots, "_take", take)
    monkeypatch.setattr(snapshots, "_possible", lambda: True)
    snapshots.begin(every)
    snapshots._seq = begun
    for seq in numbers:
        snapshots.consider(seq, STEP_SECONDS)
    return found


def test_workers_that_are_stepped_together_fork_together(monkeypatch):
    """Whenever they have begun."""
    assert taken(monkeypatch, range(3000)) == [512, 1024, 1536, 2048, 2560]
    assert taken(monkeypatch, range(300, 3000), begun=299) == [1024, 1536, 2048, 2560]


def test_where_calls_have_the_round_numbers_it_is_not_put_off_for_long(monkeypatch):
    assert taken(monkeypatch, range(1, 9000, 2))[:2] == [2001, 4001]


def test_as_often_as_it_is_told(monkeypatch):
    assert taken(monkeypatch, range(100), every=30) == [30, 60, 90]
    assert taken(monkeypatch, range(100), every=-1) == []
