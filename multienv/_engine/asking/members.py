"""Ask supervised workers one by one, and take what they answer; in threads where that takes long.

A *member* is a supervised worker, or a function that blocks (an env without two halves). A round holds what members are
asked, and what has come of it: a step of all of them (``fanout.py``), or what is asked of each at its own pace
(``in_flight.py``). A member whose process must be killed or recovered, and a member that blocks, gets a thread of the
executor meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from multienv._engine import interrupts
from multienv._engine.recovery.hot_path import MISSING
from multienv._engine.recovery.state_machine import RecoveryDue
from multienv._engine.sometimes import sometimes
from multienv._engine.threads import Bell, Pool, Task
from multienv.errors import CallPendingError, ClusterError, MultienvError, SystemLimitError

# (name, request) → answer; called in a thread.
Blocking = Callable[[str, Any], Any]


class AutoresetHook(Protocol):
    """Says what a step means besides itself: autoreset. Without one a step is a step.

    Attributes:
        leaves_ends: A request may follow a step that ended an episode.
    """

    leaves_ends: bool

    def first(self, supervisor: Any) -> Any:
        """Return the reset to ask for in place of a step, while no episode runs; ``None``: step all the same."""

    def next(self, supervisor: Any, ended: Any, answer: Any, request: Any) -> tuple[Any, str, Any] | None:
        """Return the request that follows an answer in the same step; ``None``: none does.

        Args:
            supervisor: Of the member.
            ended: What was kept of an answer before this one; ``None``: there was none.
            answer: The answer.
            request: What the member was asked for.

        Returns:
            What is kept of the answer until the next one is there; name and content of the next request.
        """

    def joined(self, ended: Any, answer: Any) -> Any:
        """Return the outcome of a step: of what was kept of an earlier answer, ``None``: nothing, and the last one."""

    def failed(self, ended: Any, error: MultienvError) -> None:
        """Put what was kept of an earlier answer, ``None``: nothing, into the error that a step comes to."""


class StepOfSome(NamedTuple):
    """A step of some of the envs of a worker, which leaves the others alone; the batch has actions for all."""

    actions: Any
    touched: tuple[bool, ...]

    def touches(self, slot: int) -> bool:
        """Tell whether the env in a slot is stepped."""
        return self.touched[slot]


class InThread(NamedTuple):
    """A request that takes a while to send: a thread calls this, which leaves the answer with the supervisor."""

    call: Callable[[], object]


class AnyRound(Protocol):
    """Holds requests to members, and the answers and failures so far.

    Attributes:
        waits: Asked and answered in one call of the caller's; else in two halves.
        answers: Of each member; ``None`` if it failed.
        failures: Member → what it raised.
        tasks: Member → the call that a thread makes for it.
        endings: Member → what the autoreset hook has kept of a step that ended an episode.
        sending: Members that are being asked; ``()``: all are asked.
        is_broken: An exception of a signal handler has left a call; the next one counts its workers as lost.
        is_supervised: It asks supervisors; else it makes calls that block.
    """

    waits: bool
    answers: Any
    failures: dict[int, BaseException]
    tasks: dict[int, Task]
    endings: dict[int, Any]
    sending: Collection[int]
    is_broken: bool

    @property
    def is_supervised(self) -> bool: ...

    def request(self, member: int) -> tuple[str, Any]:
        """Return what a member is asked: name and content."""

    def asks(self, member: int, nothing: Any) -> bool:
        """Tell whether a member is asked something, by whatever ``nothing`` stands for."""

    def misses(self, member: int) -> bool:
        """Tell whether a member was asked and its answer is missing."""

    def take_back(self) -> bool:
        """Forget the requests of the members that are being asked; return whether nothing else is asked."""

    def leave_to_thread(self, member: int) -> Callable[[], object] | None:
        """Note that a thread takes care of a member; return what is called when it has ended."""

    def look_after(self, member: int) -> None:
        """Note that a member has been asked something else."""

    def refusal(self, asked: str) -> str:
        """Return why a member that was asked for ``asked`` here is not asked elsewhere before its answer is taken."""


class Owner(Protocol):
    """Asks members: a :class:`~multienv._engine.asking.fanout.FanOut`."""

    members: Members

    def drop(self) -> None:
        """Complete what was broken off, if there is something; nobody asks for its outcome."""


class Members:
    """Asks members one by one, and takes what they answer.

    Args:
        owner: Who asks them.
        members: Supervisors; or functions ``(name, request) -> answer`` that block.
        autoreset: Makes resets of steps and lets resets follow them.
        threads: Of the executor; ``None``: one for each member.
        name: Of the threads.
        nothing: The request that leaves a member alone.

    Attributes:
        supervisors: Of the members that have one, ``None`` for the others.
        blocking: The functions of the others.
        me: A reference to the owner, by which a supervisor knows who has asked it last.
        asked: What they are asked, until the outcome has been handed to the caller.
        bell: Of all rounds in flight, once there is one: what a handler raises in a finalizer is swallowed.
        reporters: Of the supervisors.
        events: What their hooks are to be called with.
        recovers_here: There is one member alone: nobody has to wait while a call recovers it.
    """

    def __init__(
        self,
        owner: Owner,
        members: Sequence[Any],
        *,
        autoreset: AutoresetHook | None,
        threads: int | None,
        name: str,
        nothing: Any,
    ) -> None:
        self.supervisors: list[Any] = [None if callable(one) else one for one in members]
        self.blocking = {member: one for member, one in enumerate(members) if callable(one)}
        self.nothing = nothing
        self.leaves_ends = autoreset is not None and autoreset.leaves_ends
        self.recovers_here = len(members) == 1 and not self.blocking
        self.asked: Any = None  # AnyRound
        self.me = weakref.ref(owner)
        self._autoreset = autoreset
        self._threads = min(threads or len(members), len(members))
        self._name = name
        self._executor: Pool | None = None
        self.bell: Bell | None = None
        self.reporters = [one.reporter for one in self.supervisors if one is not None]
        self.events = [reporter.events for reporter in self.reporters]

    @property
    def pool(self) -> Pool:
        """Return the executor, made when it is first needed."""
        if self._executor is None:
            self._executor = Pool(self._threads, self._name)
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

    def lose(self, current: AnyRound) -> bool:
        """Count as lost the workers of a call that was broken off, and whose answers are missing.

        Returns:
            Whether the call was never made: it was broken off while it sent its requests.
        """
        sending = current.sending
        sometimes("the workers of a call that is sending are lost", bool(sending))
        sometimes("the workers of a call that has sent are lost", not sending)
        for member, supervisor in enumerate(self.supervisors):
            if supervisor is None or supervisor.asked_by is not self.me or member in current.tasks:
                continue
            if member in sending or (not sending and current.misses(member)):
                supervisor.lose(keeps_request=not sending)
        is_undone = bool(sending) and current.take_back()
        current.is_broken = False
        return is_undone

    def collect(self, current: AnyRound, ready: Collection[int], *, recovers: bool = False) -> None:
        """Take the answers of members of which something can be taken.

        Args:
            current: The round.
            ready: Which of them.
            recovers: Recover from a loss here; else a thread does.
        """
        for member in ready:
            if not current.misses(member) or member in current.tasks:
                continue
            supervisor = self.supervisors[member]
            try:
                # If nothing is pending, a thread has collected it, or a call that was broken off then.
                is_pending = is_asked(current, supervisor)
                answer = supervisor.collect(None, recovers) if is_pending else supervisor.resume()
                if self._autoreset is not None and current.request(member)[0] == "step":
                    answer = self._follow(current, member, answer)
                if answer is not MISSING:
                    current.answers[member] = answer
            except RecoveryDue:
                self.begin(current, member, supervisor.resume)
            except SystemLimitError:  # no failure of the env, which stays asked: the next call tries again
                raise
            except MultienvError as error:
                self._fail(current, member, error)

    def _follow(self, current: AnyRound, member: int, answer: Any) -> Any:
        """Return what a step comes to, given an answer; MISSING if a request follows."""
        autoreset, supervisor, ended = self._autoreset, self.supervisors[member], current.endings.get(member)
        assert autoreset is not None
        following = autoreset.next(supervisor, ended, answer, current.request(member)[1])
        if following is None:
            return autoreset.joined(ended, answer)
        current.endings[member], name, request = following
        if supervisor.maintenance.is_due or supervisor.maintenance.recycling_due:  # building takes a while
            self.begin(current, member, partial(ask_patiently, supervisor, name, request, current.waits))
        else:
            _send(supervisor, name, request, current.waits)
            current.look_after(member)
        return MISSING

    def send(self, current: AnyRound, member: int) -> None:
        """Send a supervisor's request, or the reset that takes its place."""
        supervisor, (name, request) = self.supervisors[member], current.request(member)
        if supervisor.asked_by is not self.me and not self._takes_over(current, member):
            return
        if isinstance(request, InThread):
            self.note(current, member, request.call)
            return
        try:
            message = None
            if name == "step" and self._autoreset is not None:
                message = self._autoreset.first(supervisor)
            if message is not None:
                name, request = "reset", message
            maintenance = supervisor.maintenance
            is_due = maintenance.is_due or (name == "reset" and maintenance.recycling_due)
            if is_due and not self.recovers_here:  # building takes a while
                self.note(current, member, partial(ask_patiently, supervisor, name, request, current.waits))
            else:
                _send(supervisor, name, request, current.waits)
        except MultienvError as error:
            self._fail(current, member, error)

    def _takes_over(self, current: AnyRound, member: int) -> bool:
        """Take over a supervisor that another fan-out has asked before: that of an env alone, or of a MultiEnv of it.

        If that one was broken off, the answer which the caller has not got must not be passed over: the member fails.
        A reset of an env alone drops what was broken off of it alone.
        """
        supervisor = self.supervisors[member]
        other: Owner | None = None if supervisor.asked_by is None else supervisor.asked_by()
        # As it is: another thread may just be sending it.
        unfinished = None if other is None else other.members.asked
        if other is not None and unfinished is not None:
            theirs = other.members.supervisors.index(supervisor)
            if unfinished.asks(theirs, other.members.nothing):
                name = current.request(member)[0]
                if name != "reset" or not unfinished.waits or len(other.members.supervisors) > 1:
                    asked = unfinished.request(theirs)[0]
                    error = CallPendingError(f"{name}(): {unfinished.refusal(asked)}", asked)
                    self._fail(current, member, error)
                    return False
                other.drop()
        supervisor.asked_by = self.me
        return True

    def begin(self, current: AnyRound, member: int, call: Callable[[], Any]) -> None:
        """Begin a call for a member in a thread of the executor."""
        self.note(current, member, call)
        current.tasks[member].start(self.pool)

    def note(self, current: AnyRound, member: int, call: Callable[[], Any]) -> None:
        """Note a call that a thread is to make for a member."""
        current.tasks[member] = Task(call, current.leave_to_thread(member))

    def start(self, current: AnyRound) -> None:
        """Begin the calls that are noted, in threads; again does nothing."""
        for task in list(current.tasks.values()):
            task.start(self.pool)

    def ended(self, current: AnyRound) -> list[int]:
        """Return the members whose thread has ended."""
        ended = []
        self.start(current)
        for member, task in list(current.tasks.items()):
            if task.wait(0):
                self._end(current, member, task)
                ended.append(member)
        return ended

    def _end(self, current: AnyRound, member: int, task: Task) -> None:
        """Note how a thread has ended. What it raised is a failure; what a supervisor answered is taken from it later.

        An error that is no failure of the env, which stays asked, is raised: no descriptor is left, say.
        """
        supervised, error = member not in self.blocking and current.is_supervised, task.error
        is_of_env = isinstance(error, MultienvError) and not isinstance(error, ClusterError | SystemLimitError)
        if error is not None and (is_of_env or not supervised):
            self._fail(current, member, error)
        elif not supervised:
            current.answers[member] = task.result
        del current.tasks[member]
        if error is not None and supervised and not is_of_env:
            sometimes("a thread cannot recover the envs now")
            self._drop_refused(current)
            raise error

    def _drop_refused(self, current: AnyRound) -> None:
        """Drop the threads that have met the system's limits: their members stay asked, and are tried again.

        Else each later call would raise what one of them met before.
        """
        for member, task in list(current.tasks.items()):
            if task.wait(0) and isinstance(task.error, SystemLimitError):
                del current.tasks[member]

    def _fail(self, current: AnyRound, member: int, error: BaseException) -> None:
        if self._autoreset is not None and current.request(member)[0] == "step" and isinstance(error, MultienvError):
            self._autoreset.failed(current.endings.get(member), error)
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


def ask_patiently(supervisor: Any, name: str, request: Any, waits: bool = False) -> None:
    """Send a request and wait for its answer, which the supervisor keeps."""
    _send(supervisor, name, request, waits)
    supervisor.resume()


def breaks(error: BaseException) -> bool:
    """Tell whether an exception has left a call half done: it is none of ours, and did not come while it waited."""
    return not isinstance(error, MultienvError) and not interrupts.only_waited(error)


def is_asked(current: AnyRound, supervisor: Any) -> bool:
    """Tell whether what is pending of a supervisor is the request of this round, or a reset in its place."""
    request = supervisor.state.request
    return request is not None and request.waits is current.waits
