"""What drove the envs of a worker, and what the caller saw of it.

One byte string of entries (see ``wire.banks``): for a plain step a copy of its bank, put there by the supervisor
itself::

    entries[base + number * stride :] = stretch

That is the same however often an interrupted call repeats it. Any other entry goes through :meth:`Journal.add`,
which keeps a *mark*: number and place. Between two marks entries are plain, of one length and numbered without a
gap, so that the place of any number is arithmetic.

A replay begins at the construction of the envs as long as the journal reaches back that far. When it outgrows its
limits the oldest part is forgotten, and a replay begins at an *anchor*: a reset, with the random generators put
back, or a state of the envs. Only the comparison with what the caller saw tells whether an env remembers more than
that; so no replay begins at an anchor unless enough was seen since.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import Any

from multienv.wire.banks import BEGIN, HEAD, STEP, Entry, is_plain, split_entries
from multienv.wire.messages import LASTING, Replay, Reset

# A reset becomes an anchor when so many steps have passed since the last one: telling the generators' state takes
# as long as ten steps of CartPole.
ANCHOR_EVERY = 2048
# Steps that must have been seen since a state, and since a reset unless a whole episode was seen.
PROOF_OF_STATE = 64
PROOF_OF_RESET = 512
# A state is wanted whenever this part of what may be held has come since the last one.
_PART = 4
# States of an env that a recovery tries: now and then one does not hold, and the next does.
_STATES_TRIED = 2


@dataclass(frozen=True, slots=True)
class Mark:
    """An entry that is no plain step.

    Attributes:
        number: Of the request.
        place: Where the entry begins.
        stop: Where it ends, and plain steps begin.
        begins: It is a reset of all envs.
        lasts: It may have changed an env for longer than an episode.
    """

    number: int
    place: int
    stop: int
    begins: bool = False
    lasts: bool = False


@dataclass(frozen=True, slots=True)
class Anchor:
    """Marks where a replay can begin: before the entry at ``place``, which is a reset; or with a state of the envs."""

    place: int
    steps: int
    generators: bytes = b""
    state: bytes = b""


@dataclass(frozen=True, slots=True)
class Plan:
    """A replay to try.

    Attributes:
        entries: Entries to run again; what comes of them must be the same bytes.
        rung: ``"snapshot"``, ``"journal"`` or ``"state"``.
        state, generators, lasting: See :class:`~multienv.wire.messages.Replay`.
        requests: Number of the entries.
    """

    entries: bytes
    rung: str = "journal"
    state: bytes = b""
    generators: bytes = b""
    lasting: bytes = b""
    requests: int = 0


class Journal:
    """Holds entries, bounded in bytes and in the time that their replay takes.

    Args:
        recording: Entries are kept at all.
        replaying: They are kept for recoveries, and not for crash reports alone.
        anchor_every: Steps between two resets that are anchors.

    Attributes:
        entries: The entries; the supervisor writes plain steps here itself.
        stride: Length of a plain step.
        base: Where the entry of number 0 would lie if all since the last mark were plain steps.
        complete: It reaches back to the construction of the envs.
        usable: A replay can begin somewhere.
    """

    def __init__(self, *, recording: bool, replaying: bool = True, anchor_every: int = ANCHOR_EVERY) -> None:
        self.recording = recording
        self.replaying = replaying and recording
        self.anchor_every = anchor_every
        self.stride = HEAD.size
        self.begin(0)

    def begin(self, number: int, steps: int = 0, lasting: bytes = b"") -> None:
        """Hold nothing: the envs were built, and the next request is ``number + 1`` or later.

        Args:
            number: Of the last request before.
            steps: Taken before.
            lasting: Entries of calls and attributes set that were repeated in the new envs.
        """
        self.entries = bytearray()
        self.lasting = lasting  # also of entries that are forgotten
        self.anchors: list[Anchor] = []
        self.complete = self.usable = self.recording
        self._marks = [Mark(number, 0, 0)]
        self._steps_at_start = steps
        self.base = self._base_of(self._marks[-1])

    def _base_of(self, last: Mark) -> int:
        return last.stop - (last.number + 1) * self.stride

    def __len__(self) -> int:
        """Return the bytes held."""
        return len(self.entries) + len(self.lasting) + sum(len(one.state) + len(one.generators) for one in self.anchors)

    # --- writing ----------------------------------------------------------------------------------

    def log(self, number: int, entry: bytes, message: Any = None) -> None:
        """Add the entry of a request, a plain step or not; adding it again changes nothing."""
        if not self.recording:
            return
        if is_plain(entry):
            self.entries[self.base + number * self.stride :] = entry
        else:
            self.add(number, entry, message)

    def cut(self, number: int) -> None:
        """Forget entries behind that of ``number``: an interrupted call was about to commit them."""
        marks = self._marks
        while len(marks) > 1 and marks[-1].number > number:
            del self.entries[marks.pop().place :]
        self.base = self._base_of(marks[-1])
        del self.entries[max(marks[-1].stop, self.base + (number + 1) * self.stride) :]

    def add(self, number: int, entry: bytes, message: Any = None) -> None:
        """Add the entry of a request that is not a plain step; adding it again changes nothing."""
        if not self.recording:
            return
        marks = self._marks
        again = len(marks) > 1 and marks[-1].number == number  # an interrupted call adds it once more
        # Behind the plain steps there are.
        place = marks[-1].place if again else min(len(self.entries), self.base + number * self.stride)
        begins = isinstance(message, Reset) and message.mask is None
        mark = Mark(number, place, place + len(entry), begins, isinstance(message, LASTING))
        marks[len(marks) - again :] = [mark]  # at once: an interruption finds the old mark or the new one
        self.entries[place:] = entry
        self.base = self._base_of(self._marks[-1])

    def skip(self, number: int) -> None:
        """Note that ``number`` is of a request that is not kept: the next is ``number + 1``; again changes nothing."""
        marks = self._marks
        last, place = marks[-1], len(self.entries)
        if self.recording and last.number < number:
            is_empty = len(marks) > 1 and last.place == last.stop == place  # several in a row need one mark
            marks[len(marks) - is_empty :] = [Mark(number, place, place)]
        self.base = self._base_of(self._marks[-1])

    def anchor(self, generators: bytes, steps: int) -> None:
        """Make the reset that was added last an anchor: the generators stood so before it."""
        if not self.recording:
            return
        place = self._marks[-1].place  # what lies before it may have come since a snapshot
        self.anchors = [one for one in self.anchors if one.place != place or one.state]
        self.anchors.append(Anchor(place, steps, generators=generators))
        self.usable = True

    def keep_state(self, state: bytes, steps: int) -> None:
        """Note that the envs stand so after all that was added."""
        if not self.usable:
            self.anchors, self.usable = [], True
        place = len(self.entries)
        self.anchors = [one for one in self.anchors if not (one.place == place and one.state)]
        self.anchors.append(Anchor(place, steps, state=state))

    # --- reading ----------------------------------------------------------------------------------

    def wants_anchor(self, steps: int, limit: int) -> bool:
        """Tell whether the coming reset should tell the state of the random generators."""
        if not self.replaying:
            return False
        resets = self._resets()
        if not resets or not self.usable:
            return True
        return steps - resets[-1].steps >= self.anchor_every or len(self.entries) > limit // 2

    def wants_state(self, limit: int, step_limit: float, steps: int) -> bool:
        """Tell whether the envs should be asked for their state: the last one, or the construction, is far back."""
        if not self.replaying or not limit:
            return False
        states = self._states()
        place, before = (states[-1].place, states[-1].steps) if states else (0, self._steps_at_start)
        far = len(self.entries) - place > limit / _PART or steps - before > step_limit / _PART
        return far or not self.usable

    def since(self, number: int) -> Plan | None:
        """Return what came after the request ``number``; ``None`` if that is not known any more."""
        marks = self._marks
        index = bisect_right(marks, number, key=lambda mark: mark.number) - 1
        if index < 0 or not self.recording:
            return None
        mark = marks[index]
        place = mark.stop + (number - mark.number) * self.stride
        stop = marks[index + 1].place if index + 1 < len(marks) else len(self.entries)
        return Plan(bytes(self.entries[place:]), "snapshot", requests=self._count(place)) if place <= stop else None

    def plans(self, *, short: bool = False) -> list[Plan]:
        """Return the replays to try, that which begins earliest first: it is held against the most.

        Args:
            short: Do not begin at the construction: what leaked since would leak again. The anchor before the last is
                the first to be tried, so that a whole episode, or a long part of one, is held against the journal.
        """
        if not self.replaying or not self.usable:
            return []
        resets, states = self._resets(), self._states()
        plans = []
        if short:
            for anchors in (resets, states):
                plans += [plan for anchor in reversed(anchors[:-1]) if (plan := self._from(anchor))][:1]
        furthest: list[Plan | None] = []
        if self.complete:
            # Put back before a reset that comes first: constructors make generators without a seed.
            generators = next((one.generators for one in resets if not one.place), b"")
            furthest.append(
                Plan(bytes(self.entries), generators=generators, lasting=self.lasting, requests=self._count(0))
            )
        anchors = [*([] if self.complete else resets[:1]), *states[:_STATES_TRIED]]
        furthest += map(self._from, sorted(anchors, key=lambda one: one.place))
        return plans + [plan for plan in furthest if plan is not None and plan not in plans]

    def _from(self, anchor: Anchor) -> Plan | None:
        entries = bytes(self.entries[anchor.place :])
        lasting = self.lasting + self._lasting_before(anchor.place)
        if anchor.state:
            if self._seen_since(anchor.place)[0] < PROOF_OF_STATE:
                return None
            return Plan(entries, "state", state=anchor.state, lasting=lasting, requests=self._count(anchor.place))
        later = any(mark.begins and mark.place > anchor.place for mark in self._marks)
        steps, begun = self._seen_since(anchor.place)
        if not later and not begun and steps < PROOF_OF_RESET:
            return None
        return Plan(entries, generators=anchor.generators, lasting=lasting, requests=self._count(anchor.place))

    def _count(self, place: int) -> int:
        """Return the number of entries from ``place`` on."""
        marks = [mark for mark in self._marks if mark.stop > mark.place >= place]
        other = sum(mark.stop - mark.place for mark in marks)
        return len(marks) + (len(self.entries) - place - other) // self.stride

    def _seen_since(self, place: int) -> tuple[int, int]:
        """Return the number of steps from ``place`` on, and that of resets without mail."""
        # A copy: an interruption would leave a view of the entries in its traceback, and they could not grow.
        kinds = [entry.stretch[0] for entry in split_entries(self.entries[place:], self.stride)]
        return kinds.count(STEP), kinds.count(BEGIN)

    def _resets(self) -> list[Anchor]:
        return [anchor for anchor in self.anchors if not anchor.state]

    def _states(self) -> list[Anchor]:
        return [anchor for anchor in self.anchors if anchor.state]

    def _lasting_before(self, place: int) -> bytes:
        marks = [mark for mark in self._marks if mark.lasts and mark.stop <= place]
        return b"".join([bytes(self.entries[mark.place : mark.stop]) for mark in marks])

    def all_lasting(self) -> bytes:
        """Return the entries of all calls and attributes set: they hold in a new life of the envs too."""
        return self.lasting + self._lasting_before(len(self.entries))

    def iterate(self) -> list[Entry]:
        """Return all entries held."""
        return list(split_entries(self.entries, self.stride))

    # --- limits -----------------------------------------------------------------------------------

    def trim(self, limit: int, step_limit: float, steps: int) -> None:
        """Keep the newest half, by both limits, once more than ``limit`` bytes or ``step_limit`` steps are held.

        Replays begin at the anchors in that half; without any they can begin at a snapshot alone.
        """
        if not self.recording or (len(self.entries) <= limit and steps - self._steps_at_start <= step_limit):
            return
        kept = int(min(limit / 2 // self.stride, step_limit / 2))
        place = self._entry_behind(max(0, len(self.entries) - kept * self.stride))
        self._forget(place, steps - self._count(place))

    def _entry_behind(self, place: int) -> int:
        """Return where the first entry begins that lies behind ``place`` whole."""
        marks = self._marks
        index = bisect_right(marks, place, key=lambda mark: mark.stop) - 1
        begin = place + (marks[index].stop - place) % self.stride
        return begin if index + 1 == len(marks) or begin <= marks[index + 1].place else marks[index + 1].stop

    def _forget(self, place: int, steps: int) -> None:
        """Forget all before ``place``, where an entry begins."""
        lasting = self.lasting + self._lasting_before(place)
        index = bisect_left(self._marks, place, lo=1, key=lambda mark: mark.place)
        before = self._marks[index - 1]
        number = before.number + (place - before.stop) // self.stride  # the last request that is forgotten
        later = [replace(mark, place=mark.place - place, stop=mark.stop - place) for mark in self._marks[index:]]
        anchors = [replace(one, place=one.place - place) for one in self.anchors if one.place >= place]
        entries, marks = self.entries[place:], [Mark(number, 0, 0), *later]
        base = self._base_of(marks[-1])
        # Adjacent stores: no interruption comes in between.
        self.entries, self.lasting, self.anchors, self._marks, self.base = entries, lasting, anchors, marks, base
        self.complete, self.usable, self._steps_at_start = False, bool(anchors), steps

    # --- copies -----------------------------------------------------------------------------------

    def copy(self) -> Journal:
        """Return a journal that holds the same."""
        twin = Journal(recording=self.recording, replaying=self.replaying, anchor_every=self.anchor_every)
        twin.load(self.dump())
        return twin

    def dump(self) -> dict[str, Any]:
        """Return all that is held as plain data."""
        return {
            "entries": bytes(self.entries),
            "stride": self.stride,
            "lasting": self.lasting,
            "complete": self.complete,
            "usable": self.usable,
            "steps": self._steps_at_start,
            "marks": tuple((one.number, one.place, one.stop, one.begins, one.lasts) for one in self._marks),
            "anchors": tuple((one.place, one.steps, one.generators, one.state) for one in self.anchors),
        }

    def load(self, data: dict[str, Any]) -> None:
        """Hold what :meth:`dump` returned."""
        entries, marks = bytearray(data["entries"]), [Mark(*fields) for fields in data["marks"]]
        anchors = [Anchor(*fields) for fields in data["anchors"]]
        self.entries, self.lasting, self.anchors, self._marks = entries, data["lasting"], anchors, marks
        self.stride, self._steps_at_start = data["stride"], data["steps"]
        self.complete, self.usable = data["complete"], data["usable"]
        self.base = self._base_of(self._marks[-1])


def furthest_replay(data: dict[str, Any] | None) -> Replay | None:
    """Return the replay that reaches back furthest in what :meth:`Journal.dump` returned; ``None`` if there is none."""
    if data is None:
        return None
    journal = Journal(recording=True)  # also one that is for crash reports alone can be replayed
    journal.load(data)
    plan = next(iter(journal.plans()), None)
    if plan is None:
        return None
    # From the construction on without them: they are a pickle, which only --trust allows to be loaded.
    generators = b"" if journal.complete else plan.generators
    return Replay(plan.entries, plan.state, generators, plan.lasting)
