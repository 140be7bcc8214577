"""How a worker is killed: in stages, by the clock.

One that hangs is asked for its stack first. Then comes SIGTERM, then SIGKILL, for it and what it has started; each
has its time to take effect.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from multienv.processes.ward import Ward, kill_group
from multienv.wire.memory import DEADLINE
from multienv.worker import main as worker

# Seconds given to faulthandler, to SIGTERM, to the kernel after SIGKILL, and to workers without a trainer.
STACK_GRACE = 0.3
QUIET = 0.03
TERM_GRACE = 0.2
KILL_GRACE = 1.0
ORPHAN_GRACE = 0.5


def advance(ward: Ward, now: float) -> float | None:
    """Do what is due by the clock. When to look again, or ``None``: not even SIGKILL has ended it."""
    if not ward.stage:
        if not ward.shortest_deadline:
            return float("inf")
        deadline = ward.control.times[DEADLINE]
        if not deadline or now < deadline:
            # A request sent from now on, perhaps with a nearer deadline, is not overdue before this.
            return min(deadline or float("inf"), now + ward.shortest_deadline)
        ward.overdue = True
        begin(ward, with_stack=True)
    elif now >= ward.next_stage_at:
        if ward.stage == "kill":  # an uninterruptible system call
            return None
        enter(ward, "term" if ward.stage == "stack" else "kill", now)
    return ward.next_stage_at


def begin(ward: Ward, *, with_stack: bool) -> None:
    """Kill it, unless that is under way."""
    if not ward.stage:
        enter(ward, "stack" if with_stack and worker.STACK_SIGNAL else "term", time.monotonic())


def enter(ward: Ward, stage: str, now: float) -> None:
    """Have the killing come as far as this."""
    ward.stage = stage
    if stage == "stack":
        assert worker.STACK_SIGNAL is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(ward.pid, worker.STACK_SIGNAL)
        ward.next_stage_at = now + STACK_GRACE
    elif stage == "term":
        kill_group(ward.pid, signal.SIGTERM)
        ward.next_stage_at = now + TERM_GRACE
    else:
        kill_group(ward.pid, signal.SIGKILL)
        ward.next_stage_at = now + KILL_GRACE


def stack_written(ward: Ward) -> None:
    """Some of its stack is there: it is whole when no more has come for a moment."""
    if ward.stage == "stack":
        ward.next_stage_at = time.monotonic() + QUIET


def abandon(ward: Ward) -> None:
    """Its trainer let go of it; its requests have ended too, so it should end by itself."""
    if not ward.stage:
        ward.stage = "term"
        ward.next_stage_at = time.monotonic() + ORPHAN_GRACE
