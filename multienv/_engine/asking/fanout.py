"""Ask many workers at once and collect what they answer, across a Ctrl-C.

A *round* is one request to each of several members (``members.py``): a step of all envs, say. All requests are sent
before the first answer is awaited. While one worker is waited for, all others are watched, so that a thread can recover
one whose process ends or is overdue. Envs that do not move in step are asked another way: ``in_flight.py``.

**Ctrl-C.** KeyboardInterrupt is raised only in a wait, or at the end of the call: see ``interrupts.py``. A round stays
``FanOut.unfinished`` until its owner has handed the outcome to the caller. The supervisors keep the answers: the next
call may call :meth:`FanOut.collect` again: it waits for what was not answered, and takes what was not taken.

Other signal handlers may raise anywhere. Such an exception leaves the round *broken*: the next call counts the workers
of the round as lost. If it came while the round was sent, the round was never made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import inf
from threading import get_ident
from time import monotonic
from typing import Any

from multienv._engine import interrupts
from multienv._engine.asking.members import AutoresetHook, Blocking, Members, breaks, is_asked
from multienv._engine.cores import AskingOrder
from multienv._engine.native import native
from multienv._engine.processes.channel import Channel, wait_any
from multienv._engine.recovery import hot_path
from multienv._engine.recovery.hot_path import MISSING, STEPPING, STEPPING_ASYNC
from multienv._engine.recovery.supervisor import Supervisor
from multienv._engine.sometimes import sometimes
from multienv._engine.threads import Task, idents_of_threads
from multienv.config import check_seconds
from multienv.errors import CallPendingError, WaitTimeout


def resumed(transition: Any) -> Any:
    """Return the outcome of a step of one env, whose info says that the step was interrupted."""
    *seen, info = transition
    told = info.get("multienv", {}) if isinstance(info, dict) else None
    if not isinstance(told, dict):  # an env of the caller's own, in this process
        return transition
    return (*seen, {**info, "multienv": {**told, "resumed": True}})


class Round:
    """Holds one request to each of several members, and the answers and failures so far.

    Args:
        name: What the caller called: ``"step"``, ``"reset"``, …
        requests: One for each member: an action or a message; ``None`` leaves the member alone.
        order: Of the supervisors, in which they are asked.
        waits: Asked and answered in one call of the caller's; else in two halves.
        nothing: The request that leaves a member alone.

    Attributes:
        answers: One for each member; ``None`` for those left alone and those that failed; ``MISSING`` until it comes.
        failures: Member → what it raised.
        resumed: It was broken off, and a later call completes it.
        sending: Members that are being asked; ``()``: all are asked.
        is_broken: See :class:`~multienv._engine.asking.members.AnyRound`.
    """

    __slots__ = (
        "answers",
        "endings",
        "failures",
        "is_broken",
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
        self.is_broken = False
        self.answers: list[Any]
        if native is not None and type(requests) is native.Parts:  # a batch, of which nobody is left alone
            self.answers = [MISSING] * len(requests)
        else:
            self.answers = [None if request is nothing else MISSING for request in requests]
        self.failures: dict[int, BaseException] = {}
        self.tasks: dict[int, Task] = {}
        self.endings: dict[int, Any] = {}  # what an autoreset hook has kept

    @property
    def is_supervised(self) -> bool:
        """Tell whether it asks supervisors; else it makes calls that block: see :meth:`FanOut.call_each`."""
        return bool(self.order)

    def asks(self, member: int, nothing: Any) -> bool:
        """Tell whether a supervisor is asked something, by whatever ``nothing`` stands for."""
        return self.is_supervised and self.requests[member] is not nothing

    @property
    def is_interrupted(self) -> bool:
        """Tell whether any later call completes this unfinished round: its call, or a wait for it, was interrupted."""
        return self.waits or self.resumed

    def misses(self, member: int) -> bool:
        """Tell whether the answer of a member is missing."""
        return self.answers[member] is MISSING

    def request(self, member: int) -> tuple[str, Any]:
        """Return what a member is asked: name and content."""
        return self.name, self.requests[member]

    def take_back(self) -> bool:
        """Return True: nothing of this round remains."""
        return True

    def leave_to_thread(self, member: int) -> None:
        """Note nothing: the thread is looked after."""

    def look_after(self, member: int) -> None:
        """Note nothing: all members are looked after."""

    def refusal(self, asked: str) -> str:
        """Return why a member that was asked for ``asked`` here is not asked elsewhere."""
        if self.waits:
            return f"{asked}() was interrupted elsewhere. Call it again there for its outcome, or reset() there."
        return f"{asked} is pending. Call {asked}_wait() first."

    def misses_some(self) -> bool:
        """Tell whether an answer is missing. No generator: one that is closed swallows an interruption."""
        for answer in self.answers:  # noqa: SIM110
            if answer is MISSING:
                return True
        return False


class FanOut:
    """Makes one round at a time.

    An env class calls ``ask(name, requests)``, makes the caller's values of the round, and calls ``finish()`` in the
    last line before it returns or raises them. If it finds ``unfinished`` set when it is called, an earlier call was
    interrupted: ``resume()`` completes that round, ``drop()`` completes it for nobody. The two halves of a call are
    ``send()`` and ``collect(timeout)``. What only blocks goes through ``call_each()``.

    Args:
        members: Supervisors; or functions ``(name, request) -> answer`` that block.
        autoreset: Makes resets of steps and lets resets follow them.
        threads: Of the executor; ``None``: one for each member.
        name: Of the threads.
        skips_none: A request of ``None`` leaves its member alone.

    Attributes:
        members: The same, asked one by one.
    """

    def __init__(
        self,
        members: Sequence[Supervisor | Blocking],
        *,
        autoreset: AutoresetHook | None = None,
        threads: int | None = None,
        name: str = "multienv",
        skips_none: bool = True,
    ) -> None:
        nothing = None if skips_none else MISSING
        self.members = Members(self, members, autoreset=autoreset, threads=threads, name=name, nothing=nothing)
        self._owner: dict[str, int] = {}  # "thread": the one that is in a call, or was interrupted in one
        # After multienv._engine.cores.spread(), which says on which core each worker runs.
        cores = {member: one.core for member, one in enumerate(self.members.supervisors) if one is not None}
        self._order_now = AskingOrder(cores).now if len(cores) > 1 else partial(tuple, cores)

    @property
    def unfinished(self) -> Any:
        """Return the round whose outcome has not been handed to the caller; see :meth:`Members.lose`."""
        current = self.members.asked
        if current is not None:
            if current.waits:
                self._claim(current.name)
            if current.is_broken and self.members.lose(current):
                self.members.asked, self._owner = None, {}
        return self.members.asked

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

    def close(self) -> None:
        """Release the executor, and wake a thread that waits. Takes no lock: handlers may call it."""
        self.members.close()

    def ask(self, name: str, requests: Sequence[Any]) -> Round:
        """Send all requests and collect all answers. The round is ``unfinished`` until its owner says otherwise.

        Args:
            name: ``"step"``: the requests are actions; else they are messages.
            requests: One for each member; ``None`` leaves it alone.
        """
        current, members = self.send(name, requests), self.members
        try:
            # A thread that asks a member also collects it: else it would collect the answer to the next request.
            lacks_some = (
                name != "step"
                or not current.tasks.keys() <= members.blocking.keys()
                or hot_path.take(members.supervisors, current.order, current.answers, STEPPING, members.leaves_ends)
            )
            if lacks_some or members.blocking:
                self._collect(current, inf)
        except BaseException as error:
            current.is_broken = True  # first: the next line may be broken off, too
            current.is_broken = breaks(error)
            raise
        return current

    def call_each(self, name: str, calls: Sequence[Callable[[], Any] | None]) -> Round:
        """Make blocking calls side by side, one for each member, as a round that survives an interruption, too."""
        self._claim(name)
        current = Round(name, calls, waits=True)
        current.tasks = {member: Task(call) for member, call in enumerate(calls) if call is not None}
        self.members.asked = current
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
        members, order, done = self.members, self._order_now(), 0
        nothing = members.nothing
        current = Round(name, requests, order, waits=waits, nothing=nothing)
        if members.blocking:  # begun when all others are asked
            calls = {member: partial(call, name, requests[member]) for member, call in members.blocking.items()}
            current.tasks = {member: Task(call) for member, call in calls.items() if requests[member] is not nothing}
        current.sending, members.asked = order, current
        state = STEPPING if waits else STEPPING_ASYNC
        try:
            while done < len(order):
                if name == "step":
                    done = hot_path.ask(members.supervisors, order, done, requests, state, members.me, nothing)
                if done < len(order):
                    if requests[order[done]] is not nothing:
                        members.send(current, order[done])
                    done += 1
        except BaseException:
            current.is_broken = True
            raise
        current.sending = ()
        if current.tasks:
            members.start(current)
        return current

    def collect(self, timeout: float | None = None) -> Round:
        """Wait for all answers of the unfinished round.

        Args:
            timeout: Seconds; it may be called again then.

        Raises:
            WaitTimeout: An answer is not there yet.
        """
        check_seconds("timeout", timeout, zero=True)
        current = self.members.asked
        assert current is not None
        self._claim(current.name)
        try:
            if timeout is None and current.name == "step" and not current.tasks and not current.endings:
                state = STEPPING if current.waits else STEPPING_ASYNC
                hot_path.take(self.members.supervisors, current.order, current.answers, state, self.members.leaves_ends)
            return self._collect(current, inf if timeout is None else monotonic() + timeout)
        except BaseException as error:
            current.is_broken = True
            current.is_broken = breaks(error)
            raise

    def resume(self) -> Round:
        """Complete the round that was broken off."""
        current = self.members.asked
        assert current is not None
        sometimes("a round that was broken off is completed")
        current.resumed = True
        return self.collect()

    def drop(self) -> None:
        """Complete the round that was broken off, if there is one; nobody asks for its outcome."""
        if self.unfinished is not None:
            self.resume()
            self.finish()

    def finish_interrupted(self, name: str, note: Callable[[Round], None] | None = None) -> None:
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
            first = "reset_wait(), or recv() of a batch," if asked == "reset" else f"{asked}_wait()"
            raise CallPendingError(
                f"Calling `{name}` while waiting for a pending call to `{asked}` to complete. Call {first} first.",
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
        """Call the hooks with the events of the call, then mark its outcome as delivered.

        Ctrl-C that came in the call is raised before that, and the next call has the outcome; so it is if a hook
        raises. The caller returns the outcome, or raises it, right after this.
        """
        if any(self.members.events):
            current, self.members.asked = self.members.asked, None  # for a hook that uses the envs all the same
            try:
                self.call_hooks()
            finally:
                self.members.asked = current
        if interrupts.noted is not None:
            interrupts.raise_noted()
        self.members.asked, self._owner = None, {}

    def forget(self) -> Any:
        """Return the unfinished round, and forget it without an outcome: the envs are closed."""
        current = self.members.asked
        self.members.asked, self._owner = None, {}
        return current

    def call_hooks(self) -> None:
        """Call the hooks with what happened meanwhile."""
        self.members.call_hooks()

    # --- how ----------------------------------------------------------------------------------------

    def _collect(self, current: Round, until: float) -> Round:
        """Wait for all answers of a round. Raises WaitTimeout."""
        while current.misses_some():
            recovers = self.members.recovers_here and until == inf and not current.tasks
            ready: Collection[int] = current.order if recovers else self._heard(current, until)
            if not ready and monotonic() >= until:
                self._owner.clear()  # any thread may wait again
                raise WaitTimeout(f"{current.name}(): an answer is not there yet; nothing is lost, wait again.")
            self.members.collect(current, ready, recovers=recovers)
        return current

    def _heard(self, current: Round, until: float) -> list[int]:
        """Return the members of which something can be taken; if there are none, wait for something.

        What it returns may be empty. Workers that are overdue, or silent, are left to threads, side by side. All that
        are awaited are watched: one that is lost meanwhile is returned. The answer of the worker which was asked last
        ends the wait, so that the trainer is not woken for each.

        Channels are not held beyond this: a failure that the caller keeps would keep their memory mapped by its frames.
        """
        heard = self.members.ended(current)
        awaited: dict[int, tuple[Channel, int]] = {}
        now, wake = monotonic(), until
        for member in reversed(current.order):
            if not current.misses(member) or member in current.tasks:
                continue
            supervisor = self.members.supervisors[member]
            waited = supervisor.waiting() if is_asked(current, supervisor) else None
            if waited is None or waited[0].answered(waited[1]):
                heard.append(member)
            elif now < waited[2]:
                awaited[member], wake = waited[:2], min(wake, waited[2])
            else:
                self.members.begin(current, member, supervisor.resume)
        if heard or until <= now:
            return heard
        watched, lines = list(awaited), list(awaited.values())
        if lines:
            heard = [watched[index] for index in wait_any(lines[:1], wake, watched=lines[1:])]
            for member in heard:
                self.members.supervisors[member].note_time()
            return heard
        for task in current.tasks.values():
            if not task.wait(None if until == inf else max(0.0, until - monotonic())):
                break
        return []
