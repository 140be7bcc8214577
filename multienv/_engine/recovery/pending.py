"""The pending request of a worker: what it carries, how it is published, how long it may take."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from multienv._engine.processes.channel import Channel
from multienv._engine.recovery.position import Position
from multienv._engine.recovery.state_machine import Kind, Request, State
from multienv._engine.reports.texts import deadline_of, foreign_frames
from multienv._engine.sometimes import sometimes
from multienv._engine.wire.actions import PICKLED
from multienv._engine.wire.banks import (
    BEGUN,
    HEAD,
    LEFT_ALONE,
    MESSAGE,
    NOT_RESET,
    RESET,
    SKIPPED,
    STEP,
    STEPPED,
    U32,
    BankLayout,
    Entry,
)
from multienv._engine.wire.codecs import Codec
from multienv._engine.wire.messages import PLAIN_RESET, Message, Reset, Rollout
from multienv._engine.wire.segment import BUSY, REPLY, REQUEST, SLOT, SNAPSHOT, Segment
from multienv.config import Deadlines

logger = logging.getLogger("multienv")

# A call that waits so many seconds, and whose deadline nobody has given in seconds, says so once.
SILENCE = 60.0
# The trainer looks so often within a deadline which env of a process is being called.
_LOOKS = 8
# The shortest deadline that is found from the times seen, seconds.
LEAST = 60.0
# A wait for less than this part of it says nothing of a deadline, and costs no more than without one.
BRIEF = 0.01
# A deadline is so many times the slowest request that was seen.
MULTIPLE = 10.0
# There is no deadline before so many steps and resets: the first ones compile and load.
STEPS, RESETS = 20, 3
# A deadline is so many times as long where a loss may cost the episode, and in the process after a first loss.
LONGER = 5.0


class RequestDeadlines:
    """Keeps the deadlines of the requests to one worker, and finds those that are ``"auto"``.

    Args:
        deadlines: As the user gave them.
        resets_in_steps: A step may be a reset, too.

    Attributes:
        step, reset, call: Seconds that an env may take; ``None``: there is no limit, or none yet.
        is_finding: One of them is ``"auto"``.
    """

    def __init__(self, deadlines: Deadlines, *, resets_in_steps: bool) -> None:
        self._finds = {name for name in ("step", "reset") if getattr(deadlines, name) == "auto"}
        step, reset = deadlines.step, deadlines.reset
        self.step: float | None = None if isinstance(step, str) else step
        self.reset: float | None = None if isinstance(reset, str) else reset
        self.call = deadlines.call
        self.is_finding = bool(self._finds)
        self._slowest = {"step": 0.0, "reset": 0.0}
        self._resets_in_steps = resets_in_steps
        self.find_deadlines(0, 0)

    def finds(self, name: str) -> bool:
        """Tell whether the deadline of ``"step"`` or ``"reset"`` is ``"auto"``."""
        return name in self._finds

    def record_time(self, name: str, seconds: float) -> bool:
        """Record how long an env has taken for a step or a reset; return whether none took longer before."""
        if seconds <= self._slowest.get(name, inf):
            return False
        self._slowest[name] = seconds
        return True

    def find_deadlines(self, steps: int, resets: int) -> None:
        """Find the deadlines, once there were so many steps and resets."""
        step, reset = self._slowest["step"], self._slowest["reset"]
        if self._resets_in_steps:
            step = reset = max(step, reset)
        if "step" in self._finds and steps >= STEPS:
            self.step = max(LEAST, MULTIPLE * step)
        if "reset" in self._finds and resets >= RESETS:
            self.reset = max(LEAST, MULTIPLE * reset)


class Pending:
    """Holds the content of the pending request, and its deadline.

    A plain step lies in its bank and nowhere else. Kept here are messages, and steps that another process will be asked
    for.

    Args:
        position: What the caller has seen of the worker.
        env_in: Names the env in a slot for warnings; for slot -1 all of them.
        limits: Deadlines of requests.
        replays: A process that hangs is recovered.

    Attributes:
        step_limit: Seconds that the next step may take; ``None``: no limit, or none yet.
        message: The request, unless it is a step.
        payload: The message, pickled.
        limit: Seconds that the process may take for it; ``None``: no limit.
        until: When it is overdue, seconds of the clock; ``None``: never.
    """

    # The hot path reads these, native code by offset.
    __slots__ = ("__dict__", "__weakref__", "limit", "step_limit", "until")

    def __init__(
        self, position: Position, env_in: Callable[[int], str], limits: RequestDeadlines, *, replays: bool
    ) -> None:
        self._position, self._env_in, self._limits, self._replays = position, env_in, limits, replays
        self._slots = len(position.seeds)
        self.step_limit = limits.step
        self.message: Message | None = None
        self.payload = b""
        self.limit: float | None = None
        self.until: float | None = None
        # Number, request part and payload of a step that is to be asked of another process.
        self._saved: tuple[int, bytes, bytes] | None = None
        self._silence = 0, inf  # number of a request without a deadline in seconds, and when to log that it is silent
        # Number of the request, which env was being called in which step at the last look, since when that has been the
        # same, and when to look again.
        self._mark: tuple[int, Any, float, float] = 0, None, inf, inf
        self._excused: Any = None  # the number and the rest of that for which a look came late once
        self._longest = 0.0  # that a slot has been called for in that request
        self._own = 0  # number of a request whose deadline the caller has given with it
        self._waited = 0, inf  # number of a request that is waited for, and since when

    def set_step(self) -> None:
        """Set the request to a step, which lies in its bank."""
        self.set_request(None, b"", self.step_limit)

    def set_step_without_process(self, number: int, action: Any, codec: Codec) -> None:
        """Set the request to a step for a process that is not there yet."""
        sometimes("a step is asked for while there is no process")
        aside = Segment(-1)
        aside.lay_out(codec.layout)
        codec.encoder(aside)(number, action)
        self.set_step()
        self._saved = (number, *_step_in(aside, number))

    def set_request(self, message: Message | None, payload: bytes, limit: float | None) -> None:
        """Set the request, and drop the one before: after a restore it may have the same number."""
        self.message, self.payload, self.limit = message, payload, limit
        self._saved, self._own, self._excused = None, 0, None
        self.start_deadline()

    def start_deadline(self) -> None:
        """Start to count the time that a process may take."""
        self._silence = self._waited = 0, inf
        self._mark = 0, None, inf, inf
        self.until = None if self.limit is None else time.monotonic() + self.limit

    def set_deadline(self, seconds: float | None, number: int = 0) -> None:
        """Set the deadline of the request: so many seconds from now, and in each process that it is asked of.

        Args:
            seconds: The deadline; ``None``: it has none.
            number: Of a request whose own deadline this is.
        """
        self.limit, self._own = seconds, number
        self.start_deadline()

    # --- deadlines --------------------------------------------------------------------------------

    def limit_of(self, kind: Kind, steps: int = 0) -> float | None:
        """Return the deadline of a request; of a rollout that of all its ``steps`` together, or, if found, of each."""
        limits = self._limits
        if steps and not limits.finds("step"):
            return None if limits.step is None else steps * self._slots * limits.step
        return {Kind.STEP: limits.step, Kind.RESET: limits.reset, Kind.CALL: limits.call}[kind]

    def find_deadlines(self) -> None:
        """Find the deadlines that are ``"auto"``, after enough steps and resets."""
        if self._limits.is_finding:
            self._limits.find_deadlines(self._position.steps, self._position.episodes)
            self.step_limit = self._limits.step

    def brief_wait(self, request: Request | None, number: int) -> float:
        """Return for how many seconds a request may be waited for before its deadline, ``"auto"``, is looked at."""
        is_own = self.until is not None and not self._is_found(request, number)
        return BRIEF * LEAST if self._limits.is_finding and not is_own else 0.0

    def set_found_deadline(self, request: Request | None) -> None:
        """Set the deadline of a request that had none when it was sent to the one that was found since."""
        if self._limits.is_finding and request is not None and self.until is None:
            self.find_deadlines()
            limit = self.limit_of(request.kind, request.steps)
            if limit is not None:
                self.set_deadline(limit)

    def record_time(self, segment: Segment, request: Request | None) -> None:
        """Record how long an answered request took, if it was waited for, to find ``"auto"`` deadlines by that."""
        number = self._position.number + 1
        if not self._limits.is_finding or request is None or segment.words[REPLY] != number:
            return
        if self._limits.record_time(request.kind.value, self._seconds_of(number, request)):
            self.find_deadlines()

    def lengthen_deadline(self, request: Request, number: int) -> bool:
        """Lengthen the deadline of a request if it is ``"auto"``, once; tell whether it is longer now."""
        limit = self.limit_of(request.kind, request.steps)
        if limit is None or self.limit != limit or not self._is_found(request, number):  # else it has got some before
            return False
        self.limit = LONGER * limit
        return True

    def lengthen_after_hang(self, request: Request, number: int, slot: int) -> None:
        """Lengthen the deadline of a request that hung, if it is ``"auto"``, once, and log that."""
        if self.lengthen_deadline(request, number):
            text = "%s() of %s may take %.0f s in the next process: it may only be slow (Deadlines 'auto')."
            logger.warning(text, request.name, self._env_in(slot), self.limit)

    def _is_found(self, request: Request | None, number: int) -> bool:
        """Tell whether the deadline of a request is ``"auto"``, and not the caller's own."""
        return request is not None and self._own != number and self._limits.finds(request.kind.value)

    # --- another process --------------------------------------------------------------------------

    def save_step(self, segment: Segment, number: int) -> tuple[int, bytes, bytes]:
        """Copy a step out of the bank of a lost process, for the next process; return its number, part and payload."""
        if self._saved is None or self._saved[0] != number:
            self._saved = (number, *_step_in(segment, number))
        return self._saved

    def _write_saved_step(self, segment: Segment, number: int) -> None:
        """Write a saved step into the segment of another process."""
        if self._saved is not None and self._saved[0] == number:
            _, part, payload = self._saved
            bank = segment.banks[number & 1]
            bank.view[: len(part)] = part
            tag = part[1] & ~SKIPPED
            HEAD.pack_into(bank.view, 0, STEP, tag, STEPPED, 0, 0, number & U32, 0)
            bank.skipped[:] = 0
            if tag == PICKLED:
                segment.write_request_payload(number, payload)

    def publish(self, channel: Channel, number: int, state: State, beginning: Sequence[int] = ()) -> None:
        """Publish the request, without its skipped slots. To publish it twice does no harm.

        ``beginning`` are those of the skipped slots that begin their next episode: see :func:`slots_beginning`.
        """
        segment = channel.segment
        if segment.words[REQUEST] != number:
            self.start_deadline()
            self._write_saved_step(segment, number)
            bank, request = segment.banks[number & 1], state.request
            assert request is not None
            alone = request.left_alone
            flag = SKIPPED if state.skipped or alone else 0
            if request.is_single_step:
                bank.view[1] = bank.view[1] & ~SKIPPED | flag
            else:
                if self.message is PLAIN_RESET:
                    HEAD.pack_into(bank.view, 0, RESET, flag, STEPPED, 0, 0, number & U32, 0)
                else:
                    segment.write_request_payload(number, self.payload)
                    HEAD.pack_into(bank.view, 0, MESSAGE, flag, 0, 0, 0, number & U32, 0)
            bank.skipped[:] = 0
            bank.skipped[alone] = LEFT_ALONE
            for slot, _ in state.skipped:
                sometimes("a slot is left out of a request")
                sometimes("a slot is left out and not even reset", slot in state.not_reset)
                bank.skipped[slot] = NOT_RESET if slot in state.not_reset else BEGUN if slot in beginning else 1
        channel.ring(number)

    # --- waiting ----------------------------------------------------------------------------------

    def due(self, channel: Channel, number: int, request: Request | None) -> float:
        """Return when to do more than wait for the reply: end an overdue process, or log that it has not answered.

        Args:
            channel: Of the process that was asked.
            number: Of the request.
            request: The caller's; ``None``: the process builds its envs.
        """
        if self._waited[0] != number:
            self._waited, self._longest = (number, time.monotonic()), 0.0
        if self.until is not None and not self._is_found(request, number):
            return self._overdue_at(channel, number, request)
        if self._silence[0] != number:
            self._silence = number, time.monotonic() + SILENCE
        return min(self._silence[1], self._overdue_at(channel, number, request))

    def _overdue_at(self, channel: Channel, number: int, request: Request | None) -> float:
        """Return when the process is overdue, or when to ask again; in the past if it is overdue now."""
        if self.until is None:
            return inf
        if request is None or self.limit is None:
            return self.until
        is_found, words = self._is_found(request, number), channel.segment.words
        if not is_found and (self._slots == 1 or request.steps):
            return self.until
        if is_found and not (self._replays and words[SNAPSHOT]):
            self.lengthen_deadline(request, number)
        return self._due_of_slot(number, words, self.limit, is_found=is_found)

    def _due_of_slot(self, number: int, words: Any, limit: float, *, is_found: bool) -> float:
        """Return when to look at the mark of the slot again; in the past if the env in that slot is overdue.

        An env has its whole deadline, whatever those before it have taken, and up to an eighth of it more. If the
        deadline is ``"auto"``, the time before a look that comes late is not counted, once: the trainer was stopped,
        and perhaps the worker, too. A trainer that learns for long between two calls looks late each time.
        """
        now, mark = time.monotonic(), (words[BUSY], words[SLOT])
        last, before, since, again = self._mark
        if last != number or mark != before:
            self._longest = max(self._longest, now - since) if last == number else 0.0
            since = now
        elif is_found and now > again + limit / _LOOKS and self._excused != (number, mark):
            self._excused = number, mark
            since = max(since + now - again, now + limit / _LOOKS - limit)
        elif now >= since + limit:
            return since + limit
        if last != number or now >= again:
            again = min(now + limit / _LOOKS, since + limit)
        self._mark = number, mark, since, again
        return again

    def _seconds_of(self, number: int, request: Request) -> float:
        """Return the seconds that an env took for this request, as far as it was waited for; 0.0: it was not.

        Of a rollout it is what each of its steps took in the mean.
        """
        now = time.monotonic()
        if self._mark[0] == number and not request.steps:
            return max(self._longest, now - self._mark[2])
        envs = sum(map(request.touches, range(self._slots)))
        return (now - self._waited[1]) / max(1, envs * max(1, request.steps)) if self._waited[0] == number else 0.0

    def await_reply(self, channel: Channel, number: int, until: float | None, request: Request | None) -> bool:
        """Wait for the reply.

        Args:
            channel: Of the process that was asked.
            number: Of the request.
            until: When the caller gives up waiting; ``None``: never.
            request: As for :meth:`due`.

        Returns:
            Whether it is there; else ``until`` has passed.

        Raises:
            Gone: The process ended, or was killed because the request is overdue.
        """
        self.set_found_deadline(request)
        was_here = channel.answered(number)
        is_here = self._wait(channel, number, until, request)
        if is_here and not was_here:
            self.record_time(channel.segment, request)
        return is_here

    def _wait(self, channel: Channel, number: int, until: float | None, request: Request | None) -> bool:
        while True:
            due = self.due(channel, number, request)
            nearest = due if until is None else min(due, until)
            if channel.wait(number, None if nearest == inf else nearest):
                return True
            if nearest != due:
                return False
            now = time.monotonic()
            if self._overdue_at(channel, number, request) <= now:
                raise channel.kill(cause="hung", stack=True)
            if self._silence[1] <= now:
                self._silence = number, inf
                self._log_silence(channel, "initialize" if request is None else request.name)
            else:
                sometimes("another env of the process is being called")

    def _log_silence(self, channel: Channel, name: str) -> None:
        """Log that the request has waited for ``SILENCE`` seconds, and where its process is."""
        option = deadline_of(name)
        given = f"Deadlines({option}=seconds)"
        if self.until is not None and self.limit is not None:
            advice = f"It counts as hung after {self.limit:.0f} s (Deadlines 'auto'): give {given} to have that sooner"
        else:
            advice = f"Nothing is killed without a deadline: give {given} to have it recovered"
            if self._limits.finds(option):
                advice = f"{advice}: 'auto' has no number before 20 steps, and 3 resets"
            elif option in ("step", "reset"):
                advice = f"{advice}, or {option}='auto'"
        logger.warning(
            "%s() of %s has not returned for %.0f s (pid %s). %s.\nIts stack:\n%s",
            name,
            self._env_in(channel.segment.words[SLOT] - 1),
            SILENCE,
            channel.pid,
            advice,
            foreign_frames(channel.stack()),
        )

    def payload_of(self, segment: Segment, number: int, request: Request) -> bytes:
        """Return what the request carries beside its bank."""
        return _step_in(segment, number)[1] if request.is_single_step else self.payload

    def journal_entry(self, segment: Segment, number: int, request: Request | None, layout: BankLayout) -> bytes:
        """Return the request as a journal entry without a reply, for a crash report."""
        if request is None:
            return b""
        if not request.is_single_step:
            kind = RESET if self.message is PLAIN_RESET else MESSAGE
            part, payload = HEAD.pack(kind, 0, 0, 0, 0, number & U32, 0), self.payload
        else:
            _, part, payload = self.save_step(segment, number)
        return Entry(part + bytes(layout.end - len(part)), payload).packed()


def request_of(name: str, message: Message, waits: bool) -> Request:
    """Return the request that a message makes; ``name`` and ``waits``: see :class:`Request`."""
    if isinstance(message, Rollout):
        return Request(Kind.STEP, name, waits, None, message.steps)
    if isinstance(message, Reset):
        return Request(Kind.RESET, name, waits, message.mask)
    return Request(Kind.CALL, name, waits)


def _step_in(segment: Segment, number: int) -> tuple[bytes, bytes]:
    """Return the request part of a step's bank, and its payload."""
    bank = segment.banks[number & 1]
    is_pickled = bank.view[0] == STEP and bank.view[1] & ~SKIPPED == PICKLED
    return bytes(bank.view[: bank.layout.rewards]), segment.read_request_payload(number) if is_pickled else b""
