"""A batch of envs in one block of memory: observations, rewards and flags, an array each with a row for every env.

All workers write into the same block, each into the rows of its own envs. There are two places, used in turn, as for a
single env's observations: while one is written, the one before it stays whole. A space whose values have no fixed size
(Text, Graph, Sequence, OneOf, custom) has no arrays here: its observations travel in the replies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

# So that no two fields share a cache line.
_ALIGNMENT = 64
# Channels that are copied one by one where they do not lie beside each other.
_FEW = 8
_SOLID = (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete, spaces.Discrete)

Array = np.ndarray[Any, Any]
WriteRow = Callable[[int, Any], None]  # row, observation


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of the batch: the values of one space that is not nested."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where the arrays of one place lie; those that are not observations have one value an env.

    Attributes:
        tree: The leaves, nested as the observation space is; ``None`` where observations travel in the replies.
        size: Bytes of one place.
    """

    num_envs: int
    tree: Any
    rewards: Leaf
    terminations: Leaf
    truncations: Leaf
    size: int

    @property
    def leaves(self) -> list[Leaf]:
        """The arrays of the observations, in the order of their space."""
        return [] if self.tree is None else _leaves(self.tree)

    @classmethod
    def of(cls, space: spaces.Space[Any], num_envs: int, *, with_observations: bool = True) -> BatchLayout:
        """The layout for so many envs with this observation space; or without arrays for observations."""
        end = 0

        def place(shape: tuple[int, ...], dtype: Any) -> Leaf:
            nonlocal end
            leaf = Leaf(end, (num_envs, *shape), np.dtype(dtype))
            end += math.ceil(math.prod(leaf.shape) * leaf.dtype.itemsize / _ALIGNMENT) * _ALIGNMENT
            return leaf

        tree = _tree(space, place) if with_observations and is_laid_out(space) else None
        return cls(num_envs, tree, place((), np.float64), place((), np.bool_), place((), np.bool_), end)


def is_laid_out(space: spaces.Space[Any]) -> bool:
    """Whether the observations of this space have arrays in memory."""
    # The exact type: a subclass may return anything.
    if type(space) is spaces.Dict:
        return all(map(is_laid_out, space.spaces.values()))
    if type(space) is spaces.Tuple:
        return all(map(is_laid_out, space.spaces))
    return type(space) in _SOLID and space.dtype is not None and not space.dtype.hasobject


def _tree(space: spaces.Space[Any], place: Callable[[tuple[int, ...], Any], Leaf]) -> Any:
    if type(space) is spaces.Dict:
        return {key: _tree(member, place) for key, member in space.spaces.items()}
    if type(space) is spaces.Tuple:
        return tuple(_tree(member, place) for member in space.spaces)
    assert space.shape is not None
    return place(space.shape, space.dtype)


class Place:
    """The arrays of one place.

    Attributes:
        observations: An array, or dicts and tuples of them; ``None`` where they travel in the replies.
        rewards, terminations, truncations: One value an env.
        leaves: The arrays of the observations, in the order of their space.
        arrays: These, the rewards and the flags.
    """

    __slots__ = ("arrays", "leaves", "observations", "rewards", "terminations", "truncations")

    def __init__(self, layout: BatchLayout, view: memoryview, offset: int) -> None:
        """Lay the arrays over ``view``, from ``offset`` on."""

        def array(leaf: Leaf) -> Array:
            # Unlike np.ndarray(buffer=), this keeps the memory mapped for as long as somebody has the array.
            count = math.prod(leaf.shape)
            laid: Array = np.frombuffer(view, leaf.dtype, count, offset + leaf.offset)
            return laid.reshape(leaf.shape)

        self.observations = None if layout.tree is None else _mapped(array, layout.tree)
        self.rewards, self.terminations = array(layout.rewards), array(layout.terminations)
        self.truncations = array(layout.truncations)
        self._collect()

    def part(self, rows: slice) -> Place:
        """Some rows of it, as a place of their own."""
        part = Place.__new__(Place)
        part.observations = None if self.observations is None else _mapped(lambda array: array[rows], self.observations)
        part.rewards, part.terminations = self.rewards[rows], self.terminations[rows]
        part.truncations = self.truncations[rows]
        part._collect()
        return part

    def _collect(self) -> None:
        self.leaves: list[Array] = [] if self.observations is None else _leaves(self.observations)
        self.arrays = [*self.leaves, self.rewards, self.terminations, self.truncations]


