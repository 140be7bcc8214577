"""In which turn workers are asked, and which core they prefer."""

from __future__ import annotations

import os

import pytest

from multienv import turns
from multienv.cores import cores
from multienv.turns import Turns, spread


class Worker:
    core: int | None = None
    looks = False

    def prefer(self, core: int | None, *, looks: bool) -> None:
        self.core, self.looks = core, looks


def dealt(
    monkeypatch: pytest.MonkeyPatch, workers: int, available: list[int], busy: int = 0
) -> list[tuple[int | None, bool]]:
    monkeypatch.setattr(turns, "cores", lambda: available)
    monkeypatch.setattr(turns, "busy_cores", lambda: busy or len(available))
    made = [Worker() for _ in range(workers)]
    spread(made)
    return [(one.core, one.looks) for one in made]


def test_workers_are_dealt_to_the_cores_and_one_looks_out_on_each(monkeypatch):
    assert dealt(monkeypatch, 5, [2, 3]) == [(2, False), (3, False), (2, False), (3, True), (2, True)]
    assert dealt(monkeypatch, 2, [2, 3]) == [(2, True), (3, True)]


def test_fewer_than_cores_run_anywhere_and_all_look_out(monkeypatch):
    assert dealt(monkeypatch, 2, [0, 1, 2]) == [(None, True)] * 2


def test_on_one_core_there_is_no_choice_and_nobody_looks_out(monkeypatch):
    assert dealt(monkeypatch, 1, [0]) == [(None, False)]
    assert dealt(monkeypatch, 2, [0]) == [(None, False)] * 2


def test_where_time_is_rationed_nobody_is_bound_or_looks_out(monkeypatch):
    assert dealt(monkeypatch, 4, [0, 1, 2, 3], busy=2) == [(None, False)] * 4
    assert dealt(monkeypatch, 2, [0, 1, 2, 3], busy=2) == [(None, False)] * 2


def test_none_at_all():
    spread([])
    assert Turns([]).now() == ()


def test_those_on_other_cores_are_asked_first(monkeypatch):
    order = Turns([0, 1, 0, 1])
    for here, expected in ((0, (1, 3, 0, 2)), (1, (0, 2, 1, 3)), (7, (0, 1, 2, 3)), (-1, (0, 1, 2, 3))):
        monkeypatch.setattr(turns, "_here", lambda here=here: here)
        assert order.now() == expected


def test_without_preferences_they_are_asked_as_they_come():
    assert Turns([None] * 3).now() == (0, 1, 2)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not say")
def test_where_this_thread_runs():
    before = os.sched_getaffinity(0)
    try:
        for core in cores():
            os.sched_setaffinity(0, {core})
            assert turns._here() == core
    finally:
        os.sched_setaffinity(0, before)
