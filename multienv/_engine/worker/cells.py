"""Write what envs return into the rows of a bank, *cast* as for a batch or *verbatim* for a single env.

The two classes have the same methods. The step loop first assigns an observation to ``cells[slot][key]``, which is
quickest; if that raises TypeError or ValueError, or an episode ends, it calls ``write_reward``, then
``write_observation``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np

from multienv._engine.wire.banks import Bank
from multienv._engine.wire.codecs import EXACT_INTEGER, INTEGER_REWARDS, REWARD_TAGS
from multienv._engine.wire.digests import evidence_of
from multienv._engine.wire.infos import NUMBERS
from multienv._engine.wire.rows import ARRAYS, Cell, cells, has_rows, leaf_arrays, nested, row_writer, verbatim_writer
from multienv._engine.worker.replies import pickled, wrong_value

# Characters of the types of numpy whose items a memoryview can be assigned.
_ITEMS = "?bBhHiIlLqQfd"
_WHOLE = slice(None)
_FLAGS = (bool, np.bool_)


class Cast:
    """Writes the rows of a batch, with the dtypes that gymnasium's vector envs give them.

    Args:
        space: Of the observations.
        bank: With a row for each slot.

    Attributes:
        cells, key: ``cells[slot][key] = observation`` writes an observation, or raises TypeError or ValueError. Then
            it may fit all the same, and :meth:`write_observation` decides.
        whole: All observations, where they are arrays of one or more dimensions; else ``None``.
        leaves: For each leaf of the observation its array; empty where observations have no rows.
        pickled_rows: Where observations do not fit into rows: for each slot its pickled observation, ``None`` for a
            blank one. Else ``None``.
        evidence: A digest of each pickled row, ``b""`` for a blank one.
    """

    def __init__(self, space: Any, bank: Bank) -> None:
        slots = bank.layout.slots
        self._bank = bank
        self.write_observation: Callable[[int, Any], None]
        self.whole: Any = None
        self.key: Any = _WHOLE
        self.pickled_rows: list[bytes | None] | None = None
        self.evidence = [b""] * slots
        self.leaves: list[Any] = []
        if not has_rows(space):
            self.pickled_rows = [None] * slots
            self._look = row_writer(nested(space, repeat(None)))
            self.write_observation = self._keep
            self.cells: list[Any] = [Cell(self._keep, slot) for slot in range(slots)]
            return
        self.leaves = leaf_arrays(space, bank)
        tree = nested(space, self.leaves)
        self.write_observation = row_writer(tree)
        if isinstance(tree, np.ndarray) and tree.ndim == 1 and tree.dtype.isnative and tree.dtype.char in _ITEMS:
            self.cells, self.key = [tree[slot : slot + 1].data for slot in range(slots)], 0
        else:
            self.cells = cells(tree, slots)
            self.whole = tree if isinstance(tree, np.ndarray) and tree.ndim > 1 else None

    def write_reward(self, slot: int, reward: Any, terminated: Any, truncated: Any) -> None:
        """Write a reward; the observation comes next."""
        try:
            self._bank.rewards.data[slot] = reward
        except (TypeError, ValueError):
            raise wrong_value("reward", "float", reward) from None

    def _keep(self, slot: int, observation: Any) -> None:
        assert self.pickled_rows is not None
        self._look(slot, observation)
        self.pickled_rows[slot] = pickled("step", observation)
        self.evidence[slot] = evidence_of(observation)

    def blank(self, slot: int) -> None:
        """Write the row of an env that has nothing to show: zeros."""
        self._bank.rewards[slot] = 0.0
        if self.pickled_rows is not None:
            self.pickled_rows[slot], self.evidence[slot] = None, b""
        for leaf in self.leaves:
            leaf[slot] = 0

    def copied_info(self, info: Any) -> Any:
        """Return the info as it is now: the env may change what is in it with its next step."""
        if not isinstance(info, dict):
            raise wrong_value("info", "dict", info)
        return dict(info) if NUMBERS.issuperset(map(type, info.values())) else pickled("step", info)


class Verbatim:
    """Writes what the only env of a worker returns to the bit; arguments and attributes as those of :class:`Cast`.

    What does not fit the bank to the bit (another dtype, shape or type than the space says) becomes a pickled row; a
    replay is then compared with a digest of it.
    """

    key = _WHOLE

    def __init__(self, space: Any, bank: Bank) -> None:
        self._bank = bank
        self._fits = False
        self._beside: tuple[Any, ...] = ()  # reward, terminated, truncated
        self.pickled_rows: list[bytes | None] | None = None
        self.evidence = [b""]
        self.whole: Any = None
        self.cells: list[Any] = [None]
        self.leaves: list[Any] = []
        self._write: Callable[[Any], bool] = lambda observation: False
        if has_rows(space):
            self.leaves = leaf_arrays(space, bank, verbatim=True)
            self._write = verbatim_writer(space, self.leaves)
        if self.leaves and type(space) in ARRAYS:
            (self.whole,) = self.leaves
            # Assigning to a memoryview also checks format and shape, twice as fast as asking; one dimension only.
            is_quick = len(space.shape) == 1 and space.dtype.isnative
            self.cells = [self.whole[0].data if is_quick else Cell(self._assign, 0)]

    def write_reward(self, slot: int, reward: Any, terminated: Any, truncated: Any) -> None:
        """Write a reward, with a tag of its type, and see whether all fits; the observation comes next."""
        tag = REWARD_TAGS.get(type(reward), -1)
        self._beside = reward, terminated, truncated
        self._fits = (
            tag >= 0
            and (tag < INTEGER_REWARDS or -EXACT_INTEGER <= reward <= EXACT_INTEGER)
            and type(terminated) in _FLAGS
            and type(truncated) in _FLAGS
        )
        self._bank.rewards[0], self._bank.view[4] = (reward, tag) if self._fits else (_number(reward), 0)

    def write_observation(self, slot: int, observation: Any) -> None:
        """Write an observation, or pickle all that the env returned if not all of it fits the bank."""
        if self._fits and self._write(observation):
            self.pickled_rows = None
            return
        transition = observation, *self._beside
        self._bank.view[4] = 0
        self.pickled_rows, self.evidence = [pickled("step", transition)], [evidence_of(transition)]

    def _assign(self, slot: int, observation: Any) -> None:
        if not self._write(observation):
            raise ValueError

    def blank(self, slot: int) -> None:
        """Write the row of an env that has nothing to show: zeros."""
        self._bank.rewards[0], self._bank.view[4], self.pickled_rows = 0.0, 0, None
        for leaf in self.leaves:
            leaf[0] = 0

    def copied_info(self, info: Any) -> Any:
        """Return the info as it is now, of whatever type."""
        is_plain = type(info) is dict and NUMBERS.issuperset(map(type, info.values()))
        return dict(info) if is_plain else pickled("step", info)


def _number(reward: Any) -> float:
    """Return a reward that does not fit as the nearest float, for the stacks of a rollout; 0.0 if it is no number."""
    try:
        return float(reward)
    except (TypeError, ValueError, OverflowError):
        return 0.0
