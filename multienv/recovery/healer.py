"""Bring an env back in a new process: launch, build, replay, verify; again if that dies too."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Protocol

from multienv.backends.base import Backend, Gone
from multienv.config import Deadlines, RestartPolicy
from multienv.events import Rung
from multienv.recovery.budget import RestartBudget
from multienv.recovery.journal import Plan
from multienv.recovery.verification import first_difference
from multienv.wire.messages import (
    FAILED,
    REPLY,
    Description,
    Failure,
    Initialize,
    Replay,
    drawn_seeds,
    pack_message,
    unpack_value,
)

# A replay that dies while the env is being built says nothing of the journal: try more often.
_BUILD_ATTEMPTS = 6
_BUILDING = -1
# A snapshot that has not answered by then is given up, seconds; it takes some milliseconds.
UP_WITHIN = 10.0


class Unrecoverable(Exception):  # noqa: N818 - internal
    """The env cannot be brought back exactly; the message says why."""


class BudgetSpent(Exception):  # noqa: N818 - internal
    """No restart is left."""


class BuildFailed(Exception):  # noqa: N818 - internal
    """``env_fn`` raised; ``failure`` says what."""

    def __init__(self, failure: Failure) -> None:
        """Keep the failure."""
        super().__init__(failure.text)
        self.failure = failure


@dataclass(slots=True)
class Effort:
    """What a recovery took so far."""

    began: float
    attempts: int = 0
    replayed: int = 0
    deaths: Counter[int] = field(default_factory=Counter)
    planned: bool = False  # not a restart in place of a lost process
    admitted: bool = False  # by the budget, and not made use of
    rung: Rung = ""
    plan: Plan | None = None  # the one that was held to
    refuted: list[Plan] = field(default_factory=list)  # those that did not show what had been seen


class Launcher(Protocol):
    """Where backends come from."""

    def __call__(self) -> Backend:
        """One whose process has been launched."""
        ...

    def branch(self, token: int, deadline: float | None) -> Backend | None:
        """One whose process is the snapshot kept under this token, if it can be reached."""
        ...

    def free(self, token: int) -> None:
        """Let that snapshot go."""
        ...


class Healer:
    """Starts processes for one env, the first and those that replace it.

    Args:
        launch: Gives a backend whose process has been launched.
        initialize: The request that builds the env.
        wait: Waits so many seconds; true when the env was closed meanwhile.
    """

    def __init__(
        self,
        launch: Launcher,
        initialize: Initialize,
        policy: RestartPolicy,
        deadlines: Deadlines,
        *,
        wait: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
        budget: RestartBudget | None = None,
    ) -> None:
        """Start nothing yet."""
        self.launch = launch
        self.restarts = 0
        self._current: Backend | None = None  # being built or replayed, not yet anybody's
        self._stopped = False
        self.initialize = initialize
        self._policy = policy
        self._deadlines = deadlines
        self._wait = wait
        self._clock = clock
        self._budget = budget or RestartBudget(policy)
        self.description: Description | None = None
        self.compare: Callable[[Plan, Sequence[bytes]], str] = _first_difference

    def request_build(self, backend: Backend, *, again: bool = False, replacement: bool = False) -> None:
        """Ask a process to build the env, ``again`` if it may have been asked already; does not wait."""
        frame = pack_message(0, replace(self.initialize, replacement=replacement))
        if again:
            backend.ask_again(frame)
        else:
            backend.send(frame)

    def collect_build(self, backend: Backend) -> None:
        """Wait until the env is built. Raises :class:`BuildFailed`, ``Gone``."""
        reply = backend.complete(b"", 0)
        value = unpack_value(reply)
        if REPLY.unpack_from(reply)[3] == FAILED:
            raise BuildFailed(value)
        if not isinstance(value, Description):  # of a multienv that the env has imported anew
            backend.kill()
            raise Gone("broken", detail=f"it described the env by a {type(value).__name__}")
        backend.pid = value.pid
        self._compare(value)

    @property
    def seeds(self) -> tuple[int, int, int] | None:
        """Of the generators of each process; see :class:`Initialize`."""
        return self.initialize.seeds

    @seeds.setter
    def seeds(self, seeds: tuple[int, int, int] | None) -> None:
        self.initialize = replace(self.initialize, seeds=seeds)

    def draw_seeds(self) -> None:
        """A new life begins: not with the chances of the last."""
        if self.seeds is not None:
            self.seeds = drawn_seeds()

    def begin(self, *, planned: bool = False) -> Effort:
        """A recovery begins now, or a recycling."""
        return Effort(self._clock(), planned=planned)

    def anew(self, effort: Effort | None) -> Effort:
        """The same, as the env begins a new life: that has time of its own."""
        return Effort(self._clock()) if effort is None else replace(effort, began=self._clock())

    def _admit(self, effort: Effort, progress: int) -> float | None:
        """Wait for the restart's turn; how long it may take. Raises BudgetSpent, Unrecoverable."""
        planned = effort.planned or effort.admitted
        effort.admitted = False
        delay = 0.0 if planned else self._budget.admit(self._clock(), progress)
        if delay is None:
            raise BudgetSpent
        remaining = self._remaining(effort)
        if remaining is not None:
            delay = min(delay, remaining)
        if self._stopped:
            raise Unrecoverable("the env was closed")
        if delay and self._wait(delay):
            raise Unrecoverable("the env was closed")
        return remaining

    def wake(
        self,
        lost: Backend,
        plan: Plan,
        effort: Effort,
        progress: int,
        looks_the_same: Callable[[Backend, bytes], bool],
    ) -> Backend | None:
        """The snapshot of a lost process, after what came since; ``None`` if it cannot be had so."""
        self._admit(effort, progress)
        effort.admitted = True
        backend = lost.wake(self._up_within(effort))
        if backend is None:
            return None
        effort.attempts += 1
        self.restarts += 1
        return self._follow(backend, plan, effort, looks_the_same)

    def branch(self, token: int, effort: Effort, progress: int) -> Backend | None:
        """The snapshot kept under this token; ``None`` if it is gone."""
        self._admit(effort, progress)
        backend = self.launch.branch(token, self._up_within(effort))
        return backend and self._follow(backend, Plan((), (), False), effort, lambda backend, last: True)

    def free(self, token: int) -> None:
        """Let the snapshot go that is kept under this token."""
        self.launch.free(token)

    def _follow(
        self, backend: Backend, plan: Plan, effort: Effort, looks_the_same: Callable[[Backend, bytes], bool]
    ) -> Backend | None:
        self._current = backend
        try:
            self._see_it_awake(backend)
            if self._difference(backend, plan, effort, looks_the_same):
                return None
        except Gone:
            return None
        effort.admitted, effort.rung = False, "snapshot"
        return backend

    def _up_within(self, effort: Effort) -> float:
        """One that does not get up (it has been stopped, say) is not to take the time that the other ways back need."""
        remaining = self._remaining(effort)
        return UP_WITHIN if remaining is None else min(UP_WITHIN, remaining / 2)

    def _see_it_awake(self, backend: Backend) -> None:
        """By the deadline that it was woken with."""
        try:
            self._run(backend, ())
        except BaseException as error:
            if not isinstance(error, Gone):
                backend.kill()
            backend.release()
            raise

    def restart(self, effort: Effort, progress: int) -> Backend:
        """Launch a replacement and build the env in it. Raises Gone, BuildFailed, BudgetSpent, Unrecoverable."""
        remaining = self._admit(effort, progress)
        effort.attempts += 1
        self.restarts += not effort.planned
        try:
            backend = self._current = self.launch()
        except OSError:
            if self._stopped:  # a signal handler has closed what it was to be launched with
                raise Unrecoverable("the env was closed") from None
            raise
        try:
            if self._stopped:
                raise Unrecoverable("the env was closed")
            if remaining is not None and not effort.planned:
                start = self._deadlines.start
                backend.arm(remaining if start is None else min(start, remaining))
            self.request_build(backend, replacement=not effort.planned)
            self.collect_build(backend)
        except BaseException:
            backend.kill()
            backend.release()
            raise
        return backend

    def hand_over(self) -> None:
        """What was being brought up is somebody's now."""
        self._current = None

    def repeat(self, backend: Backend, frames: list[bytes]) -> list[bytes]:
        """Run requests again, whatever comes of them. Their evidence; raises Gone."""
        if not frames:
            return []
        backend.arm(self._deadlines.recovery)
        return self._run(backend, tuple(frames))[0]

    @staticmethod
    def _run(backend: Backend, frames: tuple[bytes, ...]) -> tuple[list[bytes], bytes]:
        """Have it execute requests again: their evidence and the last reply. Raises Gone, also if it cannot do so."""
        backend.send(pack_message(1, Replay(frames)))
        reply = backend.complete(b"", 1)
        value = unpack_value(reply)
        if REPLY.unpack_from(reply)[3] == FAILED:
            backend.kill()
            raise Gone("error", detail=f"it raised {value.type_name}: {value.text}", traceback=value.traceback)
        return value  # type: ignore[no-any-return]

    def stop(self) -> None:
        """The env is being closed: end a recovery that is under way in another thread."""
        self._stopped, current = True, self._current
        if current is not None:
            current.strike()

    def bring_back(
        self, plans: list[Plan], effort: Effort, progress: int, looks_the_same: Callable[[Backend, bytes], bool]
    ) -> Backend:
        """A process that holds the env as it was after the last request of the journal."""
        with closing(self.attempts(plans, effort, progress, looks_the_same)) as attempts:
            return next(attempts)

    def attempts(
        self, plans: list[Plan], effort: Effort, progress: int, looks_the_same: Callable[[Backend, bytes], bool]
    ) -> Generator[Backend, None, None]:
        """One such process after the other, each by another plan: for who is not content with the first.

        Each is the caller's from then on. To be closed: what interrupts a generator that is only dropped is swallowed.
        Raises :class:`Unrecoverable` at the end, :class:`BudgetSpent`.
        """
        reason = "what drove it since its last reset is not all known (see RestartPolicy.journal_limit)"
        for plan in plans:
            effort.deaths.clear()
            while True:
                try:
                    backend = self.restart(effort, progress)
                except Gone as gone:
                    self._count_death(effort, _BUILDING, gone)
                    continue
                except BuildFailed as failed:
                    effort.deaths[_BUILDING] += 1
                    if effort.deaths[_BUILDING] >= self._policy.poison_after:
                        raise Unrecoverable(f"env_fn raised {failed.failure.type_name}: {failed}") from failed
                    continue
                try:
                    reason = self._difference(backend, plan, effort, looks_the_same)
                except Gone as gone:
                    self._count_death(effort, gone.replaying, gone)
                    continue
                if not reason:
                    effort.rung, effort.plan = "state" if plan.from_state else "journal", plan
                    yield backend
                effort.refuted.append(plan)
                break
            begun = " from a state of the env" if plan.from_state else ""
            reason = f"the replay{begun} does not match what was seen: {reason}"
        raise Unrecoverable(reason)

    def _difference(
        self, backend: Backend, plan: Plan, effort: Effort, looks_the_same: Callable[[Backend, bytes], bool]
    ) -> str:
        """Replay, and tell the first difference in words; unless there is none, the process is let go of."""
        try:
            reason, last = self._replay(backend, plan, effort)
            if not reason and looks_the_same(backend, last):
                return ""
        except BaseException as error:
            if not isinstance(error, Gone):
                backend.kill()
            backend.release()
            raise
        backend.kill()
        backend.release()
        return reason or "its last observation differs"

    def _replay(self, backend: Backend, plan: Plan, effort: Effort) -> tuple[str, bytes]:
        """The first difference in words, and the last reply whole where its evidence is not."""
        backend.arm(self._remaining(effort))
        try:
            evidence, last = self._run(backend, plan.frames)
        except Gone as gone:
            if gone.cause != "error":
                raise
            return gone.detail, b""
        effort.replayed += len(plan.frames)
        return self.compare(plan, evidence), last

    def _count_death(self, effort: Effort, place: int, gone: Gone) -> None:
        """Raise when it has died too often at one place."""
        effort.deaths[place] += 1
        allowed = _BUILD_ATTEMPTS if place == _BUILDING else self._policy.poison_after
        if gone.cause == "hung" and place == _BUILDING:
            allowed = self._policy.poison_after
        if effort.deaths[place] >= allowed:
            what = "being built" if place == _BUILDING else f"running request {place + 1} of its replay"
            raise Unrecoverable(f"{effort.deaths[place]} processes died while {what}") from gone

    def _remaining(self, effort: Effort) -> float | None:
        if self._deadlines.recovery is None:
            return None
        remaining = effort.began + self._deadlines.recovery - self._clock()
        if remaining <= 0:
            raise Unrecoverable("recovery took longer than Deadlines.recovery")
        return remaining

    def _compare(self, description: Description) -> None:
        before = self.description
        if before is None:
            self.description = description
        elif (before.observation_space, before.action_space) != (
            description.observation_space,
            description.action_space,
        ):
            raise Unrecoverable("env_fn built an env with other spaces than the first time")


def _first_difference(plan: Plan, replayed: Sequence[bytes]) -> str:
    return first_difference(plan.evidence, replayed)
