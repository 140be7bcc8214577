"""Send each member its next request as soon as its answer is collected. Such a round does not end.

``stream.py`` builds ``send()`` and ``recv()`` for envs on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from math import inf
from time import monotonic
from types import MappingProxyType
from typing import Any, NamedTuple

from multienv._engine.asking.members import Members, Requests, Round, leaves_broken
from multienv._engine.processes.channel import LONGEST_SLEEP
from multienv._engine.processes.watch import Watch
from multienv._engine.recovery import hot_path
from multienv._engine.recovery.hot_path import MISSING
from multienv._engine.recovery.state_machine import STEPPING_ASYNC
from multienv._engine.threads import Bell

# Seconds after requests were sent until their deadlines are looked at.
_POLL_AFTER = 0.1
# Seconds between two looks for answers that do not count as time that an env took.
_BRIEF = 0.01


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
    """Holds the answers to requests that one call delivers.

    Attributes:
        envs: These envs, in the order in which they were ready.
        answers: One for each of them, ``None`` if nothing but an error has come; or, of envs that share a worker and
            follow each other here, one with a row for each.
        in_round: The members whose answers these are, if they are still in the round, and not among the ready results:
            then the members are dropped from the round when the answers are delivered.
        resets: Those of the envs that were reset.
        errors: Env → what was raised.
    """

    envs: list[int]
    answers: list[Any]
    in_round: Collection[int] = ()
    resets: AbstractSet[int] = frozenset()
    errors: Mapping[int, BaseException] = MappingProxyType({})


class Sharing:
    """Says which envs a member of the fan-out has, and what it is asked for them. Here each member is one env.

    Args:
        count: Number of envs.

    Attributes:
        count: As given.
        is_shared: Some member has several envs.
    """

    is_shared = False

    def __init__(self, count: int) -> None:
        self.count = count

    def member(self, env: int) -> int:
        """Return the member that has an env."""
        return env

    def next_request(self, member: int, under_way: Mapping[int, Requests]) -> Requests | None:
        """Return the request to a member that is free; ``None`` if there is none."""
        return under_way.get(member)

    def envs(self, member: int, request: Requests) -> Iterable[int]:
        """Return the envs of a member that a request concerns."""
        return (member,)

    def results(self, current: Round) -> dict[int, Result]:
        """Return what came of the requests that are answered, by env; no later request changes it."""
        requests, failures = current.requests, current.failures
        return {
            member: Result(requests[member].name, answer, failures.get(member))
            for member, answer in current.answers.items()
        }

    def ready_batch(self, current: Round) -> ReadyBatch | None:
        """Return all that came, if it can be delivered as it is: plain answers to steps of whole members."""
        members = list(current.answers)
        return ReadyBatch(members, list(current.answers.values()), in_round=members)


class InFlight:
    """Sends requests to members that go at their own pace, and collects the answers of those that have answered.

    A call costs hardly more if more supervised members are asked. It goes over all that block.

    The :class:`Round` of these members refers to it. It refers to neither the round nor :class:`Members`, because a
    circle would keep envs that nobody closes alive.

    Args:
        bell: Rung by threads, and when the envs are closed.

    Attributes:
        hooks_due: Members whose hooks may have to be called.
    """

    def __init__(self, bell: Bell) -> None:
        bell.silence()
        self._bell, self._watch = bell, Watch(bell)
        self._poll_all_at = 0.0  # when to go over all members that are asked: for deadlines, say
        self._heard_at = 0.0  # when slow members were looked for last
        self._poll_now: set[int] = set()  # members to go over by the next call: no event may tell of them
        self._slow: set[int] = set()  # members that were asked when all were polled: their times are recorded
        self.hooks_due: set[int] = set()

    def close(self) -> None:
        """End the round, in which no request is pending any more."""
        self._watch.end()

    def leave_to_thread(self, member: int) -> Callable[[], object]:
        """Leave a member to a thread; return what is called when the thread has ended."""
        self._watch.remove(member)  # the thread hears it
        return self._bell.ring

    # --- sending and collecting -------------------------------------------------------------------

    def send(
        self, members: Members, current: Round, requests: Mapping[int, Requests], contents: Sequence[Any] | None = None
    ) -> None:
        """Send requests to members that are not asked. Broken off, none of them was made.

        Args:
            members: The members.
            current: Their round.
            requests: For each of them, where its request is held.
            contents: If all are steps, their actions once more, in the same order, in the form that is sent fastest.
        """
        try:
            self._send(members, current, requests, contents)
        except BaseException:
            current.is_broken, current.sending = True, requests
            raise

    def _send(
        self, members: Members, current: Round, requests: Mapping[int, Requests], contents: Sequence[Any] | None
    ) -> None:
        plain = list(requests)
        current.requests.update(requests)
        if contents is None or members.blocking:
            steps = [member for member, request in requests.items() if request.is_whole_step(member)]
            plain = [member for member in steps if member not in members.blocking]
            contents = [requests[member].content(member) for member in plain]
            for member in requests.keys() - set(plain):
                if member in members.blocking:
                    members.plan_thread(current, member, partial(members.blocking[member], *current.request(member)))
                else:
                    self._poll_now.add(member)
                    members.send(current, member)
        watched, done, count = self._watch.watched(plain), 0, len(plain)
        while done < count:
            done = hot_path.send_plain(
                members.supervisors, plain, done, contents, STEPPING_ASYNC, members.owner, MISSING, watched
            )
            if done < count:
                self._poll_now.add(plain[done])
                members.send(current, plain[done])
                done += 1
        self._poll_all_at = min(self._poll_all_at, monotonic() + _POLL_AFTER)
        if current.tasks:
            members.start_threads(current)

    def collect(self, members: Members, current: Round, until: float) -> bool:
        """Collect the answers that have come; if none has, wait for something.

        Args:
            members: The members.
            current: Their round.
            until: When to give up, by ``time.monotonic()``. It may return earlier, with nothing collected.

        Returns:
            Whether all that has come is plain answers to steps.
        """
        try:
            return self._collect_answered(members, current, *self._wait_answered(members, current, until))
        except BaseException as error:
            current.is_broken, self._poll_all_at = True, 0.0  # a wake byte may have been read in vain
            current.is_broken = leaves_broken(error)
            raise

    def _wait_answered(self, members: Members, current: Round, until: float) -> tuple[list[int], list[int]]:
        """Return the members that have answered, and those that failed or need attention; wait if there are none."""
        now = monotonic()
        others = members.finished_threads(current) if current.tasks else []
        polls_all = now >= self._poll_all_at
        if polls_all or self._poll_now:
            others += self._poll_members(members, current, now, polls_all=polls_all)
        answered, ended = self._watch.wait_for_answers(
            -inf if others else min(until, self._poll_all_at), looks_for_ends=polls_all
        )
        if self._slow:
            # Else an answer may have lain there while the trainer was elsewhere.
            if self._watch.has_waited or now - self._heard_at < _BRIEF:
                for member in self._slow.intersection(answered):
                    members.supervisors[member].record_time()
            self._slow.difference_update(answered)
            self._heard_at = monotonic()
        return answered, others + ended

    def _poll_members(self, members: Members, current: Round, now: float, *, polls_all: bool) -> list[int]:
        """Return the members whose answers can be collected; leave those that are overdue to threads."""
        ready, asked, wake = members.poll(current, list(current.requests if polls_all else self._poll_now), now)
        self._watch.add((member, *line) for member, line in asked.items())
        self._slow.update(asked.keys() - set(ready))
        self._poll_now.clear()
        wake = min(wake, now + LONGEST_SLEEP)
        self._poll_all_at = wake if polls_all else min(wake, self._poll_all_at)
        return ready

    def _collect_answered(self, members: Members, current: Round, answered: list[int], others: list[int]) -> bool:
        """Collect the answers of some members, the plain ones together; return whether all are plain."""
        asked, known, tasks = current.requests, current.answers, current.tasks
        if known or tasks or not asked.keys() >= set(answered):
            answered = [one for one in answered if one in asked and one not in known and one not in tasks]
        if current.endings:  # the answer is that to the reset after it: both make one outcome
            others += [member for member in answered if member in current.endings]
            answered = [member for member in answered if member not in current.endings]
        supervisors, backwards = members.supervisors, answered[::-1]  # the last one is collected first
        if answered and hot_path.collect_plain(supervisors, backwards, known, STEPPING_ASYNC, members.leaves_ends):
            others += [member for member in answered if member not in known]
        if others:
            self.hooks_due.update(others)
            members.collect(current, dict.fromkeys(others))
            self._poll_now.update(filter(current.misses, others))  # asked for a reset that follows a step, say
        return not others

    def call_hooks(self, members: Members) -> None:
        """Call the hooks with what happened meanwhile to members that have answered."""
        for member in list(self.hooks_due):
            supervisor = members.supervisors[member]
            if supervisor is not None:
                supervisor.reporter.call_hooks()
            self.hooks_due.discard(member)
