"""Arguments that several env classes take, checked; and the error for a call in which envs have failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex

import numpy as np
from gymnasium.vector import AutoresetMode

from multienv._engine.wire.actions import shown
from multienv._engine.wire.messages import Call, Message
from multienv.config import checked_seed, integer
from multienv.errors import ActionError, EnvError, EnvsFailedError, MultienvError, ResetNeededError, UsageError

# Compared by identity, which is faster: numpy has one such object, unless the caller has made another.
_INDEX = np.dtype(np.int64)
# Of these get_attr() returns the method of the env class itself, which counts episodes.
OWN_METHODS = frozenset(("reset", "step", "render", "close"))
# Methods of gymnasium's that change nothing.
_READING = ("get_wrapper_attr", "has_wrapper_attr")


def refuse_copy(owner: object, protocol: SupportsIndex = 0, /) -> NoReturn:
    """Raise TypeError, in place of ``__reduce_ex__()``: a copy of ``owner`` would step the same envs."""
    raise TypeError(
        f"A {type(owner).__name__} cannot be copied or pickled: it owns its envs. Build another one from the same "
        "env_fns where it is wanted. Of a SubprocessEnv, state_dict() can be pickled, snapshot() come back to."
    )


def call_message(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    slots: tuple[int, ...] | None = None,
    *,
    recorded: bool = True,
) -> Message:
    """Return the message that calls a method of envs; see ``wire.messages.Call`` for the arguments.

    Raises:
        UsageError: ``name`` is reset, step or close: that method itself must be called, which counts episodes.
    """
    if name in ("reset", "step", "close"):
        raise UsageError(
            f"Trying to call function `{name}` with `call`, use `{name}` directly instead: what it does to the "
            "episode must be seen here."
        )
    return Call(name, args, kwargs, slots, recorded and name not in _READING)


def envs_failed(
    what: str, mode: AutoresetMode, failures: Mapping[int, BaseException], results: Sequence[Any]
) -> MultienvError:
    """Return the error for a call in which some envs have failed; arguments as for ``EnvsFailedError.collect``."""
    advice, others = "No episode has ended.", "The other envs have answered."
    if what.startswith("reset"):
        advice, others = "Reset the failed envs again.", "The other envs are reset."
    elif what.startswith(("step", "recv", "rollout")):
        step, reset = ("send", "reset_async") if what.startswith("recv") else ("step", "reset")
        reset += "(options={'reset_mask': mask})"
        others = "The episodes of the other envs go on."
        by_itself = f"The next {step}() begins a new episode of each env that raised an error of its own"
        advice = f"{by_itself}; after any other, {reset}."
        if all(isinstance(error, ActionError) and not isinstance(error, EnvError) for error in failures.values()):
            advice = f"The failed envs took no step: call {step}() again, with valid actions for them."
        elif mode is AutoresetMode.DISABLED or all(isinstance(error, ResetNeededError) for error in failures.values()):
            advice = f"Reset the failed envs: {reset}."
    return EnvsFailedError.collect(what, failures, results, advice, others)


def checked_seeds(seed: Any, num_envs: int) -> list[int | None]:
    """Return a seed for each env, given ``None``, the first env's seed, or a seed for each; raise UsageError."""
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
    if type(indices) is np.ndarray and indices.dtype is _INDEX and indices.ndim == 1:  # as recv() returns them
        several: list[int] = indices.tolist()
        if several and len(set(several)) == len(several) and min(several) >= 0 and max(several) < num_envs:
            return several
    found = [integer(index) for index in indices] if hasattr(indices, "__iter__") else [None]
    if len(set(found)) != len(found) or not all(index is not None and 0 <= index < num_envs for index in found):
        raise UsageError(f"indices is {indices!r:.100}; give different integers from 0 to {num_envs - 1}.")
    return [index for index in found if index is not None]


def reset_options(options: Any, num_envs: int) -> tuple[list[Any], np.ndarray[Any, Any] | None]:
    """Return copies of the options of each env, and the ``reset_mask`` in them, if any.

    Args:
        options: As given to ``reset``: ``None``, a mapping for all, or a sequence of one or ``None`` for each env.
        num_envs: How many envs there are.
    """
    mask = None
    if isinstance(options, Mapping) and "reset_mask" in options:
        options = dict(options)
        mask = _checked_mask(options.pop("reset_mask"), num_envs)
    each = [options] * num_envs if options is None or isinstance(options, Mapping) else options
    if len(each) != num_envs:
        raise UsageError(f"reset(): options has {len(each)} items for {num_envs} envs. Nothing was sent.")
    return [None if one is None else dict(one) for one in each], mask


def _checked_mask(mask: Any, num_envs: int) -> np.ndarray[Any, Any]:
    """Return a copy of a ``reset_mask``, or refuse it in gymnasium's words."""
    name = "`options['reset_mask']` must"
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"{name} be a numpy array, got {type(mask)}: {shown(mask)}. It has a bool for each env.")
    if mask.shape != (num_envs,):
        raise UsageError(f"{name} have shape `({num_envs},)`, got {mask.shape}. It has a bool for each env.")
    if mask.dtype != np.bool_:
        raise TypeError(f"{name} have `dtype=np.bool_`, got {mask.dtype}. True are the envs to be reset.")
    if not mask.any():
        raise UsageError(
            f"{name} contain a boolean array with at least one True value, got reset_mask={mask!s:.100}. True are the "
            "envs to be reset."
        )
    return np.array(mask)
