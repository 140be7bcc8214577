"""Start the processes of one worker, send them internal requests, and bring its envs back in them.

``bring_back`` carries out what ``way_back`` decides: it tries one source after the other, and compares what comes back
with what the caller saw, slot by slot.
"""

from __future__ import annotations

import logging
import math
import pickle
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Protocol

from multienv._engine import interrupts
from multienv._engine.processes.channel import Channel, Gone
from multienv._engine.recovery.journal import UNKNOWN, Journal, Plan
from multienv._engine.recovery.state_machine import MOST_LOSSES, POISON_AFTER
from multienv._engine.recovery.verification import differences, is_comparable
from multienv._engine.recovery.way_back import (
    LONGEST_BACKOFF,
    CameBack,
    Died,
    Failed,
    GiveUp,
    LossStatistics,
    NewEnvs,
    NewestSnapshot,
    NothingBuilt,
    RecoveryProgress,
    Replayed,
    RestartBudget,
    Source,
    TakeOver,
    Try,
    Way,
    WayEvent,
    WayRules,
    decide_way,
)
from multienv._engine.reports.texts import counted
from multienv._engine.sometimes import sometimes
from multienv._engine.threads import Lock
from multienv._engine.wire.banks import FAILED, HEAD, MESSAGE, U32, split_entries
from multienv._engine.wire.codecs import Codec
from multienv._engine.wire.infos import Illegible
from multienv._engine.wire.messages import (
    Build,
    Description,
    Failure,
    Imports,
    Message,
    Replay,
    call_user_code,
    is_reset,
    pack_message,
)
from multienv._engine.wire.segment import LOSS_SECONDS, REPLAYING, RESTARTS, SLOT
from multienv._engine.worker.imports import changed_file
from multienv.config import Deadlines, RestartPolicy
from multienv.errors import NoCapacityError, ResultNotPicklableError

logger = logging.getLogger("multienv")

# Seconds that a request of a replay may take longer than its deadline: the replay may have to be read first.
REPLAY_GRACE = 1.0
# How often the trainer checks, within the limit of a replayed request, whether the replay makes progress.
_LOOKS = 8
# Seconds until a forked snapshot that does not wake is given up; waking takes some milliseconds.
_UP_WITHIN = 10.0
# After so many seconds the log says what a recovery is doing; then again whenever it has taken twice as long.
_SILENCE = 2.0
# Seconds between two checks whether the worker was closed during a back-off.
_LOOK = 0.02
# Seconds for which a build that raises is tried again without Deadlines.recovery, and the shortest pause before that.
_BUILDS_WITHIN = 120.0
_LEAST_PAUSE = 0.1
# A build beside the old envs may take so many times as long as the first one; or RestartPolicy.replay_limit.
_SLOWER = 3.0


class Unrecoverable(Exception):  # noqa: N818 - internal
    """Raised when the envs cannot be recovered; the message says why.

    Attributes:
        failure: What ``env_fn`` raised, if that is why.
    """

    failure: Failure | None = None


class NotBuilt(Unrecoverable):
    """Raised when no process can be had in which the envs are built."""

    def __init__(self, reason: str, failure: Failure | None = None) -> None:
        super().__init__(reason)
        self.failure = failure


class BudgetSpentError(Exception):
    """Raised when the policy allows no further restart."""


