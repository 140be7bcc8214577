"""When a worker is restarted, replaced by plan and asked for its state: arithmetic, with a clock and dice of ours."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multienv.config import RestartPolicy
from multienv.recovery.policy import Recycling, RestartBudget, StatePacing

LARGEST_DIE = 1 - 2**-53


# --- restarts ---------------------------------------------------------------------------------


def budget(dice: float = LARGEST_DIE, **policy: Any) -> RestartBudget:
    return RestartBudget(RestartPolicy(**policy), dice=lambda: dice)


def test_the_first_restart_is_immediate_and_the_wait_doubles_up_to_its_limit():
    one = budget(backoff=1.0, max_backoff=8.0)
    assert [one.admit(float(now), progress=5) for now in range(7)] == pytest.approx([0, 1, 2, 4, 8, 8, 8])


def test_a_thousand_failures_in_a_row_do_not_overflow_and_without_backoff_nothing_is_waited_for():
    assert [budget(backoff=0.0).admit(0.0, progress=0) for _ in range(3)] == [0.0] * 3
    one = budget(backoff=0.1, max_backoff=10.0)
    assert [one.admit(0.0, progress=0) for _ in range(1000)][-1] == pytest.approx(10.0)


@given(
    st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=60),
    st.integers(0, 5),
    st.floats(0.1, 20),
    st.floats(0, LARGEST_DIE),
)
def test_no_more_restarts_than_allowed_in_any_window_and_refused_ones_do_not_count(events, most, window, die):
    one = budget(die, max_restarts=most, window=window, backoff=0.5, max_backoff=4.0)
    now, progress, admitted = 0.0, 0, []
    for passed, moved in events:
        now, progress = now + passed, progress + moved
        delay = one.admit(now, progress)
        recent = [then for then in admitted if then > now - window]
        assert (delay is None) == (len(recent) >= most)
        if delay is not None:
            assert delay == 0.0 or 0.25 <= delay <= 4.0
            admitted.append(now)


# --- recycling --------------------------------------------------------------------------------


def unasked() -> None:
    raise AssertionError("the size was asked for, which costs a system call")


def recycling(now: list[float] | None = None, **limits: Any) -> Recycling:
    return Recycling(RestartPolicy(**limits), lambda: now[0] if now else 0.0)


def test_no_process_is_replaced_unless_a_limit_is_given():
    assert not recycling().wanted
    assert recycling().due(10**9, 10**9, unasked) == ""
    assert all(recycling(**{name: 1}).wanted for name in ("recycle_after", "max_rss", "recycle_after_steps"))


def test_a_process_is_due_after_its_steps_counted_from_when_it_began():
    one = recycling(recycle_after_steps=10)
    assert [one.due(steps, 5, unasked) for steps in (9, 10, 12)] == ["", "after 10 steps", "after 12 steps"]
    one.put_off = True
    one.begin(12, 5)
    assert not one.put_off
    assert [bool(one.due(steps, 9, unasked)) for steps in (21, 22)] == [False, True]


def test_a_process_is_due_by_size_if_that_can_be_read():
    one = recycling(max_rss=100 * 2**20)
    assert [one.due(0, 0, lambda size=size: size and size * 2**20) for size in (None, 90, 100, 101)] == ["", "", "", "at 101 MiB"]  # fmt: skip


# --- states -----------------------------------------------------------------------------------


def due_from(pacing: StatePacing, **options: Any) -> int:
    """The first count of steps from which on a state may be asked for."""
    return bisect_left(range(10**7), True, key=lambda steps: pacing.may_ask(steps, **options))


def test_a_state_costs_one_percent_of_the_time_and_ten_in_a_hurry_unless_it_is_cheap():
    pacing = StatePacing(RestartPolicy())
    pacing.took(1000, seconds=0.2, step_seconds=0.01)
    assert due_from(pacing, hurry=False) == 1000 + 100 * 20
    assert due_from(pacing, hurry=True) == 1000 + 10 * 20
    assert due_from(pacing, hurry=True, beside=True) == 1000 + 100 * 20, "there is a snapshot to come back to"
    pacing.took(5000, seconds=0.05, step_seconds=0.01)
    assert due_from(pacing, hurry=True) == 5000
    assert (pacing.taken, pacing.obstacle) == (2, "")


def test_each_refusal_puts_the_next_try_off_for_longer_and_a_lost_process_for_much_longer():
    pacing = StatePacing(RestartPolicy())
    waits = []
    for lost in (False, False, True):
        pacing.refused(0, "it holds a lock", lost=lost)
        waits.append(due_from(pacing, hurry=True))
        assert due_from(pacing, hurry=False) == waits[-1]
    assert pacing.obstacle == "it holds a lock"
    assert waits[1] / waits[0] < waits[2] / waits[1]
    assert 0 < waits[0] < waits[1] < waits[2]
    pacing.took(0, 0.01, 0.01)
    pacing.refused(0, "again")
    assert due_from(pacing, hurry=True) == waits[0], "a state that was had forgives the refusals before"
