"""When a process has served its time."""

from __future__ import annotations

from typing import Any

import pytest

from multienv import RestartPolicy
from multienv.errors import UsageError
from multienv.recovery.recycling import Recycling


def no_size() -> None:
    raise AssertionError("nobody wants to know")


def recycling(now: list[float] | None = None, **limits: Any) -> Recycling:
    return Recycling(RestartPolicy(**limits), lambda: now[0] if now else 0.0)


def test_nothing_is_wanted_unless_asked_for() -> None:
    assert not recycling().wanted
    assert recycling(recycle_after=1.5).wanted
    assert recycling(max_rss=1).wanted


def test_by_steps() -> None:
    one = recycling(recycle_after_steps=10)
    assert one.due(9, 5, no_size) == ""
    assert one.due(12, 5, no_size) == "after 12 steps"
    one.begin(12, 5)
    assert one.due(21, 9, no_size) == ""
    assert one.due(22, 9, no_size)


def test_by_episodes() -> None:
    one = recycling(recycle_after_episodes=2)
    assert [bool(one.due(100, episodes, no_size)) for episodes in range(4)] == [False, False, True, True]


def test_by_age() -> None:
    now = [100.0]
    one = recycling(now, recycle_after=5)
    now[0] = 104.9
    assert one.due(0, 0, no_size) == ""
    now[0] = 105.0
    assert one.due(0, 0, no_size) == "after 5 s"
    one.begin(0, 0)
    assert one.due(0, 0, no_size) == ""


def test_by_size() -> None:
    one = recycling(max_rss=100 * 2**20)
    sizes = [None, 90, 99, 101]
    assert [one.due(0, 0, lambda s=s: s and s * 2**20) for s in sizes] == ["", "", "", "at 101 MiB"]


def test_one_that_is_too_large_when_it_is_new_must_grow_first() -> None:
    one = recycling(max_rss=1)
    assert [one.due(0, 0, lambda s=s: s * 2**20) for s in (100, 105, 111)] == ["", "", "at 111 MiB"]


@pytest.mark.parametrize("name", ["recycle_after_steps", "recycle_after_episodes", "recycle_after", "max_rss"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), "many", True])
def test_bad_limits_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        RestartPolicy(**{name: value})
