"""Where an env stands between its calls, and what ends them inside the recovery."""

from __future__ import annotations

# Phases. RUNNING: step() may be called. READY, ENDED: reset() must come first. STEPPING, ASKED: an answer is
# outstanding. RESUMED: that of a step whose caller was interrupted. OWED: the next step is a truncation.
# DUE: as RUNNING, but the process is to be replaced first.
NEW, STARTING, READY, RUNNING, ENDED, STEPPING, ASKED, RESUMED, OWED, DUE, LOST, CLOSED = range(12)
STATES = ["new", "starting", "ready", "running", "ended", *["running"] * 5, "lost", "closed"]
PENDING = (STEPPING, ASKED, RESUMED)
IDLE = (READY, RUNNING, DUE, ENDED)

# What is known of a call that an exception from outside came through. WHOLE: the caller lost interest, or calls
# again to have the answer. HALF: it stands between the halves of a call; what was sent is still to be collected.
WHOLE, HALF = 1, 2


class EpisodeLost(Exception):  # noqa: N818 - internal
    """The episode cannot go on; the caller gets a truncation that says why."""


class RecoveryDue(Exception):  # noqa: N818 - internal
    """The worker is lost; wait again, in a thread that may take its time, for the answer."""
