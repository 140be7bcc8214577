"""Bring envs that are not lost back in another process, by plan: as new ones between two episodes, else by a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from multienv._engine.recovery.policy import RecoveryProgress
from multienv._engine.recovery.position import Position
from multienv._engine.recovery.recoverer import Recoverer, Revived, Unrecoverable
from multienv._engine.recovery.way_back import NewEnvs, Replayed, Source


def can_replay(position: Position, anew: frozenset[int]) -> bool:
    """Tell whether a replay may bring all envs back except those that are to be new ones, as far as is known."""
    journal = position.journal
    return not journal.memory.has_shown and any(plan.missing.keys() <= anew for plan in journal.plans(near=True))


def replaced(
    recoverer: Recoverer, position: Position, generators: Mapping[int, bytes], progress: RecoveryProgress
) -> Revived:
    """Bring envs that are not lost back in a new process.

    Args:
        recoverer: Of the worker.
        position: Where the envs stand.
        generators: Slot → state of its random generators, of envs that are to be new ones because they are between two
            episodes. The others are replayed.
        progress: What it takes.

    Raises:
        NotBuilt: The envs cannot be built in a new process.
        Unrecoverable: They do not come back there.
        OSError: No process can be had.
    """
    journal, memory = position.journal, position.journal.memory
    if len(generators) == journal.slots:
        calls = journal.kept_calls() if journal.replaying else ()
        sources: list[Source] = [NewEnvs(calls)]
        build = replace(position.build, generators=generators)
    elif memory.has_shown:
        raise Unrecoverable(memory.reservation)
    else:
        # A short replay: a replay of the whole past would repeat what leaked.
        sources = list(map(Replayed, journal.plans(near=True, anew=generators)))
        build = replace(position.build, generators={**position.build.generators, **generators})
    return recoverer.bring_back(build, sources, progress, why_no_source=journal.why_no_plan(), anew=generators)
