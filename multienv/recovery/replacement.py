"""Replace a process by plan, between two requests: by one with new envs, or one in which the envs are replayed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from multienv import interrupts
from multienv.errors import MultienvError
from multienv.processes.channel import Channel
from multienv.processes.worker_process import crowd_seconds
from multienv.recovery.journal import Plan
from multienv.recovery.policy import RecoveryProgress
from multienv.recovery.position import Position
from multienv.recovery.recoverer import NotBuilt, Recoverer, RequestFailedError, Unrecoverable
from multienv.recovery.state_machine import Kind, Process
from multienv.sometimes import sometimes
from multienv.wire.messages import Build, GetGenerators
from multienv.wire.segment import ASKED

logger = logging.getLogger("multienv")

_ADVICE = (
    ". RestartPolicy(accept='exact') takes no new envs, which would not remember earlier episodes. Raise the limit, or "
    "if the env needs no such memory, give accept='replayed' or recycle_after_episodes"
)


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


def _can_replay(position: Position, anew: frozenset[int]) -> bool:
    """Tell whether a replay may recover all envs except those that are to be new ones, as far as is known."""
    journal = position.journal
    return not journal.memory.has_shown and any(plan.missing.keys() <= anew for plan in journal.plans(near=True))


def _replaced(
    recoverer: Recoverer, position: Position, generators: Mapping[int, bytes], *, is_optional: bool, has_asked: bool
) -> Replacement:
    """Move envs that are not lost to a new process.

    Args:
        recoverer: Of the worker.
        position: Where the envs stand.
        generators: Slot → state of its random generators, of envs that are to be new ones because they are between two
            episodes. The others are replayed.
        is_optional: The old process still runs.
        has_asked: An env of it has asked outside. A replay beside it would ask the same server, and if the replay
            fails, the old envs would go on with that.
    """
    progress, journal, memory = recoverer.begin(planned=True), position.journal, position.journal.memory
    progress.is_optional = is_optional
    is_anew = len(generators) == journal.slots
    if is_optional and has_asked:
        return Replacement(progress, "a replay would ask outside what the envs of the old process have asked")
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


class Replacer:
    """Replaces the process of a worker, when its ``Maintenance`` says so.

    Args:
        supervisor: The worker.

    Attributes:
        why_lost: Why the worker has no process: that was ended to be replaced, and no new one could be had; or ``""``.
    """

    def __init__(self, supervisor: Any) -> None:
        self._supervisor = supervisor
        self.why_lost = ""

    def replace(self, *, resetting: bool) -> None:
        """Replace the process if that is due; ``resetting``: the next request resets all envs."""
        worker = self._supervisor
        maintenance, is_ready = worker.maintenance, worker.state.process is Process.READY
        is_anew = worker.may_begin_anew(resetting=resetting)
        if is_ready and (maintenance.spoilt or (maintenance.recycling_due and (maintenance.is_due or is_anew))):
            self._replace(is_anew=is_anew)
        maintenance.is_due = False

    @interrupts.shielded
    def _replace(self, *, is_anew: bool) -> None:
        """Replace the process: with new envs if ``is_anew``, else if they can be replayed.

        Where all envs are new the old process ends first: it may hold a port, a lock or a licence. During an episode
        the new one is built beside it. If the envs cannot be built there, the old process ends first from then
        on, as long as a replay may recover its envs; if none does, that is a loss like any other.
        """
        worker = self._supervisor
        maintenance, reporter, position = worker.maintenance, worker.reporter, worker.position
        slots = range(worker.rules.slots)
        anew = tuple(slots) if is_anew else tuple(sorted(maintenance.spoilt))
        why = maintenance.recycling_due or "after a reset that ended process after process"
        ends_first = len(anew) == len(slots) or (maintenance.ends_first and _can_replay(position, frozenset(anew)))
        try:
            generators = worker.ask_between(GetGenerators(anew)) if anew else {}
        except (MultienvError, RequestFailedError) as error:  # lost in between, and told of by the next step
            sometimes("a process is lost before it is replaced by plan")
            if worker.state.process is Process.NONE and not worker.state.pending_truncations:
                raise  # the policy says so; the caller's request has no envs to go to
            logger.warning("%s: its process is not replaced: %s", reporter.name, error)
            maintenance.put_off()
            return
        before, has_asked = worker.state, bool(worker.segment.words[ASKED])
        if ends_first:
            worker.stand_lost()  # from here on an exception leaves it so
            limit = worker.deadlines.close
            until = time.monotonic() + limit + crowd_seconds()
            worker.ask_to_end(worker.channel, limit, until, keep_memory=True)
        replacement = _replaced(worker.recoverer, position, generators, is_optional=not ends_first, has_asked=has_asked)
        process, progress, reason = replacement.channel, replacement.progress, replacement.reason
        worker.refuse_if_closed("step", process)
        if process is None:
            maintenance.put_off(is_built=replacement.is_built)
            sometimes("a process that has ended first is not replaced", ends_first)
            sometimes("a replacement by plan is put off", not ends_first)
            if ends_first:
                self.why_lost = f"it was ended to be replaced {why}, and no new process could be had: {reason}"
            advice = "" if worker.takes_new_envs else _ADVICE
            reporter.recycling(why, "put off", f"{reason}{advice}", progress)
            return
        sometimes("a process is replaced by plan")
        worker.move_into(replacement)
        worker.stand(before)
        outcome: Any = "exact" if progress.is_exact else "replayed"
        memory = position.journal.memory
        reason = memory.reservation if outcome == "replayed" else ""
        if replacement.plan is None:
            outcome, reason = "reset", memory.note_loss(reporter.name, why)
        reporter.recycling(why, outcome, reason, progress)

    def note_spoilt(self, skipped: Iterable[tuple[int, str]]) -> None:
        """Note which envs are to be new ones: their resets have ended processes, whatever brought the envs back."""
        worker = self._supervisor
        state, ended = worker.state, worker.ended()
        guilty = {slot for slot, _ in (*state.deaths, *state.killed)}
        for slot, _ in skipped:
            is_reset = state.request.kind is Kind.RESET
            if slot in guilty and (is_reset or slot in state.not_reset or ended[slot]):
                sometimes("an env whose reset ends processes is built anew")
                worker.maintenance.spoil(slot)
