"""What a reply of a group shows of its envs: all of it while that is little, else a digest of each observation."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from multienv.wire.batch import Array, BatchLayout, Place
from multienv.wire.messages import EVIDENCE, REPLY
from multienv.wire.observations import weighted_sum

# So many bytes of observations, rewards and flags travel in a reply: that fits a pipe's page with a small info.
INLINE_LIMIT = 3072
_DIGEST = struct.Struct("<Q")
# Words a row from which on rows are summed up one by one.
_LONG = 1024


class GroupEvidence:
    """Makes the evidence of a group's step, and tells of whom two such differ.

    Args:
        layout: Of the batch.
        size: How many envs the group has.
    """

    def __init__(self, layout: BatchLayout, size: int) -> None:
        """Decide how much is shown."""
        flags = [leaf.dtype.itemsize for leaf in (layout.rewards, layout.terminations, layout.truncations)]
        self._flags = flags
        widths = [math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in layout.leaves]
        self._inline = size * sum((*widths, *flags)) <= INLINE_LIMIT
        self._size = size
        # Bytes an env in each part: of an array, or of its digest. The parts lie one behind the other.
        self._own = widths
        digests = [min(width, _DIGEST.size) for width in widths]
        self._widths = [*(widths if self._inline else digests), *flags]
        self.length = size * sum(self._widths)

    def maker(self, place: Place, start: int) -> Callable[[], bytes]:
        """A function that shows what lies in the rows of the group, whenever it is called."""
        rows = [array[start : start + self._size] for array in place.arrays]
        leaves = rows[: len(place.leaves)]
        if self._inline:
            parts = [array.data.cast("B") for array in rows if array.nbytes]
            return lambda: b"".join(parts)
        flags = [array.data.cast("B") for array in rows[len(leaves) :]]
        shown = [
            _digests(array) if width > _DIGEST.size else _bytes(array)
            for array, width in zip(leaves, self._own, strict=True)
        ]
        return lambda: b"".join([*[show() for show in shown], *flags])

    def differing(self, before: bytes, after: bytes) -> set[int]:
        """Which envs of the group two replies show differently; the numbering in front does not count."""
        if before[EVIDENCE:] == after[EVIDENCE:]:
            return set()
        whole = REPLY.size + self.length
        if not len(before) == len(after) == whole or before[EVIDENCE : REPLY.size] != after[EVIDENCE : REPLY.size]:
            return set(range(self._size))
        return self._differing(before, after, REPLY.size, self._widths)

    def differing_tails(self, before: bytes, after: bytes) -> set[int]:
        """The same of replies with observations of their own, by the rewards and flags at their ends alone."""
        start = len(before) - self._size * sum(self._flags)
        if len(before) != len(after):  # only one was too large to be kept, or nobody knows of whom what is
            return set(range(self._size))
        return self._differing(before, after, start, self._flags)

    def _differing(self, before: bytes, after: bytes, start: int, widths: list[int]) -> set[int]:
        found = set()
        for width in widths:
            for slot in range(self._size):
                part = slice(start + slot * width, start + (slot + 1) * width)
                if before[part] != after[part]:
                    found.add(slot)
            start += self._size * width
        return found


def _bytes(rows: Array) -> Callable[[], bytes]:
    """Shows all of it, where a digest would be as long."""
    return rows.tobytes


def _digests(rows: Array) -> Callable[[], bytes]:
    """Shows a digest of each row.

    Of many short ones at once, which takes fewer calls; of long ones one by one, which takes less memory.
    """
    flat: Any = rows.reshape(len(rows), -1).view(np.uint8)
    words: Any = flat.view(np.uint32) if flat.shape[1] % 4 == 0 else flat
    if words.shape[1] > _LONG:
        sums = [weighted_sum(row) for row in words]
        pack = _DIGEST.pack
        return lambda: b"".join([pack(total(seen)) for seen, total in sums])
    weights = np.random.default_rng(0).integers(1, 2**32, words.shape[1], dtype=np.uint32)
    scratch, half = np.empty(words.shape, np.uint32), np.uint32(16)
    digests = np.empty((len(words), 2), np.uint32)
    multiply, shift, add = np.multiply, np.right_shift, np.add.reduce

    def show() -> bytes:
        multiply(words, weights, out=scratch)
        add(scratch, axis=1, dtype=np.uint32, out=digests[:, 0])
        shift(words, half, out=scratch)
        multiply(scratch, weights, out=scratch)
        add(scratch, axis=1, dtype=np.uint32, out=digests[:, 1])
        return digests.tobytes()

    return show
