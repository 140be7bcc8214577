"""What the trainer has of a group: its rows in the arena, and what tells two lives of an env apart."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from multienv.backends.arena import Arena
from multienv.backends.base import Backend
from multienv.recovery.doubts import Doubts
from multienv.recovery.journal import Plan
from multienv.recovery.supervisor import Supervisor
from multienv.recovery.verification import alike, first_difference, same
from multienv.wire.batch import BatchLayout, Place, row_of, row_writer
from multienv.wire.evidence import GroupEvidence
from multienv.wire.messages import (
    IRREGULAR,
    KIND_AT,
    KIND_OF_REQUEST_AT,
    LASTING,
    MESSAGE,
    REPLY,
    SEQ_MASK,
    STEP,
    STEPPED,
    TAG_AT,
    Description,
    Initialize,
    Reset,
    is_cut,
    seq_of,
    unpack_message,
)
from multienv.wire.observations import Placement, irregular_parts

_unpack = REPLY.unpack_from
# Why an env does not go on: what its replay shows, or does not.
DIFFERENT = "Its replay does not match what was seen."
UNPROVEN = "Its replay differed before, and too little has been seen since to tell whether it does again."
_Rows = list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]


class GroupKeeper(Supervisor):
    """Keeps the rows of one group as the caller saw them, whatever a replay writes there.

    Args:
        arena: Where the rows lie.
    """

    __slots__ = """
        _arena _doubts _evidence _failed_at _group _kept _places _size _strays _strict
    """.split()  # noqa: SIM905 - as in Keeper

    def __init__(self, launch: Any, initialize: Initialize, arena: Arena, **options: Any) -> None:
        """Start nothing yet."""
        group, policy = initialize.group, options["policy"]
        assert group is not None
        # Whatever becomes of the one that is to blame, the others are to go on.
        recording = policy.replays or (group.size > 1 and policy.journal_limit > 0)
        super().__init__(launch, initialize, recording=recording, **options)
        self._group, self._arena = group, arena
        self._places: tuple[Place, Place] | None = None
        self._evidence: GroupEvidence | None = None
        self._healer.compare = self._compare
        self._strays: dict[int, str] = {}  # whose replay shows something else than was seen, or not enough; in words
        self._doubts = Doubts(self._ended_in)
        self._strict = False  # none may
        self._failed_at: dict[int, int] = {}  # the last request that ended an episode by an error, by slot
        # The last reply, the rows as they were when the process was lost, and who has been written to since the reply.
        self._kept: tuple[bytes, _Rows, set[int]] | None = None
        self._size = -1

    @property
    def size(self) -> int:
        """How many envs there are."""
        return self._group.size

    def _lay_out(self, description: Description) -> None:
        group = self._group
        space = description.members[0][0] if group.space is None else group.space
        layout = BatchLayout.of(space, group.num_envs, with_observations=group.with_observations)
        self._places = self._arena.places(layout)
        self._evidence = GroupEvidence(layout, group.size)
        self._placement = Placement(None, inline=True)
        self._size = -1 if layout.tree is None else REPLY.size + self._evidence.length

    def close(self, patience: float | None = None) -> None:
        """As every supervisor; and let go of the rows: their memory is unmapped with the last of its arrays."""
        super().close(patience)
        self._places = None
        if not self.inside:
            self._kept = None

    def _size_of_plain_replies(self) -> int:
        return self._size

    # --- rows -------------------------------------------------------------------------------------

    def _rows(self) -> list[np.ndarray[Any, Any]]:
        """The group's rows as the caller saw them last."""
        seen = self._last_reply()
        places = self._places  # another thread may close() meanwhile
        if not seen or places is None:
            return []
        first, place = self._group.first, places[seq_of(seen) & 1]
        return [array[first : first + self._group.size] for array in place.arrays]

    def _keep(self) -> None:
        """Keep what those rows hold: a replay writes them anew."""
        self._put_back()  # an interruption may have kept the last replay's from being put back
        self._kept = self._last_reply(), [(rows, rows.copy()) for rows in self._rows()], self._rewritten()

    def _rewritten(self) -> set[int]:
        """Whose rows are not what they were with the reply: who gets views may write there."""
        seen, places, evidence = self._last_reply(), self._places, self._evidence
        if evidence is None or places is None or len(seen) < self._size or self._size < 0 or seen[KIND_AT] != STEPPED:
            return set()
        shown = evidence.maker(places[seq_of(seen) & 1], self._group.first)()
        return evidence.differing(seen[: self._size], seen[: REPLY.size] + shown)

    def _put_back(self) -> None:
        """Have the rows as they were kept; again does nothing."""
        kept = self._kept
        if kept is not None and kept[0] == self._last_reply():
            for rows, before in kept[1]:
                rows[...] = before
        self._kept = None

    def _observation_of(self, slot: int) -> Any:
        """What the caller saw of this env last; ``None`` where nobody has kept it."""
        seen = self._last_reply()
        places = self._places
        if not seen or places is None:
            return None
        if _unpack(seen)[4] & IRREGULAR:
            observation = None
            if not is_cut(seen):
                with contextlib.suppress(Exception):  # whoever could not read it has not seen it
                    observation = pickle.loads(irregular_parts(seen)[0][slot])
            return observation
        return row_of(places[seq_of(seen) & 1].observations, self._group.first + slot)

    def _write(self, slot: int, observation: Any) -> None:
        """Have the caller see this, wherever it looks."""
        for place in self._places or ():
            row_writer(place.observations)(self._group.first + slot, observation)

    def _trim(self) -> None:
        super()._trim()
        self._doubts.forget(self._journal.oldest())

    def keep_in_step(self, seq: int) -> None:
        """The other groups stand at ``seq``, and this one could not be asked: the places alternate for all together."""
        places = self._places
        if not (self.seq ^ seq) & 1 or self.closed or places is None or self.is_foreign:
            return
        mine = slice(self._group.first, self._group.first + self._group.size)
        before, after = places[self.seq & 1], places[seq & 1]
        for one, other in zip(before.leaves, after.leaves, strict=True):
            other[mine] = one[mine]
        for array in (after.rewards, after.terminations, after.truncations):
            array[mine] = 0
        self.seq = (self.seq + 1) & SEQ_MASK

    def _workers_waiting(self) -> float:
        return self._group.num_envs / self._group.size

    def _steps_of(self, slot: int) -> int:
        """How many steps of its episode this env has had, as far as the journal tells; nobody else counts."""
        steps, begins_by_itself = 0, self._group.autoreset == "NEXT_STEP"
        failed_at = self._failed_at.get(slot, self.seq)
        for request, reply in self._journal.newest_first():
            if failed_at == seq_of(request) != self.seq:
                return max(0, steps - 1)  # the same in any mode
            if request[KIND_OF_REQUEST_AT] == STEP:
                if self._ended_in(reply, slot):
                    return max(0, steps - begins_by_itself)  # the first step since was the reset
                steps += 1
            elif request[KIND_OF_REQUEST_AT] == MESSAGE and request[TAG_AT] != LASTING:
                message = unpack_message(request)
                if isinstance(message, Reset) and (message.options.mask is None or message.options.mask[slot]):
                    break
        return steps

    def _ended_in(self, reply: bytes, slot: int) -> bool:
        size = self._group.size
        if reply[KIND_AT] != STEPPED or len(reply) <= REPLY.size:
            return False
        return bool(reply[len(reply) - 2 * size + slot] or reply[len(reply) - size + slot])

    # --- is it the same? --------------------------------------------------------------------------

    def _compare(self, plan: Plan, replayed: Sequence[bytes]) -> str:
        """As :func:`first_difference`, if it is that of all; else those that differ are noted."""
        self._strays = dict.fromkeys(self._doubts.unproven(plan), UNPROVEN)
        for before, after in zip(plan.evidence, replayed, strict=True):
            self._note_strays(self._differing(before, after), seq_of(before))
        return first_difference(plan.evidence, replayed) or "the rows differ" if self._hopeless() else ""

    def _note_strays(self, slots: set[int], seq: int) -> None:
        if slots:
            self._strays |= dict.fromkeys(self._doubts.counting(slots, seq), DIFFERENT)

    def _hopeless(self) -> bool:
        return len(self._strays) >= (1 if self._strict else self._group.size)

    def _differing(self, before: bytes, after: bytes) -> set[int]:
        assert self._evidence is not None
        kinds = before[12], after[12]
        if kinds[0] != kinds[1]:
            return set(range(self._group.size))
        if kinds[0] != STEPPED:
            return set()
        if not _unpack(before)[4] & _unpack(after)[4] & IRREGULAR:
            return self._evidence.differing(before, after)
        if is_cut(before) or is_cut(after):
            return self._evidence.differing_tails(before, after)
        return self._differing_parts(before, after)

    def _differing_parts(self, before: bytes, after: bytes) -> set[int]:
        parts = zip(irregular_parts(before), irregular_parts(after), (alike, same, same, same), strict=True)
        slots = range(self._group.size)
        return {slot for one, other, agree in parts for slot in slots if not agree(one[slot], other[slot])}

    def _looks_the_same(self, backend: Backend, last: bytes) -> bool:
        """The last observations the caller saw, whole, against those of the replay."""
        assert self._kept is not None
        seen, kept, rewritten = self._kept
        slots = set(range(self._group.size)) - rewritten  # of these the replies alone tell
        found = {slot for rows, before in kept for slot in slots if rows[slot].tobytes() != before[slot].tobytes()}
        if last and _unpack(seen)[4] & IRREGULAR and not is_cut(seen):
            found |= self._differing_parts(seen, last)
        if found:
            self._note_strays(found, seq_of(seen))
        return not self._hopeless()
