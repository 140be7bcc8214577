"""When a worker is restarted, and replaced by plan: arithmetic, with a clock and dice of ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multienv._engine.recovery import recoverer as recoverer_module
from multienv._engine.recovery.maintenance import Recycling
from multienv._engine.recovery.recoverer import BudgetSpentError, Recoverer
from multienv._engine.recovery.way_back import LONGEST_BACKOFF, WINDOW, LossStatistics, RecoveryProgress, RestartBudget
from multienv.config import Deadlines, RestartPolicy

LARGEST_DIE = 1 - 2**-53


# --- restarts ---------------------------------------------------------------------------------


def budget(dice: float = LARGEST_DIE, **policy: Any) -> RestartBudget:
    return RestartBudget(RestartPolicy(**policy), dice=lambda: dice)


def test_the_first_restart_is_immediate_and_the_wait_doubles_up_to_its_limit():
    one = budget(backoff=1.0)
    assert [one.charge(float(now), answered=5) for now in range(7)] == pytest.approx([0, 1, 2, 4, 8, 10, 10])
    assert [one.charge(0.0, answered=5) for _ in range(2000)][-1] == pytest.approx(
        LONGEST_BACKOFF
    )  # and overflows never


def test_an_interrupted_recovery_is_charged_once_and_has_its_whole_time_when_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
):
    now = [100.0]
    monkeypatch.setattr(recoverer_module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=pytest.fail))
    recoverer = Recoverer(None, RestartPolicy(max_restarts=1), Deadlines(recovery=20.0), None, print, str)  # type: ignore[arg-type]
    progress = recoverer.new_progress()
    for _ in range(3):
        recoverer.charge_budget(progress, answered=0)
        now[0] += 50.0
        recoverer.restart_deadline(progress)
        assert progress.until == now[0] + 20.0
    with pytest.raises(BudgetSpentError):
        recoverer.charge_budget(recoverer.new_progress(), answered=0)


@given(
    st.lists(st.tuples(st.floats(0, 1800), st.booleans()), max_size=60),
    st.integers(0, 5),
    st.floats(0, LARGEST_DIE),
)
def test_no_more_restarts_than_allowed_in_any_hour_and_refused_ones_do_not_count(events, most, die):
    one = budget(die, max_restarts=most, backoff=0.5)
    now, progress, admitted = 0.0, 0, []
    for passed, moved in events:
        now, progress = now + passed, progress + moved
        delay = one.charge(now, progress)
        recent = [then for then in admitted if then > now - WINDOW]
        assert (delay is None) == (len(recent) >= most)
        if delay is not None:
            assert delay == 0.0 or 0.25 <= delay <= LONGEST_BACKOFF
            admitted.append(now)


# --- recycling --------------------------------------------------------------------------------


# --- losses of a call -------------------------------------------------------------------------


def lost(losses: LossStatistics, kind: str, *, times: int = 1, takes: float = 1.0) -> list[int]:
    """Return how many tries a request has after each of the losses that come with it, so many seconds apart."""
    tries, before = [], None
    for loss in range(times):
        progress = RecoveryProgress(loss * takes, 0.0, None)
        losses.record(progress, before, kind, limit=10.0)
        before = progress
        tries.append(progress.tries)
    return tries


def test_the_mean_time_between_losses_is_that_of_the_last_ones_and_grows_while_none_comes():
    losses = LossStatistics()
    assert losses.mean == 0.0
    for seconds in (3.0, 5.0):
        losses.seconds = seconds
        lost(losses, "crash")
    assert losses.mean == 2.5
    losses.seconds = 25.0
    assert losses.mean == 12.5
    for _ in range(9):
        losses.seconds += 1.0
        lost(losses, "crash")
    assert losses.mean == 1.0
    for _ in range(9):
        lost(losses, "crash")
    assert 0.0 < losses.mean < 0.01


def test_a_request_has_more_tries_if_others_went_through_at_last():
    losses = LossStatistics()
    assert [lost(losses, "crash") for _ in range(4)] == [[2], [3], [4], [4]]
    assert lost(losses, "crash", times=3) == [4, 4, 4]
    assert lost(losses, "hang") == [2]  # the first of its kind


def test_a_request_that_always_ends_its_process_has_no_more_tries_for_it():
    losses = LossStatistics()
    assert [lost(losses, "crash", times=2) for _ in range(3)] == [[2, 2]] * 3
    chance = [lost(losses, "crash"), lost(losses, "crash", times=4), lost(losses, "crash")]
    assert chance == [[2], [3, 3, 3, 3], [2]]


def test_no_further_try_begins_when_the_time_of_a_recovery_is_over():
    losses = LossStatistics()
    for _ in range(2):
        lost(losses, "hang")
    assert lost(losses, "hang", times=4, takes=4.0) == [4, 4, 4, 2]


# --- recycling --------------------------------------------------------------------------------


def unasked() -> Any:
    raise AssertionError("this costs something, and was asked for")


def recycling(**limits: Any) -> Recycling:
    return Recycling(RestartPolicy(**limits))


def test_a_process_is_due_after_its_steps_counted_from_when_it_began():
    one = recycling(recycle_after_steps=10)
    assert [one.due(steps, 5, 1, unasked, is_over=False) for steps in (9, 10, 12)] == [
        "",
        "after 10 steps",
        "after 12 steps",
    ]
    one.restart_counts(12, 5)
    assert [bool(one.due(steps, 9, 1, unasked, is_over=False)) for steps in (21, 22)] == [False, True]


def test_a_process_is_due_by_episodes_only_when_none_runs():
    one = recycling(recycle_after_episodes=2)
    assert one.due(50, 1, 1, unasked, is_over=True) == ""
    assert [one.due(90, 2, 1, unasked, is_over=is_over) for is_over in (False, True)] == [
        "",
        "after 2 episodes",
    ]


def test_a_replacement_that_fails_is_tried_again_after_twice_as_many_episodes_each_time():
    one = recycling(recycle_after_steps=10)
    assert not one.is_put_off(5)
    for episodes, again_at in ((5, 11), (11, 23), (30, 54)):
        one.put_off(episodes, 6)
        assert [one.is_put_off(now) for now in (episodes, again_at - 1, again_at)] == [True, True, False]
    one.restart_counts(12, 54)
    one.put_off(54, 6)
    assert not one.is_put_off(60)


def test_a_process_is_due_by_size_if_that_can_be_read_and_the_replay_that_led_to_it_does_not_take_most_of_the_time():
    one = recycling(max_rss=100 * 2**20)
    assert [one.due(0, 2, 1, lambda size=size: size and size * 2**20, is_over=False) for size in (None, 90, 100, 101)] == ["", "", "", "at 101 MiB"]  # fmt: skip
    one.restart_counts(12, 5, replayed=30)
    assert one.due(41, 9, 1, unasked, is_over=False) == ""
    assert one.due(42, 9, 1, lambda: 101 * 2**20, is_over=False) == "at 101 MiB"
    assert one.due(42, 6, 1, unasked, is_over=False) == "", "a replay would repeat all that the process has done"
    assert one.due(13, 5, 1, lambda: 101 * 2**20, is_over=True) == "at 101 MiB", "nothing is replayed"