class RequestFailedError(Exception):
    """Raised when an internal request (build, replay, …) raised in the worker; ``failure`` says what."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


def _why_not_built(failed: RequestFailedError) -> str:
    return f"env_fn raised {failed.failure.type_name}: {failed}"


def _unreadable(error: Exception) -> Failure:
    """Return the failure for a description of the envs that cannot be unpickled here, whichever process sends it."""
    text = (
        "The env was built, but its spaces, metadata or spec cannot be read in the trainer: "
        f"{type(error).__name__}: {error}. A class that the env makes at run time is missing here: make it in the "
        "trainer, too (build such an env there before), or wrap the env in env_fn, so that its spaces are gymnasium's."
    )
    return Failure(ResultNotPicklableError.__name__, text, "", None, result_not_picklable=True)


class Launcher(Protocol):
    """Launches the processes of one worker."""

    def start(self) -> Channel:
        """Launch a process; does not wait for it."""

    def wake_kept(self, token: int) -> Channel | None:
        """Wake the snapshot kept under this token; ``None`` if it is gone."""

    def free(self, token: int) -> None:
        """End the snapshot kept under this token."""

    def close(self) -> None:
        """End the launcher: no process is launched any more."""


@dataclass(frozen=True, slots=True)
class Revived:
    """Holds envs that were brought back.

    Attributes:
        channel: Of their process.
        source: Where they come from.
        build: The request that has built them; of a snapshot that of the process it was taken of.
        mismatches: Slot → difference, for each slot that is not as the caller saw it.
        progress: What it has taken.
    """

    channel: Channel
    source: Source
    build: Build
    mismatches: Mapping[int, str]
    progress: RecoveryProgress

    @property
    def plan(self) -> Plan | None:
        """Return the replay that brought them back; ``None``: there was none."""
        return self.source.plan if isinstance(self.source, Replayed) else None

    def trim_journal(self, journal: Journal, number: int) -> None:
        """Drop from the journal, whose last request has this number, what is no past of the envs any more."""
        if isinstance(self.source, NewEnvs):
            journal.clear(number, self.source.calls)
        elif isinstance(self.source, Replayed):
            journal.drop_before(self.source.plan)
            journal.drop_replay_points(self.mismatches)


class BatchCode:
    """Keeps one copy of the list of files, which is long, and warns of each changed file once.

    Attributes:
        builds_alone: An env could not be built beside the one that it was to replace, which holds a port or a lock.
    """

    def __init__(self) -> None:
        self.builds_alone = False
        self._first = b""
        self._told: set[str] = set()

    def shared(self, files: bytes) -> bytes:
        """Return an equal list that another worker keeps, if there is one."""
        self._first = self._first or files
        return self._first if files == self._first else files

    def warn_changed(self, file: str) -> None:
        """Log that a file has changed, the first time."""
        if file not in self._told:
            self._told.add(file)
            logger.warning(
                "%s has changed since the running envs imported it, and a new process imports it as it is now. A "
                "replay there counts as replayed, not as exact, even if all compares equal; "
                "RestartPolicy(accept='exact') does not take it.",
                file,
            )


class BuildTurns:
    """Bounds how many workers build their envs at the same time.

    A turn is acquired by name, and to acquire it again does nothing. So an interruption right after that costs no turn.

    Args:
        most: How many may build at the same time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._building: set[object] = set()
        self._lock = Lock()

    def acquire(self, name: object) -> bool:
        """Acquire a turn if one is free, and tell whether it is acquired; it lasts until :meth:`release`."""
        with self._lock:
            if name not in self._building and len(self._building) >= self.most:
                return False
            self._building.add(name)
            return True

    def release(self, name: object) -> None:
        """Release a turn; does nothing if none was acquired."""
        self._building.discard(name)


