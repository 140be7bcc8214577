"""A batch of envs: dealt to workers; spaces; actions cut for the workers; rows and infos put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import (
    batch_differing_spaces,
    batch_space,
    concatenate,
    create_empty_array,
    iterate,
)

from multienv.config import checked_seed, integer
from multienv.errors import ActionError, NotShareableError, SpaceMismatchError, UsageError
from multienv.wire.actions import misfit, shown
from multienv.wire.codecs import RowsReply
from multienv.wire.messages import dumps
from multienv.wire.rows import has_rows, leaf_spaces, nested, row_of

Array = np.ndarray[Any, Any]
Space = spaces.Space[Any]
Split = Callable[[Any], list[Any]]

# Actions of so many envs are compared with a set of what is allowed; of more, by numpy, which takes longer to begin.
_FEW = 64
_SMALL = 1024
# Sets of arrays over banks that are remembered; each worker has two until it is replaced.
_KNOWN = 16
_INT64, _UINT64 = np.dtype(np.int64), np.dtype(np.uint64)
_NESTED = (spaces.Dict, spaces.Tuple)
_SOLID = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)


class WrongTypeError(UsageError, TypeError):
    """An argument has a type for which gymnasium raises a TypeError."""


class NoBatchError(ActionError, TypeError):
    """The actions are a single value, where there must be one for each env; a TypeError for gymnasium too."""


class DynamicShapeError(NotShareableError, TypeError):
    """The space contains a Graph or a Sequence; a TypeError for gymnasium."""


# --- envs to workers ----------------------------------------------------------------------------


def deal(num_envs: int, envs_per_worker: int | str, cores: int, max_concurrency: int | None = None) -> list[int]:
    """Return how many envs each worker hosts.

    Args:
        num_envs: How many there are.
        envs_per_worker: So many each, and the rest in the last one; ``"auto"``: one worker a core, as even as can be.
        cores: How many cores may be kept busy.
        max_concurrency: How many envs may step at a time: each worker steps its envs one after the other.
    """
    most = num_envs
    if max_concurrency is not None:
        if integer(max_concurrency) is None:
            raise UsageError(
                f"`max_concurrency` must be an integer or None, got {type(max_concurrency)}: {max_concurrency!r:.100}."
            )
        if max_concurrency < 1:
            raise UsageError(f"`max_concurrency` must be a positive or None, got {max_concurrency}; give at least 1.")
        most = int(max_concurrency)
    if envs_per_worker == "auto":
        # The worker on the trainer's core waits while the trainer computes. To give it fewer envs is decided here; the
        # first worker is the one that shares the trainer's core, as long as the trainer does not move.
        workers = min(num_envs, cores, most)
        return [num_envs // workers + (worker < num_envs % workers) for worker in range(workers)]
    size = integer(envs_per_worker)
    if size is None or size < 1:
        raise UsageError(f"envs_per_worker is {envs_per_worker!r}; give an integer of at least 1, or 'auto'.")
    full, rest = divmod(num_envs, size)
    if full + bool(rest) > most:
        raise UsageError(
            f"envs_per_worker={size} makes {full + bool(rest)} workers, which step at the same time, and "
            f"max_concurrency is {most}. Leave out one of them."
        )
    return [size] * full + [rest] * bool(rest)


# --- spaces -------------------------------------------------------------------------------------


def check_observation_mode(mode: Any) -> None:
    """Refuse what is no ``observation_mode``, in gymnasium's words."""
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, gymnasium.Space) for space in mode):
            kinds = " and ".join(str(type(one)) for one in mode)
            raise WrongTypeError(f"Expected both elements of observation_mode to be Spaces, got {kinds}.")
    elif mode not in ("same", "different"):
        raise UsageError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
            f"space, actual got {mode!s:.200}. Of the tuple the first is the batched one, as in gymnasium."
        )


def observation_spaces(mode: Any, found: Sequence[Space]) -> tuple[Space, Space]:
    """Return the batched and the single observation space that ``observation_mode`` asks for."""
    if isinstance(mode, tuple):
        return mode
    if mode == "different":
        return batch_differing_spaces(list(found)), found[0]
    return batch_space(found[0], len(found)), found[0]


