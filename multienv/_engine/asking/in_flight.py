"""Ask each member again as soon as its answer was taken, at its own pace. Such a round does not end.

``stream.py`` builds ``send()`` and ``recv()`` for envs on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import repeat
from math import inf
from time import monotonic
from types import MappingProxyType
from typing import Any, NamedTuple

from multienv._engine.asking.members import Members, StepOfSome, breaks, is_asked
from multienv._engine.processes.channel import LONGEST_SLEEP
from multienv._engine.processes.watch import Watch
from multienv._engine.recovery import hot_path
from multienv._engine.recovery.hot_path import MISSING, STEPPING_ASYNC
from multienv._engine.threads import Bell, Task

# Seconds after requests were sent until their deadlines are looked at.
_LOOK_EVERY = 0.1
# Seconds between two looks for answers that do not count as time that an env took.
_BRIEF = 0.01


class Requests:
    """Holds the requests of one call to some envs, or to some members. Each env in flight may be in another.

    Args:
        name: What the caller called.
        envs: The envs, or members, that are asked.
        contents: For each of them an action, a message, or, of a reset, :class:`InThread`. To take actions out one by
            one takes as long as to send them, so it is done only if one of them is looked at.
    """

    __slots__ = ("_contents", "_envs", "_places", "name")

    def __init__(self, name: str, envs: Collection[int], contents: Sequence[Any]) -> None:
        self.name, self._envs, self._contents = name, envs, contents
        self._places: dict[int, int] = {}

    def content(self, env: int) -> Any:
        """Return what this env, or member, is asked."""
        return self._contents[self._by_env()[env]]

    def _by_env(self) -> dict[int, int]:
        """Return the place of each env."""
        if not self._places:
            self._places = {env: place for place, env in enumerate(self._envs)}
        return self._places

    def rows(self, envs: Sequence[int]) -> Any:
        """Return the actions of these envs as one array, if they lie in one and follow each other; else ``None``."""
        array, places = getattr(self._contents, "array", None), self._by_env()
        begin = places[envs[0]]
        end = begin + len(envs)
        return array[begin:end] if array is not None and [*map(places.get, envs)] == [*range(begin, end)] else None

    def is_whole_step(self, member: int) -> bool:
        """Tell whether a member is asked to step all of its envs."""
        return self.name == "step" and not isinstance(self.content(member), StepOfSome)


class Result(NamedTuple):
    """Holds the outcome of a request to one env in flight.

    Attributes:
        name: What the caller called.
        answer: Of the supervisor; in a batch a reply with the row of this env alone.
        error: What was raised, or ``None``.
    """

    name: str
    answer: Any
    error: BaseException | None


class ReadyBatch(NamedTuple):
    """Holds the answers to requests, those that one call hands over.

    Attributes:
        envs: These envs, in the order in which they were ready.
        answers: One for each of them, ``None`` if nothing but an error has come; or, of envs that share a worker and
            follow each other here, one with a row for each.
        members: Those that have given these answers, which are still asked; none if the answers were noted.
        resets: Those of the envs that were reset.
        errors: Env → what was raised.
    """

    envs: list[int]
    answers: list[Any]
    members: Collection[int] = ()
    resets: AbstractSet[int] = frozenset()
    errors: Mapping[int, BaseException] = MappingProxyType({})


def results_of(current: InFlight) -> dict[int, Result]:
    """Return the result of each request that is answered, by member."""
    answers, requests, failures = current.answers, current.requests, current.failures
    names = [requests[member].name for member in answers]
    errors = map(failures.get, answers) if failures else repeat(None)
    made = map(partial(tuple.__new__, Result), zip(names, answers.values(), errors, strict=False))
    return dict(zip(answers, made, strict=True))


class InFlight:
    """Holds the requests to members that go at their own pace, and the answers that were not taken yet.

    A call costs hardly more if more supervised members are asked. It goes over all that block.

    :class:`Members` refers to it. It does not refer to them, because a circle would keep envs that nobody closes alive.

    Args:
        bell: Rung by threads, and when the envs are closed.
        pending: The round of a call in two halves, of which the answers are taken one by one; ``None``: there is none.
        nothing: The request there that leaves a member alone.

    Attributes:
        requests: For each member that is asked, where its request is held.
        answers: Member → its answer, ``None`` if it failed. A member whose answer is missing is not in it.
        failures: Member → what it raised.
        untold: Members whose hooks may have to be told something.
        sending: Members that were being asked when that was broken off; ``()``: none.
        is_broken: See :class:`~multienv._engine.asking.members.AnyRound`.
    """

    name, waits, resumed, is_interrupted, is_supervised = "", False, False, False, True

    def __init__(self, bell: Bell, pending: Any, nothing: Any) -> None:
        bell.silence()
        self._bell, self._watch = bell, Watch(bell)
        self._look_at = 0.0  # when to go over all members that are asked: for deadlines, say
        self._heard_at = 0.0  # when slow members were looked for last
        self._look_now: set[int] = set()  # members to go over by the next call: no event may tell of them
        self._slow: set[int] = set()  # members that were asked when all were gone over: their times are noted
        self.requests: dict[int, Requests] = {}
        self.answers: dict[int, Any] = {}
        self.failures: dict[int, BaseException] = {}
        self.untold: set[int] = set()
        self.tasks: dict[int, Task] = {}
        self.endings: dict[int, Any] = {}
        self.sending: Collection[int] = ()
        self.is_broken = False
        if pending is not None:
            self._go_on_with(pending, nothing)

    def _go_on_with(self, pending: Any, nothing: Any) -> None:
        self.failures, self.tasks, self.endings = pending.failures, pending.tasks, pending.endings
        for member, request in enumerate(pending.requests):
            if pending.asks(member, nothing):
                self.requests[member] = Requests(pending.name, [member], [request])
                if not pending.misses(member):
                    self.answers[member] = pending.answers[member]
        for task in self.tasks.values():
            task.notify(self._bell.ring)

    def end(self) -> None:
        """End the round, in which nothing is asked any more."""
        self._watch.end()

    def misses(self, member: int) -> bool:
        """Tell whether a member was asked and its answer is missing."""
        return member in self.requests and member not in self.answers

    def asks(self, member: int, nothing: Any) -> bool:
        """Tell whether a member is asked something."""
        return member in self.requests

    def request(self, member: int) -> tuple[str, Any]:
        """Return what a member is asked: name and content."""
        request = self.requests[member]
        return request.name, request.content(member)

    def forget(self, members: Collection[int]) -> None:
        """Forget the requests of these members, and their answers, which are noted elsewhere. Again does nothing."""
        for held in (self.requests, self.answers, self.failures, self.endings):
            if held:
                for member in members:
                    held.pop(member, None)

    def take_back(self) -> bool:
        """Forget the requests of the members that are being asked."""
        for member in self.sending:
            self.tasks.pop(member, None)
        self.forget(self.sending)
        self.sending = ()
        return False

    def leave_to_thread(self, member: int) -> Callable[[], object]:
        """Note that a thread takes care of a member; return what is called when it has ended."""
        self._watch.remove(member)  # the thread hears it
        return self._bell.ring

    def look_after(self, member: int) -> None:
        """Note that a member has been asked something else."""
        self._look_now.add(member)

    def refusal(self, asked: str) -> str:
        """Return why a member that was asked for ``asked`` here is not asked elsewhere."""
        return f"its {asked}() is under way; recv() of the envs that it belongs to gives the result."

    # --- asking and taking ------------------------------------------------------------------------

    def send(self, members: Members, requests: Mapping[int, Requests], contents: Sequence[Any] | None = None) -> None:
        """Send requests to members that are not asked. Broken off, none of them was made.

        Args:
            members: The members.
            requests: For each of them, where its request is held.
            contents: If all are steps, their actions once more, in the same order, in the form that is sent fastest.
        """
        try:
            self._send(members, requests, contents)
        except BaseException:
            self.is_broken, self.sending = True, requests
            raise

    def _send(self, members: Members, requests: Mapping[int, Requests], contents: Sequence[Any] | None) -> None:
        plain = list(requests)
        self.requests.update(requests)
        if contents is None or members.blocking:
            steps = [member for member, request in requests.items() if request.is_whole_step(member)]
            plain = [member for member in steps if member not in members.blocking]
            contents = [requests[member].content(member) for member in plain]
            for member in requests.keys() - set(plain):
                if member in members.blocking:
                    members.note(self, member, partial(members.blocking[member], *self.request(member)))
                else:
                    self._look_now.add(member)
                    members.send(self, member)
        watched, done, count = self._watch.watched(plain), 0, len(plain)
        while done < count:
            done = hot_path.ask(
                members.supervisors, plain, done, contents, STEPPING_ASYNC, members.me, MISSING, watched
            )
            if done < count:
                self._look_now.add(plain[done])
                members.send(self, plain[done])
                done += 1
        self._look_at = min(self._look_at, monotonic() + _LOOK_EVERY)
        if self.tasks:
            members.start(self)

    def take(self, members: Members, until: float) -> bool:
        """Take what has come; if nothing has, wait for something.

        Args:
            members: The members.
            until: When to give up, by ``time.monotonic()``. It may return earlier, with nothing taken.

        Returns:
            Whether all that has come is plain answers to steps.
        """
        try:
            return self._take_answered(members, *self._come(members, until))
        except BaseException as error:
            self.is_broken, self._look_at = True, 0.0  # a wake byte may have been read in vain
            self.is_broken = breaks(error)
            raise

    def _come(self, members: Members, until: float) -> tuple[list[int], list[int]]:
        """Return the members that have answered, and those that failed or need attention; wait if there are none."""
        now = monotonic()
        others = members.ended(self) if self.tasks else []
        goes_over_all = now >= self._look_at
        if goes_over_all or self._look_now:
            others += self._overdue(members, now, goes_over_all=goes_over_all)
        answered, ended = self._watch.heard(-inf if others else min(until, self._look_at), looks_for_ends=goes_over_all)
        if self._slow:
            # Else an answer may have lain there while the trainer was elsewhere.
            if self._watch.has_waited or now - self._heard_at < _BRIEF:
                for member in self._slow.intersection(answered):
                    members.supervisors[member].note_time()
            self._slow.difference_update(answered)
            self._heard_at = monotonic()
        return answered, others + ended

    def _overdue(self, members: Members, now: float, *, goes_over_all: bool) -> list[int]:
        """Return the members of which something can be taken; leave those that are overdue to threads."""
        heard, wake = [], now + LONGEST_SLEEP
        for member in list(self.requests if goes_over_all else self._look_now):
            if not self.misses(member) or member in self.tasks or member in members.blocking:
                continue
            supervisor = members.supervisors[member]
            waited = supervisor.waiting() if is_asked(self, supervisor) else None
            if waited is None:
                heard.append(member)
                continue
            self._watch.add([(member, *waited[:2])])
            if waited[0].answered(waited[1]):
                heard.append(member)
            elif now < waited[2]:
                wake = min(wake, waited[2])
                self._slow.add(member)
            else:
                members.begin(self, member, supervisor.resume)
        self._look_now.clear()
        self._look_at = wake if goes_over_all else min(wake, self._look_at)
        return heard

    def _take_answered(self, members: Members, answered: list[int], others: list[int]) -> bool:
        """Take the answers of some members, the plain ones together; return whether all are plain."""
        asked, known, tasks = self.requests, self.answers, self.tasks
        if known or tasks or not asked.keys() >= set(answered):
            answered = [one for one in answered if one in asked and one not in known and one not in tasks]
        if self.endings:  # that is the reset after it, and what it comes to is told of both together
            others += [member for member in answered if member in self.endings]
            answered = [member for member in answered if member not in self.endings]
        # It takes the last one first.
        backwards = answered[::-1]
        if answered and hot_path.take(members.supervisors, backwards, known, STEPPING_ASYNC, members.leaves_ends):
            others += [member for member in answered if member not in known]
        if others:
            self.untold.update(others)
            members.collect(self, dict.fromkeys(others))
        return not others

    def call_hooks(self, members: Members) -> None:
        """Call the hooks with what happened meanwhile to members that have answered."""
        for member in list(self.untold):
            supervisor = members.supervisors[member]
            if supervisor is not None:
                supervisor.reporter.call_hooks()
            self.untold.discard(member)
