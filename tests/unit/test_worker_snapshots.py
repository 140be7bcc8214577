"""When a worker takes its next snapshot: arithmetic."""

from __future__ import annotations

import pytest

from multienv._engine.worker.snapshots import interval_for


def test_snapshots_take_a_third_of_a_percent_where_no_process_is_lost():
    assert interval_for(0.0) == interval_for(1e-5) == 0.05
    assert interval_for(1e-3) == pytest.approx(0.3)
    assert interval_for(4e-3) == 0.5  # so that a replay is short
    assert interval_for(0.02) == pytest.approx(2.0)  # one percent


def test_the_interval_follows_the_losses_and_is_never_longer_for_them():
    assert interval_for(4e-3, 1.5) == pytest.approx((2 * 4e-3 * 1.5) ** 0.5)
    assert interval_for(4e-3, 1e6) == interval_for(4e-3)
    assert interval_for(4e-3, 1e-6) == 4e-3  # half of the time goes by in steps
    assert interval_for(0.0, 1.5) == 0.05  # what one costs is not known yet