def check_spaces(face: str, mode: Any, members: Sequence[tuple[Space, Space]]) -> None:
    """Raise SpaceMismatchError unless the spaces of all envs fit one batch.

    Args:
        face: The name of the class, for messages.
        mode: The ``observation_mode``.
        members: Observation and action space of each env.
    """
    single = mode[1] if isinstance(mode, tuple) else members[0][0]
    actions = members[0][1]
    for index, (observation_space, action_space) in enumerate(members):
        if mode == "same" and observation_space != single:
            raise SpaceMismatchError(
                f"{face}(..., observation_mode='same') however some of the sub-environments observation spaces are not "
                "equivalent. If this is intentional, use `observation_mode='different'` instead. "
                f"Here env {index} has the observation space {observation_space}, not {single}."
            )
        if mode != "same" and not _are_alike(observation_space, single):
            raise SpaceMismatchError(
                f"{face}(..., observation_mode='different' or custom space) however the sub-environment's observation "
                "spaces do not share a common shape and dtype. Wrap the envs so that they agree: "
                f"env {index} has the observation space {observation_space}, not {single}."
            )
        if action_space != actions:
            raise SpaceMismatchError(
                f"Some environments have an action space different from `{actions}`. In order to batch actions, the "
                f"action spaces from all environments must be equal: env {index} has {action_space}."
            )


def _are_alike(one: Space, other: Space) -> bool:
    try:
        return is_space_dtype_shape_equiv(one, other)
    except NotImplementedError:  # a custom space: nothing is known of it but what it says itself
        return one == other


def check_shareable(space: Space) -> None:
    """Raise NotShareableError where gymnasium cannot share observations either."""
    kinds = _kinds(space)
    if not kinds.issubset((*_SOLID, spaces.Text, spaces.OneOf)):
        variable = not kinds.isdisjoint((spaces.Graph, spaces.Sequence))
        raise (DynamicShapeError if variable else NotShareableError)(
            f"shared_memory=True: {space} has a dynamic shape so its not possible to make a static shared memory. "
            "Leave shared_memory out, and its observations travel pickled."
        )


def _kinds(space: Any) -> set[type]:
    """Return the types of the spaces that are not nested."""
    if isinstance(space, _NESTED):
        members = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return set().union(*map(_kinds, members))
    return {type(space)}


# --- actions ------------------------------------------------------------------------------------


def action_splitter(space: Space, slices: Sequence[slice]) -> Split:
    """Return the function that checks a batch of actions and cuts it into one part for each worker.

    It raises ActionError before anything is sent: for another length or shape, and for a Discrete space for what is no
    integer or out of range, naming env and value.

    Args:
        space: Action space of one env.
        slices: Which envs each worker has.
    """
    count = slices[-1].stop
    ndarray, cuts = np.ndarray, list(slices)

    def split_any(actions: Any) -> list[Any]:
        try:
            whole = _normal_batch(space, actions, count)
        except ActionError:
            raise
        except Exception as error:  # looking at the actions runs foreign code
            raise ActionError(f"step(): {shown(actions)} is no batch for {count} envs with {space}: {error}") from error
        _check_each(space, whole, count)
        return [_part(space, whole, cut) for cut in cuts]

    if type(space) is spaces.Discrete:
        is_allowed, shape = _discrete_check(space, count), (count,)

        def split_integers(actions: Any) -> list[Any]:
            if type(actions) is ndarray and actions.dtype is _INT64 and actions.shape == shape and is_allowed(actions):
                return [actions[cut] for cut in cuts]
            return split_any(actions)

        return split_integers
    if type(space) in _SOLID:
        shape = (count, *(space.shape or ()))

        def split_array(actions: Any) -> list[Any]:
            if type(actions) is ndarray and actions.shape == shape and not actions.dtype.hasobject:
                return [actions[cut] for cut in cuts]
            return split_any(actions)

        return split_array
    return split_any


def _discrete_check(space: spaces.Discrete, count: int) -> Callable[[Array], bool]:
    """Return the quickest test of whether all int64 actions are in range."""
    start, n = int(space.start), int(space.n)
    if count <= _FEW and n <= _SMALL:
        contains = frozenset(range(start, start + n)).issuperset
        return lambda actions: contains(actions.tolist())
    largest = np.maximum.reduce
    if start == 0:
        # What is negative is large as an unsigned number.
        return lambda actions: bool(largest(actions.view(_UINT64)) < n)
    return lambda actions: bool(largest((actions - start).view(_UINT64)) < n)


