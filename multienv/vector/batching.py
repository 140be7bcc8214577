"""A batch of envs: dealt to workers; spaces; actions cut for the workers; rows and infos put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import chain
from operator import attrgetter
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import (
    batch_differing_spaces,
    batch_space,
    create_empty_array,
    iterate,
)

from multienv._engine.native import native
from multienv._engine.wire.actions import misfit, own_copy, shown, step_head_of
from multienv._engine.wire.codecs import RowsReply
from multienv._engine.wire.messages import dumps
from multienv._engine.wire.rows import batch_of, has_rows, leaf_spaces, nested, row_bytes, row_of
from multienv.config import checked_count, integer
from multienv.errors import ActionError, UsageError, catchable_as

Array = np.ndarray[Any, Any]
Space = spaces.Space[Any]
Split = Callable[..., Sequence[Any]]

# From this size on numpy asks for huge pages; a bytearray gets pages of 4 KiB, and a page fault for each: for 100 MB it
# took six times as long.
_HUGE = 2**22
_VIEWS = attrgetter("views")
_NESTED = (spaces.Dict, spaces.Tuple)
_SOLID = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)


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
        # Fewer envs for the worker that shares the trainer's core do not pay: with 8 and 32 envs it made 0.94 to 0.98
        # times the steps. The scheduler moves the trainer, now and then, to the core that has more to do.
        workers = min(num_envs, cores, most)
        return [num_envs // workers + (worker < num_envs % workers) for worker in range(workers)]
    size = checked_count("envs_per_worker", envs_per_worker, words=", or 'auto'")
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
            raise TypeError(f"Expected both elements of observation_mode to be Spaces, got {kinds}.")
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


def check_spaces(owner: str, mode: Any, members: Sequence[tuple[Space, Space]]) -> None:
    """Raise RuntimeError, as gymnasium does, unless the spaces of all envs fit one batch.

    Args:
        owner: The name of the class, for messages.
        mode: The ``observation_mode``.
        members: Observation and action space of each env.
    """
    single = mode[1] if isinstance(mode, tuple) else members[0][0]
    actions = members[0][1]
    for index, (observation_space, action_space) in enumerate(members):
        if mode == "same" and observation_space != single:
            raise RuntimeError(
                f"{owner}(..., observation_mode='same') however some of the sub-environments observation spaces are "
                "not equivalent. If this is intentional, use `observation_mode='different'` instead. "
                f"Here env {index} has the observation space {observation_space}, not {single}."
            )
        if mode != "same" and not _are_alike(observation_space, single):
            raise RuntimeError(
                f"{owner}(..., observation_mode='different' or custom space) however the sub-environment's observation "
                "spaces do not share a common shape and dtype. Wrap the envs so that they agree: "
                f"env {index} has the observation space {observation_space}, not {single}."
            )
        if action_space != actions:
            raise RuntimeError(
                f"Some environments have an action space different from `{actions}`. In order to batch actions, the "
                f"action spaces from all environments must be equal: env {index} has {action_space}."
            )


def _are_alike(one: Space, other: Space) -> bool:
    try:
        return is_space_dtype_shape_equiv(one, other)
    except NotImplementedError:  # a custom space: nothing is known of it but what it says itself
        return one == other


def check_shareable(space: Space) -> None:
    """Refuse observations that gymnasium cannot share either: a Graph or a Sequence with TypeError, as it does."""
    kinds = {type(leaf) for leaf in leaf_spaces(space)}
    if not kinds.issubset((*_SOLID, spaces.Text, spaces.OneOf)):
        variable = not kinds.isdisjoint((spaces.Graph, spaces.Sequence))
        raise (TypeError if variable else UsageError)(
            f"shared_memory=True: {space} has a dynamic shape so its not possible to make a static shared memory. "
            "Leave shared_memory out, and its observations travel pickled."
        )


# --- actions ------------------------------------------------------------------------------------


def action_splitter(space: Space, slices: Sequence[slice], name: str = "step()") -> Split:
    """Return the function that checks a batch of actions and cuts it into parts: one for each worker, say.

    It raises ActionError before anything is sent: for another length or shape, and for a Discrete space for what is no
    integer of 64 bits, naming env and value. Bounds are the env's to judge. Given second: whose actions they are, for
    messages; ``None``: those of 0, 1, …

    Args:
        space: Action space of one env.
        slices: Which actions go into each part.
        name: Of the call, for messages.
    """
    slices, count = tuple(slices), slices[-1].stop
    ndarray, shape = np.ndarray, (count, *(space.shape or ()))
    kinds = "iub" if type(space) is spaces.Discrete else "iubfc"
    batched = cache(partial(batch_space, space, count))  # when it is first needed: it takes longer than many a step

    def split_any(actions: Any, envs: Sequence[int] | None = None) -> list[Any]:
        try:
            whole = _by_leaf(space, actions, partial(_normal_leaf, count, name))
        except ActionError:
            raise
        except Exception as error:  # looking at the actions runs code of the user
            # Of gymnasium's type, too: a scalar, and what else nobody can go through, is a TypeError there.
            what = f"{name}: {shown(actions)} is no batch for {count} envs with {space}: {error}. Nothing was sent."
            raise catchable_as(ActionError, error, what) from error
        if type(space) not in _SOLID or whole.dtype.kind not in kinds:
            _check_each(space, batched(), whole, name, envs)
        return [_by_leaf(space, whole, partial(_part, cut)) for cut in slices]

    if type(space) in _SOLID:
        last: Any = None
        head = 0

        def split_array(actions: Any, envs: Sequence[int] | None = None) -> Sequence[Any]:
            nonlocal last, head
            if type(actions) is ndarray and actions.shape == shape and actions.dtype.kind in kinds:
                if native is not None and actions.flags.c_contiguous:
                    # Looked up when it changes: to hash a dtype takes as long as to copy a few actions.
                    if actions.dtype is not last:
                        last, head = actions.dtype, step_head_of(actions.dtype)
                    if head:
                        return native.Parts(actions, slices, head)  # type: ignore[no-any-return]
                return [actions[cut] for cut in slices]
            return split_any(actions, envs)

        return split_array
    return split_any


def action_cutter(space: Space, count: int, name: str) -> Callable[[Any, Sequence[int]], Sequence[Any]]:
    """Return the function that checks the actions of some envs, and cuts them into one part each.

    The parts are copies: an env may be asked later, when the caller has written to the arrays. For errors see
    :func:`action_splitter`.

    Args:
        space: Action space of one env.
        count: How many envs there are at most.
        name: Of the call, for messages.
    """
    cuts = tuple(slice(index, index + 1) for index in range(count))
    splitter = lru_cache(maxsize=64)(lambda number: action_splitter(space, cuts[:number], name))

    def cut(actions: Any, envs: Sequence[int]) -> Sequence[Any]:
        split = splitter(len(envs))
        if type(actions) is np.ndarray and not actions.dtype.hasobject:
            return split(actions.copy(), envs)
        return [own_copy(part, name) for part in split(actions, envs)]

    return cut


def _check_each(space: Space, batched: Space, whole: Any, name: str, envs: Sequence[int] | None) -> None:
    """Raise ActionError if the action of some env is none of its space."""
    for index, action in enumerate(iterate(batched, whole)):
        problem = misfit(space, action)
        if problem:
            env = index if envs is None else envs[index]
            raise ActionError(
                f"{name}: env {env}: {problem} Nothing was sent; the episodes go on with the next {name}."
            )


def joined(space: Any, parts: Sequence[Any]) -> Any:
    """Return the batch of the actions in these batches, one after the other."""
    if isinstance(space, spaces.Dict):
        return {key: joined(member, [part[key] for part in parts]) for key, member in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(joined(member, leaf) for member, leaf in zip(space.spaces, zip(*parts, strict=True), strict=True))
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else tuple(chain(*parts))


def _by_leaf(space: Any, whole: Any, function: Callable[[Any, Any], Any]) -> Any:
    """Return a batch of the same structure, of what the function makes of each leaf of the space and its values."""
    if isinstance(space, spaces.Dict):  # also a subclass: the worker goes through the batch as gymnasium does
        return {key: _by_leaf(member, whole[key], function) for key, member in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_by_leaf(member, item, function) for member, item in zip(space.spaces, whole, strict=True))
    return function(space, whole)


def _part(cut: slice, space: Any, whole: Any) -> Any:
    return whole[cut]


def _normal_leaf(count: int, name: str, space: Any, actions: Any) -> Any:
    """Return the actions in the form in which they can be cut; raise unless there are as many as envs."""
    is_array = type(space) in _SOLID
    whole: Any = np.asarray(actions) if is_array else tuple(actions)
    if is_array and whole.ndim == 0:
        raise TypeError(f"a {type(actions).__name__} is not an action for each env")
    shape = (count, *(space.shape or ())) if is_array else (count,)
    found = whole.shape if isinstance(whole, np.ndarray) else (len(whole),)
    if found != shape:
        raise ActionError(
            f"{name}: the actions {shown(actions)} have shape {found}; {count} envs with {space} want {shape}. "
            "Nothing was sent."
        )
    if not is_array or whole.dtype.hasobject:
        check_sendable(whole, f"{name}: the actions", ActionError)
    return whole


def check_sendable(values: Any, what: str, refusal: type[UsageError] = UsageError) -> None:
    """Raise ``refusal`` if values that go to several workers cannot be pickled, before the first one gets its part."""
    try:
        dumps(values)
    except Exception as error:
        raise refusal(f"{what} {shown(values)} cannot be pickled: {shown(error)}. Nothing was sent.") from error


# --- rows ---------------------------------------------------------------------------------------


class Rows:
    """Puts the answers of all workers together.

    Args:
        space: Observation space of one env.
        count: How many envs there are.
        copy: Put observations into new arrays; else in turn into one of two sets of arrays, so that what one step
            returned is overwritten by the next step but one.
    """

    def __init__(self, space: Space, count: int, *, copy: bool) -> None:
        self._space, self._count = space, count
        self._has_rows = has_rows(space)
        self._join = _joiner(space)
        self._gather = _gatherer(space, count, self._join, copy=copy)
        self._unset, self._no_ends = bytes(2 * count), np.zeros(count, np.bool_)
        self._turn = 0
        self._known: list[Any] = []
        self.forget()

    def forget(self) -> None:
        """Keep no views of banks any more."""
        self._known = [(None,) * 4, (None,) * 4]

    def batch(self, replies: Sequence[RowsReply]) -> tuple[Any, Array, Array, Array]:
        """Return observations, rewards, terminations and truncations of all envs, given the replies of all workers."""
        # The arrays over the banks are the same in every other step, until a worker is replaced. So views of them are
        # made once, and bytes are joined, which takes half as long as np.concatenate: together an eighth of a round of
        # eight CartPoles.
        turn = self._turn = self._turn ^ 1
        known, leaves, rewards, flags = self._known[turn]
        arrays = [id(reply.rewards) for reply in replies]
        if known != arrays:
            rewards, terminated, truncated, *leaves = zip(*map(_VIEWS, replies), strict=True)
            flags = terminated + truncated
            self._known[turn] = arrays, leaves, rewards, flags
        count, ended = self._count, bytearray().join(flags)
        joined = np.ndarray(count, np.float64, bytearray().join(rewards))
        observations = self._gather(replies, leaves, turn)
        if ended == self._unset:
            return observations, joined, self._no_ends.copy(), self._no_ends.copy()
        return observations, joined, np.ndarray(count, np.bool_, ended), np.ndarray(count, np.bool_, ended, count)

    def some(self, replies: Sequence[RowsReply]) -> tuple[Any, Array, Array, Array]:
        """Return observations, rewards, terminations and truncations of the envs of some replies, in new arrays."""
        parts = list(zip(*map(_VIEWS, replies), strict=True))
        join = bytearray().join
        joined_rewards = join(parts[0])
        count = len(joined_rewards) // 8
        rewards = np.ndarray(count, np.float64, joined_rewards)
        terminated, truncated = np.ndarray(count, np.bool_, join(parts[1])), np.ndarray(count, np.bool_, join(parts[2]))
        return self._join(count, replies, parts[3:]), rewards, terminated, truncated

    def row(self, reply: RowsReply, slot: int) -> Any:
        """Return the observation of one slot of a worker."""
        if not self._has_rows:
            return listed_observations(reply)[slot]
        return row_of(self._space, reply.leaves, slot)


def _gatherer(
    space: Any, count: int, join: Callable[..., Any], *, copy: bool
) -> Callable[[Sequence[RowsReply], list[Any], int], Any]:
    """Return the function that makes the batch of observations, given replies, views of their leaves, and the turn."""
    if not has_rows(space) or (copy and (type(space) in _NESTED or count * sum(row_bytes(space)) >= _HUGE)):
        return lambda replies, views, turn: join(count, replies, views)
    shapes = [((count, *leaf.shape), leaf.dtype) for leaf in leaf_spaces(space)]
    if not copy:
        sets = [[np.zeros(*shape) for shape in shapes] for _ in (0, 1)]

        def gather_in_turn(replies: Sequence[RowsReply], views: list[Any], turn: int) -> Any:
            arrays = sets[turn]
            for index, whole in enumerate(arrays):
                np.concatenate([reply.leaves[index] for reply in replies], out=whole)
            return nested(space, arrays)

        return gather_in_turn

    ((shape, dtype),) = shapes
    return lambda replies, views, turn: np.ndarray(shape, dtype, bytearray().join(views[0]))


def _joiner(space: Any) -> Callable[[int, Sequence[RowsReply], Sequence[Any]], Any]:
    """Return the function that joins the observations of some replies in new arrays, given views of their leaves."""

    def join_listed(count: int, replies: Sequence[RowsReply], views: Sequence[Any]) -> Any:
        listed = [_blank(space) if one is None else one for reply in replies for one in listed_observations(reply)]
        return batch_of(space, listed)

    if not has_rows(space):
        return join_listed
    known = [(leaf.shape, leaf.dtype, size) for leaf, size in zip(leaf_spaces(space), row_bytes(space), strict=True)]

    def join(count: int, replies: Sequence[RowsReply], views: Sequence[Any]) -> Any:
        leaves = []
        for index, (shape, dtype, size) in enumerate(known):
            if count * size >= _HUGE:
                leaves.append(np.concatenate([reply.leaves[index] for reply in replies]))
            else:
                leaves.append(np.ndarray((count, *shape), dtype, bytearray().join(views[index])))
        return nested(space, leaves) if type(space) in _NESTED else leaves[0]

    return join


def listed_observations(reply: RowsReply) -> Sequence[Any]:
    """Return the newest observation of each slot, where observations have no rows."""
    return reply.extras.observations or () if reply.extras is not None else ()


def _blank(space: Space) -> Any:
    """Return what stands for an observation where there has been none, as zeros do in an array."""
    batch: Any = create_empty_array(space, 1)
    return None if batch is None else next(iter(iterate(batch_space(space, 1), batch)))
