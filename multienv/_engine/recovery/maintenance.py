"""When and how the process of a worker is replaced by plan: because simulators leak, or a reset ends processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from multienv._engine.processes.channel import Channel
from multienv._engine.recovery.position import Position
from multienv._engine.recovery.recoverer import NotBuilt, Recoverer, Revived, Unrecoverable
from multienv._engine.recovery.reporter import Reporter
from multienv._engine.recovery.state_machine import Kind, State
from multienv._engine.recovery.way_back import NewEnvs, Source, sources_by_plan, sources_of_new_envs
from multienv._engine.sometimes import sometimes
from multienv.config import RestartPolicy

logger = logging.getLogger("multienv")

_ADVICE = (
    ". RestartPolicy(accept='exact') takes no new envs, which would not remember earlier episodes. Raise the limit, or "
    "if the env needs no such memory, give accept='replayed' or recycle_after_episodes"
)


class Recycling:
    """Tells when a process is due to be replaced, because simulators leak.

    Args:
        policy: The limits.

    Attributes:
        wanted: The policy has such limits at all.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.wanted = policy.recycles
        self.restart_counts(0, 0)

    def restart_counts(self, steps: int, episodes: int, replayed: int = 0) -> None:
        """Count anew for a new process: after so many steps, ended episodes, and requests of a replay."""
        self._steps, self._episodes, self._replayed = steps, episodes, replayed
        self._again_at = self._waited = 0

    def put_off(self, episodes: int, least: int) -> None:
        """Put a replacement that has failed off: it is tried at a reset of all envs, else after some more episodes.

        Args:
            episodes: Begun so far.
            least: How many more the first time; then twice as many each time.
        """
        self._waited = 2 * self._waited or least
        self._again_at = episodes + self._waited

    def is_put_off(self, episodes: int) -> bool:
        """Tell whether a replacement has failed not long ago."""
        return episodes < self._again_at

    def due(self, steps: int, episodes: int, slots: int, rss: Callable[[], int | None], *, is_over: bool) -> str:
        """Return why the process should be replaced, or ``""``.

        Args:
            steps: Taken so far.
            episodes: Ended so far.
            slots: Number of envs.
            rss: Tells the resident memory, in bytes. It is asked last: it costs a system call.
            is_over: No episode runs.
        """
        policy = self._policy
        if policy.recycle_after_steps is not None and steps - self._steps >= policy.recycle_after_steps:
            return f"after {steps - self._steps} steps"
        most = policy.recycle_after_episodes
        if most is not None and episodes - self._episodes >= most and is_over:
            return f"after {episodes - self._episodes} episodes"
        # A replay of all that the process has done would leak as much once more. A replay goes back two episodes; where
        # it alone takes that much, the process would be replaced all the time.
        gains = is_over or (episodes - self._episodes >= 2 * slots and steps - self._steps >= self._replayed)
        if policy.max_rss is not None and gains:
            size = rss()
            if size is not None and size > policy.max_rss:
                return f"at {size / 2**20:.0f} MiB"
        return ""


