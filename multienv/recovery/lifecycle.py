"""The processes of one worker, one after the other: launched, built, lost, brought back, replaced by plan.

Each method carries out one instruction of the state machine and returns the event that came of it; the supervisor
commits the state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from multienv.config import Deadlines, RestartPolicy
from multienv.errors import MultienvError, RestartBudgetExceeded
from multienv.events import Loss, Outcome
from multienv.processes.channel import Channel, Fate, Gone
from multienv.recovery.journal import Journal, furthest_replay
from multienv.recovery.pending import Pending
from multienv.recovery.policy import Effort
from multienv.recovery.record import Record
from multienv.recovery.recoverer import (
    BudgetSpentError,
    Found,
    Launcher,
    NotBuilt,
    Recoverer,
    RequestFailedError,
    Unrecoverable,
)
from multienv.recovery.state_machine import (
    BudgetSpent,
    Built,
    Event,
    Instruction,
    Kind,
    Launched,
    Lost,
    NotRecovered,
    Recovered,
    State,
    told,
)
from multienv.reports.crash import Case
from multienv.reports.texts import what_happened
from multienv.sometimes import sometimes
from multienv.wire.messages import Build
from multienv.wire.shared_pickle import SharedPickle

# After so many losses for one request, all killed from outside, their common past may be to blame.
_OUTSIDE_LOSSES = 3


class Replacement(NamedTuple):
    """Says what came of a replacement by plan.

    Attributes:
        channel: To the new process; ``None``: there is none.
        effort: What it took.
        reason: Why there is none, or why what goes on is not exact; or ``""``.
        is_built: The envs could be built.
    """

    channel: Channel | None
    effort: Effort
    reason: str = ""
    is_built: bool = True


class Lifecycle:
    """Has a worker's process, and each that replaces it.

    Args:
        launcher, build: Where processes come from, and what builds their envs.
        policy, deadlines: The limits.
        record: Notes losses and recoveries.
        journal: What drove the envs.
        pending: The pending request.
        path: The last events of the worker and the states that they led to.

    Attributes:
        channel: To the present process, or to the last one that was lost.
        building: Number of the request that builds the envs for the first time.
        found: Envs that were brought back and are to be adopted.
        loss: The loss that is being healed.
        replayed: Requests that were replayed in the process that was found last.
    """

    def __init__(
        self,
        launcher: Launcher,
        build: Build,
        policy: RestartPolicy,
        deadlines: Deadlines,
        *,
        record: Record,
        journal: Journal,
        pending: Pending,
        path: Iterable[tuple[Event, State]],
    ) -> None:
        self.recoverer = Recoverer(launcher, build, policy, deadlines, record.recovering, self._strayed)
        self.channel: Channel | None = None
        self.building = 0
        self.found: Found | None = None
        self.loss: Loss | None = None
        self._lost: Channel | None = None  # whose loss that is
        self.replayed = 0
        self._policy, self._deadlines = policy, deadlines
        self._record, self._journal, self._pending, self._path = record, journal, pending, path
        self._fate: Fate | None = None  # not the Gone itself: its traceback would keep the segment mapped
        self._effort: Effort | None = None
        self._processes_lost = 0  # by the request that the last recovery was for
        self._is_long = False  # the last recovery repeated more of the past than it had to
        self._repeats = False  # the lost process came from such a recovery, for the same request

    # --- the first process ------------------------------------------------------------------------

    def launch(self) -> Event:
        """Launch the first process and ask it to build the envs; one that replaces a lost one is charged."""
        effort = self._effort
        if effort is not None:
            effort.turn = None  # each of these deaths is charged
            try:
                self.recoverer.admit(effort, self._record.steps)
            except (BudgetSpentError, Unrecoverable):
                return self._budget_spent(effort)
            effort.attempts += 1
            self.recoverer.restarts += 1
        self.channel, self.building = self.recoverer.launch()
        self.recoverer.handed_over()
        self._pending.limit = self._deadlines.start
        self._pending.arm()
        return Launched()

    def await_build(self, until: float | None) -> Event | Exception | None:
        """Wait until the envs are built.

        Returns:
            The event; ``None`` if ``until`` has passed; or the error to raise, if ``env_fn`` raised. It is not raised
            here: its traceback would keep the segment mapped as long as the caller keeps the error.
        """
        channel = self.channel
        assert channel is not None
        try:
            if not self._pending.await_reply(channel, self.building, until, "initialize"):
                return None
            self.recoverer.await_build(channel, self.building, self._pending.until)
        except RequestFailedError as failed:
            self.drop()
            return self._record.error_of(-1, failed.failure, "initialize")
        except Gone as gone:
            self.loss = self._record.loss(gone, "initialize", gone.slot, self._pending.limit, self._case(b""))
            self._effort = self._effort or self.recoverer.begin()
            return Lost(gone.cause, -1, gone.is_from_outside)
        if self._effort is not None and self.loss is not None:
            self._record.recovery(self.loss, "exact", "", self._effort)
        self.forget_loss()
        return Built()

    # --- losses -----------------------------------------------------------------------------------

    def lost(self, gone: Gone, state: State, committed: int) -> Lost:
        """Note that the process with the pending request is lost; return the event.

        Args:
            gone: How it was lost.
            state: The state, with the pending request; none is pending if it was asked for a snapshot.
            committed: Number of the last request that was answered: the journal may already hold one more.
        """
        request, channel, number = state.request, self.channel, committed + 1
        assert channel is not None
        slots, is_policy = len(self._record.seeds), False
        slot = (0 if slots == 1 else gone.slot) if gone.number == number else -1
        if request is not None and request.steps and gone.number >= number:  # each step of it has a number of its own
            slot, is_policy = gone.slot, gone.slot < 0
        if request is not None and request.is_plain_step:
            self._pending.save(channel.segment, number)
        self._journal.cut(committed)
        self._fate = gone.fate
        if gone.fate.snapshot is not None and gone.fate.snapshot > committed:  # of a request that was taken back
            sometimes("a snapshot is newer than the last answer")
            self._fate = replace(gone.fate, snapshot=None)
        codec = self.recoverer.codec
        entry, name = b"", "snapshot" if request is None else request.name
        if request is not None and codec is not None and self._record.reports.wanted:
            entry = self._pending.entry(channel.segment, number, request, codec.layout)
        idle = gone.number == 0 and gone.cause != "broken" and gone.fate.code is not None
        if self.loss is None or self._lost is not channel:  # else Ctrl-C came before the state was committed
            loss = self._record.loss(gone, name, slot, self._pending.limit, self._case(entry), idle=idle)
            self.loss, self._lost = loss, channel
        self._effort = self.recoverer.begin()
        slot = slots if is_policy else slot
        # One that is killed from outside need not have failed by its past; but memory that piles up also ends so.
        self._repeats = self._is_long and state.losses >= (_OUTSIDE_LOSSES if gone.is_from_outside else 1)
        is_spared = self._repeats and gone.cause == "died"
        return Lost(gone.cause, slot, gone.is_from_outside, what_happened(self.loss), is_spared)

    def drop_lost(self, instruction: Instruction, state: State) -> None:
        """Drop a lost process whose envs are not brought back, and record the outcome."""
        assert self.loss is not None
        assert self._effort is not None
        self.drop()
        if instruction is Instruction.RAISE_LOST:
            outcome: Outcome = "raised"
        else:
            is_reset = state.request is not None and state.request.kind is Kind.RESET
            outcome = "reset" if is_reset else "truncated"
        self._record.recovery(self.loss, outcome, "" if outcome == "raised" else state.what, self._effort)

    def recover(self) -> Event:
        """Bring the envs back, with one charge to the budget and one deadline; return the event."""
        fate, loss, recoverer, channel = self._fate, self.loss, self.recoverer, self.channel
        assert fate is not None
        assert loss is not None
        assert channel is not None
        effort = self._effort = self._effort or recoverer.begin()
        recoverer.arm(effort)
        try:
            recoverer.admit(effort, self._record.steps)
            self.found = self._ways_back(channel, effort, fate)
            self._go_on_from(self.found, effort)
        except BudgetSpentError:
            return self._budget_spent(effort)
        except Unrecoverable as why:
            return NotRecovered(f"{what_happened(loss)} It cannot be brought back: {why}.")
        return Recovered(
            {
                slot: f"{what_happened(loss)} It cannot be brought back: {what}."
                for slot, what in self.found.mismatches.items()
            }
        )

    def _ways_back(self, lost: Channel, effort: Effort, fate: Fate) -> Found:
        """Bring the envs back from the snapshot, else by the journal; the second time by a short replay if possible.

        A simulator may fail because something has piled up in its process. A snapshot has the same pile, and a replay
        from the construction builds it again. Raises Unrecoverable.
        """
        self._is_long = False
        found = self._shortly_replayed(effort) if self._repeats else None
        found = found or self.recoverer.wake(lost, self._journal.since, effort, fate)
        if found is None:
            self.drop()  # first: there may be no descriptors for a lost process and its replacement at a time
        found = found or self.recoverer.bring_back(self._journal.plans(), effort, self._journal.why_no_plan())
        self._is_long = self._journal.can_be_shorter(found.plan)
        return found

    def _shortly_replayed(self, effort: Effort) -> Found | None:
        sometimes("a process with all of its past is lost with the next request")
        try:
            found = self.recoverer.bring_back(self._journal.plans(near=True), effort)
        except Unrecoverable:
            sometimes("no short replay leads back")
            return None
        if not found.mismatches:
            return found
        sometimes("a short replay differs")
        found.channel.kill()
        found.channel.release()
        return None

    def _budget_spent(self, effort: Effort) -> Event:
        assert self.loss is not None
        self._record.recovery(self.loss, "raised", "the budget of restarts is spent", effort)
        self.drop()
        return BudgetSpent()

    def tell(self, event: Event, instruction: Instruction, before: State, after: State) -> None:
        """Record the outcome of a recovery. The state is committed next, by a line that calls nothing."""
        loss, effort = self.loss, self._effort
        assert loss is not None
        assert effort is not None
        self._processes_lost = before.losses
        if isinstance(event, NotRecovered):
            is_reset = before.request is not None and before.request.kind is Kind.RESET
            fresh = is_reset and not after.pending_truncations and not after.skipped
            self._record.recovery(loss, "reset" if fresh else "truncated", event.reason, effort)
        elif isinstance(event, Recovered):
            truncated = [reason for slot, reason in after.pending_truncations if slot in event.mismatches]
            reasons = [*dict(after.skipped).values(), *truncated, *event.mismatches.values()]
            outcome: Outcome = "exact" if effort.is_exact else "replayed"
            if reasons:  # all that differs may be about to be reset
                outcome = "truncated" if after.skipped or truncated else "reset"
            reason = next(iter(reasons), "" if effort.is_exact else self._journal.memory.reservation)
            if instruction is Instruction.RAISE_POISON:
                outcome, reason = "raised", f"The same {loss.command}() ended process after process."
            self._record.recovery(loss, outcome, reason, effort)

    def renew(self, number: int) -> Channel:
        """Start a process with new envs, on which recorded calls and attributes are repeated.

        Raises:
            RequestFailedError: ``env_fn`` raised.
            Unrecoverable: No process can be built.
        """
        effort = self.recoverer.begin(planned=self.loss is None)
        return self._begin_anew(number, partial(self.recoverer.renew, effort))

    def _begin_anew(self, number: int, launch: Callable[[tuple[bytes, ...]], Channel]) -> Channel:
        """Start a process with new envs, and repeat recorded calls and attributes in them; the journal begins there."""
        self.replayed = 0
        lasting = self._journal.all_lasting() if self._journal.replaying else ()
        try:
            channel = launch(lasting)
        except Gone:  # one of the calls ends the process, or they take too long: go on without them
            sometimes("a repeated call ends the process of new envs")
            lasting = ()
            channel = launch(lasting)
        self._journal.begin(number, lasting)
        return channel

    def can_replay(self, anew: Collection[int]) -> bool:
        """Tell whether a replay may lead to all envs but those that are to be new ones, as far as is known."""
        plans = [] if self._journal.memory.has_shown else self._journal.plans(near=True)
        return any(plan.missing.keys() <= set(anew) for plan in plans)

    def replace(self, number: int, generators: Mapping[int, bytes]) -> Replacement:
        """Have the envs, which are not lost, in a new process.

        Args:
            number: Of the last request.
            generators: Slot → state of its random generators, of envs that are to be new ones because they are between
                two episodes. The others are replayed.
        """
        effort, memory, recoverer = self.recoverer.begin(planned=True), self._journal.memory, self.recoverer
        before, is_anew = recoverer.build, len(generators) == len(self._record.seeds)
        if memory.has_shown and not is_anew:
            return Replacement(None, effort, memory.reservation)
        try:
            if is_anew:
                channel = self._begin_anew(number, partial(recoverer.go_on, effort, generators=generators))
                return Replacement(channel, effort)
            self._journal.lose(generators)
            recoverer.build = replace(before, generators={**before.generators, **generators})
            # A short replay: a replay of the whole past would repeat what leaked.
            plans, why = self._journal.plans(near=True), self._journal.why_no_plan()
            found = recoverer.bring_back(plans, effort, why, generators)
        except (Unrecoverable, RequestFailedError, OSError) as reason:
            if isinstance(reason, OSError) and reason.errno is None:  # a signal handler's
                raise
            sometimes("a replacement by plan fails")
            recoverer.build = before
            return Replacement(None, effort, str(reason), is_built=not isinstance(reason, NotBuilt))
        if not found.mismatches.keys() <= generators.keys():
            sometimes("a replacement by plan differs")
            recoverer.build = before
            found.channel.kill()
            found.channel.release()
            return Replacement(None, effort, next(iter(found.mismatches.values())))
        self._go_on_from(found, effort)
        return Replacement(found.channel, effort, "" if effort.is_exact else memory.reservation)

    def _strayed(self, slot: int, what: str) -> None:
        """Note that a slot was replayed from a reset otherwise than it was seen."""
        description = self.recoverer.description
        spec = None if description is None else description.spec
        env = self._record.env_in(slot)
        self._journal.memory.note(env if spec is None else f"{spec.id} ({env})", what)

    def _go_on_from(self, found: Found, effort: Effort) -> None:
        """Have later replays begin where this one did, or after it."""
        self.replayed = effort.replayed
        effort.is_exact = found.plan is None or not found.plan.resets or self._journal.begins_anew
        if found.plan is not None:
            self._journal.go_on_from(found.plan)
            self._journal.lose(found.mismatches)

    def error(self, instruction: Instruction, state: State) -> MultienvError:
        """Build the error for an instruction to raise."""
        loss, record = self.loss, self._record
        assert loss is not None
        if instruction is Instruction.RAISE_BUDGET:
            return record.lost_error(loss, self._budget_text(), RestartBudgetExceeded)
        if instruction is Instruction.RAISE_POISON:
            sometimes("a reset or a call ends process after process")
            count = self._processes_lost
            advice = f"The same {loss.command}() ended process after process, {count} so far; it is given up. "
            if loss.command == "reset":
                advice += "The next reset() starts a new process: try another seed or other options, or mend the env."
            else:
                advice += "The episode goes on: mend what it calls in the env, or leave it out."
            return record.lost_error(loss, advice)
        if loss.command == "initialize":
            sometimes("the first process is lost while its envs are built, and given up")
            return record.lost_error(loss, "Run env_fn() in-process to see why; initialize() tries again.")
        if state.pending_truncations:
            sometimes("a call finds the episode lost")
            reason = state.pending_truncations[0][1].removeprefix(what_happened(loss)).strip()
            return record.lost_error(loss, f"{reason} The next step() ends the episode.".strip())
        whose = "The episodes of all its envs are" if len(loss.envs) > 1 else "Its episode is"
        return record.lost_error(loss, f"{whose} lost; the next reset() starts a new process.")

    def _budget_text(self) -> str:
        policy = self._policy
        return f"Its RestartPolicy allows {policy.max_restarts} restarts in {policy.window:g} s; they are spent."

    def forget_loss(self) -> None:
        """Note that nothing is being healed any more: the next loss is another one."""
        self.loss = self._lost = self._effort = None

    def drop(self) -> None:
        """End the process; its segment stays, with what the caller saw last."""
        channel = self.channel
        if channel is not None:
            channel.kill()
            channel.release(keep_memory=True)

    def _case(self, pending: bytes) -> Case | None:
        """Return the data for a crash report; ``None`` if no reports are wanted."""
        if not self._record.reports.wanted:
            return None
        recoverer, codec = self.recoverer, self.recoverer.codec
        known = self._journal.recording and codec is not None
        packed = recoverer.build.env_fns
        if isinstance(packed, SharedPickle):  # the worker may be closed before the report is written
            packed = packed.again()
        return Case(
            replay=partial(furthest_replay, self._journal.dump() if known else None),
            size=len(self._journal) if known else 0,
            pending=pending,
            build=replace(recoverer.build, env_fns=packed),
            description=recoverer.description,
            deadline=self._pending.limit,
            layout=None if codec is None else codec.layout,
            path=tuple(told(event, after) for event, after in tuple(self._path)),
        )
