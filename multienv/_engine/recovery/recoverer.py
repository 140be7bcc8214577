"""Recover the envs of a lost process, by one method after the other.

The first method is the forked snapshot of the lost process, in which the later requests are executed again. The others
are replays of the journal in new processes, in which each slot begins at a reset of its own. Each result is compared
with what the caller saw, slot by slot, and the first one in which no slot differs is taken. If there is none, the last
replay is taken with its mismatches, unless all its slots differ (with a single env, that is any mismatch): then the
envs cannot be recovered.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Protocol

from multienv._engine import interrupts
from multienv._engine.processes.channel import Channel, Fate, Gone
from multienv._engine.recovery.code import BatchCode
from multienv._engine.recovery.journal import UNKNOWN, Plan
from multienv._engine.recovery.policy import LONGEST_BACKOFF, RecoveryProgress, RestartBudget
from multienv._engine.recovery.state_machine import LOSSES
from multienv._engine.recovery.turns import Turns
from multienv._engine.recovery.verification import differences, is_comparable
from multienv._engine.sometimes import sometimes
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
from multienv._engine.wire.segment import REPLAYING, RESTARTS, SLOT
from multienv._engine.worker.source_files import changed_file
from multienv.config import Deadlines, RestartPolicy
from multienv.errors import NoCapacityError, ResultNotPicklableError

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
_BUILDING = -2


class Unrecoverable(Exception):  # noqa: N818 - internal
    """Raised when the envs cannot be recovered; the message says why."""


class NotBuilt(Unrecoverable):
    """Raised when no process can be had in which the envs are built."""


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
        ...

    def wake_kept(self, token: int) -> Channel | None:
        """Wake the snapshot kept under this token; ``None`` if it is gone."""
        ...

    def free(self, token: int) -> None:
        """End the snapshot kept under this token."""
        ...

    def close(self) -> None:
        """Note that no process will be launched any more."""
        ...


@dataclass(frozen=True, slots=True)
class RecoveredEnvs:
    """Holds envs that were recovered.

    Attributes:
        channel: Of their process.
        mismatches: Slot → difference, for each slot that is not as the caller saw it.
        plan: The replay that recovered them; ``None``: a snapshot did.
    """

    channel: Channel
    mismatches: dict[int, str]
    plan: Plan | None = None


class Recoverer:
    """Starts the processes of one worker and recovers its envs in them.

    Args:
        launcher: Where processes come from.
        policy, deadlines: The limits.
        tell: Logs what a recovery that takes long is doing.
        strayed: Called with a slot, and the difference, if a replay from a reset differs from what the caller saw.

    Attributes:
        description: Of the envs; known once they were built.
        codec: Encodes actions and decodes replies; known then.
        restarts: Processes started in place of lost ones.
        turns: Bounds how many workers build at the same time; ``None``: nothing does.
        code: What the workers of a batch have in common about their code.
        learn: Called with what a process has imported to build the envs, if it was asked for that.
    """

    def __init__(
        self,
        launcher: Launcher,
        policy: RestartPolicy,
        deadlines: Deadlines,
        tell: Callable[[str, RecoveryProgress], object],
        strayed: Callable[[int, str], object],
    ) -> None:
        self.description: Description | None = None
        self.codec: Codec | None = None
        self.restarts = 0
        self.turns: Turns | None = None
        self.code = BatchCode()
        self.learn: Callable[[Imports], object] = lambda imports: None
        self._launcher = launcher
        self._policy = policy
        self._deadlines = deadlines
        self._tell, self._strayed = tell, strayed
        self._budget = RestartBudget(policy)
        self._numbers = count(-1, -1)
        self._current: Channel | None = None  # being started; the worker does not own it yet
        self._closed = False

    # --- requests of our own ------------------------------------------------------------------------

    def next_number(self) -> int:
        """Return a number for an internal request: negative, so it equals none of the caller's."""
        return next(self._numbers)

    def publish(self, channel: Channel, number: int, payload: bytes) -> None:
        """Publish a request that is not a step; a repeated call does no harm."""
        segment = channel.segment
        segment.write_request_payload(number, payload)
        HEAD.pack_into(segment.banks[number & 1].view, 0, MESSAGE, 0, 0, 0, 0, number & U32, 0)
        channel.ring(number)

    def ask(
        self,
        channel: Channel,
        message: Message,
        until: float | None,
        limits: Sequence[float] = (),
        progress: RecoveryProgress | None = None,
    ) -> Any:
        """Send an internal request to a process and return its answer.

        Args:
            channel: To the process.
            message: The request.
            until: When to give up, by ``time.monotonic()``; ``None``: never.
            limits: The seconds that an env may take in each request of a replay, as ``REPLAYING`` says it.
            progress: Of the recovery that it belongs to, for the log.

        Raises:
            Gone: The process was lost, or did not answer in time and was killed.
            RequestFailedError: The request raised; ``failure`` says what.
        """
        number = self.next_number()
        self.publish(channel, number, pack_message(message))
        return self.answer(channel, number, until, limits, progress)

    def answer(
        self,
        channel: Channel,
        number: int,
        until: float | None,
        limits: Sequence[float] = (),
        progress: RecoveryProgress | None = None,
    ) -> Any:
        """Wait for the answer to an internal request, and return it; see :meth:`ask`."""
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
            self._say(progress, doing)

    def _say(self, progress: RecoveryProgress, doing: str) -> None:
        """Log what a recovery is doing; the next time will be when it has taken twice as long."""
        now = time.monotonic()
        progress.log_at = now + (now - progress.began)
        self._tell(doing, progress)

    # --- building -----------------------------------------------------------------------------------

    def launch(self, build: Build, *, replacement: bool = False, lost: Collection[int] = ()) -> tuple[Channel, int]:
        """Launch a process and ask it to build the envs; return its channel and the number of that request.

        Args:
            build: That request.
            replacement: It takes the place of a lost one.
            lost: Slots whose generators are not restored: they would repeat draws that the caller has seen.
        """
        channel = self._current = self._launcher.start()
        if self._closed:
            channel.kill()
            channel.release()
            raise Unrecoverable("it was closed")
        channel.segment.words[RESTARTS] = self.restarts
        number = self.next_number()
        generators = {slot: state for slot, state in build.generators.items() if slot not in lost}
        message = replace(build, replacement=replacement, generators=generators, code=b"")
        self.publish(channel, number, pack_message(message))
        return channel, number

    def await_build(
        self, build: Build, channel: Channel, number: int, until: float | None, progress: RecoveryProgress | None = None
    ) -> None:
        """Wait until the envs are built. Raises :class:`RequestFailedError`, ``Gone``, :class:`Unrecoverable`."""
        try:
            description = self.answer(channel, number, until, progress=progress)
        except Gone as gone:
            error = None if gone.__cause__ is None else gone.__cause__.__cause__
            if isinstance(error, AttributeError | ImportError):  # else the reply is torn, or garbage
                raise RequestFailedError(_unreadable(error)) from error
            raise
        if not isinstance(description, Description):  # of a multienv that the env has imported anew
            raise channel.kill(cause="broken", detail=f"it described the envs by a {type(description).__name__}")
        channel.code = description.code
        self._note(build, description)
        assert self.codec is not None
        channel.segment.lay_out(self.codec.layout)

    def _note(self, build: Build, description: Description) -> None:
        """Keep the description of the envs; raise Unrecoverable if their spaces differ from the first time."""
        if description.imports is not None:
            self.learn(description.imports)
        if self.description is None:
            self.codec = Codec(description, build.exact, build.space, build.autoreset)
            self.description = replace(description, code=b"")
        elif self.description.spaces != description.spaces:
            raise Unrecoverable("env_fn built an env with other spaces than the first time")

    def start_deadline(self, progress: RecoveryProgress | None = None) -> float | None:
        """Return when a process that is launched now must have built its envs."""
        limits = [] if self._deadlines.start is None else [time.monotonic() + self._deadlines.start]
        if progress is not None and progress.until is not None:
            limits.append(progress.until)
        return min(limits, default=None)

    def handed_over(self) -> None:
        """Note that the worker now owns the process that was being started."""
        self._current = None

    def close(self) -> None:
        """End a recovery that runs in another thread, or in the code that a signal handler has interrupted."""
        self._closed = True
        current = self._current
        if current is not None:
            current.kill()

    def release(self) -> None:
        """Release the process that was being started when an interruption came; this recoverer is not used any more."""
        current, self._current = self._current, None
        if current is not None:
            current.release()
        self._launcher.close()

    def free(self, token: int) -> None:
        """End the snapshot kept under this token."""
        self._launcher.free(token)

    # --- recoveries ---------------------------------------------------------------------------------

    def begin(self, *, planned: bool = False) -> RecoveryProgress:
        """Return the progress of a recovery that begins now, with its deadline."""
        now = time.monotonic()
        progress = RecoveryProgress(now, now + _SILENCE, None, planned)
        self.arm(progress)
        return progress

    def arm(self, progress: RecoveryProgress) -> None:
        """Restart the deadline of a recovery: an interrupted one goes on in a later call, with its whole time."""
        limit = self._deadlines.recovery
        progress.until = None if limit is None else time.monotonic() + limit

    def admit(self, progress: RecoveryProgress, answered: int) -> None:
        """Charge one recovery to the budget, once, and wait for its turn. Raises :class:`BudgetSpentError`."""
        if progress.planned:
            return
        if progress.begins_at is None:
            now = time.monotonic()
            delay = self._budget.admit(now, answered)
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
                self._say(progress, doing)
            interrupts.sleep(_LOOK)
        if self._closed:
            raise Unrecoverable("it was closed")

    def wake(
        self,
        lost: Channel,
        since: Callable[[int], Plan | None],
        progress: RecoveryProgress,
        fate: Fate,
        tries: int = LOSSES,
    ) -> RecoveredEnvs | None:
        """Recover the envs from the forked snapshot that a lost process left; ``None`` if that fails.

        A woken copy first takes another snapshot. If the copy is killed before it is handed over, or ends by chance in
        a request that it repeats, the other snapshot is woken, up to ``tries`` times in all. It is not woken if the
        same request has ended as many copies as make it poison.
        """
        if tries == LOSSES:
            progress.deaths.clear()  # in a replay before
        plan = None if fate.snapshot is None else since(fate.snapshot)
        if plan is None:
            return None
        assert fate.snapshot is not None
        try:
            channel = self._current = lost.wake()
        except OSError as error:  # no descriptor is left, or the monitor is gone
            if error.errno is None:  # a signal handler's
                raise
            sometimes("no descriptor is left to wake a snapshot")
            return None
        if channel is None:
            sometimes("the snapshot of a lost process is gone")
            return None
        self.restarts += not progress.planned
        try:
            return self._follow(channel, fate.snapshot, plan, progress)
        except Gone as gone:
            progress.setback = self._count_death(progress, gone.replaying, gone)
            if tries == 1 or progress.setback:
                self._let_go(channel)
                return None
            fate = gone.fate
            sometimes("a woken snapshot fails by chance in a request that it repeats", not gone.is_from_outside)
        sometimes("a woken snapshot is killed before it is handed over")
        try:
            return self.wake(channel, since, progress, fate, tries - 1)
        finally:
            channel.release()

    def wake_kept(self, token: int, number: int, progress: RecoveryProgress) -> Channel | None:
        """Wake the snapshot kept under this token; ``None``: it is gone."""
        channel = self._current = self._launcher.wake_kept(token)
        if channel is None:
            return None
        try:
            found = self._follow(channel, number, Plan(b""), progress)
        except Gone:
            self._let_go(channel)
            return None
        return None if found is None else found.channel

    def _follow(self, channel: Channel, number: int, plan: Plan, progress: RecoveryProgress) -> RecoveredEnvs | None:
        """Replay in a woken snapshot what came after it; ``None``: what comes out differs. Raises ``Gone``."""
        assert self.codec is not None
        progress.attempts += 1
        until, limit = progress.until, time.monotonic() + _UP_WITHIN
        if until is not None:  # a copy that does not wake, or hangs in its replay, must leave time for a replay
            until = (time.monotonic() + until) / 2
            limit = min(limit, until)
        try:
            channel.segment.words[RESTARTS] = self.restarts
            channel.segment.lay_out(self.codec.layout)
            progress.doing = "waking the snapshot"
            if not self._wait(channel, number, limit, progress):
                raise channel.kill(cause="hung")
            mismatches = self._replay(channel, plan, progress, until)
        except Gone:
            raise
        except RequestFailedError as failed:
            progress.setback = f"the replay raised {failed.failure.type_name}: {failed}"
            self._let_go(channel)
            return None
        except BaseException:
            self._let_go(channel)
            raise
        if mismatches:
            sometimes("what follows a woken snapshot differs")
            progress.setback = next(iter(mismatches.values()))
            self._let_go(channel)
            return None
        sometimes("a snapshot recovers the envs")
        progress.method = "snapshot"
        return RecoveredEnvs(channel, {})

    def recover_by_replay(
        self,
        build: Build,
        plans: Iterable[Plan],
        progress: RecoveryProgress,
        reason: str = UNKNOWN,
        anew: Collection[int] = (),
    ) -> RecoveredEnvs:
        """Recover the envs in a new process, by the first of these plans on which no slot differs, else by the last.

        Args:
            build: What builds the envs.
            plans: The replays to try, in order.
            progress: Counts what it takes.
            reason: Why there is no plan, if there is none.
            anew: Slots whose envs are new ones and need not match.

        Raises:
            NotBuilt: No process with the envs can be had.
            Unrecoverable: All plans failed: a replay ended its process or raised, or all slots differ.
        """
        assert self.codec is not None
        tried = list(plans)
        for index, plan in enumerate(tried):
            is_last = index == len(tried) - 1
            until = progress.until
            if until is not None and not is_last:  # the next one must have time too
                until = (time.monotonic() + until) / 2
            progress.deaths.clear()
            while True:
                try:
                    channel = self.restart(build, progress, plan.missing.keys() - set(anew))
                except RequestFailedError as failed:
                    # Without its frames, which would keep a segment mapped as long as the caller keeps the error.
                    raise NotBuilt(_why_not_built(failed)) from failed.with_traceback(None)
                self._compare_code(build, channel, progress)
                try:
                    mismatches = self._replay(channel, plan, progress, until)
                except Gone as gone:
                    sometimes("a replay ends its process")
                    self._let_go(channel)
                    reason = self._count_death(progress, gone.replaying, gone, is_last=is_last)
                    if not reason and until is not None and time.monotonic() >= until:
                        reason = "its replay took too long (see Deadlines.recovery)"
                    if reason:
                        break
                    continue
                except RequestFailedError as failed:
                    self._let_go(channel)
                    reason = f"the replay raised {failed.failure.type_name}: {failed}"
                    break
                except BaseException:
                    self._let_go(channel)
                    raise
                if mismatches.keys() <= set(anew) or (is_last and len(mismatches) < self.codec.slots):
                    sometimes("a replay of the journal recovers the envs")
                    sometimes("a replay recovers some envs of a batch and others not", mismatches)
                    progress.method = "journal"
                    return RecoveredEnvs(channel, mismatches, plan)
                sometimes("a replay differs, and another one is tried", not is_last)
                self._let_go(channel)
                reason = next(iter(mismatches.values()))
                break
        raise Unrecoverable(reason)

    def _compare_code(self, build: Build, channel: Channel, progress: RecoveryProgress) -> None:
        """Note whether the envs were built from other code. Raises Unrecoverable if only exact recoveries are taken."""
        file = changed_file(build.code, channel.code)
        progress.changed = file and f"{file} has changed since the process that is replaced imported it"
        if not file:
            return
        sometimes("the code has changed since the lost process imported it")
        self.code.tell(file)
        if self._policy.accept == "exact":
            self._let_go(channel)
            raise Unrecoverable(f"{progress.changed}, and RestartPolicy(accept='exact') takes no replay by other code")

    def restart(self, build: Build, progress: RecoveryProgress, lost: Collection[int] = ()) -> Channel:
        """Launch a process, wait until its envs are built and return its channel; if it dies before, try again.

        If ``env_fn`` raises, too: its source may be half saved, a package half installed, a port not free yet. The
        pauses grow. Each time it first waits until no more other workers build than may. ``lost``: see :meth:`launch`.

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
                return self._restart_in_turn(build, progress, lost)
            except RequestFailedError as error:
                failed = error.with_traceback(None)  # its frames would keep a segment mapped
            except Unrecoverable:
                if failed is None or self._closed:
                    raise
                raise failed from None  # it says more than that the time is over
            left = until - time.monotonic()
            if left < 2 * _LEAST_PAUSE or (progress.is_optional and tries >= self._policy.poison_after):
                raise failed
            sometimes("a build that raises is tried again")
            pause = min(LONGEST_BACKOFF, max(_LEAST_PAUSE, self._policy.backoff) * 2.0 ** min(tries - 1, 60), left / 2)
            progress.doing = f"building again in a new process, because {_why_not_built(failed)}"
            self._pause(time.monotonic() + pause, progress, progress.doing)

    def _restart_in_turn(self, build: Build, progress: RecoveryProgress, lost: Collection[int]) -> Channel:
        turns = self.turns
        if turns is None:
            return self._restart(build, progress, lost)
        while not turns.take(self):
            self._check_time(progress)
            if time.monotonic() >= progress.log_at:
                self._say(progress, "waiting while other workers build their envs (starts_at_once)")
            interrupts.sleep(_LOOK)
        try:
            return self._restart(build, progress, lost)
        finally:
            turns.give_back(self)

    def _restart(self, build: Build, progress: RecoveryProgress, lost: Collection[int]) -> Channel:
        while True:
            self._check_time(progress)
            progress.attempts += 1
            self.restarts += not progress.planned
            try:
                channel, number = self.launch(build, replacement=not progress.planned, lost=lost)
            except NoCapacityError as error:
                raise NotBuilt(str(error)) from error.with_traceback(None)
            try:
                self.await_build(build, channel, number, self.start_deadline(progress), progress)
            except Gone as gone:
                sometimes("a replacement is lost while its envs are built")
                self._let_go(channel)
                reason = self._count_death(progress, _BUILDING, gone)
                if reason:
                    raise NotBuilt(reason) from gone.with_traceback(None)
            except BaseException:
                self._let_go(channel)
                raise
            else:
                return channel

    def begin_anew(
        self, build: Build, progress: RecoveryProgress, calls: tuple[bytes, ...]
    ) -> tuple[Channel, tuple[bytes, ...]]:
        """Launch a process with new envs, and repeat recorded calls and attributes in them.

        Returns:
            The channel, and the calls and attributes that were repeated: none if they end it, or take too long.
        """
        for _ in range(LOSSES):
            try:
                return self._built_anew(build, progress, calls), calls
            except Gone as gone:
                if not gone.is_from_outside:
                    break
                sometimes("the process of new envs is killed from outside while calls are repeated")
        sometimes("a repeated call ends the process of new envs")
        return self._built_anew(build, progress, ()), ()

    def _built_anew(self, build: Build, progress: RecoveryProgress, calls: tuple[bytes, ...]) -> Channel:
        progress.deaths.clear()
        channel = self.restart(build, progress)
        if calls:
            sometimes("calls and attributes set are repeated in new envs")
            until, limit = progress.until, self._deadlines.call
            if until is not None:  # one that hangs must leave time for a process without them
                until = (time.monotonic() + until) / 2
            if limit is not None:
                until = min(until or math.inf, time.monotonic() + len(calls) * limit + REPLAY_GRACE)
            try:
                progress.doing = f"repeating {len(calls)} calls in a new process"
                self.ask(channel, Replay(b"", calls=calls), until, progress=progress)
            except BaseException:
                self._let_go(channel)
                raise
        return channel

    def _replay(self, channel: Channel, plan: Plan, progress: RecoveryProgress, until: float | None) -> dict[int, str]:
        assert self.codec is not None
        if not (plan.entries or plan.calls):
            return {}
        self._check_time(progress)
        if progress.is_optional:
            until = min(progress.until or math.inf, time.monotonic() + self._policy.replay_limit)
        message, codec = plan.message, self.codec
        progress.doing = f"replaying {plan.requests} requests"
        answered = self.ask(channel, message, until, self._limits_of(plan), progress)
        progress.replayed += plan.requests
        starts = {start.slot: start.entry for start in message.starts if start.waits}
        found = differences(plan.entries, answered, codec.layout, exact=codec.exact, starts=starts)
        for slot in plan.resets:
            if slot in found and is_comparable(found[slot]):
                self._strayed(slot, found[slot])
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

    def _count_death(self, progress: RecoveryProgress, request: int, gone: Gone, *, is_last: bool = True) -> str:
        """Count a death; return why this method is given up if too many died at this request, else ``""``.

        If a shorter replay is left to try (not ``is_last``), deaths at all requests count together: an env that crashes
        at random will hardly come to the end of a long one.

        Raises:
            Unrecoverable: It was a replay that is tried once.
        """
        if progress.is_optional and request != _BUILDING:
            hung = f"hung, or took longer than RestartPolicy.replay_limit ({self._policy.replay_limit:g} s)"
            raise Unrecoverable(f"its replay {hung if gone.cause == 'hung' else 'ended the new process'}")
        outside = (request == _BUILDING or gone.fate.code in (None, -9)) and gone.cause != "hung"
        progress.deaths[request, outside] += 1
        deaths = progress.deaths[request, outside]
        if not is_last and not outside:
            deaths = sum(count for (_, was_outside), count in progress.deaths.items() if not was_outside)
        if deaths < (LOSSES if outside else self._policy.poison_after):
            return ""
        what = "while being built" if request == _BUILDING else f"while running request {request + 1} of its replay"
        return f"{deaths} processes ended {'when their replay was over' if request == -1 else what}"

    def _check_time(self, progress: RecoveryProgress) -> None:
        if self._closed:
            raise Unrecoverable("it was closed")
        if progress.until is not None and time.monotonic() >= progress.until:
            sometimes("a recovery passes its deadline")
            raise Unrecoverable(f"recovery took longer than Deadlines.recovery ({self._deadlines.recovery:g} s)")

    def _let_go(self, channel: Channel) -> None:
        channel.kill()
        channel.release()
        self._current = None
