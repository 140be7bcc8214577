"""Replays that begin at a reset as soon as one is proven, as they do late in a run."""

from __future__ import annotations

import math

import pytest

from multienv._engine.recovery import journal, supervisor


def prefer_resets(patch: pytest.MonkeyPatch) -> None:
    """Have a replay from the construction be no longer affordable at once, and every reset told of."""
    lay_out = journal.Journal.lay_out
    patch.setattr(journal, "AFFORDABLE", 0.0)
    patch.setattr(journal.Journal, "lay_out", lambda self, stride, slots, seconds=0.0: lay_out(self, stride, slots))
    patch.setattr(supervisor, "SHARE", math.inf)
    patch.setattr(supervisor, "LARGE_SHARE", math.inf)
