"""Replace a process by plan, between two requests: by one with new envs, or one in which the envs are replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from multienv.processes.channel import Channel
from multienv.recovery.journal import Plan
from multienv.recovery.policy import RecoveryProgress
from multienv.recovery.position import Position
from multienv.recovery.recoverer import NotBuilt, Recoverer, RequestFailedError, Unrecoverable
from multienv.sometimes import sometimes
from multienv.wire.messages import Build


class Replacement(NamedTuple):
    """Holds the outcome of a replacement by plan.

    Attributes:
        progress: What it has taken.
        reason: Why the process is not replaced; or ``""``.
        channel: To the new process; ``None``: there is none.
        build: The request that built its envs.
        calls: Calls and attributes that were repeated in it, if all its envs are new ones.
        plan: What was replayed in it, if not all are.
        is_built: The envs could be built in a new process.
    """

    progress: RecoveryProgress
    reason: str = ""
    channel: Channel | None = None
    build: Build | None = None
    calls: tuple[bytes, ...] = ()
    plan: Plan | None = None
    is_built: bool = True


def can_replay(position: Position, anew: frozenset[int]) -> bool:
    """Tell whether a replay may recover all envs except those that are to be new ones, as far as is known."""
    journal = position.journal
    return not journal.memory.has_shown and any(plan.missing.keys() <= anew for plan in journal.plans(near=True))


def replaced(recoverer: Recoverer, position: Position, generators: Mapping[int, bytes]) -> Replacement:
    """Move envs that are not lost to a new process.

    Args:
        recoverer: Of the worker.
        position: Where the envs stand.
        generators: Slot → state of its random generators, of envs that are to be new ones because they are between two
            episodes. The others are replayed.
    """
    progress, journal, memory = recoverer.begin(planned=True), position.journal, position.journal.memory
    is_anew = len(generators) == journal.slots
    if memory.has_shown and not is_anew:
        return Replacement(progress, memory.reservation)
    try:
        if is_anew:
            build = replace(position.build, generators=generators)
            channel, calls = recoverer.begin_anew(build, progress, journal.kept_calls() if journal.replaying else ())
            return Replacement(progress, "", channel, build, calls)
        build = replace(position.build, generators={**position.build.generators, **generators})
        # A short replay: a replay of the whole past would repeat what leaked.
        plans = journal.plans(near=True, anew=generators)
        found = recoverer.recover_by_replay(build, plans, progress, journal.why_no_plan(), generators)
    except (Unrecoverable, RequestFailedError, OSError) as reason:
        if isinstance(reason, OSError) and reason.errno is None:  # a signal handler's
            raise
        sometimes("a replacement by plan fails")
        return Replacement(progress, str(reason), is_built=not isinstance(reason, NotBuilt))
    if not found.mismatches.keys() <= generators.keys():
        sometimes("a replacement by plan differs")
        found.channel.kill()
        found.channel.release()
        return Replacement(progress, next(iter(found.mismatches.values())))
    return Replacement(progress, "", found.channel, build, plan=found.plan)
