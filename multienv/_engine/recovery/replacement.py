"""Bring envs that are not lost back in another process, by plan: as new ones between two episodes, else by a replay."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from multienv._engine.recovery.maintenance import Maintenance
from multienv._engine.recovery.position import Position
from multienv._engine.recovery.recoverer import NotBuilt, Recoverer, Revived, Unrecoverable
from multienv._engine.recovery.reporter import Reporter
from multienv._engine.recovery.way_back import NewEnvs, Source, sources_by_plan, sources_of_new_envs
from multienv._engine.sometimes import sometimes

logger = logging.getLogger("multienv")

_ADVICE = (
    ". RestartPolicy(accept='exact') takes no new envs, which would not remember earlier episodes. Raise the limit, or "
    "if the env needs no such memory, give accept='replayed' or recycle_after_episodes"
)


class Replacement:
    """Makes one replacement by plan: which envs are to be new ones, how all come back, and what is reported of it.

    Where all envs are new the old process ends first: it may hold a port, a lock or a licence. During an episode the
    new one is built beside it. If the envs cannot be built there, the old processes of the batch end first from then
    on, as long as a replay may bring its envs back; if none does, that is a loss like any other.

    Args:
        recoverer, maintenance, reporter: Of the worker.
        position: Where the envs stand.
        is_anew: All envs are to be new ones: they are between two episodes.

    Attributes:
        anew: Slots whose envs are to be new ones.
        ends_first: The old process ends before the new one is built.
        progress: What it has taken.
    """

    def __init__(
        self, recoverer: Recoverer, position: Position, maintenance: Maintenance, reporter: Reporter, *, is_anew: bool
    ) -> None:
        self._recoverer, self._position, self._maintenance, self._reporter = recoverer, position, maintenance, reporter
        self._why = maintenance.recycling_due or "after a reset that ended process after process"
        slots = position.journal.slots
        self.anew = tuple(range(slots)) if is_anew else tuple(sorted(maintenance.needs_rebuild))
        self._is_all = len(self.anew) == slots
        self.ends_first = self._is_all or (recoverer.code.builds_alone and self._may_be_replayed())
        self.progress = recoverer.begin(planned=True)

    def _may_be_replayed(self) -> bool:
        """Tell whether a replay may bring all envs back except those that are to be new ones, as far as is known."""
        journal, anew = self._position.journal, set(self.anew)
        return not journal.memory.has_shown and any(plan.missing.keys() <= anew for plan in journal.plans(near=True))

    def bring_back(self, generators: Mapping[int, bytes], *, has_asked: bool) -> Revived:
        """Bring the envs back in a new process.

        Args:
            generators: Slot → state of its random generators, of the envs that are to be new ones.
            has_asked: The envs have asked outside since they were built.

        Raises:
            NotBuilt: The envs cannot be built in a new process.
            Unrecoverable: They do not come back there.
            OSError: No process can be had.
        """
        position, journal, memory = self._position, self._position.journal, self._position.journal.memory
        self.progress = self._recoverer.begin(planned=True)
        self.progress.is_optional = not self.ends_first
        if has_asked and not self.ends_first:  # if the replay failed, the old envs would go on with another server
            raise Unrecoverable("a replay would ask outside what the envs of the old process have asked")
        if self._is_all:
            sources = sources_of_new_envs(journal)
            build = replace(position.build, generators=generators)
        elif memory.has_shown:
            raise Unrecoverable(memory.reservation)
        else:
            sources = sources_by_plan(journal, generators)
            build = replace(position.build, generators={**position.build.generators, **generators})
        why = journal.why_no_plan()
        return self._recoverer.bring_back(build, sources, self.progress, why_no_source=why, anew=generators)

    def tell_lost(self, error: Exception) -> None:
        """Report that the old process was lost before; the next step tells of that."""
        sometimes("a process is lost before it is replaced by plan")
        logger.warning("%s: its process is not replaced: %s", self._reporter.name, error)
        self._maintenance.put_off()

    def put_off(self, reason: Exception) -> str:
        """Report that the envs did not come back; return how the old process was lost, ``""`` if it goes on."""
        sometimes("a process that has ended first is not replaced", self.ends_first)
        sometimes("a replacement by plan is put off", not self.ends_first)
        is_built = not isinstance(reason, NotBuilt)
        self._maintenance.put_off(is_built=is_built)
        self._recoverer.code.builds_alone |= not is_built
        advice = "" if self._maintenance.takes_new_envs else _ADVICE
        self._reporter.recycling(self._why, "put off", f"{reason}{advice}", self.progress)
        if not self.ends_first:
            return ""
        return f"it was ended to be replaced {self._why}, and no new process could be had: {reason}"

    def tell(self, source: Source) -> None:
        """Report that the envs came back from this source."""
        reporter, memory, progress = self._reporter, self._position.journal.memory, self.progress
        sometimes("a process is replaced by plan")
        if isinstance(source, NewEnvs):
            reporter.recycling(self._why, "reset", memory.note_loss(reporter.name, self._why), progress)
        elif progress.is_exact:
            reporter.recycling(self._why, "exact", "", progress)
        else:
            reporter.recycling(self._why, "replayed", progress.changed or memory.reservation, progress)