def _check_each(space: Space, whole: Any, count: int) -> None:
    """Raise ActionError if the action of some env is none of its space."""
    if type(space) in _SOLID and type(space) is not spaces.Discrete:
        return  # the shape is right, and bounds are the env's to judge
    if type(space) is spaces.Discrete and _is_in_range(space, whole):
        return
    for index, action in enumerate(iterate(batch_space(space, count), whole)):
        problem = misfit(space, action)
        if problem:
            raise ActionError(
                f"step(): env {index}: {problem} Nothing was sent; the episodes go on with the next step()."
            )


def _is_in_range(space: spaces.Discrete, whole: Array) -> bool:
    return whole.dtype.kind in "iub" and bool(((whole >= space.start) & (whole < space.start + space.n)).all())


def _normal_batch(space: Any, actions: Any, count: int) -> Any:
    """Return the batch in the form in which it can be cut; raise if it has another length."""
    if type(space) is spaces.Dict:
        return {key: _normal_batch(member, actions[key], count) for key, member in space.spaces.items()}
    if type(space) is spaces.Tuple:
        return tuple(_normal_batch(member, item, count) for member, item in zip(space.spaces, actions, strict=True))
    is_array = type(space) in _SOLID
    whole: Any = np.asarray(actions) if is_array else tuple(actions)
    shape = (count, *(space.shape or ())) if is_array else (count,)
    found = whole.shape if isinstance(whole, np.ndarray) else (len(whole),)
    if found != shape:
        raise (ActionError if found else NoBatchError)(
            f"step(): the actions {shown(actions)} have shape {found}; {count} envs with {space} want {shape}. "
            "Nothing was sent."
        )
    if not is_array or whole.dtype.hasobject:
        check_sendable(whole, "step(): the actions", ActionError)
    return whole


def check_sendable(values: Any, what: str, refusal: type[UsageError] = UsageError) -> None:
    """Raise ``refusal`` if values that go to several workers cannot be pickled, before the first one gets its part."""
    try:
        dumps(values)
    except Exception as error:
        raise refusal(f"{what} {shown(values)} cannot be pickled: {shown(error)}. Nothing was sent.") from error


def _part(space: Any, whole: Any, cut: slice) -> Any:
    if type(space) is spaces.Dict:
        return {key: _part(member, whole[key], cut) for key, member in space.spaces.items()}
    if type(space) is spaces.Tuple:
        return tuple(_part(member, item, cut) for member, item in zip(space.spaces, whole, strict=True))
    return whole[cut]


# --- arguments ----------------------------------------------------------------------------------


def checked_seeds(seed: Any, num_envs: int) -> list[int | None]:
    """Return a seed for each env, given ``None``, the first one's, or one for each; SeedError if one is none."""
    if seed is None or not hasattr(seed, "__len__") or getattr(seed, "shape", None) == ():
        first = checked_seed(seed)
        return [None if first is None else first + index for index in range(num_envs)]
    if len(seed) != num_envs:
        raise UsageError(
            f"reset(): If seeds are passed as a list the length must match num_envs={num_envs} but got "
            f"length={len(seed)}."
        )
    return [checked_seed(one) for one in seed]


def checked_indices(indices: Any, num_envs: int) -> list[int]:
    """Return indices of envs as a list; UsageError if one is no index, or there twice."""
    found = [integer(index) for index in indices]
    if len(set(found)) != len(found) or not all(index is not None and 0 <= index < num_envs for index in found):
        raise UsageError(f"indices is {indices!r:.100}; give different integers from 0 to {num_envs - 1}.")
    return [index for index in found if index is not None]


def check_mask(mask: Any, num_envs: int) -> Array:
    """Return a copy of a ``reset_mask``, or refuse it in gymnasium's words."""
    name = "`options['reset_mask']` must"
    if not isinstance(mask, np.ndarray):
        raise WrongTypeError(f"{name} be a numpy array, got {type(mask)}: {shown(mask)}. It has a bool for each env.")
    if mask.shape != (num_envs,):
        raise UsageError(f"{name} have shape `({num_envs},)`, got {mask.shape}. It has a bool for each env.")
    if mask.dtype != np.bool_:
        raise WrongTypeError(f"{name} have `dtype=np.bool_`, got {mask.dtype}. True are the envs to be reset.")
    if not mask.any():
        raise UsageError(
            f"{name} contain a boolean array with at least one True value, got reset_mask={mask!s:.100}. True are the "
            "envs to be reset."
        )
    return np.array(mask)


# --- rows ---------------------------------------------------------------------------------------