class Maintenance:
    """Finds out when the process of a worker is to be replaced.

    Args:
        policy: The limits.
        position: Of the worker.
        resets_itself: The worker begins the next episode by itself: it is counted when one has ended.

    Attributes:
        is_due: Something is to be done before the next request.
        why_recycle: Why the process is to be replaced, or ``""``.
        needs_rebuild: Slots that need a new env, because their resets have ended processes.
        takes_new_envs: The policy takes new envs between two episodes, which remember nothing.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "is_due",
    )  # the hot path reads it, native code by offset

    def __init__(self, policy: RestartPolicy, position: Position, *, resets_itself: bool = False) -> None:
        self._position, self._resets_itself = position, resets_itself
        self.recycling = Recycling(policy)
        self.takes_new_envs = (
            policy.accept != "exact" or policy.recycle_after_episodes is not None or not policy.replays
        )
        self.is_due = False
        self.why_recycle = ""
        self.needs_rebuild: frozenset[int] = frozenset()

    def restart_counts(self, replayed: int, *, is_over: bool) -> None:
        """Count anew for a new process, after so many requests of a replay; ``is_over``: no episode runs."""
        if self.recycling.wanted:
            self.recycling.restart_counts(self._position.steps, self._ended(is_over=is_over), replayed)
        self.is_due, self.why_recycle, self.needs_rebuild = False, "", frozenset()

    def _ended(self, *, is_over: bool) -> int:
        """Return about how many episodes have ended: of several envs, all but one count as ended."""
        return max(0, self._position.episodes - (self._resets_itself or not is_over))

    def mark_for_rebuild(self, state: State, ended: Any) -> None:
        """Mark the envs that are to be new ones: their resets have ended processes, whatever brought the envs back.

        Args:
            state: The worker's, before the answer is committed.
            ended: Of each slot, whether its episode has ended and the next one has not begun.
        """
        assert state.request is not None
        guilty = {slot for slot, _ in (*state.deaths, *state.killed)}
        for slot, _ in state.skipped:
            is_reset = state.request.kind is Kind.RESET
            if slot in guilty and (is_reset or slot in state.not_reset or ended[slot]):
                sometimes("an env whose reset ends processes is built anew")
                self.needs_rebuild, self.is_due = self.needs_rebuild | {slot}, True

    def put_off(self, *, is_built: bool = True) -> None:
        """Put the replacement off, because it has failed.

        Args:
            is_built: The envs could be built in another process; else the old one ends first the next time.
        """
        self.why_recycle, self.needs_rebuild = "", frozenset()
        self.recycling.put_off(self._position.episodes, 2 * len(self._position.seeds) if is_built else 1)

    def update_due(self, channel: Channel, is_between: Callable[[], bool]) -> None:
        """Find out what is due; ``is_between`` tells whether no episode runs."""
        position = self._position
        if self.recycling.wanted and not self.why_recycle:
            is_over = is_between()
            counts = position.steps, self._ended(is_over=is_over), len(position.seeds)
            self.why_recycle = self.recycling.due(*counts, channel.memory, is_over=is_over)
        is_ripe = bool(self.why_recycle) and not self.recycling.is_put_off(position.episodes)
        self.is_due = is_ripe or bool(self.needs_rebuild)


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
        new_slots: Slots whose envs are to be new ones.
        ends_first: The old process ends before the new one is built.
        progress: How far it has come, and what it has cost.
    """

    def __init__(
        self, recoverer: Recoverer, position: Position, maintenance: Maintenance, reporter: Reporter, *, is_anew: bool
    ) -> None:
        self._recoverer, self._position, self._maintenance, self._reporter = recoverer, position, maintenance, reporter
        self._why = maintenance.why_recycle or "after a reset that ended process after process"
        slots = position.journal.slots
        self.new_slots = tuple(range(slots)) if is_anew else tuple(sorted(maintenance.needs_rebuild))
        self._is_all = len(self.new_slots) == slots
        self.ends_first = self._is_all or (recoverer.code.builds_alone and self._may_be_replayed())
        self.progress = recoverer.new_progress(planned=True)

    def _may_be_replayed(self) -> bool:
        """Tell whether a replay may bring all envs back except those that are to be new ones, as far as is known."""
        journal, anew = self._position.journal, set(self.new_slots)
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
        self.progress = self._recoverer.new_progress(planned=True)
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
        return self._recoverer.bring_back(build, sources, self.progress, why_no_source=why, new_slots=generators)

    def report_lost(self, error: Exception) -> None:
        """Report that the old process was lost before; the next step tells of that."""
        sometimes("a process is lost before it is replaced by plan")
        logger.warning("%s: its process is not replaced: %s", self._reporter.name, error)
        self._maintenance.put_off()

    def put_off(self, reason: Exception) -> str:
        """Put the replacement off and report it; return how the old process was lost, ``""`` if it goes on."""
        sometimes("a process that has ended first is not replaced", self.ends_first)
        is_built = not isinstance(reason, NotBuilt)
        self._maintenance.put_off(is_built=is_built)
        self._recoverer.code.builds_alone |= not is_built
        advice = "" if self._maintenance.takes_new_envs else _ADVICE
        self._reporter.report_recycling(self._why, "put off", f"{reason}{advice}", self.progress)
        if not self.ends_first:
            return ""
        return f"it was ended to be replaced {self._why}, and no new process could be had: {reason}"

    def report(self, source: Source) -> None:
        """Report that the envs came back from this source."""
        reporter, memory, progress = self._reporter, self._position.journal.memory, self.progress
        if isinstance(source, NewEnvs):
            reporter.report_recycling(self._why, "reset", memory.record_new_envs(reporter.name, self._why), progress)
        elif progress.is_exact:
            reporter.report_recycling(self._why, "exact", "", progress)
        else:
            reporter.report_recycling(self._why, "replayed", progress.changed or memory.reservation, progress)
