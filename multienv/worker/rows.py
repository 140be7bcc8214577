"""The rows of the batch that are a group's: where its envs' observations, rewards and flags go."""

from __future__ import annotations

import contextlib
import pickle
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from multienv.wire.batch import Array, BatchLayout, copied_rows, places, row_of, row_writer
from multienv.wire.evidence import GroupEvidence
from multienv.wire.memory import Block
from multienv.wire.messages import IRREGULAR, TAILED, Group, dumps


class Rows:
    """Both places of them; which one is written the number of the request says.

    Attributes:
        block: The memory they lie in, shared with the other groups.
        laid_out: Observations have arrays there; else they are kept in ``loose``, and travel in the replies.
        loose: The last such observation of each env.
        stale: For each place whether flags are set in it.
        begun: Of which envs something has been seen.
        shown: For each place what makes the evidence of what lies there.
    """

    def __init__(self, space: spaces.Space[Any], group: Group, arena: Callable[[int], Block]) -> None:
        """Find them in the arena."""
        layout = BatchLayout.of(space, group.num_envs, with_observations=group.with_observations)
        self.block = arena(2 * layout.size)
        self.laid_out = layout.tree is not None
        self.loose: list[Any] = [None] * group.size
        self.stale = [True, True]  # another process may have left some
        self.begun = [False] * group.size
        self._first, self._size = group.first, group.size
        self._mine = slice(group.first, group.first + group.size)
        self._places = places(layout, self.block.view)
        evidence = GroupEvidence(layout, group.size)
        self.shown = [evidence.maker(place, group.first) for place in self._places]
        self._writers = [row_writer(place.observations) if self.laid_out else self._keep for place in self._places]
        self._told: list[bytes | None] = [None] * group.size  # observations as they have travelled, one by one
        self._remembered: list[tuple[Array, Array]] = []

    def target(self, side: int) -> tuple[list[Any], memoryview, memoryview, memoryview]:
        """What a step writes to: a cell for each env's observation; rewards and flags of the whole batch."""
        place = self._places[side]
        return self._cells(side), place.rewards.data, place.terminations.data, place.truncations.data

    def _cells(self, side: int) -> list[Any]:
        """What to assign observations to.

        A memoryview takes what has its very format and shape, and refuses anything else, in half the time that it takes
        to ask; but it knows one dimension only.
        """
        observations = self._places[side].observations
        if isinstance(observations, np.ndarray) and observations.ndim == 2 and observations.dtype.isnative:
            return [observations[row].data for row in range(self._first, self._first + self._size)]
        return [Cell(partial(self.write, side, slot)) for slot in range(self._size)]

    def write(self, side: int, slot: int, observation: Any) -> None:
        """Write one observation; raises what is wrong with it."""
        self._writers[side](self._first + slot, observation)

    def _keep(self, row: int, observation: Any) -> None:
        self.loose[row - self._first] = observation

    def clear_flags(self, side: int) -> None:
        """No episode has ended."""
        place = self._places[side]
        place.terminations[self._mine] = False
        place.truncations[self._mine] = False
        self.stale[side] = False

    def put(self, seq: int, slot: int, observation: Any, *, truncated: bool = False) -> None:
        """Write all that is one env's, where nothing has been earned."""
        side, row = seq & 1, self._first + slot
        self.write(side, slot, observation)
        place, self.stale[side] = self._places[side], True
        place.rewards[row], place.terminations[row], place.truncations[row] = 0.0, False, truncated

    def earned(self, seq: int, slot: int) -> tuple[float, bool, bool]:
        """Reward and flags of one env."""
        place, row = self._places[seq & 1], self._first + slot
        return float(place.rewards[row]), bool(place.terminations[row]), bool(place.truncations[row])

    def seen(self, seq: int, slot: int) -> Any:
        """What the caller saw of this env before this request; ``None`` where it alone has kept that."""
        if not self.laid_out:
            return None
        self._forget_unseen(seq, slot)
        return row_of(self._places[~seq & 1].observations, self._first + slot)

    def told(self, seq: int, slot: int) -> Any:
        """The same, also of what travelled; ``None`` where that cannot be had again."""
        if self.laid_out:
            return self.seen(seq, slot)
        with contextlib.suppress(Exception):  # foreign code
            return pickle.loads(self._told[slot] or b"")
        return None

    def keep(self, seq: int, slot: int | None = None) -> None:
        """Have the caller see once more what it saw before this request: of one env, or of all."""
        for one in range(self._size) if slot is None else (slot,):
            self._forget_unseen(seq, one)
            row = self._first + one
            copied_rows(self._places[~seq & 1], self._places[seq & 1], row, row + 1)
        self.stale[seq & 1] = True

    def _forget_unseen(self, seq: int, slot: int) -> None:
        """An env of which nothing has been seen shows zeros: what lies there is of a process before this one."""
        if not self.begun[slot]:
            for array in self._places[~seq & 1].arrays:
                array[self._first + slot] = 0

    def loose_evidence(self, seq: int) -> tuple[int, bytes, int]:
        """Flags and body of a reply that carries the observations; raises what pickling raises.

        Rewards and flags lie at the end once more, in so many bytes: as they do where observations have arrays.
        """
        place = self._places[seq & 1]
        others = [array[self._mine] for array in (place.rewards, place.terminations, place.truncations)]
        tail = b"".join([array.tobytes() for array in others])
        # One by one: who cannot be read by the trainer costs nobody else.
        told = list(map(dumps, self.loose))
        pickled = dumps((told, *[array.tolist() for array in others]))
        kept = zip(self.loose, told, self._told, strict=True)
        self._told = [before if one is None else data for one, data, before in kept]
        return IRREGULAR | TAILED, pickled + tail, len(tail)

    def remember(self, seq: int) -> None:
        """Keep them as they are after this request."""
        rows = [array[self._mine] for array in self._places[seq & 1].arrays]
        self._remembered = [(one, one.copy()) for one in rows]

    def kept(self, seq: int) -> bytes:
        """What they are after this request, for another process."""
        rows = [array[self._mine] for array in self._places[seq & 1].arrays]
        return zlib.compress(pickle.dumps((seq & 1, self.loose, rows), protocol=5), 1)  # a screen is large

    def put_there(self, kept: bytes) -> None:
        """Have them as they were in another one."""
        self.begun[:] = [True] * self._size
        side, self.loose[:], rows = pickle.loads(zlib.decompress(kept))
        self._told = [None if one is None else dumps(one) for one in self.loose]
        for array, before in zip(self._places[side].arrays, rows, strict=True):
            array[self._mine] = before
        self.stale[:] = [True, True]

    def put_back(self) -> None:
        """Have them as they were when :meth:`remember` was called."""
        for rows, before in self._remembered:
            rows[...] = before
        self.stale[:] = [True, True]


class Cell:
    """As a memoryview: takes an observation that is assigned to all of it."""

    __slots__ = ("_write",)

    def __init__(self, write: Callable[[Any], None]) -> None:
        """Hold the function that takes it."""
        self._write = write

    def __setitem__(self, whole: slice, observation: Any) -> None:
        """Take the observation."""
        self._write(observation)
