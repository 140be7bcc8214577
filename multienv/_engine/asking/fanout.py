"""Ask many workers at once and collect what they answer, across a Ctrl-C.

A *round* is one request to each of several members (``members.py``): a step of all envs, say. All requests are sent
before the first answer is awaited. While one worker is waited for, all others are watched, so that a thread can recover
one whose process ends or is overdue. Envs that do not move in step are asked another way: ``in_flight.py``.

**Ctrl-C.** KeyboardInterrupt is raised only in a wait, or at the end of the call: see ``interrupts.py``. A round stays
``FanOut.unfinished`` until its owner has handed the outcome to the caller. The supervisors keep the answers: the next
call may call :meth:`FanOut.collect` again: it waits for the missing answers, and collects what was not collected yet.

Other signal handlers may raise anywhere. Such an exception leaves the round *broken*: the next call counts the workers
of the round as lost. If it came while the round was sent, the round was never made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from threading import get_ident
from time import monotonic
from typing import Any

from multienv._engine import cores, interrupts
from multienv._engine.asking.members import AutoresetHook, Blocking, Members, Requests, Round, leaves_broken
from multienv._engine.processes.channel import wait_any
from multienv._engine.recovery import hot_path
from multienv._engine.recovery.hot_path import MISSING
from multienv._engine.recovery.state_machine import STEPPING, STEPPING_ASYNC, Process
from multienv._engine.recovery.supervisor import Supervisor
from multienv._engine.sometimes import sometimes
from multienv._engine.threads import Task, idents_of_threads
from multienv.config import check_seconds
from multienv.errors import CallPendingError, MultienvError, WaitTimeout


def mark_resumed(transition: Any) -> Any:
    """Return the outcome of a step of one env, with ``resumed`` in its info: the step was interrupted."""
    *seen, info = transition
    told = info.get("multienv", {}) if isinstance(info, dict) else None
    if not isinstance(told, dict):  # an env of the caller's own, in this process
        return transition
    return (*seen, {**info, "multienv": {**told, "resumed": True}})


class FanOut:
    """Makes one round at a time.

    An env class calls ``ask(name, requests)``, makes the caller's values of the round, and calls ``finish()`` in the
    last line before it returns or raises them. If it finds ``unfinished`` set when it is called, an earlier call was
    interrupted: ``resume()`` completes that round; ``complete_unfinished()`` does, too, and drops its outcome. The two
    halves of a call are ``send()`` and ``collect(timeout)``. What only blocks goes through ``call_each()``.

    Args:
        members: Supervisors; or functions ``(name, request) -> answer`` that block.
        autoreset: Makes resets of steps and lets resets follow them.
        threads: Of the executor; ``None``: one for each member.
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
        skips_none: bool = True,
    ) -> None:
        self.members = Members(self, members, autoreset=autoreset, threads=threads)
        self._skip, self._all = None if skips_none else MISSING, range(len(members))
        self._owner: dict[str, int] = {}  # "thread": the one that is in a call, or was interrupted in one
        # After multienv._engine.cores.spread(), which says on which core each worker runs.
        supervised = {member: one.core for member, one in enumerate(self.members.supervisors) if one is not None}
        self._supervised, self._orders = tuple(supervised), cores.asking_orders(supervised)

    @property
    def unfinished(self) -> Round | None:
        """Return the round whose outcome has not been handed to the caller; see :meth:`Members.mark_lost`."""
        current = self.members.current_round
        if current is not None:
            if current.waits:
                self._claim(current.name)
            if current.is_broken and self.members.mark_lost(current):
                self.members.current_round, self._owner = None, {}
        return self.members.current_round

    def _claim(self, name: str) -> None:
        """Claim the members for this thread, until :meth:`finish`. Raises CallPendingError if another one has."""
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

    def ask(self, name: str, requests: Sequence[Any]) -> Round:
        """Send all requests and collect all answers. The round is ``unfinished`` until its owner says otherwise.

        Args:
            name: ``"step"``: the requests are actions; else they are messages.
            requests: One for each member; ``None`` leaves it alone.
        """
        return self._collect(self.send(name, requests), inf)

    def call_each(self, name: str, calls: Sequence[Callable[[], Any] | None]) -> Round:
        """Make blocking calls side by side, one for each member, as a round that survives an interruption, too."""
        self._claim(name)
        tasks = {member: Task(call) for member, call in enumerate(calls) if call is not None}
        current = self.members.current_round = Round(name, {}, waits=True, tasks=tasks)
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
        members, skip, done = self.members, self._skip, 0
        order = self._orders.get(cores.current_core(), self._supervised) if self._orders else self._supervised
        held = Requests(name, self._all, requests)
        current = Round(name, dict.fromkeys(order, held), waits)
        if members.blocking:  # begun when all others are asked
            calls = {member: partial(call, name, requests[member]) for member, call in members.blocking.items()}
            current.tasks = {member: Task(call) for member, call in calls.items() if requests[member] is not skip}
            current.requests.update(dict.fromkeys(current.tasks, held))
        current.sending, members.current_round = order, current
        state = STEPPING if waits else STEPPING_ASYNC
        try:
            while done < len(order):
                if name == "step":
                    done = hot_path.send_plain(members.supervisors, order, done, requests, state, members.owner, skip)
                if done < len(order):
                    if requests[order[done]] is skip:
                        del current.requests[order[done]]
                    else:
                        members.send(current, order[done])
                    done += 1
        except BaseException:
            current.is_broken = True
            raise
        current.sending = ()
        if current.tasks:
            members.start_threads(current)
        return current

    def collect(self, timeout: float | None = None) -> Round:
        """Wait for all answers of the unfinished round.

        Args:
            timeout: Seconds; it may be called again then.

        Raises:
            WaitTimeout: An answer is not there yet.
        """
        check_seconds("timeout", timeout, zero=True)
        current = self.members.current_round
        assert current is not None
        self._claim(current.name)
        return self._collect(current, inf if timeout is None else monotonic() + timeout)

    def answers_of(self, current: Round) -> list[Any]:
        """Return the answers of all members in their order, ``None`` for those left alone and those that failed."""
        return [*map(current.answers.get, self._all)]

    def resume(self) -> Round:
        """Complete the round that was broken off."""
        current = self.members.current_round
        assert current is not None
        sometimes("a round that was broken off is completed")
        current.resumed = True
        return self.collect()

    def complete_unfinished(self) -> None:
        """Complete the round that was broken off, if there is one, and drop its outcome."""
        if self.unfinished is not None:
            self.resume()
            self.finish()

    def finish_interrupted(self, name: str) -> None:
        """Finish what an earlier call has left unfinished, before ``name`` is called.

        A call that was interrupted is completed, and its outcome dropped; a step only before a reset: else the caller
        would miss a transition. Of a call in two halves the second must be called first, unless it was interrupted.

        Args:
            name: Of the call that is made now.

        Raises:
            CallPendingError: The answer to the earlier call must be collected first.
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
        self.finish()

    def finish(self) -> None:
        """Call the hooks with the events of the call, then mark its outcome as delivered.

        Ctrl-C that came in the call, or what leaves a hook, is raised before that: then the next call has the outcome.
        The caller returns the outcome, or raises it, right after this.
        """
        if any(self.members.events):
            current, self.members.current_round = self.members.current_round, None  # for a hook that calls the envs
            try:
                self.members.call_hooks()
            finally:
                self.members.current_round = current
        if interrupts.noted is not None:
            interrupts.raise_noted()
        self.members.current_round, self._owner = None, {}

    def drop_round(self) -> Round | None:
        """Drop the unfinished round, which holds descriptors and maps banks, without an outcome; return it."""
        current = self.members.current_round
        self.members.current_round, self._owner = None, {}
        return current

    def close(self) -> Round | None:
        """Release the executor, wake a thread that waits, :meth:`drop_round`. Takes no lock: handlers may call it."""
        self.members.close()
        return self.drop_round()

    # --- how ----------------------------------------------------------------------------------------

    def _collect(self, current: Round, until: float) -> Round:
        """Wait for all answers of a round. Raises WaitTimeout."""
        members, asked = self.members, current.requests
        try:
            # A thread that asks a member also collects it: else it would collect the answer to the next request.
            are_asked_here = not current.tasks or current.tasks.keys() <= members.blocking.keys()
            if current.name == "step" and until == inf and are_asked_here and not current.endings:
                left: Any = asked
                if current.answers or members.blocking:
                    left = [one for one in asked if one not in current.answers and one not in members.blocking]
                state = STEPPING if current.waits else STEPPING_ASYNC
                hot_path.collect_plain(members.supervisors, left, current.answers, state, members.leaves_ends)
            while current.tasks or len(current.answers) < len(asked):
                recovers = members.is_alone and until == inf and not current.tasks
                ready = list(asked) if recovers else self._wait_ready(current, until)
                if not ready and monotonic() >= until:
                    self._owner.clear()  # any thread may wait again
                    raise WaitTimeout(f"{current.name}(): an answer is not there yet; nothing is lost, wait again.")
                members.collect(current, ready, recovers=recovers)
        except BaseException as error:
            current.is_broken = True  # first: the next line may be broken off, too
            current.is_broken = leaves_broken(error)
            # By a second wait, or as if both halves were one call; else the wait has only taken too long.
            current.resumed |= not isinstance(error, MultienvError)
            raise
        return current

    def _wait_ready(self, current: Round, until: float) -> list[int]:
        """Return the members whose answers can be collected; if there are none, wait for something.

        The list may be empty. All that are awaited are watched: one that is lost meanwhile is returned. The
        answer of the worker which was asked last ends the wait, so that the trainer is not woken for each.

        Channels are not held beyond this: a failure that the caller keeps would keep their memory mapped by its frames.
        """
        members, now = self.members, monotonic()
        ended = members.finished_threads(current)
        ready, asked, wake = members.poll(current, reversed(current.requests), now)
        if ended or ready or until <= now:
            return ended + ready
        awaited, lines = list(asked), list(asked.values())
        if lines:
            heard = [awaited[index] for index in wait_any(lines[:1], min(until, wake), watched=lines[1:])]
            for member in heard:
                members.supervisors[member].record_time()
            return heard
        for task in current.tasks.values():
            if not task.wait(None if until == inf else max(0.0, until - monotonic())):
                break
        return []


class Calls:
    """Makes one call at a time to one env: rounds of one member.

    A step or a rollout that was interrupted is completed by the next one, whose own request is not sent; a reset drops
    it. Any other interrupted call is completed by the next call of any name, and its outcome is dropped.

    Args:
        supervisor: Of the env.
        autoreset: Makes resets of steps and lets resets follow them.

    Attributes:
        convert: Name of a call → a function that turns its answer into what the caller gets; it is also given whether
            the call was interrupted. It is called before the call counts as finished: Ctrl-C in there loses nothing,
            and what it raises is told once.
    """

    __slots__ = ("_fan", "_supervisor", "convert")

    def __init__(self, supervisor: Supervisor, autoreset: AutoresetHook | None = None) -> None:
        self.convert: dict[str, Callable[[Any, bool], Any]] = {}
        self._supervisor = supervisor
        self._fan = FanOut([supervisor], autoreset=autoreset, skips_none=False)

    def ask(self, name: str, request: Any) -> Any:
        """Send a message or the action of a step; return what comes of it, or raise the error that is the answer."""
        unfinished = self._fan.unfinished
        if unfinished is not None:
            if name == unfinished.name and name in ("step", "rollout") and unfinished.is_interrupted:
                return self._outcome(self._fan.resume())
            self.finish_interrupted(name)
        return self._outcome(self._fan.ask(name, (request,)))

    def send(self, name: str, request: Any, *, waits: bool = False) -> None:
        """Send a request whose answer :meth:`wait` collects; ``waits``: in the same call of the caller's."""
        self.finish_interrupted(name)
        current = self._fan.send(name, (request,), waits=waits)
        if current.failures:
            self._outcome(current)

    def wait(self, name: str, timeout: float | None, *, waits: bool = False) -> Any:
        """Collect the answer to the request that :meth:`send` sent under this name; wait ``timeout`` seconds for it."""
        unfinished = self._fan.unfinished
        if unfinished is None or unfinished.name != name or unfinished.waits is not waits:
            self._supervisor.check(f"{name}_wait")
        return self._outcome(self._fan.collect(timeout))

    def pending(self) -> str:
        """Return the name of the call whose outcome has not been handed to the caller; ``""``: there is none."""
        unfinished = self._fan.unfinished
        return "" if unfinished is None else unfinished.name

    def finish_interrupted(self, name: str) -> None:
        """Do what :meth:`FanOut.finish_interrupted` does; refuse the call if the worker is closed."""
        if self._supervisor.state.process is Process.CLOSED:
            self._fan.finish()
            self._supervisor.check(name)
        self._fan.finish_interrupted(name)

    def _outcome(self, current: Round) -> Any:
        """Finish a call: return what comes of its answer, or raise its error."""
        for error in current.failures.values():
            self._fan.finish()
            raise error
        answer, name = current.answers[0], current.name
        if current.resumed and name == "step":
            answer = mark_resumed(answer)
        convert = self.convert.get(name)
        if convert is not None:
            try:
                answer = convert(answer, current.resumed)
            except Exception:
                self._fan.finish()
                raise
        self._fan.finish()
        return answer
