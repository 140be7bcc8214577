"""Ask many workers at once and collect what they answer, with losses healed in threads, across a Ctrl-C.

A *member* is a supervised worker, or a function that blocks (an env without two halves). A *round* is one request to
each of several members: a step of all envs, say. All requests are sent before the first answer is awaited. A member
whose process must be killed or brought back, and a member that blocks, gets a thread of the executor meanwhile. While
one worker is waited for all others are watched, so that such a thread begins when a process ends or is overdue.

:class:`Endless` lets each member go at its own pace: it is asked again whenever it has answered, and answers are taken
as they come. ``stream.py`` has what is made of it. No call there goes over all members, however many there are.

**Ctrl-C.** KeyboardInterrupt is raised only where it does no harm: see ``interrupts.py``. Other signal handlers may
raise anywhere. A round that was broken off before all its requests were published was never made: the next call takes
it back from those that were asked, whose processes count as lost. One that was sent stays ``FanOut.unfinished`` until
its owner has handed the outcome to the caller; an endless round always. The supervisors keep the answers. So
:meth:`FanOut.collect` and :meth:`FanOut.take` wait for what was not answered and take what was not taken; they may be
broken off and called again any number of times.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from threading import get_ident
from time import monotonic
from typing import Any, NamedTuple, Protocol

from multienv import interrupts
from multienv.config import check_seconds
from multienv.cores import AskingOrder
from multienv.errors import CallPendingError, ClosedError, ClusterError, MultienvError, SystemLimitError, WaitTimeout
from multienv.native import native
from multienv.processes.channel import LONGEST_SLEEP, Channel, wait_any
from multienv.processes.watch import Watch
from multienv.recovery import hot_path
from multienv.recovery.hot_path import MISSING, STEPPING, STEPPING_ASYNC
from multienv.recovery.reporter import share_queue
from multienv.recovery.supervisor import RecoveryDue, Supervisor
from multienv.sometimes import sometimes
from multienv.threads import Bell, Pool, Task, idents_of_threads

# An endless round looks after so many seconds which of the requests that were sent meanwhile are overdue.
_LOOK_EVERY = 0.1

# (name, request) → answer; called in a thread.
Blocking = Callable[[str, Any], Any]


def resumed(transition: Any) -> Any:
    """Return the outcome of a step of one env, whose info says that the step was interrupted."""
    *seen, info = transition
    told = info.get("multienv", {}) if isinstance(info, dict) else None
    if not isinstance(told, dict):  # an env of the caller's own, in this process
        return transition
    return (*seen, {**info, "multienv": {**told, "resumed": True}})


class Followup(Protocol):
    """Says what a step means besides itself: autoreset. Without one a step is a step.

    Attributes:
        leaves_ends: A request may follow a step that ended an episode.
    """

    leaves_ends: bool

    def first(self, place: int, supervisor: Supervisor) -> Any:
        """Return the reset to ask for in place of a step, while no episode runs; ``None``: step all the same."""

    def next(self, supervisor: Supervisor, ended: Any, answer: Any, request: Any) -> tuple[Any, str, Any] | None:
        """Return the request that follows an answer in the same step; ``None``: none does.

        Args:
            supervisor: Of the member.
            ended: What was kept of an answer before this one; ``None``: there was none.
            answer: The answer.
            request: What the member was asked for.

        Returns:
            What is kept of the answer until the next one is there; name and content of the next request.
        """

    def joined(self, place: int, ended: Any, answer: Any) -> Any:
        """Return the outcome of a step: of what was kept of an earlier answer, ``None``: nothing, and the last one."""

    def failed(self, place: int, ended: Any, error: MultienvError) -> None:
        """Note that a member failed in a step, or in the reset after it."""


class InThread(NamedTuple):
    """A request that takes a while to send: a thread calls this, which leaves the answer with the supervisor."""

    call: Callable[[], object]


class Noted(NamedTuple):
    """A request in an endless round, where each member may be asked something else.

    Attributes:
        name: What the caller called.
        content: An action, a message, or :class:`InThread`.
    """

    name: str
    content: Any


class Ready(NamedTuple):
    """Holds what has come of a request in an endless round to an env.

    Attributes:
        name: What the caller called.
        answer: Of the supervisor; in a batch a reply with this env alone.
        error: What was raised, or ``None``.
    """

    name: str
    answer: Any
    error: BaseException | None


class Round:
    """Holds one request to several members, and what has come of it so far.

    Args:
        name: What the caller called: ``"step"``, ``"reset"``, …
        requests: One for each member: an action or a message; ``None`` leaves the member alone.
        order: Of the supervisors, in which they are asked.
        waits: Asked and answered in one call of the caller's; else in two halves.
        nothing: The request that leaves a member alone.

    Attributes:
        answers: One for each member; ``None`` for those left alone and those that failed; ``MISSING`` while it lacks.
        failures: Member → what it raised.
        resumed: It was broken off, and a later call completes it.
        sending: Members that are being asked; ``()``: all are asked.
    """

    __slots__ = (
        "answers",
        "ended",
        "failures",
        "name",
        "order",
        "requests",
        "resumed",
        "sending",
        "tasks",
        "waits",
    )

    def __init__(
        self,
        name: str,
        requests: Sequence[Any],
        order: Sequence[int] = (),
        *,
        waits: bool,
        nothing: Any = None,
    ) -> None:
        self.name = name
        self.requests = requests
        self.order = order
        self.waits = waits
        self.resumed = False
        self.sending: Collection[int] = ()
        self.answers: list[Any]
        if native is not None and type(requests) is native.Parts:  # a batch, of which nobody is left alone
            self.answers = [MISSING] * len(requests)
        else:
            self.answers = [None if request is nothing else MISSING for request in requests]
        self.failures: dict[int, BaseException] = {}
        self.tasks: dict[int, Task] = {}
        self.ended: dict[int, Any] = {}  # transitions that ended an episode and are followed by a reset

    @property
    def is_supervised(self) -> bool:
        """Tell whether it asks supervisors; else it makes calls that block: see :meth:`FanOut.call_each`."""
        return bool(self.order)

    def asks(self, place: int, nothing: Any) -> bool:
        """Tell whether a supervisor is asked something, by whatever ``nothing`` stands for."""
        return self.is_supervised and self.requests[place] is not nothing

    @property
    def is_interrupted(self) -> bool:
        """Tell whether any later call completes this unfinished round: its call, or a wait for it, was interrupted."""
        return self.waits or self.resumed

    def lacks(self, place: int) -> bool:
        """Tell whether the answer of a member lacks."""
        return self.answers[place] is MISSING

    def request(self, place: int) -> tuple[str, Any]:
        """Return what a member is asked: name and content."""
        return self.name, self.requests[place]

    def misses_some(self) -> bool:
        """Tell whether an answer lacks. No generator: one swallows an interruption that comes while it is closed."""
        for answer in self.answers:  # noqa: SIM110
            if answer is MISSING:
                return True
        return False


class Endless:
    """Holds what is asked of members that go at their own pace, and what has come of it.

    Attributes:
        requests: Member → its request, for those that are asked.
        answers: Member → what it answered, ``None`` if it failed; for those whose answer has come.
        failures: Member → what it raised.
        sending: Members that are being asked; ``()``: all are asked.
    """

    __slots__ = ("answers", "ended", "failures", "requests", "sending", "tasks")
    name, waits, resumed, is_interrupted, is_supervised = "", False, False, False, True

    def __init__(self) -> None:
        self.requests: dict[int, Noted] = {}
        self.answers: dict[int, Any] = {}
        self.failures: dict[int, BaseException] = {}
        self.tasks: dict[int, Task] = {}
        self.ended: dict[int, Any] = {}
        self.sending: Collection[int] = ()

    def lacks(self, place: int) -> bool:
        """Tell whether a member is asked and its answer lacks."""
        return place in self.requests and place not in self.answers

    def asks(self, place: int, nothing: Any) -> bool:
        """Tell whether a member is asked something."""
        return place in self.requests

    def request(self, place: int) -> tuple[str, Any]:
        """Return what a member is asked: name and content."""
        return self.requests[place]

    def forget(self, places: Iterable[int]) -> None:
        """Forget these members: they are not asked, or what came of it is noted elsewhere. Again does nothing."""
        for place in places:
            self.requests.pop(place, None)
            self.answers.pop(place, None)
            self.failures.pop(place, None)
            self.ended.pop(place, None)


class FanOut:
    """Makes one round at a time, or an endless one.

    An env class calls ``ask(name, requests)``, makes the caller's values of the round, and calls ``finish()`` in the
    last line before it returns or raises them. If it finds ``unfinished`` set when it is called, an earlier call was
    interrupted: ``resume()`` completes that round, ``drop()`` completes it for nobody. The two halves of a call are
    ``send()`` and ``collect(timeout)``. What only blocks goes through ``call_each()``. One whose envs do not move in
    step calls ``begin_endless()``, then ``send_some()`` for requests and ``take()`` for the answers, and ``finish()``.

    Args:
        members: Supervisors; or functions ``(name, request) -> answer`` that block.
        followup: Makes resets of steps and lets resets follow them.
        threads: Of the executor; ``None``: one for each member.
        name: Of the threads.
        skips_none: A request of ``None`` leaves its member alone.

    Attributes:
        supervisors: Of the members that have one, ``None`` for the others.
    """

    def __init__(
        self,
        members: Sequence[Supervisor | Blocking],
        *,
        followup: Followup | None = None,
        threads: int | None = None,
        name: str = "multienv",
        skips_none: bool = True,
    ) -> None:
        self.supervisors: list[Any] = [None if callable(member) else member for member in members]
        self._round: Round | Endless | None = None
        self._owner: dict[str, int] = {}  # "thread": the one that is in a call, or was interrupted in one
        self._blocking = {place: member for place, member in enumerate(members) if callable(member)}
        self._followup = followup
        self._leaves_ends = followup is not None and followup.leaves_ends
        self._threads = min(threads or len(members), len(members))
        self._name = name
        self._executor: Pool | None = None
        self._bell: Bell | None = None  # of all endless rounds: what a handler raises in a finalizer is swallowed
        self._watch: Watch | None = None  # in an endless round
        self._look_at = 0.0  # when to go over all members that are asked: for deadlines, say
        self._look_now: set[int] = set()  # members to go over by the next call: no event may tell of them
        self.nothing = None if skips_none else MISSING
        self._me = weakref.ref(self)
        self._reporters = [one.reporter for one in self.supervisors if one is not None]
        share_queue(self._reporters)
        self._heals_here = len(members) == 1 and not self._blocking  # no other member has to wait meanwhile
        # After multienv.cores.spread(), which says on which core each worker runs.
        self._asking_order = AskingOrder(
            {place: one.core for place, one in enumerate(self.supervisors) if one is not None}
        )

    @property
    def unfinished(self) -> Any:
        """Return the round whose outcome has not been handed to the caller; one that was sent in part is taken back."""
        current = self._round
        if current is not None:
            if current.waits:
                self._claim(current.name)
            if current.sending:
                self._take_back(current)
        return self._round

    def _claim(self, name: str) -> None:
        """Note that this thread makes a call, until :meth:`finish`. Raises CallPendingError if another one does."""
        mine = get_ident()
        if self._owner.setdefault("thread", mine) == mine:  # in C: no other thread comes in between
            return
        if self._owner.get("thread") in idents_of_threads():
            raise CallPendingError(
                f"{name}(): another thread is in a call of these envs, or was interrupted in one. Make one call at a "
                "time, or give each thread envs of its own. Nothing was sent.",
                name,
            )
        self._owner["thread"] = mine  # it was interrupted there, and has ended

    def _is_sent(self, current: Round | Endless, place: int) -> bool:
        """Tell whether nothing is left to do to send a member its request, though an exception came meanwhile.

        A worker has its request once the number of it is published. What comes after that, the byte that wakes it,
        is sent again by each wait. Most interruptions strike there: the worker wakes, and takes the core.
        """
        supervisor = self.supervisors[place]
        if current.request(place)[1] is self.nothing or not current.lacks(place) or place in current.tasks:
            return True
        return supervisor is not None and supervisor.asked_by is self._me and supervisor.is_published()

    def _take_back(self, current: Round | Endless) -> None:
        """Take back the requests of a round that an exception has struck while it was sent, unless all were sent.

        This may be broken off, too.
        """
        if all(self._is_sent(current, place) for place in current.sending):
            sometimes("a round that was broken off is sent as a whole")
            current.sending = ()
            return
        for place in current.sending:
            supervisor = self.supervisors[place]
            if supervisor is not None and supervisor.asked_by is self._me:
                supervisor.take_back()
        if isinstance(current, Round):
            self._round, self._owner = None, {}
            return
        for place in current.sending:
            current.tasks.pop(place, None)
        current.forget(current.sending)
        current.sending = ()

    @property
    def pool(self) -> Pool:
        """Return the executor, made when it is first needed."""
        if self._executor is None:
            self._executor = Pool(self._threads, self._name)
        return self._executor

    def close(self) -> None:
        """Release the executor: its threads end once they have nothing to do. Takes no lock: handlers may call it."""
        bell, self._executor, self._bell, self._watch = self._bell, None, None, None
        if bell is not None:
            bell.ring()  # take() may be waiting

    def ask(self, name: str, requests: Sequence[Any]) -> Round:
        """Send all requests and collect all answers. The round is ``unfinished`` until its owner says otherwise.

        Args:
            name: ``"step"``: the requests are actions; else they are messages.
            requests: One for each member; ``None`` leaves it alone.
        """
        current = self.send(name, requests)
        if (
            name != "step"
            or hot_path.take(self.supervisors, current.order, current.answers, STEPPING, self._leaves_ends)
            or self._blocking
            or current.tasks
        ):
            self._collect(current, inf)
        return current

    def call_each(self, name: str, calls: Sequence[Callable[[], Any] | None]) -> Round:
        """Make blocking calls side by side, one for each member, as a round that survives an interruption, too."""
        self._claim(name)
        current = Round(name, calls, waits=True)
        current.tasks = {place: Task(call) for place, call in enumerate(calls) if call is not None}
        self._round = current
        return self._collect(current, inf)

    def send(self, name: str, requests: Sequence[Any], *, waits: bool = True) -> Round:
        """Send all requests; a member that refuses its own has failed. Does not block.

        Args:
            name: As for :meth:`ask`.
            requests: As for :meth:`ask`.
            waits: ``collect()`` follows in the same call of the caller's.
        """
        # Most often it is free: then this costs no call of a function.
        if waits and self._owner.setdefault("thread", mine := get_ident()) != mine:
            self._claim(name)
        nothing, order, done = self.nothing, self._asking_order.now(), 0
        current = Round(name, requests, order, waits=waits, nothing=nothing)
        if self._blocking:  # begun when all others are asked
            calls = {place: partial(call, name, requests[place]) for place, call in self._blocking.items()}
            current.tasks = {place: Task(call) for place, call in calls.items() if requests[place] is not nothing}
        current.sending, self._round = order, current
        state = STEPPING if waits else STEPPING_ASYNC
        while done < len(order):
            if name == "step":
                done += hot_path.ask(
                    self.supervisors, order[done:] if done else order, requests, state, self._me, nothing
                )
            if done < len(order):
                if requests[order[done]] is not nothing:
                    self._send_one(current, order[done])
                done += 1
        current.sending = ()
        if current.tasks:
            self._start(current)
        return current

    def collect(self, timeout: float | None = None) -> Round:
        """Wait for all answers of the unfinished round.

        Args:
            timeout: Seconds; it may be called again then.

        Raises:
            WaitTimeout: An answer is not there yet.
        """
        check_seconds("timeout", timeout, zero=True)
        current = self._round
        assert isinstance(current, Round)
        self._claim(current.name)
        if timeout is None and current.name == "step" and not current.tasks and not current.ended:
            state = STEPPING if current.waits else STEPPING_ASYNC
            hot_path.take(self.supervisors, current.order, current.answers, state, self._leaves_ends)
        return self._collect(current, inf if timeout is None else monotonic() + timeout)

    def resume(self) -> Round:
        """Complete the round that was broken off."""
        current = self._round
        assert current is not None
        sometimes("a round that was broken off is completed")
        current.resumed = True
        return self.collect()

    def drop(self) -> None:
        """Complete the round that was broken off, if there is one; nobody asks for its outcome."""
        if self.unfinished is not None:
            self.resume()
            self.finish()

    def settle(self, name: str, note: Callable[[Round], None] | None = None) -> None:
        """Finish what an earlier call has left unfinished, before ``name`` is called.

        A call that was interrupted is completed, and its outcome dropped; a step only before a reset: else the caller
        would miss a transition. Of a call in two halves the second must be called first, unless it was interrupted.

        Args:
            name: Of the call that is made now.
            note: Called with the round that is dropped, while it is unfinished.

        Raises:
            CallPendingError: The answer to the earlier call must be taken first.
        """
        current = self.unfinished
        if current is None:
            return
        asked = current.name
        if not current.is_interrupted:
            raise CallPendingError(
                f"Calling `{name}` while waiting for a pending call to `{asked}` to complete. Call {asked}_wait() "
                "first.",
                asked,
            )
        if asked in ("step", "rollout") and not name.startswith("reset"):
            raise CallPendingError(
                f"Calling `{name}` after a {asked} that was interrupted. Call {asked}() to complete it, or reset() to "
                "drop it.",
                asked,
            )
        self.resume()
        if note is not None:
            note(current)
        self.finish()

    def finish(self) -> None:
        """Call the hooks with what happened meanwhile; note in the last line that the outcome is handed over.

        Ctrl-C that came in the call is raised before that, and the next call has the outcome; so is what a hook raises.
        What the caller does between this and its ``return`` must not call anything: what another signal handler raises
        there would lose the outcome.
        """
        if self._reporters and self._reporters[0].queue:
            current, self._round = self._round, None  # for a hook that uses the envs all the same
            try:
                self.call_hooks()
            finally:
                self._round = current
        if interrupts.noted is not None:
            interrupts.raise_noted()
        # Adjacent stores: neither a signal handler nor another thread comes in between.
        self._round, self._owner = None, {}

    def forget(self) -> Any:
        """Return the unfinished round, and be done with it whatever has become of it: the envs are closed."""
        current = self._round
        self._round, self._owner = None, {}
        return current

    def call_hooks(self) -> None:
        """Call the hooks with what happened meanwhile."""
        if self._reporters:
            self._reporters[0].call_all_hooks()

    # --- an endless round ---------------------------------------------------------------------------

    def begin_endless(self) -> Endless:
        """Begin an endless round, or go on with the one that is begun.

        The answers to a call in two halves that is pending are taken in it one by one.
        """
        pending = self.unfinished
        if isinstance(pending, Endless):
            return pending
        bell = self._bell = self._bell or Bell()
        bell.silence()
        current, watch = Endless(), Watch(bell)
        if pending is not None:
            for place, request in enumerate(pending.requests):
                if request is not self.nothing:
                    current.requests[place] = Noted(pending.name, request)
                    if not pending.lacks(place):
                        current.answers[place] = pending.answers[place]
            current.failures, current.tasks, current.ended = pending.failures, pending.tasks, pending.ended
            for task in current.tasks.values():
                task.notify(bell.ring)
        self._watch, self._look_at = watch, 0.0
        self._look_now.clear()
        self._round = current
        return current

    def end_endless(self) -> None:
        """End the endless round, in which nothing is asked any more."""
        watch, self._watch, self._round, self._owner = self._watch, None, None, {}
        if watch is not None:
            watch.end()

    def send_some(self, requests: Mapping[int, Noted], contents: Sequence[Any] | None = None) -> None:
        """Send requests in the endless round, to members that are not asked. Broken off, none of them was made.

        Args:
            requests: Member → its request.
            contents: If all are steps, their actions once more, in the same order, in the form that is sent fastest.
        """
        (current, watch), supervisors = self.endless(), self.supervisors
        current.sending = tuple(requests)
        current.requests.update(requests)
        plain: list[int] = []
        for place, noted in requests.items():
            if place in self._blocking:
                self._note(current, place, partial(self._blocking[place], *noted))
            elif noted.name == "step" and type(noted.content) is not InThread:
                supervisor = supervisors[place]
                if not watch.add(place, supervisor.channel, supervisor.position.number + 1):
                    self._look_now.add(place)
                plain.append(place)
            else:
                self._send_one(current, place)
                self._look_now.add(place)
        asked, done, count = [supervisors[place] for place in plain], 0, len(plain)
        if contents is None or count < len(requests):
            contents = [requests[place].content for place in plain]
        while done < count:
            done += hot_path.ask(asked, range(done, count), contents, STEPPING_ASYNC, self._me)
            if done < count:
                self._send_one(current, plain[done])
                self._look_now.add(plain[done])
                done += 1
        current.sending = ()
        self._look_at = min(self._look_at, monotonic() + _LOOK_EVERY)
        if current.tasks:
            self._start(current)

    def take(self, until: float) -> None:
        """Take what has come in the endless round; if nothing has, wait for something.

        Args:
            until: When to give up, by ``time.monotonic()``. It may return earlier, with nothing taken.
        """
        current, watch = self.endless()
        try:
            self._take_answered(current, self._come(current, watch, until))
        except BaseException:
            self._look_at = 0.0  # a wake byte may have been read in vain
            raise

    def endless(self) -> tuple[Endless, Watch]:
        """Return the endless round, and what watches its members."""
        current, watch = self.unfinished, self._watch
        if not isinstance(current, Endless) or watch is None:  # by another thread, or by a signal handler
            raise ClosedError("The envs were closed in the middle of the call. Make new ones.")
        return current, watch

    def _come(self, current: Endless, watch: Watch, until: float) -> tuple[list[int], list[int]]:
        """Return the members that have answered, and those that something else has come of; wait if there are none."""
        now = monotonic()
        others = self._ended_tasks(current) if current.tasks else []
        goes_over_all = now >= self._look_at
        if goes_over_all or self._look_now:
            others += self._overdue(current, watch, now)
        answered, ended = watch.heard(-inf if others else min(until, self._look_at), looks_for_ends=goes_over_all)
        return answered, others + ended

    def _overdue(self, current: Endless, watch: Watch, now: float) -> list[int]:
        """Return the members of which something can be taken; leave those that are overdue to threads."""
        heard, wake = [], now + LONGEST_SLEEP
        goes_over_all = now >= self._look_at
        for place in list(current.requests if goes_over_all else self._look_now):
            if not current.lacks(place) or place in current.tasks or place in self._blocking:
                continue
            supervisor = self.supervisors[place]
            waited = supervisor.waiting() if _is_asked(current, supervisor) else None
            if waited is None:
                heard.append(place)
                continue
            watch.add(place, *waited[:2])
            if waited[0].answered(waited[1]):
                heard.append(place)
            elif now < waited[2]:
                wake = min(wake, waited[2])
            else:
                self._begin(current, place, supervisor.resume)
        self._look_now.clear()
        self._look_at = wake if goes_over_all else min(wake, self._look_at)
        return heard

    def _take_answered(self, current: Endless, come: tuple[list[int], list[int]]) -> None:
        """Take the answers of some members, the plain ones together."""
        answered, others = come
        answered = [place for place in answered if current.lacks(place) and place not in current.tasks]
        if answered:
            answers: list[Any] = [MISSING] * len(answered)
            supervisors = [self.supervisors[place] for place in answered]
            hot_path.take(supervisors, range(len(answered)), answers, STEPPING_ASYNC, self._leaves_ends)
            for place, answer in zip(answered, answers, strict=True):
                if answer is MISSING:
                    others.append(place)
                else:
                    current.answers[place] = answer
        self._collect_once(current, dict.fromkeys(others))

    # --- how ----------------------------------------------------------------------------------------

    def _collect(self, current: Round, until: float) -> Round:
        """Wait for all answers of a round. Raises WaitTimeout."""
        while current.misses_some():
            is_here = self._heals_here and until == inf and not current.tasks
            places: Collection[int] = current.order if is_here else self._heard(current, until)
            if not places and monotonic() >= until:
                self._owner.clear()  # any thread may wait again
                raise WaitTimeout(f"{current.name}(): an answer is not there yet; nothing is lost, wait again.")
            self._collect_once(current, places, heals=is_here)
        return current

    def _heard(self, current: Round, until: float) -> list[int]:
        """Return the members of which something can be taken; if there are none, wait for something.

        What it returns may be empty. Workers that are overdue, or silent, are left to threads, side by side. All that
        are awaited are watched: one that is lost meanwhile is returned. The answer of the worker which was asked last
        ends the wait, so that the trainer is not woken for each.

        Channels are not held beyond this: a failure that the caller keeps would keep their memory mapped by its frames.
        """
        heard = self._ended_tasks(current)
        awaited: dict[int, tuple[Channel, int]] = {}
        now, wake = monotonic(), until
        for place in reversed(current.order):
            if not current.lacks(place) or place in current.tasks:
                continue
            supervisor = self.supervisors[place]
            waited = supervisor.waiting() if _is_asked(current, supervisor) else None
            if waited is None or waited[0].answered(waited[1]):
                heard.append(place)
            elif now < waited[2]:
                awaited[place], wake = waited[:2], min(wake, waited[2])
            else:
                self._begin(current, place, supervisor.resume)
        if heard or until <= now:
            return heard
        places, lines = list(awaited), list(awaited.values())
        if lines:
            heard = [places[index] for index in wait_any(lines[:1], wake, watched=lines[1:])]
            for place in heard:
                self.supervisors[place].note_time()
            return heard
        for task in current.tasks.values():
            if not task.wait(None if until == inf else max(0.0, until - monotonic())):
                break
        return []

    def _collect_once(self, current: Round | Endless, places: Collection[int], *, heals: bool = False) -> None:
        """Take the answers of these supervisors, of which something can be taken.

        Args:
            current: The round.
            places: Of the supervisors.
            heals: Bring back a lost process here; else a thread does.
        """
        for place in places:
            if not current.lacks(place) or place in current.tasks:
                continue
            supervisor = self.supervisors[place]
            try:
                # If nothing is pending, a thread has collected it, or a call that was broken off then.
                is_asked = _is_asked(current, supervisor)
                answer = supervisor.collect(None, heals) if is_asked else supervisor.resume()
                if self._followup is not None and current.request(place)[0] == "step":
                    answer = self._follow(current, place, answer)
                if answer is not MISSING:
                    current.answers[place] = answer
            except RecoveryDue:
                self._begin(current, place, supervisor.resume)
            except SystemLimitError:  # no failure of the env, which stays asked: the next call tries again
                raise
            except MultienvError as error:
                self._fail(current, place, error)

    def _follow(self, current: Round | Endless, place: int, answer: Any) -> Any:
        """Return what a step comes to, given an answer; MISSING if a request follows."""
        followup, supervisor, ended = self._followup, self.supervisors[place], current.ended.get(place)
        assert followup is not None
        following = followup.next(supervisor, ended, answer, current.request(place)[1])
        if following is None:
            return followup.joined(place, ended, answer)
        current.ended[place], name, request = following
        if supervisor.maintenance.is_due or supervisor.maintenance.recycling_due:  # building takes a while
            self._begin(current, place, partial(ask_patiently, supervisor, name, request, current.waits))
        else:
            _send(supervisor, name, request, current.waits)
            self._look_now.add(place)  # of an endless round
        return MISSING

    def _send_one(self, current: Round | Endless, place: int) -> None:
        """Send a supervisor's request, or the reset that takes its place."""
        supervisor, (name, request) = self.supervisors[place], current.request(place)
        if supervisor.asked_by is not self._me and not self._takes_over(current, place):
            return
        if isinstance(request, InThread):
            self._note(current, place, request.call)
            return
        try:
            message = None
            if name == "step" and self._followup is not None:
                message = self._followup.first(place, supervisor)
            if message is not None:
                name, request = "reset", message
            maintenance = supervisor.maintenance
            is_due = maintenance.is_due or (name == "reset" and maintenance.recycling_due)
            if is_due and not self._heals_here:  # building takes a while
                self._note(current, place, partial(ask_patiently, supervisor, name, request, current.waits))
            else:
                _send(supervisor, name, request, current.waits)
        except MultienvError as error:
            self._fail(current, place, error)

    def _takes_over(self, current: Round | Endless, place: int) -> bool:
        """Take over a supervisor that another fan-out has asked before: that of an env alone, or of a MultiEnv of it.

        If that one was broken off, the answer which the caller has not got must not be passed over: the member fails.
        A reset of an env alone drops what was broken off of it alone.
        """
        supervisor = self.supervisors[place]
        other: FanOut | None = None if supervisor.asked_by is None else supervisor.asked_by()
        unfinished = None if other is None else other._round  # as it is: another thread may just be sending it
        if other is not None and unfinished is not None:
            theirs = other.supervisors.index(supervisor)
            if unfinished.asks(theirs, other.nothing):
                name = current.request(place)[0]
                if name != "reset" or not unfinished.waits or len(other.supervisors) > 1:
                    self._fail(current, place, _unfinished_elsewhere(name, unfinished, theirs))
                    return False
                other.drop()
        supervisor.asked_by = self._me
        return True

    def _begin(self, current: Round | Endless, place: int, call: Callable[[], Any]) -> None:
        """Begin a call for a member in a thread of the executor."""
        self._note(current, place, call)
        current.tasks[place].start(self.pool)

    def _note(self, current: Round | Endless, place: int, call: Callable[[], Any]) -> None:
        """Note a call that a thread is to make for a member."""
        bell = self._bell if isinstance(current, Endless) else None
        if self._watch is not None:
            self._watch.remove(place)  # the thread hears it
        current.tasks[place] = Task(call, None if bell is None else bell.ring)

    def _start(self, current: Round | Endless) -> None:
        """Begin the calls that are noted, in threads; again does nothing."""
        for task in list(current.tasks.values()):
            task.start(self.pool)

    def _ended_tasks(self, current: Round | Endless) -> list[int]:
        """Return the members whose thread has ended."""
        ended = []
        self._start(current)
        for place, task in list(current.tasks.items()):
            if task.wait(0):
                self._end(current, place, task)
                ended.append(place)
        return ended

    def _end(self, current: Round | Endless, place: int, task: Task) -> None:
        """Note how a thread has ended. What it raised is a failure; what a supervisor answered is taken from it later.

        An error that is no failure of the env, which stays asked, is raised: no descriptor is left, say.
        """
        supervised, error = place not in self._blocking and current.is_supervised, task.error
        is_of_env = isinstance(error, MultienvError) and not isinstance(error, ClusterError | SystemLimitError)
        if error is not None and (is_of_env or not supervised):
            self._fail(current, place, error)
        elif not supervised:
            current.answers[place] = task.result
        del current.tasks[place]
        if error is not None and supervised and not is_of_env:
            sometimes("a thread cannot bring the envs back now")
            self._drop_refused(current)
            raise error

    def _drop_refused(self, current: Round | Endless) -> None:
        """Drop the threads that have met the system's limits: their members stay asked, and are tried again.

        Else each later call would raise what one of them met before.
        """
        for place, task in list(current.tasks.items()):
            if task.wait(0) and isinstance(task.error, SystemLimitError):
                del current.tasks[place]

    def _fail(self, current: Round | Endless, place: int, error: BaseException) -> None:
        if self._followup is not None and current.request(place)[0] == "step" and isinstance(error, MultienvError):
            self._followup.failed(place, current.ended.get(place), error)
        # Without its frames: they would keep arrays over the banks mapped as long as the caller keeps the error.
        current.failures[place] = error.with_traceback(None)
        current.answers[place] = None


