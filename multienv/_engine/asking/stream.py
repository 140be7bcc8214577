"""Envs that go at their own pace: the caller sends each its next request, and gets the first results that are ready.

An env is in one of three places. The caller has it; or a request to it is under way (``Stream.under_way``); or its
result is ready (``Stream.ready``), until that is delivered to the caller. A worker that is free is sent the requests
to all of its envs that have one, and its others are left alone.

Most often all that has come is plain answers to steps, and the caller gets all of them at once. Then they do not become
ready results: they stay in the round (``Round.answers``) until they are delivered. This saves a third of the time.

**Ctrl-C.** A change from one place to another is stored as ``pending_change`` first, and made then; a delivery with the
last store before the call returns. So an interrupted call has sent all of its requests or none, and has delivered all
of its results or none. What it did not get to send is sent by the next call.
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
from typing import Any, NoReturn

from multienv._engine import interrupts
from multienv._engine.asking.fanout import FanOut
from multienv._engine.asking.in_flight import InFlight, ReadyBatch, Result, Sharing
from multienv._engine.asking.members import Requests, Round
from multienv._engine.threads import Bell
from multienv.config import check_seconds, checked_count
from multienv.errors import CallPendingError, ClosedError, MultienvError, UsageError, WaitTimeout
from multienv.events import Statistics

_IN_A_CALL = "A signal handler, or another thread, calls these envs in the middle of another call."


class Stream:
    """Sends requests to envs that go at their own pace, and holds their results in the order in which they come.

    It begins with :meth:`start`, and ends when all envs are asked at once: see :meth:`finish_interrupted`. A call costs
    hardly more if there are more envs: it goes over those that it is about.

    Args:
        fan: Over the members. A reset in two halves that is pending there goes on in here.
        sharing: Which envs share a member; ``None``: none.

    Attributes:
        pending_change: Carries out a change that is decided, see :meth:`send` and :meth:`delivery`; ``None``: nothing.
            To store it is to decide: the next call carries it out, if an interruption comes before this one has.
        reader: The thread whose ``recv()`` is taking some of what is ready now; 0: none.
    """

    def __init__(self, fan: FanOut, sharing: Sharing | None = None) -> None:
        self._fan, self._sharing = fan, sharing or Sharing(len(fan.members.supervisors))
        # Returns the InFlight while the stream goes on; a weak reference: it keeps descriptors, and a manager this.
        self._flight: Callable[[], InFlight | None] = lambda: None
        self._under_way: dict[int, Requests] = {}  # env → its request: sent, or waiting for its worker to be free
        self._ready: dict[int, Result] = {}  # env → what came of its request, in the order in which it came
        self._due: dict[int, None] = {}  # members that there may be something to ask
        self.pending_change: Callable[[Stream], None] | None = None  # no bound method: it would be a circle
        self.reader = 0
        self._is_changing = False  # makes the pending change, or sends requests
        # Seconds that recv() has waited; that envs were ready, and that the caller had them, of all envs together.
        self._waited = self._were_ready = self._were_idle = 0.0
        self._counted = 0.0  # when these were counted last

    # --- start and end ------------------------------------------------------------------------------

    def start(self, name: str) -> Stream:
        """Start, unless it has started, if need be with a reset in two halves that is pending; return this object.

        Args:
            name: Of the call that is made now.

        Raises:
            CallPendingError: The answer to another call must be collected first.
        """
        if self._flight() is None:
            current = self._fan.unfinished
            if current is not None and current.flight is None and not self.is_beginning():
                self._fan.finish_interrupted(name)
            self._start_flight()
        return self

    def _start_flight(self) -> None:
        """Let the members that are asked now go at their own pace; again does nothing."""
        members, current = self._fan.members, self._fan.unfinished or Round("", {}, waits=False)
        if current.flight is None:
            members.bell = members.bell or Bell()
            for task in current.tasks.values():
                task.notify(members.bell.ring)
            current = members.current_round = replace(current, name="", flight=InFlight(members.bell))
        asked = current.requests.items()
        self._under_way = {env: request for member, request in asked for env in self._sharing.envs(member, request)}
        self._counted = monotonic()
        self._flight = weakref.ref(current.flight)

    def finish_interrupted(self, name: str) -> None:
        """Give all envs back to the caller, and finish what an earlier call has left, before ``name`` is called.

        Args:
            name: Of the call that is made now; a reset drops what is under way.

        Raises:
            CallPendingError: It is no reset, and envs are under way; or it is called inside of a ``recv()``; or the
                answer to another call must be collected first.
        """
        current = self._fan.unfinished
        if current is not None and current.flight is not None:
            if self._flight() is None:  # start() was broken off
                self._start_flight()
            if name == "reset":
                self.refuse_nested(name)
                self._send_due()
                while self._under_way:
                    self.collect(inf)
                self._ready = {}
            self.refuse_busy(name, sorted({*self.under_way, *self.ready}))
            while self._round().requests:  # a reset has left out all envs of a worker
                self.collect(inf)
            self.count_seconds()
            self._flight = lambda: None
            current.flight.close()
            self._fan.drop_round()
        self._fan.finish_interrupted(name)

    def drop_results(self) -> None:
        """Drop all results, which map banks: the envs are closed."""
        self._under_way, self._ready, self._due = {}, {}, {}

    def idle(self) -> list[int]:
        """Return the envs that wait for an action: all but those that are under way."""
        current, busy = self._fan.unfinished, {*self.under_way, *self.ready}
        if self.is_beginning():
            assert current is not None
            busy = {env for member, asked in current.requests.items() for env in self._sharing.envs(member, asked)}
        elif current is not None and current.flight is None:
            self._fan.finish_interrupted("idle_envs")
        return [env for env in range(self._sharing.count) if env not in busy]

    def is_beginning(self) -> bool:
        """Tell whether a reset in two halves is pending, whose answers can be collected one by one."""
        current = self._fan.unfinished
        return current is not None and current.name == "reset" and not current.is_interrupted

    def add_seconds(self, statistics: Statistics) -> Statistics:
        """Return statistics of a worker with what is counted here; any thread may call it."""
        since = 0.0 if self._flight() is None else monotonic() - self._counted
        count, ready = self._sharing.count, len(self._ready)
        return replace(
            statistics,
            recv_seconds=self._waited,
            ready_seconds=(self._were_ready + since * ready) / count,
            idle_seconds=(self._were_idle + since * (count - ready - len(self._under_way))) / count,
        )

    # --- sending and collecting ----------------------------------------------------------------------

    @property
    def under_way(self) -> Mapping[int, Requests]:
        """Return the requests without a result so far, by env."""
        if self.pending_change is not None:
            self._apply_change()
        return self._under_way

    @property
    def ready(self) -> Mapping[int, Result]:
        """Return the results that were not delivered yet, by env, in the order in which they came."""
        self._apply_change()
        return self._ready

    @property
    def is_idle(self) -> bool:
        """Tell whether the caller has all envs."""
        return not self.under_way and not self._ready

    def send(self, name: str, envs: Collection[int], contents: Sequence[Any]) -> None:
        """Send requests to envs that the caller has: all of them, or none if an interruption comes meanwhile.

        Args:
            name: What the caller called: ``"step"``, ``"reset"``, …
            envs: Those that get one.
            contents: For each of them, in the same order: an action, which the caller must not change any more, or a
                message.
        """
        if self.reader not in (0, get_ident()):
            self.refuse_nested("send" if name == "step" else "reset_async")
        if self._is_changing:
            self._refuse()
        self.count_seconds()
        requests = dict.fromkeys(envs, Requests(name, envs, contents))
        are_steps = name == "step" and not (self._due or self._sharing.is_shared)
        self.pending_change = partial(Stream._apply_sent, requests=requests)
        self._send_due(requests if are_steps else None, contents)

    def collect(self, until: float = -inf) -> None:
        """Move what has come to the ready results; wait if nothing has, by ``time.monotonic()`` until then."""
        self._send_due()
        if not self._move_to_ready():
            current = self._round()
            current.flight.collect(self._fan.members, current, until)
            self._move_to_ready()

    def recv(
        self,
        make: Callable[[ReadyBatch], Any],
        count: int | None,
        at_most: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Wait until so many envs are ready, and deliver the results of those that were ready first.

        Args:
            make: Returns what the caller gets, or the error to raise, given the results; called again if interrupted.
            count: How many; ``None``: all whose result can come.
            at_most: So many of those that are ready by then; ``None``: ``count``.
            timeout: Seconds to wait; ``None``: for ever. Then fewer are returned, unless none is ready.

        Raises:
            CallPendingError: A ``recv()`` is under way.
            UsageError: Fewer results than ``count`` can come.
            WaitTimeout: None is ready in time; nothing is lost.
        """
        self.refuse_nested()
        self.reader = get_ident()
        try:
            ready = self._collect_ready(count, at_most, timeout)
            outcome = make(ready)
            self.call_hooks()
            failed = isinstance(outcome, MultienvError)
            self.deliver(ready.envs, ready.in_round)
        finally:
            self.reader = 0
        if failed:
            raise outcome
        return outcome

    def _collect_ready(self, count: int | None, at_most: int | None, timeout: float | None) -> ReadyBatch:
        """Return the results of the first that are ready, which stay here until :meth:`deliver`; see :meth:`recv`."""
        most: Any = count if at_most is None else at_most
        if not (type(count) is type(most) is int and 0 < count <= most):
            _check_counts(count, at_most)
        until = inf
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
            until = monotonic() + timeout
        self._send_due()
        coming = len(self._ready) + len(self._under_way)
        wanted = coming if count is None else count
        if not 0 < wanted <= coming:
            if not coming:
                raise UsageError("recv(): no env is under way. Call send() first, or reset_async().")
            raise UsageError(f"recv(): the results of {coming} envs can come. Ask for 1 to {coming} of them.")
        most = wanted if at_most is None else at_most
        if len(self._ready) < most:
            ready = self._collect_plain_at_once(wanted, most)
            if ready is not None:
                return ready
        while len(self._ready) < wanted:
            if monotonic() >= until:
                if self._ready:
                    break
                self.call_hooks()
                raise WaitTimeout("recv(): no env is ready; nothing is lost, call it again.")
            began = monotonic()
            self.collect(until)
            self._waited += monotonic() - began
        envs = list(islice(self._ready, most))
        results = [self._ready[env] for env in envs]
        resets = {env for env, one in zip(envs, results, strict=True) if one.name == "reset"}
        errors = {env: one.error for env, one in zip(envs, results, strict=True) if one.error is not None}
        return ReadyBatch(envs, [one.answer for one in results], resets=resets, errors=errors)

    def _collect_plain_at_once(self, wanted: int, most: int) -> ReadyBatch | None:
        """Collect what has come, without a wait. Return it if it is plain and all that the caller gets.

        Else it is ready now.
        """
        current = self._round()
        is_first = not (self._ready or current.answers)
        is_plain = current.flight.collect(self._fan.members, current, -inf)
        if is_first and is_plain and current.answers:
            ready = self._sharing.ready_batch(current)
            if ready is not None and wanted <= len(ready.envs) <= most:
                return ready
        self._move_to_ready()
        return None

    def refuse_busy(self, name: str, envs: Iterable[int]) -> None:
        """Raise CallPendingError if some of these envs are under way."""
        sent, ready = self.under_way, self._ready
        if (sent or ready) and not (sent.keys().isdisjoint(envs) and ready.keys().isdisjoint(envs)):
            busy = [env for env in envs if env in sent or env in ready]
            raise CallPendingError(
                f"{name}(): envs {busy} are under way; recv() gives their results first. Nothing was sent.",
                "send",
            )

    def refuse_nested(self, name: str = "recv") -> None:
        """Raise CallPendingError if a ``recv()`` is under way: it would wait for envs that ``name`` takes from it."""
        if self.reader:
            who = "another thread, or what a signal handler has interrupted"
            self._refuse(f"{name}(): {who}, is in recv() of these envs.", "recv")

    def _refuse(self, why: str = _IN_A_CALL, asked: str = "send") -> NoReturn:
        raise CallPendingError(f"{why} Make one call at a time. Nothing was sent.", asked)

    def deliver(self, envs: Collection[int], in_round: Collection[int] = ()) -> None:
        """Mark these envs as delivered. No call may follow it before the caller has the results.

        Ctrl-C that came in the call is raised before. ``in_round``: see :class:`ReadyBatch`.
        """
        decided = self.delivery(envs, in_round)
        if interrupts.noted is not None:
            interrupts.raise_noted()
        self.pending_change = decided

    def delivery(self, envs: Collection[int], in_round: Collection[int] = ()) -> Callable[[Stream], None]:
        """Return the change that marks these envs as delivered; store it in ``pending_change``."""
        self.count_seconds()
        return partial(Stream._apply_delivered, envs=envs, in_round=in_round)

    # --- changes, each of which may be broken off and carried out once more -------------------------

    def _apply_change(self) -> None:
        """Make the change that is decided; again does nothing."""
        if self.pending_change is not None:
            if self._is_changing:
                self._refuse()
            self._is_changing = True
            try:
                self.pending_change(self)
                self.pending_change = None
            finally:
                self._is_changing = False

    def call_hooks(self) -> None:
        """Call the hooks with what happened meanwhile to envs that are ready."""
        flight = self._flight()
        if flight is not None and flight.hooks_due:
            self._round().flight.call_hooks(self._fan.members)

    def count_seconds(self) -> None:
        """Count the seconds since the last time, before it is decided that an env changes from one place to another."""
        if self.pending_change is not None:
            self._apply_change()
        now, ready = monotonic(), len(self._ready)
        seconds, self._counted = now - self._counted, now
        self._were_ready += seconds * ready
        self._were_idle += seconds * (self._sharing.count - ready - len(self._under_way))

    def _apply_sent(self, requests: Mapping[int, Requests]) -> None:
        self._under_way.update(requests)
        members = map(self._sharing.member, requests) if self._sharing.is_shared else requests
        self._due.update(dict.fromkeys(members))

    def _apply_ready(self, members: AbstractSet[int], ready: Mapping[int, Result]) -> None:
        self._ready.update(ready)
        for env in ready:
            self._under_way.pop(env, None)
        self._round().drop(members)
        if self._sharing.is_shared or not members <= ready.keys():
            self._due.update(dict.fromkeys(members))

    def _apply_delivered(self, envs: Collection[int], in_round: Collection[int]) -> None:
        held: dict[int, Any] = self._under_way if in_round else self._ready
        for env in envs:
            held.pop(env, None)
        current = self._fan.members.current_round
        if in_round and current is not None and current.flight is not None:
            current.drop(in_round)

    # --- members ------------------------------------------------------------------------------------

    def _send_due(self, steps: Mapping[int, Requests] | None = None, actions: Sequence[Any] = ()) -> None:
        """Send the members that are free the requests that they are due to get. Again does nothing.

        Args:
            steps: All that there is to send, if it is steps of envs that share no member; ``None``: it is to be found.
            actions: Those of the steps once more, in the form that is sent fastest.
        """
        if self._is_changing:
            self._refuse()
        self._apply_change()
        if not self._due:
            return
        self._is_changing = True
        try:
            current = self._round()
            asked, next_request = current.requests, self._sharing.next_request
            if steps is not None and asked.keys().isdisjoint(steps):  # none is left out by a reset under way
                current.flight.send(self._fan.members, current, steps, actions)
            else:
                requests = {
                    member: request
                    for member in self._due
                    if member not in asked and (request := next_request(member, self._under_way)) is not None
                }
                if requests:
                    current.flight.send(self._fan.members, current, requests)
            self._due.clear()
        finally:
            self._is_changing = False

    def _move_to_ready(self) -> bool:
        """Move the answers in the round to the ready results, and return whether there were any."""
        self._apply_change()
        current = self._round()
        if not current.answers:
            return False
        ready = self._sharing.results(current)
        self.count_seconds()
        self.pending_change = partial(Stream._apply_ready, members=set(current.answers), ready=ready)
        self._apply_change()
        return True

    def _round(self) -> Round:
        current = self._fan.unfinished
        if current is None or current.flight is None or current.flight is not self._flight():
            if self._fan.members.bell is None:
                raise ClosedError("The envs were closed in the middle of the call. Make new ones.")
            self._refuse()
        return current


def _check_counts(count: Any, at_most: Any) -> None:
    for name, given in (("k", count), ("at_most", at_most)):
        checked_count(f"recv(): {name}", given, needed=False)
    if count is not None and at_most is not None and at_most < count:
        raise UsageError(f"recv(): at_most={at_most} is less than k={count}.")
