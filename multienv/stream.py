"""Envs that go at their own pace: each is asked again when the caller pleases, and the first that are ready are taken.

An env is in one of three places. The caller has it; or it has been given a request (``Stream.given``); or what came of
that is ready (``Stream.ready``) until the caller takes it. Envs that share a worker are asked together, once each of
them has been given a request.

**Ctrl-C.** What is given is noted first, and asked from there; what is ready is noted in one go; the owner hands it
over with the last store before it returns. So an interrupted call has given all or nothing, and has taken all or
nothing. What it had given is asked by the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf
from time import monotonic
from typing import Any, Protocol

from multienv import interrupts
from multienv.config import check_seconds, integer
from multienv.errors import CallPendingError, ClosedError, UsageError, WaitTimeout
from multienv.fanout import FanOut, Noted, Ready, Round
from multienv.recovery.hot_path import MISSING


class Sharing(Protocol):
    """Says which envs a member of the fan-out has, and what it is asked for them."""

    def due(self, member: int, given: Mapping[int, Noted]) -> Noted | None:
        """Return the request to a member that is free; ``None`` if there is none, or an env lacks one."""

    def envs(self, member: int, noted: Noted) -> Iterable[int]:
        """Return the envs of a member that a request concerns."""

    def results(
        self, member: int, noted: Noted, answer: Any, failure: BaseException | None
    ) -> Iterable[tuple[int, Ready]]:
        """Return what came of a request for each of its envs, whatever the member is asked from now on."""


class OneEach:
    """Has each member be one env."""

    def due(self, member: int, given: Mapping[int, Noted]) -> Noted | None:
        """Return what was given."""
        return given.get(member)

    def envs(self, member: int, noted: Noted) -> Iterable[int]:
        """Return the env."""
        return (member,)

    def results(
        self, member: int, noted: Noted, answer: Any, failure: BaseException | None
    ) -> Iterable[tuple[int, Ready]]:
        """Return what came of the request."""
        return ((member, Ready(noted.name, answer, failure)),)


class Stream:
    """Gives requests to envs, and has what came of them, the first first.

    Args:
        fan: Over the members. A call in two halves that is pending there goes on in here.
        sharing: Which envs share a member.

    Attributes:
        given: Env → its request, which is asked, or waits for those of the envs that share its worker.
        ready: Env → what came of its request, in the order in which it came. The owner replaces it by one without those
            that it has handed over.
        is_read: The owner is taking some of these now.
    """

    def __init__(self, fan: FanOut, sharing: Sharing | None = None) -> None:
        self._fan, self._sharing = fan, sharing or OneEach()
        self.ready: Mapping[int, Ready] = {}
        self.is_read = False
        current = fan.begin_endless()
        self.given: Mapping[int, Noted] = {
            env: noted
            for member, noted in enumerate(current.requests)
            if noted is not None
            for env in self._sharing.envs(member, noted)
        }

    @property
    def is_idle(self) -> bool:
        """Tell whether the caller has all envs."""
        return not self.given and not self.ready

    def give(self, name: str, requests: Mapping[int, Any]) -> None:
        """Give requests to envs that the caller has: all of them, or none if an interruption comes meanwhile.

        Args:
            name: What the caller called: ``"step"``, ``"reset"``, …
            requests: Env → an action, which the caller must not change any more, or a message.
        """
        self.given = {**self.given, **{env: Noted(name, one) for env, one in requests.items()}}
        self._ask()

    def take(self, until: float = -inf) -> None:
        """Note what has come as ready; if nothing has, wait for something, by ``time.monotonic()`` until then."""
        self._ask()
        if not self._note():
            self._fan.take(until)
            self._note()

    def first(self, count: int | None, timeout: float | None) -> list[int]:
        """Wait until so many envs are ready, and return those that were so first; the caller does not have them yet.

        Args:
            count: How many; ``None``: all whose result can come.
            timeout: Seconds to wait; ``None``: for ever.

        Raises:
            UsageError: The results of so many cannot come.
            WaitTimeout: They are not ready in time; nothing is lost.
        """
        check_seconds("timeout", timeout, zero=True)
        if count is not None and (integer(count) or 0) < 1:
            raise UsageError(f"recv(): {count!r:.100} envs are asked for; give an integer of at least 1, or None.")
        until = inf if timeout is None else monotonic() + timeout
        self.take()
        coming = len(self.ready) + len(self._asked())
        wanted = coming if count is None else count
        if not 0 < wanted <= coming:
            raise UsageError(f"recv(): {self._what_comes(coming)}")
        while len(self.ready) < wanted:
            if monotonic() >= until:
                raise WaitTimeout(f"recv(): {len(self.ready)} of {wanted} are ready; nothing is lost, call it again.")
            self.take(until)
        return list(self.ready)[:wanted]

    def end(self, name: str) -> None:
        """Give all envs back to the caller, before ``name`` is called: a reset drops what is under way.

        Raises:
            CallPendingError: It is no reset, and envs are under way.
        """
        if name == "reset":
            self._ask()
            while self._asked():
                self.take(inf)
            self.given, self.ready = {}, {}
        self.refuse_busy(name, sorted({*self.given, *self.ready}))
        while any(asked is not None for asked in self._round().requests):  # a reset has left out all envs of a worker
            self.take(inf)

    def refuse_busy(self, name: str, envs: Iterable[int]) -> None:
        """Raise CallPendingError if some of these envs are under way."""
        busy = [env for env in envs if env in self.given or env in self.ready]
        if busy:
            raise CallPendingError(
                f"{name}(): envs {busy} are under way; recv() gives their results first. Nothing was sent.", "send"
            )

    def refuse_nested(self) -> None:
        """Raise CallPendingError if a ``recv()`` is under way: it would wait for envs that this one takes from it."""
        if self.is_read:
            raise CallPendingError(
                "recv(): it is called inside of another recv() of these envs, by a signal handler or another thread. "
                "Leave the results to that one.",
                "recv",
            )

    def hand_over(self, envs: Collection[int]) -> None:
        """Give these envs, of which all is done, back to the caller: nothing may come after it but the return.

        Ctrl-C that came in the call is raised before that.
        """
        if interrupts.noted is not None:
            interrupts.raise_noted()
        self.ready = {env: one for env, one in self.ready.items() if env not in envs}

    def _ask(self) -> None:
        """Ask the members that are free and for which there is something to ask. Again does nothing."""
        current = self._round()
        due = {
            member: noted
            for member, asked in enumerate(current.requests)
            if asked is None and (noted := self._sharing.due(member, self.given)) is not None
        }
        if due:
            self._fan.send_some(due)

    def _note(self) -> bool:
        """Note what has come as ready, and return whether anything has."""
        current = self._round()
        answers, asked = current.answers, enumerate(current.requests)
        come = {member: noted for member, noted in asked if noted is not None and answers[member] is not MISSING}
        requests, given, ready = list(current.requests), dict(self.given), dict(self.ready)
        for member, noted in come.items():
            for env, one in self._sharing.results(member, noted, answers[member], current.failures.get(member)):
                ready[env] = one
                given.pop(env, None)
            requests[member] = None
        self.given, self.ready, current.requests = given, ready, requests  # adjacent stores: no interruption in between
        return bool(come)

    def _round(self) -> Round:
        current = self._fan.unfinished
        if current is None:  # by another thread, or by a signal handler
            raise ClosedError("The envs were closed in the middle of the call. Make new ones.")
        return current

    def _asked(self) -> list[int]:
        """Return the envs that are asked, or will be without any more being given."""
        current = self._round()
        found: list[int] = []
        for member, asked in enumerate(current.requests):
            envs = () if asked is None else tuple(self._sharing.envs(member, asked))
            if not envs:  # it is free, or soon will be: a reset has left out all of its envs
                asked = self._sharing.due(member, self.given)
                envs = () if asked is None else tuple(self._sharing.envs(member, asked))
            found += envs
        return found

    def _what_comes(self, coming: int) -> str:
        waiting = sorted(self.given.keys() - set(self._asked()))
        text = f"the results of {coming} envs can come. Ask for 1 to {coming} of them." if coming else ""
        text = text or "no env is under way. Call send() first, or reset_async()."
        if waiting:
            text += (
                f" Envs {waiting} wait for actions for the envs that share their process: send these, or make the envs "
                "with envs_per_worker=1."
            )
        return text


class OwnPace:
    """Begins and ends the time in which envs go at their own pace; calls to all of them at once are made in between.

    Args:
        fan: What the envs are asked through.
        sharing: Which envs share a member of it; ``None``: none.

    Attributes:
        stream: While envs go at their own pace, else ``None``.
    """

    def __init__(self, fan: FanOut, sharing: Sharing | None = None) -> None:
        self._fan, self._sharing = fan, sharing
        self.stream: Stream | None = None

    def begin(self, name: str, note: Callable[[Round], None] | None = None) -> Stream:
        """Return the stream; it begins, if need be, with a reset in two halves that is pending.

        Args:
            name: Of the call that is made now.
            note: As for :meth:`FanOut.settle`.

        Raises:
            CallPendingError: The answer to another call must be taken first.
        """
        if self.stream is None:
            current = self._fan.unfinished
            if current is not None and current.name and not self.is_beginning():
                self._fan.settle(name, note)
            self.stream = Stream(self._fan, self._sharing)
        return self.stream

    def settle(self, name: str, note: Callable[[Round], None] | None = None) -> None:
        """Give all envs back to the caller, and finish what an earlier call has left; arguments: see :meth:`begin`."""
        current = self._fan.unfinished
        if current is not None and not current.name:
            (self.stream or Stream(self._fan, self._sharing)).end(name)
            self.stream = None
            self._fan.finish()
        self._fan.settle(name, note)

    def is_busy(self) -> bool:
        """Tell whether envs are under way."""
        return self.stream is not None and not self.stream.is_idle

    def is_beginning(self) -> bool:
        """Tell whether a reset in two halves is pending, whose answers can be taken one by one."""
        current = self._fan.unfinished
        return current is not None and current.name == "reset" and not current.is_interrupted
