"""Restarts counted in a window, with a backoff that grows only while they make no progress."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multienv.config import RestartPolicy
from multienv.recovery.budget import RestartBudget

LARGEST_DIE = 1 - 2**-53


def budget(dice: float = LARGEST_DIE, **policy: float) -> RestartBudget:
    return RestartBudget(RestartPolicy(**policy), dice=lambda: dice)


def test_the_first_restart_is_immediate():
    assert budget(backoff=1.0).admit(0.0, progress=0) == 0.0


def test_the_delay_doubles_up_to_its_limit():
    one = budget(backoff=1.0, max_backoff=8.0)
    delays = [one.admit(float(now), progress=5) for now in range(7)]
    assert delays == pytest.approx([0, 1, 2, 4, 8, 8, 8])


def test_jitter_takes_up_to_half_of_the_delay():
    least, most = budget(dice=0.0, backoff=4.0), budget(dice=LARGEST_DIE, backoff=4.0)
    for one in (least, most):
        one.admit(0.0, progress=0)
    assert least.admit(1.0, progress=0) == 2.0
    assert most.admit(1.0, progress=0) == pytest.approx(4.0)


def test_progress_makes_the_next_restart_immediate_again():
    one = budget(backoff=1.0)
    assert [one.admit(0.0, progress) for progress in (0, 0, 0, 1, 1, 2)] == pytest.approx([0, 1, 2, 0, 1, 0])


def test_without_backoff_nothing_is_waited_for():
    one = budget(backoff=0.0)
    assert [one.admit(0.0, progress=0) for _ in range(100)] == [0.0] * 100


def test_a_thousand_failures_in_a_row_do_not_overflow():
    one = budget(backoff=0.1, max_backoff=10.0)
    assert [one.admit(0.0, progress=0) for _ in range(1000)][-1] == pytest.approx(10.0)


def test_no_more_than_the_allowed_restarts_within_the_window():
    one = budget(max_restarts=2, window=10.0, backoff=0.0)
    assert one.admit(0.0, progress=0) == 0.0
    assert one.admit(9.0, progress=1) == 0.0
    assert one.admit(9.5, progress=2) is None
    assert one.admit(9.999, progress=3) is None
    assert one.admit(10.0, progress=4) == 0.0, "the first one has left the window"
    assert one.admit(10.1, progress=5) is None
    assert one.admit(19.0, progress=6) == 0.0


def test_a_refused_restart_does_not_count():
    one = budget(max_restarts=1, window=10.0)
    one.admit(0.0, progress=0)
    for now in range(1, 10):
        assert one.admit(float(now), progress=now) is None
    assert one.admit(10.0, progress=99) is not None


def test_none_allowed_is_none_admitted():
    assert budget(max_restarts=0).admit(0.0, progress=0) is None


@given(
    st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=60),
    st.integers(0, 5),
    st.floats(0.1, 20),
    st.floats(0, LARGEST_DIE),
)
def test_whatever_happens_the_bounds_hold(events, max_restarts, window, die):
    one = budget(die, max_restarts=max_restarts, window=window, backoff=0.5, max_backoff=4.0)
    now, progress, admitted = 0.0, 0, []
    for passed, moved in events:
        now, progress = now + passed, progress + moved
        delay = one.admit(now, progress)
        recent = [then for then in admitted if then > now - window]
        assert (delay is None) == (len(recent) >= max_restarts)
        if delay is not None:
            assert 0.0 <= delay <= 4.0
            assert delay == 0.0 or delay >= 0.25
            admitted.append(now)
