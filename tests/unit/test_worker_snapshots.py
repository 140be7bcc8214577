"""When a worker takes a snapshot; the rest is in tests/faults/test_snapshots.py, with real ones."""

from __future__ import annotations

import pytest

from multienv.wire.segment import OBSTACLE, Segment
from multienv.worker.snapshots import OBSTACLES, Snapshots

STEP_SECONDS = 1e-4  # the interval of 50 ms is 500 of these


def taken(numbers: range, every: int = 0, begun: int = 0, obstacle: int = 0, at_once: bool = False) -> list[int]:
    """The numbers of the steps after which one is taken, or tried."""
    found: list[int] = []
    segment = Segment(-1)
    snapshots = Snapshots(segment, None)  # type: ignore[arg-type]

    def take(number: int, token: int) -> int:
        found.append(number)
        snapshots._number = number
        snapshots._interval = 0.05
        return obstacle

    snapshots._take = take  # type: ignore[method-assign]
    snapshots.begin(every, at_once=at_once)
    snapshots._number = begun
    for number in numbers:
        snapshots.consider(number, STEP_SECONDS)
    assert OBSTACLES[segment.words[OBSTACLE]] == OBSTACLES[obstacle]
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"numbers": range(3000)}, [512, 1024, 1536, 2048, 2560]),
        ({"numbers": range(300, 3000), "begun": 299}, [1024, 1536, 2048, 2560]),
        ({"numbers": range(1, 5000, 2)}, [2001, 4001]),
        ({"numbers": range(100), "every": 30}, [30, 60, 90]),
        ({"numbers": range(100), "every": -1}, []),
        ({"numbers": range(1, 600), "at_once": True}, [1, 512]),
    ],
    ids=["round numbers", "begun later", "no round numbers", "as told", "never", "a replacement at once"],
)
def test_snapshots_are_taken_when_it_is_time(options, expected):
    assert taken(**options)[: len(expected) or None] == expected


def test_where_something_is_in_the_way_it_is_tried_again_after_four_times_as_long():
    without, with_one = taken(range(20_000)), taken(range(20_000), obstacle=1)
    assert 2 <= len(with_one) <= len(without) / 3
