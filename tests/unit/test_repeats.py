"""What the log says of losses: the first of a kind whole, then counted, at most one line a minute; nothing is kept back."""

from __future__ import annotations

import re

import pytest

from multienv._engine.recovery.reporter import PERIOD, Repeats


def test_the_first_loss_of_each_kind_is_told_whole():
    repeats = Repeats()
    for kind in ((3, "died", -9), (4, "died", -9), (3, "died", -11), (3, "hung", None)):
        for outcome in ("exact", "truncated"):
            assert repeats.line(kind, outcome, "all of it", 5.0) == "all of it"


def test_later_losses_are_counted_and_told_once_a_minute_with_the_last_one():
    repeats = Repeats()
    assert repeats.line("SIGKILL", "exact", "loss 0", 100.0) == "loss 0"
    for number in range(1, 37):
        assert repeats.line("SIGKILL", "exact", f"loss {number}", 100.0 + number) == ""
    counted = "37 such losses in the last 60 s, all exact. The last: loss 37"
    assert repeats.line("SIGKILL", "exact", "loss 37", 100.0 + PERIOD) == counted
    assert repeats.line("SIGKILL", "exact", "loss 38", 101.0 + PERIOD) == ""


def test_a_loss_that_comes_alone_after_a_minute_is_told_whole():
    repeats = Repeats()
    for hour in range(3):
        assert repeats.line("SIGKILL", "exact", f"loss {hour}", 3600.0 * hour) == f"loss {hour}"
    assert repeats.rest(9999.0) == []


def test_what_has_only_been_counted_is_told_in_the_end_once():
    repeats = Repeats()
    for number in range(3):
        repeats.line("SIGKILL", "exact", f"killed {number}", 1.0 * number)
        repeats.line("hang", "truncated", f"hung {number}", 1.0 * number)
    repeats.line("SIGSEGV", "exact", "told", 3.0)
    assert repeats.rest(10.0) == [
        "2 such losses in the last 10 s, all exact. The last: killed 2",
        "2 such losses in the last 10 s, all truncated. The last: hung 2",
    ]
    assert repeats.rest(11.0) == []


@pytest.mark.parametrize("pause", [0.5, 7.0, 61.0])
def test_each_loss_of_a_night_is_told_or_counted_in_at_most_one_line_a_minute(pause):
    repeats, lines = Repeats(), []
    for number in range(1000):
        lines += [repeats.line("SIGKILL", "exact", "loss", pause * number)]
    lines = [*filter(None, lines), *repeats.rest(pause * 1000)]
    counts = [re.match(r"\d+", line) for line in lines]
    assert sum(1 if count is None else int(count.group()) for count in counts) == 1000
    assert len(lines) <= 2 + pause * 1000 / PERIOD