class Recoverer:
    """Starts the processes of one worker and recovers its envs in them.

    Args:
        launcher: Where processes come from.
        policy, deadlines: The limits.
        journal: Of the worker.
        log: Logs what a recovery that takes long is doing.
        env_in: Names the env in a slot.

    Attributes:
        description: Of the envs; known once they were built.
        codec: Encodes actions and decodes replies; known then.
        restarts: Processes started in place of lost ones.
        turns: Bounds how many workers build at the same time; ``None``: nothing does.
        code: What the workers of a batch have in common about their code.
        losses: And about their losses.
        on_imports: Called with what a process has imported to build the envs, if it was asked for that.
    """

    def __init__(
        self,
        launcher: Launcher,
        policy: RestartPolicy,
        deadlines: Deadlines,
        journal: Journal,
        log: Callable[[str, RecoveryProgress], object],
        env_in: Callable[[int], str],
    ) -> None:
        self.description: Description | None = None
        self.codec: Codec | None = None
        self.restarts = 0
        self.turns: BuildTurns | None = None
        self.code = BatchCode()
        self.losses = LossStatistics()
        self.on_imports: Callable[[Imports], object] = lambda imports: None
        self._launcher = launcher
        self._policy = policy
        self._deadlines = deadlines
        self._journal, self._log, self._env_in = journal, log, env_in
        self._budget = RestartBudget(policy)
        self._numbers = count(-1, -1)
        self._starting: Channel | None = None  # being started; the worker does not own it yet
        self._closed = False
        self._was_given_up = False  # env_fn has raised until the time for it was over

    # --- requests of our own ------------------------------------------------------------------------

    def send(self, channel: Channel, message: Message) -> int:
        """Send an internal request to a process; return its number: negative, so it equals none of the caller's."""
        number, payload, segment = next(self._numbers), pack_message(message), channel.segment
        segment.write_request_payload(number, payload)
        HEAD.pack_into(segment.banks[number & 1].view, 0, MESSAGE, 0, 0, 0, 0, number & U32, 0)
        channel.ring(number)
        return number

    def collect_answer(
        self,
        channel: Channel,
        number: int,
        until: float | None,
        limits: Sequence[float] = (),
        progress: RecoveryProgress | None = None,
    ) -> Any:
        """Wait for the answer to an internal request, and return it.

        Args:
            channel: To the process.
            number: Of the request.
            until: When to give up, by ``time.monotonic()``; ``None``: never.
            limits: The seconds that an env may take in each request of a replay, by what ``REPLAYING`` says (0: in the
                calls before the first).
            progress: Of the recovery that it belongs to, for the log.

        Raises:
            Gone: The process was lost, or did not answer in time and was killed.
            RequestFailedError: The request raised; ``failure`` says what.
        """
        banks, words = channel.segment.banks, channel.segment.words
        until = math.inf if until is None else until
        mark, since = (-1, -1), 0.0
        pause = min(limits, default=math.inf) / _LOOKS  # short enough for every request, whichever comes next
        while True:
            now, before = time.monotonic(), mark
            mark = words[REPLAYING], words[SLOT]  # the env that is being called, and in which request
            if mark != before:
                since = now
            limit = limits[min(mark[0], len(limits) - 1)] if limits else math.inf
            if now >= min(until, since + limit):
                sometimes("a request of our own hangs")
                raise channel.kill(cause="hung", stack=True)
            if self._wait(channel, number, min(until, since + limit, now + pause), progress):
                break
        try:
            payload = channel.segment.read_reply_payload(number)
            value = call_user_code(partial(pickle.loads, payload), Illegible)
        except (EOFError, Illegible) as illegible:
            sometimes("the answer to a request of our own is unreadable")
            raise channel.kill(cause="broken", detail=str(illegible)) from illegible
        if banks[number & 1].view[2] == FAILED:
            raise RequestFailedError(value)
        return value

    def _wait(self, channel: Channel, number: int, limit: float, progress: RecoveryProgress | None) -> bool:
        """Wait for an answer until ``limit``; log what is being done each time that ``progress`` says so."""
        while True:
            nearest = limit if progress is None else min(limit, progress.log_at)
            if channel.wait(number, None if nearest == math.inf else nearest):
                return True
            if progress is None or nearest == limit:
                return False
            sometimes("a recovery that takes long is logged")
            running = channel.segment.words[REPLAYING]
            doing = f"{progress.doing}, {running - 1} are done" if running > 1 else progress.doing
            self._log_doing(progress, doing)

    def _log_doing(self, progress: RecoveryProgress, doing: str) -> None:
        """Log what a recovery is doing; the next time will be when it has taken twice as long."""
        now = time.monotonic()
        progress.log_at = now + (now - progress.began)
        self._log(doing, progress)

    # --- building -----------------------------------------------------------------------------------

    def launch(
        self, build: Build, progress: RecoveryProgress, *, replacement: bool = False, lost: Collection[int] = ()
    ) -> tuple[Channel, int]:
        """Launch a process and send it the request to build the envs; return its channel and that request's number.

        Args:
            build: That request.
            progress: Counts the process.
            replacement: It takes the place of another one.
            lost: Slots whose generators are not restored: they would repeat draws that the caller has seen.
        """
        progress.attempts += 1
        self.restarts += not progress.planned
        channel = self._starting = self._launcher.start()
        if self._closed:
            channel.kill()
            channel.release()
            raise Unrecoverable("it was closed")
        self._write_loss_figures(channel)
        generators = {slot: state for slot, state in build.generators.items() if slot not in lost}
        message = replace(build, replacement=replacement, generators=generators, code=b"")
        return channel, self.send(channel, message)

    def _write_loss_figures(self, channel: Channel) -> None:
        """Write into a new process's segment how many processes were lost, and how often."""
        channel.segment.words[RESTARTS] = self.restarts
        self.write_loss_interval(channel)

    def write_loss_interval(self, channel: Channel) -> None:
        """Write into a process's segment how often processes are lost: so often it takes snapshots."""
        if self.losses.count:
            channel.segment.times[LOSS_SECONDS] = self.losses.mean

    def await_build(
        self, build: Build, channel: Channel, number: int, until: float | None, progress: RecoveryProgress | None = None
    ) -> None:
        """Wait until the envs are built. Raises :class:`RequestFailedError`, ``Gone``, :class:`Unrecoverable`."""
        try:
            description = self.collect_answer(channel, number, until, progress=progress)
        except Gone as gone:
            error = None if gone.__cause__ is None else gone.__cause__.__cause__
            if isinstance(error, AttributeError | ImportError):  # else the reply is torn, or garbage
                raise RequestFailedError(_unreadable(error)) from error
            raise
        if not isinstance(description, Description):  # of a multienv that the env has imported anew
            raise channel.kill(cause="broken", detail=f"it described the envs by a {type(description).__name__}")
        channel.code = description.code
        self._set_description(build, description)
        assert self.codec is not None
        channel.segment.lay_out(self.codec.layout)

    def _set_description(self, build: Build, description: Description) -> None:
        """Set the description of the envs; raise Unrecoverable if their spaces differ from the first time."""
        if description.imports is not None:
            self.on_imports(description.imports)
        if self.description is None:
            self.codec = Codec(description, build.verbatim, build.space, build.autoreset)
            self.description = replace(description, code=b"")
        elif self.description.spaces != description.spaces:
            raise Unrecoverable("env_fn built an env with other spaces than the first time")

    def build_deadline(self, progress: RecoveryProgress | None = None) -> float | None:
        """Return when a process that is launched now must have built its envs."""
        now = time.monotonic()
        limits = [] if self._deadlines.start is None else [now + self._deadlines.start]
        if progress is not None and progress.until is not None:
            limits.append(progress.until)
        if progress is not None and progress.is_optional and self.description is not None:
            # The old envs live: the constructor may wait for a lock that one of them holds, for ever.
            limits.append(now + max(self._policy.replay_limit, _SLOWER * self.description.seconds))
        return min(limits, default=None)

    def mark_owned(self) -> None:
        """Mark the process that was being started as owned by the worker."""
        self._starting = None

    def close(self) -> None:
        """End a recovery that runs in another thread, or in the code that a signal handler has interrupted."""
        self._closed = True
        current = self._starting
        if current is not None:
            current.kill()

    def release(self) -> None:
        """Release the process that was being started when an interruption came; this recoverer is not used any more."""
        current, self._starting = self._starting, None
        if current is not None:
            current.kill()
            current.release()
        self._launcher.close()

    def free(self, token: int) -> None:
        """End the snapshot kept under this token."""
        self._launcher.free(token)

    # --- recoveries ---------------------------------------------------------------------------------

    def new_progress(self, *, planned: bool = False) -> RecoveryProgress:
        """Return the progress of a recovery that starts now, with its deadline."""
        now = time.monotonic()
        progress = RecoveryProgress(now, now + _SILENCE, None, planned)
        self.restart_deadline(progress)
        return progress

    def new_progress_after(self, kind: Hashable, before: RecoveryProgress | None) -> RecoveryProgress:
        """Return the progress of a recovery from a loss, and record its ``kind``; ``None``: of a build."""
        progress, limit = self.new_progress(), self._deadlines.recovery
        if kind is not None:
            self.losses.record(progress, before, kind, math.inf if limit is None else limit)
        return progress

    def restart_deadline(self, progress: RecoveryProgress) -> None:
        """Restart the deadline of a recovery: an interrupted one goes on in a later call, with its whole time."""
        limit = self._deadlines.recovery
        progress.until = None if limit is None else time.monotonic() + limit

    def charge_budget(self, progress: RecoveryProgress, answered: int) -> None:
        """Charge one recovery to the budget, once, and wait for its turn. Raises :class:`BudgetSpentError`."""
        if progress.planned:
            return
        if progress.begins_at is None:
            now = time.monotonic()
            delay = self._budget.charge(now, answered)
            if delay is None:
                sometimes("no restart is left")
                raise BudgetSpentError
            progress.begins_at = now + delay if progress.until is None else min(now + delay, progress.until)
        sometimes("a restart waits for its turn", time.monotonic() < progress.begins_at)
        self._pause(progress.begins_at, progress, "waiting before the next restart (RestartPolicy.backoff)")

    def _pause(self, until: float, progress: RecoveryProgress, doing: str) -> None:
        """Wait; log what for if the recovery takes long. Raises Unrecoverable if the worker is closed."""
        while not self._closed and time.monotonic() < until:
            if time.monotonic() >= progress.log_at:
                self._log_doing(progress, doing)
            interrupts.sleep(_LOOK)  # no event: close() takes no lock, as a signal handler may call it
        if self._closed:
            raise Unrecoverable("it was closed")

    def bring_back(
        self,
        build: Build,
        sources: Sequence[Source],
        progress: RecoveryProgress,
        *,
        lost: Channel | None = None,
        why_no_source: str = UNKNOWN,
        new_slots: Collection[int] = (),
    ) -> Revived:
        """Bring the envs back from the first of these sources that leads to them.

        Args:
            build: What builds the envs.
            sources: Where they may come from, in order.
            progress: Counts what it takes.
            lost: The process that was lost; it is released before another one is built, unless its copy is still to be
                tried: there may be too few descriptors for both.
            why_no_source: The reason to tell if there is no source.
            new_slots: Slots whose envs are new ones and need not match.

        Raises:
            NotBuilt: No process with the envs can be had.
            Unrecoverable: No source leads to the envs.
        """
        assert self.codec is not None
        once = self._policy.replay_limit if progress.is_optional else 0.0
        rules = WayRules(self.codec.slots, progress.tries, once, new_slots, takes_some=lost is not None)
        way = Way(tuple(sources), why_no_source)
        instruction: Try | GiveUp = way.next
        not_built: NotBuilt | None = None
        dead: Channel | None = None  # a woken copy that has died, while the copy of it is tried
        try:
            while isinstance(instruction, Try):
                source = instruction.source
                if lost is not None and not any(isinstance(one, NewestSnapshot) for one in way.sources):
                    lost.kill()
                    lost.release(keep_memory=True)  # it shows what the caller saw last
                    lost = None
                try:
                    channel, event = self._try_source(build, instruction, progress, rules)
                except NotBuilt as error:
                    channel, event, not_built = None, NothingBuilt(str(error)), error.with_traceback(None)
                way, decided = decide_way(way, event, rules)
                progress.snapshot_failure = way.snapshot_failure
                if dead is not None:
                    dead.release()
                    dead = None
                if isinstance(decided, TakeOver):
                    assert channel is not None
                    progress.is_exact = not isinstance(source, Replayed) or not (source.plan.resets or progress.changed)
                    if not isinstance(source, NewEnvs):
                        progress.method = "journal" if isinstance(source, Replayed) else "snapshot"
                    return Revived(channel, source, build, decided.mismatches, progress)
                instruction = decided
                next_source = instruction.source if isinstance(instruction, Try) else None
                if isinstance(next_source, NewestSnapshot) and next_source.of is channel:
                    dead = channel
                elif channel is not None:
                    self._end_process(channel)
        finally:
            if dead is not None:
                dead.release()
        if not_built is not None:
            raise not_built
        raise Unrecoverable(instruction.reason)

    def _try_source(
        self, build: Build, instruction: Try, progress: RecoveryProgress, rules: WayRules
    ) -> tuple[Channel | None, WayEvent]:
        """Try one source; return its process, if there is one, and what came of it. Raises :class:`NotBuilt`."""
        source, until = instruction.source, progress.until
        if until is not None and not instruction.is_last:  # the next one must have time too
            until = (time.monotonic() + until) / 2
        channel = self._process_of(build, source, progress, rules)
        if channel is None:
            return None, Failed()
        try:
            if isinstance(source, Replayed):
                changed = self._changed_code(build, channel, progress)
                if changed:
                    return channel, Failed(changed)
            return channel, CameBack(self._repeat(channel, source, progress, until))
        except Gone as gone:
            late = until is not None and time.monotonic() >= until
            outside = gone.is_from_outside
            copy = self.newest_snapshot_of(channel, gone.fate.snapshot) if isinstance(source, NewestSnapshot) else None
            if isinstance(source, NewEnvs) and not outside:
                self._log_doing(progress, "what was called and set is left out: repeating it has ended a process")
            return channel, Died(gone.replaying, outside, gone.cause == "hung", late, copy)
        except RequestFailedError as failed:
            return channel, Failed(f"the replay raised {failed.failure.type_name}: {failed}")
        except BaseException:
            self._end_process(channel)
            raise

    def _process_of(self, build: Build, source: Source, progress: RecoveryProgress, rules: WayRules) -> Channel | None:
        """Return the process that a source gives; ``None``: it is not there. Raises :class:`NotBuilt`."""
        if isinstance(source, Replayed | NewEnvs):
            missing = source.plan.missing.keys() - set(rules.new_slots) if isinstance(source, Replayed) else ()
            try:
                return self.build_process(build, progress, missing)
            except RequestFailedError as failed:
                # Without its frames, which would keep a segment mapped as long as the caller keeps the error.
                raise NotBuilt(_why_not_built(failed), failed.failure) from failed.with_traceback(None)
        try:
            wake = (
                source.of.wake
                if isinstance(source, NewestSnapshot)
                else partial(self._launcher.wake_kept, source.token)
            )
            channel = self._starting = wake()
        except OSError as error:  # no descriptor is left, or the monitor is gone
            if error.errno is None:  # a signal handler's
                raise
            sometimes("no descriptor is left to wake a snapshot")
            return None
        sometimes("the snapshot of a lost process is gone", channel is None and isinstance(source, NewestSnapshot))
        self.restarts += channel is not None and not progress.planned
        progress.attempts += channel is not None
        return channel

    def _repeat(
        self, channel: Channel, source: Source, progress: RecoveryProgress, until: float | None
    ) -> Mapping[int, str]:
        """Repeat in a process what leads to where the caller stood; return the slots that differ. Raises ``Gone``."""
        assert self.codec is not None
        if isinstance(source, NewEnvs):
            self._repeat_calls(channel, source.calls, progress)
            return {}
        if isinstance(source, Replayed):
            return self._replay(channel, source.plan, progress, until)
        limit = time.monotonic() + _UP_WITHIN
        self._write_loss_figures(channel)
        channel.segment.lay_out(self.codec.layout)
        progress.doing = "waking the snapshot"
        # A woken copy repeats its reply to this request, which it has executed already: the sign that it is up.
        if not self._wait(channel, source.number, limit if until is None else min(limit, until), progress):
            raise channel.kill(cause="hung")
        return self._replay(channel, source.plan, progress, until) if isinstance(source, NewestSnapshot) else {}

    def _repeat_calls(self, channel: Channel, calls: tuple[bytes, ...], progress: RecoveryProgress) -> None:
        """Repeat recorded calls and attributes in new envs."""
        if not calls:
            return
        until, limit = progress.until, self._deadlines.call
        if until is not None:  # one that hangs must leave time for a process without them
            until = (time.monotonic() + until) / 2
        if limit is not None:
            until = min(until or math.inf, time.monotonic() + len(calls) * limit + REPLAY_GRACE)
        progress.doing = f"repeating {counted(len(calls), 'call')} in a new process"
        self.collect_answer(channel, self.send(channel, Replay(b"", calls=calls)), until, progress=progress)

    def _changed_code(self, build: Build, channel: Channel, progress: RecoveryProgress) -> str:
        """Find out whether the envs were built from other code; return why they are not taken, else ``""``."""
        file = changed_file(build.code, channel.code) if channel.code != build.code else ""
        progress.changed = file and f"{file} has changed since the process that is replaced imported it"
        if file:
            sometimes("the code has changed since the lost process imported it")
            self.code.warn_changed(file)
        if not file or self._policy.accept != "exact":
            return ""
        return f"{progress.changed}, and RestartPolicy(accept='exact') takes no replay by other code"

    def newest_snapshot_of(self, channel: Channel, number: int | None) -> NewestSnapshot | None:
        """Return the copy that a lost process has left, as a source; ``None``: there is none that leads on."""
        plan = None if number is None else self._journal.plan_since(number)
        return None if plan is None or number is None else NewestSnapshot(channel, number, plan)

    def build_process(self, build: Build, progress: RecoveryProgress, lost: Collection[int] = ()) -> Channel:
        """Launch a process, wait until its envs are built and return its channel; if it dies before, try again.

        If ``env_fn`` raises, too: its source may be half saved, a package half installed, a port not free yet. The
        pauses grow. Once that was in vain, each later call of the caller's tries once. Each time it first waits until
        no more other workers build than may. ``lost``: see :meth:`launch`.

        Raises:
            RequestFailedError: ``env_fn`` raised until the time was over.
            NotBuilt: Too many processes died, or none can be launched.
            Unrecoverable: The time is over.
        """
        until = progress.began + _BUILDS_WITHIN if progress.until is None else progress.until
        failed: RequestFailedError | None = None
        progress.doing, tries = "building in a new process", 0
        while True:
            tries += 1
            try:
                channel = self._build_in_turn(build, progress, lost)
            except RequestFailedError as error:
                failed = error.with_traceback(None)  # its frames would keep a segment mapped
            except Unrecoverable:
                if failed is None or self._closed:
                    raise
                self._was_given_up = True
                raise failed from None  # it says more than that the time is over
            else:
                self._was_given_up = False
                return channel
            left = until - time.monotonic()
            if progress.is_optional and tries >= POISON_AFTER:
                raise failed
            if left < 2 * _LEAST_PAUSE or self._was_given_up:
                self._was_given_up = True
                raise failed
            sometimes("a build that raises is tried again")
            pause = min(LONGEST_BACKOFF, max(_LEAST_PAUSE, self._policy.backoff) * 2.0 ** min(tries - 1, 60), left / 2)
            progress.doing = f"building again in a new process, because {_why_not_built(failed)}"
            self._pause(time.monotonic() + pause, progress, progress.doing)

    def _build_in_turn(self, build: Build, progress: RecoveryProgress, lost: Collection[int]) -> Channel:
        turns = self.turns
        if turns is None:
            return self._build_until_alive(build, progress, lost)
        while not turns.acquire(self):
            self._check_time(progress)
            doing = "waiting while other workers build their envs (starts_at_once)"
            self._pause(time.monotonic() + _LOOK, progress, doing)
        try:
            return self._build_until_alive(build, progress, lost)
        finally:
            turns.release(self)

    def _build_until_alive(self, build: Build, progress: RecoveryProgress, lost: Collection[int]) -> Channel:
        deaths = Counter[bool]()
        while True:
            self._check_time(progress)
            try:
                channel, number = self.launch(build, progress, replacement=True, lost=lost)
            except NoCapacityError as error:
                raise NotBuilt(str(error)) from error.with_traceback(None)
            try:
                self.await_build(build, channel, number, self.build_deadline(progress), progress)
            except Gone as gone:
                sometimes("a replacement is lost while its envs are built")
                self._end_process(channel)
                hung = gone.cause == "hung"
                deaths[hung] += 1
                if hung and progress.is_optional:
                    raise NotBuilt(
                        "its envs are not built beside the old ones, or too slowly"
                    ) from gone.with_traceback(None)
                if deaths[hung] >= (POISON_AFTER if hung else MOST_LOSSES):
                    why = f"{deaths[hung]} processes ended while being built"
                    raise NotBuilt(why) from gone.with_traceback(None)
            except BaseException:
                self._end_process(channel)
                raise
            else:
                return channel

    def _replay(self, channel: Channel, plan: Plan, progress: RecoveryProgress, until: float | None) -> dict[int, str]:
        assert self.codec is not None
        if not (plan.entries or plan.calls):
            return {}
        self._check_time(progress)
        if progress.is_optional:
            until = min(progress.until or math.inf, time.monotonic() + self._policy.replay_limit)
        message, codec = plan.message, self.codec
        progress.doing = f"replaying {plan.requests} request{'s' * (plan.requests != 1)}"
        limits, number = self._limits_of(plan), self.send(channel, message)
        answered = self.collect_answer(channel, number, until, limits, progress)
        progress.replayed += plan.requests
        starts = {start.slot: start.entry for start in message.starts if start.waits}
        found = differences(plan.entries, answered, codec.layout, verbatim=codec.verbatim, starts=starts)
        for slot in plan.resets:
            if slot in found and is_comparable(found[slot]):
                env = self._env_in(slot)
                spec = None if self.description is None else self.description.spec
                self._journal.memory.record_difference(env if spec is None else f"{spec.id} ({env})", found[slot])
        differ = {slot: f"the replay does not match what was seen: {what}" for slot, what in found.items()}
        return {**differ, **plan.missing}

    def _limits_of(self, plan: Plan) -> list[float]:
        """Return after how many seconds an env hangs in a replay, for each request as ``REPLAYING`` says it."""
        assert self.codec is not None
        end = self.codec.layout.end
        # One that is "auto" ends no replay.
        step, reset, call = (
            limit + REPLAY_GRACE if isinstance(limit, int | float) else math.inf
            for limit in (self._deadlines.step, self._deadlines.reset, self._deadlines.call)
        )
        if step == reset == call == math.inf:
            return []
        limits = [max(step, reset, call * len(plan.calls) if plan.calls else 0.0)]
        for entry in split_entries(plan.entries, end):
            if entry.is_step:
                limits.append(step)
            else:
                limits.append(reset if is_reset(entry.record[0], entry.request_payload) else call)
        return limits

    def _check_time(self, progress: RecoveryProgress) -> None:
        if self._closed:
            raise Unrecoverable("it was closed")
        if progress.until is not None and time.monotonic() >= progress.until:
            sometimes("a recovery passes its deadline")
            raise Unrecoverable(f"recovery took longer than Deadlines.recovery ({self._deadlines.recovery:g} s)")

    def _end_process(self, channel: Channel) -> None:
        channel.kill()
        channel.release()
        self._starting = None