class Rows:
    """Puts what all workers answered together.

    Args:
        space: Observation space of one env.
        sizes: How many envs each worker has.
        copy: Put observations into new arrays; else in turn into one of two sets of arrays, so that what one step
            returned is overwritten by the next step but one.
    """

    def __init__(self, space: Space, sizes: Sequence[int], *, copy: bool) -> None:
        self._space, self._count = space, sum(sizes)
        self._has_rows = has_rows(space)
        leaves = leaf_spaces(space) if self._has_rows else []
        self._places = range(len(leaves))
        self._unset = bytes(2 * self._count)
        self._known: dict[tuple[int, ...], tuple[Any, ...]] = {}
        self._most = _KNOWN
        self._turn = 0
        # Not bound methods: a cycle would keep the banks mapped until garbage is collected.
        self._gather: Callable[[Rows, Sequence[RowsReply]], Any] = Rows._gather_loose
        if self._has_rows and copy:
            self._gather = Rows._gather_nested if type(space) in _NESTED else Rows._gather_array
        elif self._has_rows:
            self._sets = [[np.zeros((self._count, *leaf.shape), leaf.dtype) for leaf in leaves] for _ in (0, 1)]
            self._batches = [nested(space, arrays) for arrays in self._sets]
            self._gather = Rows._gather_in_turn

    def observations(self, replies: Sequence[RowsReply]) -> Any:
        """Return the batch of observations, given the replies of all workers in order."""
        return self._gather(self, replies)

    def forget(self) -> None:
        """Keep no arrays over banks any more."""
        self._most, self._known = 0, {}

    def batch(self, replies: Sequence[RowsReply]) -> tuple[Any, Array, Array, Array]:
        """Return observations, rewards, terminations and truncations of all envs."""
        # The arrays over the banks are the same objects again in every other step, and kept here, so that their
        # addresses name them. What is made of them is made once: this is a tenth of a round of eight CartPoles.
        known = self._known.get(tuple([id(reply.rewards) for reply in replies]))
        rewards, terminated, truncated, flags = self._parts(replies) if known is None else known
        observations, joined = self._gather(self, replies), np.concatenate(rewards)
        if b"".join(flags) == self._unset:
            return observations, joined, np.zeros(self._count, np.bool_), np.zeros(self._count, np.bool_)
        return observations, joined, np.concatenate(terminated), np.concatenate(truncated)

    def _parts(self, replies: Sequence[RowsReply]) -> tuple[Any, ...]:
        rewards = [reply.rewards for reply in replies]
        terminated, truncated = [reply.terminated for reply in replies], [reply.truncated for reply in replies]
        parts = rewards, terminated, truncated, [array.data for array in (*terminated, *truncated)]
        if len(self._known) >= self._most:
            self._known.clear()
        if self._most:
            self._known[tuple([id(array) for array in rewards])] = parts
        return parts

    def _gather_array(self, replies: Sequence[RowsReply]) -> Any:
        return np.concatenate([reply.leaves[0] for reply in replies])

    def _gather_nested(self, replies: Sequence[RowsReply]) -> Any:
        return nested(self._space, [np.concatenate([reply.leaves[k] for reply in replies]) for k in self._places])

    def _gather_in_turn(self, replies: Sequence[RowsReply]) -> Any:
        turn = self._turn = self._turn ^ 1
        for place, whole in enumerate(self._sets[turn]):
            np.concatenate([reply.leaves[place] for reply in replies], out=whole)
        return self._batches[turn]

    def _gather_loose(self, replies: Sequence[RowsReply]) -> Any:
        loose = [_blank(self._space) if one is None else one for reply in replies for one in loose_of(reply)]
        empty: Any = create_empty_array(self._space, self._count)
        return concatenate(self._space, loose, empty)

    def row(self, reply: RowsReply, slot: int) -> Any:
        """Return the observation of one slot of a worker."""
        if not self._has_rows:
            return loose_of(reply)[slot]
        return nested(self._space, [row_of(leaf, slot) for leaf in reply.leaves])


def loose_of(reply: RowsReply) -> Sequence[Any]:
    """Return the newest observation of each slot, where observations have no rows."""
    return reply.extras.observations or () if reply.extras is not None else ()


def _blank(space: Space) -> Any:
    """Return what stands for an observation where there has been none, as zeros do in an array."""
    batch: Any = create_empty_array(space, 1)
    return None if batch is None else next(iter(iterate(batch_space(space, 1), batch)))