def _send(supervisor: Supervisor, name: str, request: Any, waits: bool) -> None:
    if name == "step":
        supervisor.send_step(request, waits)
    else:
        supervisor.send(name, request, waits)


def ask_patiently(supervisor: Supervisor, name: str, request: Any, waits: bool = False) -> None:
    """Send a request and wait for its answer, which the supervisor keeps."""
    _send(supervisor, name, request, waits)
    supervisor.resume()


def _is_asked(current: Round | Endless, supervisor: Any) -> bool:
    """Tell whether what is pending of a supervisor is the request of this round, or a reset in its place."""
    request = supervisor.state.request
    return request is not None and request.waits is current.waits


def _unfinished_elsewhere(name: str, unfinished: Round | Endless, place: int) -> CallPendingError:
    """Build the error for a call of an env that another fan-out has asked, and whose answer nobody has got."""
    asked = unfinished.request(place)[0]
    if isinstance(unfinished, Endless):
        text = f"its {asked}() is under way; recv() of the envs that it belongs to gives the result."
    elif unfinished.waits:
        text = f"{asked}() was interrupted elsewhere. Call it again there for its outcome, or reset() there."
    else:
        text = f"{asked} is pending. Call {asked}_wait() first."
    return CallPendingError(f"{name}(): {text}", asked)
