"""What is given to a vector env: checked, and dealt out to the groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from multienv.config import integer
from multienv.errors import ActionError, UsageError
from multienv.wire.actions import can
from multienv.wire.batch import is_laid_out
from multienv.wire.messages import dumps


class WrongTypeError(UsageError, TypeError):
    """What is a TypeError for gymnasium too."""


class NoBatchError(ActionError, TypeError):
    """The actions are one thing, where there must be one for each env; a TypeError for gymnasium too."""


def deal(num_envs: int, envs_per_worker: int | str, cores: int) -> list[int]:
    """How many envs each worker gets: as evenly as can be on all cores, or so many each and the rest in the last."""
    if envs_per_worker == "auto":
        workers = min(num_envs, cores)
        return [num_envs // workers + (worker < num_envs % workers) for worker in range(workers)]
    size = integer(envs_per_worker)
    if size is None or size < 1:
        raise UsageError(f"envs_per_worker is {envs_per_worker!r}; give an integer of at least 1, or 'auto'.")
    full, rest = divmod(num_envs, size)
    return [size] * full + [rest] * bool(rest)


def check_arguments(env_fns: Any, observation_mode: Any, max_concurrency: Any, worker: Any) -> None:
    """Refuse what makes no sense before anything is started."""
    if not env_fns:
        raise UsageError("env_fns is empty; give one function for each env.")
    if worker is not None:
        raise UsageError(
            "A custom `worker` runs AsyncVectorEnv's own protocol; here multienv's worker hosts the envs, or they "
            "could not be brought back. Leave it out, and put what it does into env_fn or a wrapper."
        )
    is_pair = isinstance(observation_mode, tuple) and len(observation_mode) == 2
    if is_pair and not all(isinstance(space, gymnasium.Space) for space in observation_mode):
        kinds = " and ".join(str(type(one)) for one in observation_mode)
        raise WrongTypeError(f"Expected both elements of observation_mode to be Spaces, got {kinds}.")
    if not is_pair and observation_mode not in ("same", "different"):
        raise UsageError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
            f"space, actual got {observation_mode!s:.200}. Of the tuple the first is the batched one, as in gymnasium."
        )
    if max_concurrency is None:
        return
    if integer(max_concurrency) is None:
        raise UsageError(
            f"`max_concurrency` must be an integer or None, got {type(max_concurrency)}: {max_concurrency!r:.100}."
        )
    if max_concurrency < 1:
        raise UsageError(f"`max_concurrency` must be a positive or None, got {max_concurrency}; give at least 1.")


def check_options(options: Any) -> None:
    """Refuse what cannot hold a ``reset_mask``."""
    if not (options is None or isinstance(options, Mapping)):
        raise WrongTypeError(f"reset(): options is {shown(options)}; give a dict, or None. Nothing was sent.")


def check_mask(mask: Any, num_envs: int) -> None:
    """Refuse a ``reset_mask`` that is none."""
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


def normal_batch(space: spaces.Space[Any], actions: Any, num_envs: int) -> Any:
    """The batch in the form in which it can be dealt out; raises if it has another length."""
    if type(space) is spaces.Dict:
        return {key: normal_batch(member, actions[key], num_envs) for key, member in space.spaces.items()}
    if type(space) is spaces.Tuple:
        return tuple(normal_batch(member, item, num_envs) for member, item in zip(space.spaces, actions, strict=True))
    whole = np.asarray(actions) if is_laid_out(space) else tuple(actions)
    shape = (num_envs, *(space.shape or ())) if is_laid_out(space) else (num_envs,)
    found = whole.shape if isinstance(whole, np.ndarray) else (len(whole),)
    if found != shape:
        raise (ActionError if found else NoBatchError)(
            f"step(): the actions {shown(actions)} have shape {found}; {num_envs} envs with {space} want {shape}. "
            "Nothing was sent."
        )
    if not isinstance(whole, np.ndarray) or whole.dtype.hasobject:
        check_sendable(whole, "step(): the actions", ActionError)
    return whole


def check_sendable(values: Any, what: str, refusal: type[UsageError] = UsageError) -> None:
    """All of them, before the first worker gets its part."""
    try:
        dumps(values)
    except Exception as error:
        if can(dumps, values):
            raise
        raise refusal(
            f"{what} {shown(values)} cannot be pickled: {type(error).__name__}: {error}. Nothing was sent."
        ) from error


def sliced(space: spaces.Space[Any], whole: Any, rows: slice) -> Any:
    """Some envs' part of a batch."""
    if type(space) is spaces.Dict:
        return {key: sliced(member, whole[key], rows) for key, member in space.spaces.items()}
    if type(space) is spaces.Tuple:
        return tuple(sliced(member, item, rows) for member, item in zip(space.spaces, whole, strict=True))
    return whole[rows]


def shown(value: object) -> str:
    """Some text that stands for it."""
    try:
        return f"{value!r:.200}"
    except Exception:  # foreign code
        return f"<a {type(value).__name__}>"
