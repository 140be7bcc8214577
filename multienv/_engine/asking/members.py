"""Send requests to workers one by one, and collect their answers; in threads where that takes long.

A *member* is a supervised worker, or a function that blocks (an env without two halves). A round holds what members are
asked, and what has come of it: a step of all of them (``fanout.py``), or what is asked of each at its own pace
(``in_flight.py``). A member whose process must be killed or recovered, and a member that blocks, gets a thread of the
executor meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple, Protocol

from multienv._engine import interrupts
from multienv._engine.processes.channel import Channel
from multienv._engine.recovery.hot_path import MISSING
from multienv._engine.recovery.state_machine import RecoveryDue
from multienv._engine.sometimes import sometimes
from multienv._engine.threads import Bell, Pool, Task
from multienv.errors import CallPendingError, ClusterError, MultienvError, SystemLimitError

# (name, request) → answer; called in a thread.
Blocking = Callable[[str, Any], Any]


class Ending(NamedTuple):
    """Holds a step that ended an episode, until what follows it in the same step is answered, too.

    Attributes:
        returned: What the env's step had returned; an error of what follows has it.
        reply: The reply, in a batch; its memory is not that of the bank.
        number: Of the newest request that was answered.
        is_last: What follows is asked for once more; whatever comes of that is shown.
    """

    returned: tuple[Any, ...]
    reply: Any = None
    number: int = 0
    is_last: bool = False


class AutoresetHook(Protocol):
    """Says what a step means besides itself: autoreset. Without one a step is a step.

    Attributes:
        leaves_ends: A request may follow a step that ended an episode.
    """

    leaves_ends: bool

    def first(self, supervisor: Any) -> Any:
        """Return the reset to ask for in place of a step, while no episode runs; ``None``: step all the same."""

    def next(self, supervisor: Any, ended: Ending | None, answer: Any, request: Any) -> tuple[Ending, str, Any] | None:
        """Return the request that follows an answer in the same step; ``None``: none does.

        Args:
            supervisor: Of the member.
            ended: The end of an episode before this answer; ``None``: there was none.
            answer: The answer.
            request: What the member was asked for.

        Returns:
            What is kept of the answer until the next one is there; name and content of the next request.
        """

    def joined(self, ended: Ending | None, answer: Any) -> Any:
        """Return the outcome of a step: of the end of an episode, ``None``: there was none, and the last answer."""


class StepOfSome(NamedTuple):
    """A step of some of the envs of a worker, which leaves the others alone; the batch has actions for all."""

    actions: Any
    touched: tuple[bool, ...]

    def touches(self, slot: int) -> bool:
        """Tell whether the env in a slot is stepped."""
        return self.touched[slot]


@dataclass(slots=True, eq=False)
class Requests:
    """Holds the requests of one call to some envs, or to some members. Each env in flight may be in another.

    Attributes:
        name: What the caller called.
        envs: The envs, or members, that are asked.
        contents: For each of them an action or a message. To take actions out one by one takes as long as to send them,
            so it is done only if one of them is looked at.
    """

    name: str
    envs: Collection[int]
    contents: Sequence[Any]
    _places: dict[int, int] | None = None

    def content(self, env: int) -> Any:
        """Return what this env, or member, is asked."""
        return self.contents[self._by_env()[env]]

    def _by_env(self) -> dict[int, int]:
        """Return the place of each env."""
        if self._places is None:
            self._places = {env: place for place, env in enumerate(self.envs)}
        return self._places

    def rows(self, envs: Sequence[int]) -> Any:
        """Return the actions of these envs as one array, if they lie in one and follow each other; else ``None``."""
        array, places = getattr(self.contents, "array", None), self._by_env()
        begin = places[envs[0]]
        end = begin + len(envs)
        return array[begin:end] if array is not None and [*map(places.get, envs)] == [*range(begin, end)] else None

    def is_whole_step(self, member: int) -> bool:
        """Tell whether a member is asked to step all of its envs."""
        return self.name == "step" and not isinstance(self.content(member), StepOfSome)


@dataclass(slots=True, eq=False)
class Round:
    """Holds what members were asked, and what has come of it so far.

    In the round of a call each member is asked once: a step of all, say. In the round of members *in flight* each is
    asked again as soon as its answer is collected.

    Attributes:
        name: What the caller called; ``""``: the members are in flight.
        requests: For each member that is asked, where its request is held. Members that are left alone are not in it.
        waits: Asked and answered in one call of the caller's; else in two halves, or in flight.
        flight: An ``InFlight``, which sends to members in flight and collects from them; ``None``: of a call.
        resumed: It was broken off, and a later call completes it.
        sending: Members that are being asked; ``()``: all are asked.
        is_broken: An exception of a signal handler has left a call; the next one counts its workers as lost.
        answers: Member → its answer, ``None`` if it failed. A member whose answer is missing is not in it.
        failures: Member → what it raised.
        tasks: Member → the call that a thread makes for it.
        endings: Member → its step that ended an episode, where a request of the autoreset hook follows.
    """

    name: str
    requests: dict[int, Requests]
    waits: bool
    flight: Any = None
    resumed: bool = False
    sending: Collection[int] = ()
    is_broken: bool = False
    answers: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, BaseException] = field(default_factory=dict)
    tasks: dict[int, Task] = field(default_factory=dict)
    endings: dict[int, Ending] = field(default_factory=dict)

    @property
    def is_interrupted(self) -> bool:
        """Tell whether any later call completes this unfinished round: its call, or a wait for it, was interrupted."""
        return self.waits or self.resumed

    def request(self, member: int) -> tuple[str, Any]:
        """Return what a member is asked: name and content."""
        request = self.requests[member]
        return request.name, request.content(member)

    def misses(self, member: int) -> bool:
        """Tell whether a member was asked and its answer is missing."""
        return member in self.requests and member not in self.answers

    def drop(self, members: Collection[int]) -> None:
        """Drop the requests of these members, and what has come of them. Again does nothing."""
        for held in (self.requests, self.answers, self.failures, self.tasks, self.endings):
            if held:
                for member in members:
                    held.pop(member, None)

    def refusal(self, member: int) -> str:
        """Return why a member that is asked here is not asked elsewhere before its answer is collected."""
        asked = self.requests[member].name
        if self.flight is not None:
            return f"its {asked}() is under way; recv() of the envs that it belongs to gives the result."
        if self.waits:
            return f"{asked}() was interrupted elsewhere. Call it again there for its outcome, or reset() there."
        return f"{asked} is pending. Call {asked}_wait() first."


class Members:
    """Sends requests to members one by one, and collects their answers.

    Args:
        owner: The ``FanOut`` that asks them.
        members: Supervisors; or functions ``(name, request) -> answer`` that block.
        autoreset: Makes resets of steps and lets resets follow them.
        threads: Of the executor; ``None``: one for each member.

    Attributes:
        supervisors: Of the members that have one, ``None`` for the others.
        blocking: The functions of the others.
        owner: A weak reference to the ``FanOut``, by which a supervisor knows who has asked it last.
        current_round: What they are asked, until the outcome has been handed to the caller.
        bell: One for all rounds in flight, made with the first, and kept: it is freed in a finalizer, where Python
            swallows what a signal handler raises.
        reporters: Of the supervisors.
        events: What their hooks are to be called with.
        is_alone: There is one member alone: nobody has to wait while a call recovers it.
    """

    def __init__(
        self,
        owner: Any,
        members: Sequence[Any],
        *,
        autoreset: AutoresetHook | None,
        threads: int | None,
    ) -> None:
        self.supervisors: list[Any] = [None if callable(one) else one for one in members]
        self.blocking = {member: one for member, one in enumerate(members) if callable(one)}
        self.leaves_ends = autoreset is not None and autoreset.leaves_ends
        self.is_alone = len(members) == 1 and not self.blocking
        self.current_round: Round | None = None
        self.owner = weakref.ref(owner)
        self._autoreset = autoreset
        self._threads = min(threads or len(members), len(members))
        self._executor: Pool | None = None
        self.bell: Bell | None = None
        self.reporters = [one.reporter for one in self.supervisors if one is not None]
        self.events = [reporter.events for reporter in self.reporters]

    @property
    def pool(self) -> Pool:
        """Return the executor, made when it is first needed."""
        if self._executor is None:
            self._executor = Pool(self._threads, "multienv")
        return self._executor

    def close(self) -> None:
        """Release the executor, whose threads end once they have nothing to do, and wake a thread that waits."""
        bell, self._executor, self.bell = self.bell, None, None
        if bell is not None:
            bell.ring()

    def call_hooks(self) -> None:
        """Call the hooks with what happened meanwhile."""
        for reporter in self.reporters:
            reporter.call_hooks()

    def mark_lost(self, current: Round) -> bool:
        """Mark the workers of a call that was broken off, and whose answers are missing, as lost.

        Returns:
            Whether the call was never made: it was broken off while it sent its requests.
        """
        sending = current.sending
        sometimes("the workers of a call that is sending are lost", bool(sending))
        sometimes("the workers of a call that has sent are lost", not sending)
        for member, supervisor in enumerate(self.supervisors):
            if supervisor is None or supervisor.asked_by is not self.owner or member in current.tasks:
                continue
            if member in sending or (not sending and current.misses(member)):
                supervisor.mark_lost(keeps_request=not sending)
        current.drop(sending)
        current.sending, current.is_broken = (), False
        return bool(sending) and current.flight is None

    def collect(self, current: Round, ready: Collection[int], *, recovers: bool = False) -> None:
        """Collect the answers of these members.

        Args:
            current: The round.
            ready: The members that have answered, or whose process is lost.
            recovers: Recover from a loss here; else a thread does.
        """
        for member in ready:
            if not current.misses(member) or member in current.tasks:
                continue
            supervisor = self.supervisors[member]
            try:
                # If nothing is pending, a thread has collected it, or a call that was broken off then.
                is_pending = is_pending_in(current, supervisor)
                answer = supervisor.collect(None, recovers) if is_pending else supervisor.collect_again()
                if self._autoreset is not None and current.requests[member].name == "step":
                    answer = self._step_outcome(current, member, answer)
                if answer is not MISSING:
                    current.answers[member] = answer
            except RecoveryDue:
                self.start_in_thread(current, member, supervisor.collect_again)
            except SystemLimitError:  # no failure of the env, which stays asked: the next call tries again
                raise
            except MultienvError as error:
                self._record_failure(current, member, error)

    def _step_outcome(self, current: Round, member: int, answer: Any) -> Any:
        """Return the outcome of a step after this answer to it; MISSING if a request follows."""
        autoreset, supervisor, ended = self._autoreset, self.supervisors[member], current.endings.get(member)
        assert autoreset is not None
        following = autoreset.next(supervisor, ended, answer, current.request(member)[1])
        if following is None:
            return autoreset.joined(ended, answer)
        current.endings[member], name, request = following
        is_due = supervisor.maintenance.is_due or supervisor.maintenance.why_recycle
        self._send_or_plan(current, member, name, request, in_thread=is_due)
        self.start_threads(current)
        return MISSING

    def _send_or_plan(self, current: Round, member: int, name: str, request: Any, *, in_thread: Any) -> None:
        """Send a request; plan a thread for it if the process is to be replaced first, which takes long."""
        supervisor, waits = self.supervisors[member], current.waits
        if not in_thread:
            _send(supervisor, name, request, waits)
            return

        def send_and_wait() -> None:  # does not refer to the round, which has it: their circle would keep a Bell open
            _send(supervisor, name, request, waits)
            supervisor.collect_again()  # the supervisor keeps the answer

        self.plan_thread(current, member, send_and_wait)

    def send(self, current: Round, member: int) -> None:
        """Send a supervisor's request, or the reset that takes its place."""
        supervisor, (name, request) = self.supervisors[member], current.request(member)
        if supervisor.asked_by is not self.owner and not self._claim(current, member):
            return
        try:
            message = None
            if name == "step" and self._autoreset is not None:
                message = self._autoreset.first(supervisor)
            if message is not None:
                name, request = "reset", message
            maintenance = supervisor.maintenance
            is_due = maintenance.is_due or (name == "reset" and maintenance.why_recycle)
            self._send_or_plan(current, member, name, request, in_thread=is_due and not self.is_alone)
        except MultienvError as error:
            self._record_failure(current, member, error)

    def _claim(self, current: Round, member: int) -> bool:
        """Claim a supervisor that another fan-out has asked before: that of an env alone, or of a MultiEnv of it.

        If that one was broken off, the answer which the caller has not got must not be passed over: the member fails.
        A reset of an env alone drops what was broken off of it alone.
        """
        supervisor = self.supervisors[member]
        other = None if supervisor.asked_by is None else supervisor.asked_by()
        # Read without a lock: another thread may just be sending it.
        unfinished = None if other is None else other.members.current_round
        if other is not None and unfinished is not None:
            theirs = other.members.supervisors.index(supervisor)
            if theirs in unfinished.requests:
                name = current.requests[member].name
                if name != "reset" or not unfinished.waits or len(other.members.supervisors) > 1:
                    refusal, asked = unfinished.refusal(theirs), unfinished.requests[theirs].name
                    self._record_failure(current, member, CallPendingError(f"{name}(): {refusal}", asked))
                    return False
                other.complete_unfinished()
        supervisor.asked_by = self.owner
        return True

    def start_in_thread(self, current: Round, member: int, call: Callable[[], Any]) -> None:
        """Start a call for a member in a thread of the executor."""
        self.plan_thread(current, member, call)
        current.tasks[member].start(self.pool)

    def plan_thread(self, current: Round, member: int, call: Callable[[], Any]) -> None:
        """Plan a call that a thread is to make for a member."""
        current.tasks[member] = Task(call, current.flight and current.flight.leave_to_thread(member))

    def poll(
        self, current: Round, members: Iterable[int], now: float
    ) -> tuple[list[int], dict[int, tuple[Channel, int]], float]:
        """Look at members that are asked; leave those that are overdue to threads, side by side.

        Returns:
            Those whose answers can be collected; channel and number of the request of each that has a process and is
            not overdue, whether it has answered or not; and when the next one is overdue.
        """
        ready: list[int] = []
        asked: dict[int, tuple[Channel, int]] = {}
        wake = inf
        for member in members:
            if not current.misses(member) or member in current.tasks or member in self.blocking:
                continue
            supervisor = self.supervisors[member]
            waited = supervisor.wait_target() if is_pending_in(current, supervisor) else None
            if waited is None:
                ready.append(member)
                continue
            channel, number, due = waited
            if channel.answered(number):
                ready.append(member)
            elif now < due:
                wake = min(wake, due)
            else:
                self.start_in_thread(current, member, supervisor.collect_again)
                continue
            asked[member] = channel, number
        return ready, asked, wake

    def start_threads(self, current: Round) -> None:
        """Start the calls that are planned, in threads; again does nothing."""
        for task in list(current.tasks.values()):
            task.start(self.pool)

    def finished_threads(self, current: Round) -> list[int]:
        """Start planned threads, record what came of those that have ended, and return the members of these."""
        ended = []
        self.start_threads(current)
        for member, task in list(current.tasks.items()):
            if task.wait(0):
                self._record_thread(current, member, task)
                ended.append(member)
        return ended

    def _record_thread(self, current: Round, member: int, task: Task) -> None:
        """Record how a thread has ended. What it raised is a failure; a supervisor's answer is collected later.

        An error that is no failure of the env, which stays asked, is raised: no descriptor is left, say.
        """
        supervised, error = member not in self.blocking and member in current.requests, task.error
        is_of_env = isinstance(error, MultienvError) and not isinstance(error, ClusterError | SystemLimitError)
        if error is not None and (is_of_env or not supervised):
            self._record_failure(current, member, error)
        elif not supervised:
            current.answers[member] = task.result
        del current.tasks[member]
        if error is not None and supervised and not is_of_env:
            sometimes("a thread cannot recover the envs now")
            # Others that have met the system's limits are tried again, too: else each later call would raise theirs.
            for other, left in list(current.tasks.items()):
                if left.wait(0) and isinstance(left.error, SystemLimitError):
                    del current.tasks[other]
            raise error

    def _record_failure(self, current: Round, member: int, error: BaseException) -> None:
        if member in current.endings:
            error.returned = current.endings[member].returned  # type: ignore[attr-defined]
        # Without its frames: they would keep arrays over the banks mapped as long as the caller keeps the error.
        current.failures[member] = error.with_traceback(None)
        current.answers[member] = None


def _send(supervisor: Any, name: str, request: Any, waits: bool) -> None:
    if isinstance(request, StepOfSome):
        supervisor.send_step(request.actions, waits, request.touched)
    elif name == "step":
        supervisor.send_step(request, waits)
    else:
        supervisor.send(name, request, waits)


def leaves_broken(error: BaseException) -> bool:
    """Tell whether an exception has left a call half done: it is none of ours, and did not come while it waited."""
    return not isinstance(error, MultienvError) and not interrupts.only_waited(error)


def is_pending_in(current: Round, supervisor: Any) -> bool:
    """Tell whether a request is pending that was asked as this round asks: in one call, or in two halves."""
    request = supervisor.state.request
    return request is not None and request.waits is current.waits
