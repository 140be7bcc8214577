"""Envs that go at their own pace: each is asked again when the caller pleases, and the first that are ready are taken.

An env is in one of three places. The caller has it; or it has been given a request (``Stream.given``); or what came of
that is ready (``Stream.ready``) until the caller takes it. A worker that is free is asked for all of its envs that have
been given a request, and its others are left alone.

Most often all that has come is plain answers to steps, and the caller gets all of them at once. Then they are not noted
as ready: they stay in the round (``Round.answers``) until they are handed over. This saves a third of the time.

**Ctrl-C.** What is given is noted first, and asked from there; what is ready is noted in one go; the owner hands it
over with the last store before it returns. So an interrupted call has given all or nothing, and has taken all or
nothing. What it had given is asked by the next call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from itertools import islice
from math import inf
from threading import get_ident
from time import monotonic
from typing import Any, NoReturn, Protocol

from multienv._engine import interrupts
from multienv._engine.asking.fanout import FanOut
from multienv._engine.asking.in_flight import InFlight, ReadyBatch, Result, results_of
from multienv._engine.asking.members import Requests, Round
from multienv._engine.threads import Bell
from multienv.config import check_seconds, integer
from multienv.errors import CallPendingError, ClosedError, UsageError, WaitTimeout
from multienv.events import Statistics


class Sharing(Protocol):
    """Says which envs a member of the fan-out has, and what it is asked for them."""

    is_shared: bool
    """Some member has several envs."""
    count: int
    """Number of envs."""

    def member(self, env: int) -> int:
        """Return the member that has an env."""

    def due(self, member: int, given: Mapping[int, Requests]) -> Requests | None:
        """Return the request to a member that is free; ``None`` if there is none."""

    def envs(self, member: int, request: Requests) -> Iterable[int]:
        """Return the envs of a member that a request concerns."""

    def results(self, current: Round) -> dict[int, Result]:
        """Return what came of the requests that are answered, by env; no later request changes it."""

    def ready_batch(self, current: Round) -> ReadyBatch | None:
        """Return all that came, if it can be handed over as it is; it is plain answers to steps of whole members."""


class OneEach:
    """Says that each member is one env.

    Args:
        count: Number of envs.
    """

    is_shared = False

    def __init__(self, count: int) -> None:
        self.count = count

    def member(self, env: int) -> int:
        """Return the env."""
        return env

    def due(self, member: int, given: Mapping[int, Requests]) -> Requests | None:
        """Return what was given."""
        return given.get(member)

    def envs(self, member: int, request: Requests) -> Iterable[int]:
        """Return the env."""
        return (member,)

    def results(self, current: Round) -> dict[int, Result]:
        """Return what came of the requests that are answered."""
        return results_of(current)

    def ready_batch(self, current: Round) -> ReadyBatch:
        """Return all that came."""
        members = list(current.answers)
        return ReadyBatch(members, list(current.answers.values()), members)


class Stream:
    """Gives requests to envs, and holds their results in the order in which they come.

    A call costs hardly more if there are more envs: it goes over those that it is about.

    Args:
        fan: Over the members. A call in two halves that is pending there goes on in here.
        sharing: Which envs share a member.

    Attributes:
        decided: Carries out a change that is decided, see :meth:`give` and :meth:`handing_over`; ``None``: nothing.
            To store it is to decide: the next call carries it out, if an interruption comes before this one has.
        reader: The thread whose ``recv()`` is taking some of what is ready now; 0: none.
        seconds: Waited; that envs were ready, of all together; and that the caller had them, of all together.
    """

    def __init__(self, fan: FanOut, sharing: Sharing) -> None:
        self._fan, self._sharing = fan, sharing
        self.seconds = [0.0, 0.0, 0.0]
        self._counted = monotonic()  # so far
        self.decided: Callable[[Stream], None] | None = None  # no bound method: it would be a circle
        self.reader = 0
        self._is_at_work = False  # carries out what is decided, or asks members
        current = self._begun()
        self._flight = weakref.ref(current.flight)  # it keeps descriptors, and a manager keeps this
        # Env → its request, which is asked, or waits until its worker is free.
        self._given = {
            env: request for member, request in current.requests.items() for env in self._sharing.envs(member, request)
        }
        self._ready: dict[int, Result] = {}  # env → what came of its request, in the order in which it came
        self._due: dict[int, None] = {}  # members that there may be something to ask

    @property
    def given(self) -> Mapping[int, Requests]:
        """Return the requests without a result so far, by env."""
        if self.decided is not None:
            self._carry_out()
        return self._given

    @property
    def ready(self) -> Mapping[int, Result]:
        """Return the results that were not delivered yet, by env, in the order in which they came."""
        self._carry_out()
        return self._ready

    @property
    def is_idle(self) -> bool:
        """Tell whether the caller has all envs."""
        return not self.given and not self._ready

    def give(self, name: str, envs: Collection[int], contents: Sequence[Any]) -> None:
        """Give requests to envs that the caller has: all of them, or none if an interruption comes meanwhile.

        Args:
            name: What the caller called: ``"step"``, ``"reset"``, …
            envs: Those that get one.
            contents: For each of them, in the same order: an action, which the caller must not change any more, or a
                message.
        """
        if self.reader not in (0, get_ident()):
            call = "send" if name == "step" else "reset_async"
            raise CallPendingError(
                f"{call}(): another thread is in recv() of these envs. Make one call at a time. Nothing was sent.",
                "recv",
            )
        if self._is_at_work:
            self._refuse()
        self.count_seconds()
        given = dict.fromkeys(envs, Requests(name, envs, contents))
        are_steps = name == "step" and not (self._due or self._sharing.is_shared)
        self.decided = partial(Stream._note_given, requests=given)
        self._ask(given if are_steps else None, contents)

    def take(self, until: float = -inf) -> None:
        """Note what has come as ready; if nothing has, wait for something, by ``time.monotonic()`` until then."""
        self._ask()
        if not self._note():
            current = self._round()
            current.flight.take(self._fan.members, current, until)
            self._note()

    def first(self, count: int | None, at_most: int | None, timeout: float | None) -> ReadyBatch:
        """Wait until so many envs are ready, and return the results of those that were ready first.

        The results stay here until :meth:`hand_over`.

        Args:
            count: How many; ``None``: all whose result can come.
            at_most: So many of those that are ready by then; ``None``: ``count``.
            timeout: Seconds to wait; ``None``: for ever. Then fewer are returned, unless none is ready.

        Raises:
            UsageError: Fewer results than ``count`` can come.
            WaitTimeout: None is ready in time; nothing is lost.
        """
        most: Any = count if at_most is None else at_most
        if not (type(count) is type(most) is int and 0 < count <= most):
            _check_counts(count, at_most)
        until = inf
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
            until = monotonic() + timeout
        self._ask()
        coming = len(self._ready) + len(self._given)
        wanted = coming if count is None else count
        if not 0 < wanted <= coming:
            if not coming:
                raise UsageError("recv(): no env is under way. Call send() first, or reset_async().")
            raise UsageError(f"recv(): the results of {coming} envs can come. Ask for 1 to {coming} of them.")
        most = wanted if at_most is None else at_most
        if len(self._ready) < most:
            ready = self._take_without_wait(wanted, most)
            if ready is not None:
                return ready
        while len(self._ready) < wanted:
            if monotonic() >= until:
                if self._ready:
                    break
                self.call_hooks()
                raise WaitTimeout("recv(): no env is ready; nothing is lost, call it again.")
            began = monotonic()
            self.take(until)
            self.seconds[0] += monotonic() - began
        envs = list(islice(self._ready, most))
        results = [self._ready[env] for env in envs]
        resets = {env for env, one in zip(envs, results, strict=True) if one.name == "reset"}
        errors = {env: one.error for env, one in zip(envs, results, strict=True) if one.error is not None}
        return ReadyBatch(envs, [one.answer for one in results], (), resets, errors)

    def _take_without_wait(self, wanted: int, most: int) -> ReadyBatch | None:
        """Take what has come, without a wait. Return it if it is plain and all that the caller gets; else note it."""
        current = self._round()
        is_first = not (self._ready or current.answers)
        is_plain = current.flight.take(self._fan.members, current, -inf)
        if is_first and is_plain and current.answers:
            ready = self._sharing.ready_batch(current)
            if ready is not None and wanted <= len(ready.envs) <= most:
                return ready
        self._note()
        return None

    def end(self, name: str) -> None:
        """Give all envs back to the caller, before ``name`` is called: a reset drops what is under way.

        Raises:
            CallPendingError: It is no reset, and envs are under way; or it is called inside of a ``recv()``.
        """
        if name == "reset":
            self.refuse_nested(name)
            self._ask()
            while self._given:
                self.take(inf)
            self._given, self._ready = {}, {}
        self.refuse_busy(name, sorted({*self.given, *self.ready}))
        while self._round().requests:  # a reset has left out all envs of a worker
            self.take(inf)

    def refuse_busy(self, name: str, envs: Iterable[int]) -> None:
        """Raise CallPendingError if some of these envs are under way."""
        given, ready = self.given, self._ready
        if (given or ready) and not (given.keys().isdisjoint(envs) and ready.keys().isdisjoint(envs)):
            busy = [env for env in envs if env in given or env in ready]
            raise CallPendingError(
                f"{name}(): envs {busy} are under way; recv() gives their results first. Nothing was sent.",
                "send",
            )

    def refuse_nested(self, name: str = "recv") -> None:
        """Raise CallPendingError if a ``recv()`` is under way: it would wait for envs that ``name`` takes from it."""
        if self.reader:
            raise CallPendingError(
                f"{name}(): it is called inside of another recv() of these envs, by a signal handler or a thread. "
                "Leave the results to that one.",
                "recv",
            )

    def _refuse(self) -> NoReturn:
        raise CallPendingError(
            "A signal handler, or another thread, calls these envs while another call sends to them. Call when that "
            "one has returned. Nothing was sent.",
            "send",
        )

    def hand_over(self, envs: Collection[int], members: Collection[int] = ()) -> None:
        """Mark these envs as delivered. Must be the last statement before ``return``.

        Ctrl-C that came in the call is raised before. ``members``: see :class:`ReadyBatch`.
        """
        decided = self.handing_over(envs, members)
        if interrupts.noted is not None:
            interrupts.raise_noted()
        self.decided = decided

    def handing_over(self, envs: Collection[int], members: Collection[int] = ()) -> Callable[[Stream], None]:
        """Return the change that marks these envs as delivered; store it in ``decided``."""
        self.count_seconds()
        return partial(Stream._note_handed_over, envs=envs, members=members)

    # --- changes, each of which may be broken off and carried out once more -------------------------

    def _carry_out(self) -> None:
        """Carry out what is decided; again does nothing."""
        if self.decided is not None:
            if self._is_at_work:
                self._refuse()
            self._is_at_work = True
            try:
                self.decided(self)
                self.decided = None
            finally:
                self._is_at_work = False

    def seconds_by_now(self) -> list[float]:
        """Return ``seconds`` with those since they were counted; any thread may call it."""
        waited, ready, idle = self.seconds
        since, count = monotonic() - self._counted, len(self._ready)
        return [waited, ready + since * count, idle + since * (self._sharing.count - count - len(self._given))]

    def call_hooks(self) -> None:
        """Call the hooks with what happened meanwhile to envs that are ready."""
        flight = self._flight()
        if flight is not None and flight.untold:
            self._round().flight.call_hooks(self._fan.members)

    def count_seconds(self) -> None:
        """Count the seconds since the last time, before it is decided that an env changes from one place to another."""
        if self.decided is not None:
            self._carry_out()
        now, ready = monotonic(), len(self._ready)
        seconds, self._counted = now - self._counted, now
        self.seconds[1] += seconds * ready
        self.seconds[2] += seconds * (self._sharing.count - ready - len(self._given))

    def _note_given(self, requests: Mapping[int, Requests]) -> None:
        self._given.update(requests)
        members = map(self._sharing.member, requests) if self._sharing.is_shared else requests
        self._due.update(dict.fromkeys(members))

    def _note_ready(self, members: AbstractSet[int], ready: Mapping[int, Result]) -> None:
        self._ready.update(ready)
        given = self._given
        for env in ready:
            given.pop(env, None)
        self._round().forget(members)
        if self._sharing.is_shared or not members <= ready.keys():
            self._due.update(dict.fromkeys(members))

    def _note_handed_over(self, envs: Collection[int], members: Collection[int]) -> None:
        held: dict[int, Any] = self._given if members else self._ready  # those of members were never noted as ready
        for env in envs:
            held.pop(env, None)
        current = self._fan.members.asked
        if members and current is not None and current.flight is not None:
            current.forget(members)

    # --- members ------------------------------------------------------------------------------------

    def _ask(self, steps: Mapping[int, Requests] | None = None, actions: Sequence[Any] = ()) -> None:
        """Ask the members that are free and for which there is something to ask. Again does nothing.

        Args:
            steps: All that there is to ask, if it is steps of envs that share no member; ``None``: it is to be found.
            actions: Those of the steps once more, in the form that is sent fastest.
        """
        if self._is_at_work:
            self._refuse()
        self._carry_out()
        if not self._due:
            return
        self._is_at_work = True
        try:
            current = self._round()
            asked, due, given = current.requests, self._sharing.due, self._given
            if steps is not None and asked.keys().isdisjoint(steps):  # none is left out by a reset under way
                current.flight.send(self._fan.members, current, steps, actions)
            else:
                requests = {
                    member: request
                    for member in self._due
                    if member not in asked and (request := due(member, given)) is not None
                }
                if requests:
                    current.flight.send(self._fan.members, current, requests)
            self._due.clear()
        finally:
            self._is_at_work = False

    def _note(self) -> bool:
        """Note what has come as ready, and return whether anything has."""
        self._carry_out()
        current = self._round()
        if not current.answers:
            return False
        ready = self._sharing.results(current)
        self.count_seconds()
        self.decided = partial(Stream._note_ready, members=set(current.answers), ready=ready)
        self._carry_out()
        return True

    def _round(self) -> Round:
        current = self._fan.unfinished
        if current is None or current.flight is None or current.flight is not self._flight():
            if self._fan.members.bell is None:
                raise ClosedError("The envs were closed in the middle of the call. Make new ones.")
            raise CallPendingError(
                "A signal handler, or another thread, has called all of these envs in the middle of this call. Nothing "
                "was sent.",
                "send",
            )
        return current

    def _begun(self) -> Round:
        """Return the round in flight; it goes on with a call in two halves that is pending."""
        members, current = self._fan.members, self._fan.unfinished or Round("", {}, waits=False)
        if current.flight is None:
            members.bell = members.bell or Bell()
            for task in current.tasks.values():
                task.notify(members.bell.ring)
            current = members.asked = replace(current, name="", flight=InFlight(members.bell))
        return current


def _check_counts(count: Any, at_most: Any) -> None:
    for name, given in (("k", count), ("at_most", at_most)):
        number = integer(given)
        if given is not None and (number is None or number < 1):
            raise UsageError(f"recv(): {name} is {given!r:.100}; give an integer of at least 1, or None.")
    if count is not None and at_most is not None and at_most < count:
        raise UsageError(f"recv(): at_most={at_most} is less than k={count}.")


class OwnPace:
    """Begins and ends the time in which envs go at their own pace; calls to all of them at once are made in between.

    Args:
        fan: What the envs are asked through.
        sharing: Which envs share a member of it; ``None``: none.

    Attributes:
        stream: While envs go at their own pace, else ``None``.
    """

    def __init__(self, fan: FanOut, sharing: Sharing | None = None) -> None:
        self._fan, self._sharing = fan, sharing or OneEach(len(fan.members.supervisors))
        self.stream: Stream | None = None
        self._seconds = [0.0, 0.0, 0.0]  # of streams that have ended, see Stream.seconds

    def add_seconds(self, statistics: Statistics) -> Statistics:
        """Return statistics of a worker with what is counted here."""
        waited, ready, idle = self._seconds if self.stream is None else self._with_those_of(self.stream)
        count = self._sharing.count
        return replace(statistics, recv_seconds=waited, ready_seconds=ready / count, idle_seconds=idle / count)

    def _with_those_of(self, stream: Stream) -> list[float]:
        return [one + other for one, other in zip(self._seconds, stream.seconds_by_now(), strict=True)]

    def begin(self, name: str, note: Callable[[Round], None] | None = None) -> Stream:
        """Return the stream; it begins, if need be, with a reset in two halves that is pending.

        Args:
            name: Of the call that is made now.
            note: As for :meth:`FanOut.finish_interrupted`.

        Raises:
            CallPendingError: The answer to another call must be taken first.
        """
        if self.stream is None:
            current = self._fan.unfinished
            if current is not None and current.flight is None and not self.is_beginning():
                self._fan.finish_interrupted(name, note)
            self.stream = Stream(self._fan, self._sharing)
        return self.stream

    def finish_interrupted(self, name: str, note: Callable[[Round], None] | None = None) -> None:
        """Give all envs back to the caller, and finish what an earlier call has left; arguments: see :meth:`begin`."""
        current = self._fan.unfinished
        if current is not None and current.flight is not None:
            stream = self.stream or Stream(self._fan, self._sharing)
            stream.end(name)
            self._seconds, self.stream = self._with_those_of(stream), None
            current.flight.end()
            self._fan.forget()
        self._fan.finish_interrupted(name, note)

    def idle(self, note: Callable[[Round], None] | None = None) -> list[int]:
        """Return the envs that wait for an action: all but those that are under way; ``note``: see :meth:`begin`."""
        current, busy = self._fan.unfinished, set[int]()
        if self.stream is not None:
            busy = {*self.stream.given, *self.stream.ready}
        elif current is not None and self.is_beginning():
            busy = {env for member, asked in current.requests.items() for env in self._sharing.envs(member, asked)}
        elif current is not None and current.flight is None:
            self._fan.finish_interrupted("idle_envs", note)
        return [env for env in range(self._sharing.count) if env not in busy]

    def is_busy(self) -> bool:
        """Tell whether envs are under way."""
        return self.stream is not None and not self.stream.is_idle

    def is_beginning(self) -> bool:
        """Tell whether a reset in two halves is pending, whose answers can be taken one by one."""
        current = self._fan.unfinished
        return current is not None and current.name == "reset" and not current.is_interrupted
