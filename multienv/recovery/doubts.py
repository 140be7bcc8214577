"""What of a group's journal an env is not to be held against any more: what it showed before its replay differed.

Such an env has been truncated. It is another one since, and what it showed before would condemn every replay to come.
What it shows from then on counts; and because all that led there is not known, it has to be enough: a whole episode, or
as many steps as for a replay from a reset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from multienv.recovery.journal import Plan
from multienv.recovery.proof import PROOF_OF_RESET
from multienv.wire.actions import LEAVING_OUT, left_out
from multienv.wire.messages import (
    KIND_AT,
    KIND_OF_REQUEST_AT,
    SEQ_MASK,
    STEP,
    STEPPED,
    TAG_AT,
    Reset,
    seq_of,
    unpack_message,
)


class Doubts:
    """Since which request each env counts; those that have never differed are not in here.

    Args:
        has_ended: Whether this evidence shows the end of that slot's episode.
    """

    def __init__(self, has_ended: Callable[[bytes, int], bool]) -> None:
        """There are none."""
        self._since: dict[int, int] = {}
        self._has_ended = has_ended

    def note(self, slots: Iterable[int], seq: int) -> None:
        """They are truncated, or reset, by this request."""
        self._since.update(dict.fromkeys(slots, seq))

    def clear(self) -> None:
        """The journal begins anew."""
        self._since.clear()

    def forget(self, oldest: int) -> None:
        """The journal does not reach back further than this request."""
        for slot, seq in list(self._since.items()):
            if _is_since(oldest, seq):
                del self._since[slot]

    def counting(self, slots: set[int], seq: int) -> set[int]:
        """Those of the slots that are held against what was seen with this request."""
        return {slot for slot in slots if slot not in self._since or _is_since(seq, self._since[slot])}

    def unproven(self, plan: Plan) -> set[int]:
        """Those of which this replay shows too little: it begins before they count, and is not long enough since."""
        return {slot for slot in self._since if not self._is_proven(plan, slot)}

    def _is_proven(self, plan: Plan, slot: int) -> bool:
        since, led_there, steps = self._since[slot], True, 0
        for frame, reply in zip(plan.frames, plan.evidence, strict=True):
            if reply[KIND_AT] != STEPPED:
                continue
            if not _is_since(seq_of(reply), since):
                led_there = False
                continue
            if led_there:  # the replay begins where it counts already
                return True
            if frame[KIND_OF_REQUEST_AT] != STEP:
                message = unpack_message(frame)
                assert isinstance(message, Reset)
                if message.options.mask is None or message.options.mask[slot]:
                    if steps:
                        return True
                    steps = 0
            elif frame[TAG_AT] == LEAVING_OUT and slot in left_out(frame)[1]:
                steps = 0
            else:
                steps += 1
                if steps >= PROOF_OF_RESET or self._has_ended(reply, slot):
                    return True
        return led_there


def _is_since(seq: int, other: int) -> bool:
    return (seq - other) & SEQ_MASK < 1 << 31
