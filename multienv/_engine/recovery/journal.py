"""What drove the envs of a worker, what the caller saw of it, and where a replay of each slot can begin.

Entries are stored under the number of their request (``wire.banks`` says what is in one). The hot path stores that of
a plain step itself: a copy of its bank. An interrupted call may store an entry twice: the same one, under the same
number.

Each slot has a history of its own. A replay from the construction of its env is exact, whatever the env remembers. The
entries for it are kept for about two seconds of the envs' time; longer where nothing else can take their place: as long
as the worker can be forked and has no snapshot yet; and, without snapshots or until each slot has a proven replay point
(see below), as long as a replay may take at all. A snapshot does not take their place: it may be lost with its worker.

Later a slot is replayed from a *replay point*: a reset of that slot before which the worker has saved the state of the
slot's random generators, whether the caller or the worker asked for the reset. Until its replay point a slot takes no
part in a replay. A point is proven by an episode that has ended since, because a replay from there compares at least
that episode. The last two proven points are kept. An env that remembers something from before its point may go on
otherwise. So such a replay is not exact.

What the journal holds is therefore bounded by the length of episodes, not by the length of the run.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from multienv._engine.wire.banks import HEAD, OVERHEAD
from multienv._engine.wire.messages import Replay, ReplayStart
from multienv._engine.wire.segment import OBSTACLE, SNAPSHOT
from multienv.config import RestartPolicy

logger = logging.getLogger("multienv")

# Seconds that the envs of a worker took since their construction, up to which a replay begins there; or twice what the
# construction took, if that is more.
AFFORDABLE = 2.0
# Why a slot cannot be replayed.
UNKNOWN = (
    "its episode is no longer recorded from its beginning, and there is no snapshot. It has probably outgrown "
    "RestartPolicy.replay_limit or journal_limit"
)
UNPROVEN = (
    "there is no snapshot, none of its episodes has ended since the reset where its replay would begin, so that too "
    "little could be compared, and it is no longer recorded from its construction. That has probably outgrown "
    "RestartPolicy.replay_limit or journal_limit"
)
NEW = "it is a new one"
NOT_ACCEPTED = "it can only be replayed from a reset, which RestartPolicy(accept='exact') does not take"
# Replay points of a slot that are kept, of those that are proven: if a replay from the last one differs, the one before
# is tried.
_KEPT = 2
# How many calls are kept, which include attributes set, to be repeated before a replay; older ones are forgotten.
MOST_CALLS = 1000
# They take no more bytes than the limit of the journal divided by this.
_CALLS_PART = 4


class MemoryAcrossResets:
    """Holds whether a replay from a reset has come out otherwise than what the caller saw.

    Attributes:
        has_shown: It has, in a worker of the batch. It never becomes false again.
    """

    def __init__(self) -> None:
        self.has_shown = self._is_loss_logged = False

    @property
    def reservation(self) -> str:
        """Return why a replay from a reset is not exact though it shows no difference."""
        if self.has_shown:
            return "This env carries memory across resets: a replay that begins at a reset may go on otherwise."
        return "An env that remembers something from before the reset where its replay began may go on otherwise."

    @property
    def lost(self) -> str:
        """Return what is lost when new envs replace old ones; ``""`` if no memory is known."""
        return "What the env remembered from earlier episodes is lost." if self.has_shown else ""

    def record_difference(self, env: str, what: str) -> None:
        """Record that a replay from a reset differs; log a warning the first time.

        Args:
            env: Names the env.
            what: The difference.
        """
        if self.has_shown:
            return
        self.has_shown = True
        logger.warning(
            "%s carries memory across resets, or draws random numbers that multienv does not know: a replay from a "
            "reset came out otherwise (%s). From now on a replay begins at the construction where it can, and planned "
            "replacements wait for a reset of all envs of a worker, which then lose that memory. "
            "To have only recoveries that are shown to be exact, give RestartPolicy(accept='exact'). "
            "`multienv doctor` examines the env.",
            env,
            what,
        )

    def record_new_envs(self, env: str, why: str) -> str:
        """Record that new envs have replaced old ones; return what is lost, and log a warning the first time.

        Args:
            env: Names the env.
            why: The limit that was reached, in words.
        """
        if self.has_shown and not self._is_loss_logged:
            self._is_loss_logged = True
            logger.warning(
                "%s: its process is replaced, %s, by one with new envs. What the env remembers from earlier episodes "
                "(a curriculum, statistics) is lost, now and at each such replacement of an env of this batch. To keep "
                "it, raise the limit (max_rss, recycle_…), give RestartPolicy(accept='exact'), or give the env what it "
                "needs in the options of reset().",
                env,
                why,
            )
        return self.lost


class ReplayPoint(NamedTuple):
    """A reset of one slot at which a replay of it can begin.

    Attributes:
        number: Of the request in which the slot was reset.
        seconds: Time of the worker's envs up to there, see :meth:`Journal.trim`.
        generators: State of its random generators before that; see ``worker.seeding``.
    """

    number: int
    seconds: float
    generators: bytes


@dataclass(slots=True)
class History:
    """Holds what is known of one slot.

    Attributes:
        replay_points: The oldest first.
        ended: Number of the last request in which an episode ended, or a reset was asked for.
        is_whole: What is recorded reaches back to the construction of the slot's env.
    """

    replay_points: tuple[ReplayPoint, ...] = ()
    ended: int = 0
    is_whole: bool = True

    def proven(self) -> tuple[ReplayPoint, ...]:
        """Return the replay points after which an episode has ended: a replay from there compares at least one."""
        return tuple(one for one in self.replay_points if one.number < self.ended)

    @property
    def why_not_from_reset(self) -> str:
        """Return why the slot cannot be replayed from a reset, if it cannot."""
        if self.proven():
            return NOT_ACCEPTED
        return UNPROVEN if self.replay_points else UNKNOWN


@dataclass(frozen=True, slots=True)
class Plan:
    """A replay to try.

    Attributes:
        entries: Entries to run again; what comes of them must be the same bytes.
        starts: Where slots begin. Those not named take part from the first entry on.
        missing: Slots that take no part in it, and why.
        calls: Calls and attributes set before the first entry.
        requests: Number of the entries.
        replay_points: By slot.
        resets: Slots that are replayed from a reset, and not from the construction of their envs.
        repeated: So many requests the process has repeated: it is a copy, forked in an attempt that has failed.
        every: Copies are forked between so many of the others; 0: none.
    """

    entries: bytes
    starts: tuple[ReplayStart, ...] = ()
    missing: Mapping[int, str] = field(default_factory=dict)
    calls: tuple[bytes, ...] = ()
    requests: int = 0
    replay_points: Mapping[int, ReplayPoint] = field(default_factory=dict)
    resets: tuple[int, ...] = ()
    repeated: int = 0
    every: int = 0

    @property
    def message(self) -> Replay:
        """Return the request for the worker."""
        skipped = tuple(ReplayStart(slot, self.requests, b"") for slot in self.missing)
        return Replay(self.entries, (*self.starts, *skipped), self.calls, self.repeated, self.every)


class Journal:
    """Holds entries, bounded by episodes, in bytes, and in the time that their replay takes.

    Args:
        recording: Entries are kept at all.
        policy: Says whether they are kept for recoveries, or for crash reports alone, and which replays are taken.

    Attributes:
        entries: By number, in order; the supervisor puts plain steps here itself.
        memory: Whether the env has shown a memory across resets; a batch shares it.
        first: Number of the oldest request that is wholly known, with all that came after it.
        stride: Length of a plain step.
        histories: Of each slot.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "entries",
        "recording",
    )  # the hot path reads these, native code by offset

    def __init__(self, *, recording: bool, policy: RestartPolicy = RestartPolicy()) -> None:  # noqa: B008 - frozen
        self.recording = recording
        self.replaying = policy.replays and recording
        self._policy, self.memory = policy, MemoryAcrossResets()
        self.stride, self.slots, self._affordable = HEAD.size, 1, AFFORDABLE
        self.clear(0)

    def lay_out(self, stride: int, slots: int, construction: float = 0.0) -> None:
        """Set how long a plain step is, how many envs there are, and the seconds that their construction took."""
        self.stride, self.slots, self._affordable = stride, slots, max(AFFORDABLE, 2 * construction)

    def clear(self, number: int, calls: Iterable[bytes] = ()) -> None:
        """Clear the journal, because the envs were just built: the next request is ``number + 1`` or later.

        Args:
            number: Of the last request before.
            calls: Calls and attributes set that were repeated in the new envs.
        """
        repeated = list(calls)
        self.entries: dict[int, bytes] = {}
        # Entries may be held from _oldest on: a trim that was broken off leaves some before `first`.
        self.first = self._oldest = number + 1
        self.histories = [History(is_whole=self.recording) for _ in range(self.slots)]
        self._built: float | None = None  # time of the envs at their construction; noted at the first look
        self._is_affordable = True  # a replay from the construction, as far as time goes
        self._longer: dict[int, int] = {}  # by how much an entry is longer than a plain step, or shorter
        self._kept_calls = dict(enumerate(repeated, number + 1 - len(repeated)))

    @property
    def is_whole(self) -> bool:
        """Return whether it reaches back to the construction of the envs, for one slot at least."""
        return any(history.is_whole for history in self.histories)

    @property
    def last(self) -> int:
        """Return the number of the newest entry; that before the first if there is none."""
        return next(reversed(self.entries), self.first - 1)

    def __len__(self) -> int:
        """Return the bytes held."""
        held = len(self.entries) * self.stride + sum(self._longer.values()) + sum(map(len, self._kept_calls.values()))
        return held + sum(len(point.generators) for history in self.histories for point in history.replay_points)

    # --- writing ----------------------------------------------------------------------------------

    def record(self, number: int, entry: bytes, call: bytes = b"") -> None:
        """Record the entry of a request; recording it again changes nothing.

        Args:
            number: Of the request.
            entry: Whatever its length.
            call: The message, pickled, if it may change an env for longer than an episode: see ``messages.CALLS``.
        """
        if not self.recording:
            return
        if len(entry) != self.stride:
            self._longer[number] = len(entry) - self.stride
        if call:
            self._kept_calls[number] = call
        self.entries[number] = entry

    def record_rollout(self, number: int, entries: Iterable[bytes]) -> None:
        """Record the entries of a rollout, the first of which has this number."""
        self.drop_after(number - 1)
        for one, entry in enumerate(entries, number):
            self.record(one, entry)

    def drop_after(self, number: int) -> None:
        """Drop the entries after that of ``number``: they were recorded, but not committed."""
        for late in list(takewhile(lambda one: one > number, reversed(self.entries))):
            for held in (self._longer, self._kept_calls, self.entries):
                held.pop(late, None)

    def record_replay_point(self, slot: int, number: int, generators: bytes, seconds: float) -> None:
        """Record a reset of a slot, and the state of its generators before it; recording it again changes nothing."""
        history = self.histories[slot]
        earlier = tuple(one for one in history.replay_points if one.number < number)
        history.replay_points = (*earlier, ReplayPoint(number, seconds, generators))

    def record_ends(self, slots: Iterable[int], number: int) -> None:
        """Record that episodes of these slots ended in a request, or that it resets them."""
        for slot in slots:
            self.histories[slot].ended = number

    def drop_replay_points(self, slots: Iterable[int]) -> None:
        """Drop the replay points of these slots: their envs are others than the recorded ones."""
        for slot in slots:
            self.histories[slot] = History(ended=self.histories[slot].ended, is_whole=False)

    def drop_before(self, plan: Plan) -> None:
        """Drop what lies before the replay points of this plan, as its replay has brought the envs back."""
        for slot, point in plan.replay_points.items():
            history = self.histories[slot]
            if history.replay_points and history.replay_points[0].number < point.number:
                kept = tuple(one for one in history.replay_points if one.number >= point.number)
                self.histories[slot] = History(kept, history.ended, is_whole=False)

    # --- reading ----------------------------------------------------------------------------------

    def plan_since(self, number: int) -> Plan | None:
        """Return the replay of what came after request ``number``; ``None`` if not all of that is held any more."""
        if not self.recording or number + 1 < self.first:
            return None
        numbers = self._numbers_from(number + 1)
        return Plan(b"".join([self.entries[one] for one in numbers]), requests=len(numbers))

    def _numbers_from(self, front: int) -> list[int]:
        """Return the numbers of the entries from ``front`` on; what comes before is not looked at."""
        return list(takewhile(lambda one: one >= front, reversed(self.entries)))[::-1]

    def plans(self, *, near: bool = False, new_slots: Collection[int] = ()) -> list[Plan]:
        """Return the replays to try, in order.

        Args:
            near: The shortest first, even if the journal is whole: a long replay would leak again what has leaked.
            new_slots: Slots that take no part in them: their envs are to be new ones.
        """
        if not self.recording:
            return []
        plans = self._plan(near=False, new_slots=new_slots), self._plan(near=True, new_slots=new_slots)
        found = [plan for plan in plans if plan is not None]
        repeats_all = len({plan.requests for plan in found}) == 1  # also the near one, for a slot without a point
        is_far = self.is_whole and (self._is_affordable or self.memory.has_shown or repeats_all)
        if near or not is_far:
            found.reverse()
        return found[:1] if len(found) == 2 and found[0].replay_points == found[1].replay_points else found

    def can_be_shorter(self, plan: Plan | None) -> bool:
        """Tell whether another replay can begin later than this one; ``None``: than a woken snapshot."""
        near = self._plan(near=True)
        return near is not None and (plan is None or plan.replay_points != near.replay_points)

    def _plan(self, *, near: bool, new_slots: Collection[int] = ()) -> Plan | None:
        """Return the replay from the last replay points, or from the first ones; ``None`` if no slot has any."""
        points, missing, resets, from_construction = {}, {}, [], False
        only_whole = self._policy.accept == "exact"
        for slot, history in enumerate(self.histories):
            proven = history.proven()
            if slot in new_slots:
                missing[slot] = NEW
            elif history.is_whole and (only_whole or not near or proven[-1:] in ((), history.replay_points[:1])):
                from_construction = True
                if history.replay_points:
                    points[slot] = history.replay_points[0]
            elif proven and not only_whole:
                points[slot] = proven[-1 if near else 0]
                resets.append(slot)
            else:
                missing[slot] = history.why_not_from_reset
        if len(missing) == self.slots:
            return None
        front = self.first if from_construction else min(one.number for one in points.values())
        numbers = self._numbers_from(front)
        return Plan(
            b"".join([self.entries[number] for number in numbers]),
            tuple(
                ReplayStart(slot, bisect_left(numbers, one.number), one.generators, waits=slot in resets)
                for slot, one in points.items()
            ),
            missing,
            tuple(payload for number, payload in self._kept_calls.items() if number < front),
            len(numbers),
            points,
            tuple(resets),
        )

    def why_no_plan(self) -> str:
        """Return why there is no plan, so that no slot can be replayed."""
        gaps = [history.why_not_from_reset for history in self.histories]
        return next((gap for gap in (NOT_ACCEPTED, UNPROVEN) if gap in gaps), UNKNOWN)

    def kept_calls(self) -> tuple[bytes, ...]:
        """Return all calls that are kept, each pickled: they are repeated in new envs, too."""
        return tuple(self._kept_calls.values())

    # --- limits -----------------------------------------------------------------------------------

    def apply_limits(self, seconds: float, words: Any) -> None:
        """Drop what no recovery needs any more by its policy; ``words``: of the segment of the present process."""
        if self.recording:
            policy = self._policy
            limit, longest = policy.journal_limit * self.slots, policy.replay_limit * self.slots
            forks = policy.snapshots and policy.replays and sys.platform == "linux" and not words[OBSTACLE]
            self.trim(limit, seconds, longest, words[SNAPSHOT], forks=forks)

    def trim(self, limit: int, seconds: float, longest: float, snapshot: int, *, forks: bool = False) -> None:
        """Drop the entries and replay points that no recovery needs any more.

        Args:
            limit: Bytes that entries may take.
            seconds: Time of the worker's envs so far.
            longest: Time of the envs that a replay may take.
            snapshot: Number of the last request executed in the newest forked snapshot; 0: there is none.
            forks: The worker can be forked, as far as is known.
        """
        self._drop_calls(limit)
        self._built = seconds if self._built is None else self._built
        since_built, room = seconds - self._built, self._front_within(limit)
        self._is_affordable = since_built <= min(self._affordable, longest)
        is_kept = self._is_affordable
        stands = self._policy.accept != "exact" and all(history.proven() for history in self.histories)
        # Else no other recovery would be exact, or there would be none. A crash report may begin at any reset.
        if self.replaying and not (snapshot and stands and not self.memory.has_shown):
            is_kept = since_built <= longest or (forks and not snapshot)
        is_kept = is_kept and room == self.first
        front, histories = self.first, []
        for history in self.histories:
            is_whole = history.is_whole and is_kept
            kept = [one for one in history.replay_points if one.number >= room and seconds - one.seconds <= longest]
            proven = history.proven()[-_KEPT:]
            kept = [one for one in kept if not proven or one.number >= proven[0].number]
            if is_whole and history.replay_points[:1] != tuple(kept[:1]):
                kept = [*history.replay_points[:1], *kept]
            histories.append(History(tuple(kept), history.ended, is_whole))
        if not any(history.is_whole for history in histories):
            wanted = [history.replay_points[0].number for history in histories if history.replay_points]
            front = max(room, min(wanted + [snapshot + 1] * bool(snapshot), default=self.last + 1))
        # First: the entries that are dropped below are then in no plan.
        self.histories, self.first = histories, front
        if self._oldest < front:
            drop, dropped = self.entries.pop, range(self._oldest, front)
            for number in dropped:
                drop(number, None)
            for number in dropped if self._longer else ():
                self._longer.pop(number, None)
            self._oldest = front

    def _front_within(self, limit: int) -> int:
        """Return the number from which on entries take no more than ``limit`` bytes."""
        each = self.stride + OVERHEAD
        held = each * len(self.entries) + sum(self._longer.values())
        if held <= limit:
            return self.first
        front, last = self.first, self.last
        for number in range(self._oldest, front):  # left by a trim that was broken off
            if number in self.entries:
                held -= each + self._longer.get(number, 0)
        while held > limit and front <= last:
            if front in self.entries:
                held -= each + self._longer.get(front, 0)
            front += 1
        return front

    def _drop_calls(self, limit: int) -> None:
        """Drop the oldest calls and attributes set, if there are too many."""
        size = sum(map(len, self._kept_calls.values()))
        for number in list(self._kept_calls):
            if len(self._kept_calls) <= MOST_CALLS and size <= limit // _CALLS_PART:
                return
            if number < self.first:  # repeated in the new envs: a replay from their construction would lack it
                for history in self.histories:
                    history.is_whole = False
            size -= len(self._kept_calls.pop(number))

    # --- copies -----------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Return the contents as plain data."""
        return {
            "entries": dict(self.entries),
            "first": self.first,
            "built": self._built,
            "is_affordable": self._is_affordable,
            "stride": self.stride,
            "calls": dict(self._kept_calls),
            "histories": tuple((tuple(map(tuple, of.replay_points)), of.ended, of.is_whole) for of in self.histories),
        }

    def load(self, data: Mapping[str, Any]) -> None:
        """Replace the contents by what :meth:`dump` returned."""
        histories = [History(tuple(ReplayPoint(*one) for one in points), *rest) for points, *rest in data["histories"]]
        self.lay_out(data["stride"], len(histories))
        longer = {number: len(entry) - self.stride for number, entry in data["entries"].items()}
        self._longer = {number: by for number, by in longer.items() if by}
        self.entries, self._kept_calls, self.histories = dict(data["entries"]), dict(data["calls"]), histories
        self.first = data["first"]
        self._oldest = next(iter(self.entries), self.first)
        self._built, self._is_affordable = data["built"], data["is_affordable"]


def replays_of(data: Mapping[str, Any] | None) -> tuple[Replay, ...]:
    """Return the replay that reaches back furthest in what :meth:`Journal.dump` returned, if there is one.

    A second one begins at the last replay point of each slot, if it is at most half as long.
    """
    if data is None:
        return ()
    journal = Journal(recording=True)  # also one that is for crash reports alone can be replayed
    journal.load(data)
    for history in journal.histories:
        history.ended = journal.last + 1  # a report compares nothing that counts: it needs no proven point
    plans = sorted(journal.plans(), key=lambda plan: -plan.requests)
    return tuple(plan.message for plan in plans if plan is plans[0] or 2 * plan.requests <= plans[0].requests)