def places(layout: BatchLayout, view: memoryview) -> tuple[Place, Place]:
    """The places for even and odd requests."""
    return Place(layout, view, 0), Place(layout, view, layout.size)


def copied(observations: Any) -> Any:
    """Observations that the next step does not overwrite."""
    return observations.copy() if type(observations) is np.ndarray else _mapped(np.ndarray.copy, observations)


def row_of(observations: Any, row: int) -> Any:
    """A copy of one env's observation, in the type its space has."""
    if isinstance(observations, dict):
        return {key: row_of(member, row) for key, member in observations.items()}
    if isinstance(observations, tuple):
        return tuple(row_of(member, row) for member in observations)
    value = observations[row]
    return value.copy() if isinstance(value, np.ndarray) else value


def row_writer(observations: Any) -> WriteRow:
    """The function that writes one env's observation into its row."""
    if isinstance(observations, dict):
        by_key = {key: row_writer(member) for key, member in observations.items()}

        def write_dict(row: int, value: Any) -> None:
            for key, write in by_key.items():
                write(row, value[key])

        return write_dict
    if isinstance(observations, tuple):
        members = [row_writer(member) for member in observations]

        def write_tuple(row: int, value: Any) -> None:
            for write, item in zip(members, value, strict=True):
                write(row, item)

        return write_tuple
    return _array_row_writer(observations)


def _array_row_writer(array: Array) -> WriteRow:
    dtype, shape, ndarray = array.dtype, array.shape[1:], np.ndarray
    few = shape[-1] if len(shape) > 2 and shape[-1] <= _FEW else 0
    pixel = array.strides[-2:]  # where the channels lie beside each other, and the pixels

    def write(row: int, value: Any) -> None:
        if type(value) is not ndarray or value.shape != shape or (value.dtype is not dtype and value.dtype != dtype):
            value = _fitting(value, dtype, shape)
        if few and value.strides[-2:] != pixel:
            # A stack of frames whose axis was moved to the end: numpy would copy it a few bytes at a time.
            target = array[row]
            for channel in range(few):
                target[..., channel] = value[..., channel]
        else:
            array[row] = value

    return write


def _fitting(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """What ``np.stack`` would make of it: another shape, or a type that loses more than precision, is refused."""
    array = np.asarray(value)
    if array.shape != shape:
        raise ValueError(
            f"An observation has shape {array.shape}; the env's observation space wants {shape}. Mend the env, or its "
            "observation_space."
        )
    same_kind = np.can_cast(array.dtype, dtype, "same_kind")
    if not same_kind and not (isinstance(value, int) and _holds(dtype, value)):
        raise TypeError(
            f"An observation has dtype {array.dtype}; the env's observation space wants {dtype}. Mend the env, or its "
            "observation_space."
        )
    fitting: Array = array.astype(dtype, copy=False)
    return fitting


def _holds(dtype: np.dtype[Any], value: int) -> bool:
    return np.issubdtype(dtype, np.integer) and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _mapped(function, member) for key, member in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_mapped(function, member) for member in tree)
    return function(tree)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for member in tree.values() for leaf in _leaves(member)]
    if isinstance(tree, tuple):
        return [leaf for member in tree for leaf in _leaves(member)]
    return [tree]


def copied_rows(source: Place, target: Place, start: int, stop: int) -> None:
    """Have some rows of one place in the other too."""
    for one, other in zip(source.arrays, target.arrays, strict=True):
        other[start:stop] = one[start:stop]
