"""What is given to a vector env: checked, and dealt out to the groups."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from multienv.errors import ActionError, UsageError
from multienv.wire.batch import is_laid_out


class WrongTypeError(UsageError, TypeError):
    """What is a TypeError for gymnasium too."""


def deal(num_envs: int, envs_per_worker: int | str, cores: int) -> list[int]:
    """How many envs each worker gets: as evenly as can be on all cores, or so many each and the rest in the last."""
    if envs_per_worker == "auto":
        workers = min(num_envs, cores)
        return [num_envs // workers + (worker < num_envs % workers) for worker in range(workers)]
    if type(envs_per_worker) is not int or envs_per_worker < 1:
        raise UsageError(f"envs_per_worker is {envs_per_worker!r}; give an integer of at least 1, or 'auto'.")
    full, rest = divmod(num_envs, envs_per_worker)
    return [envs_per_worker] * full + [rest] * bool(rest)


def check_arguments(env_fns: Any, observation_mode: Any, max_concurrency: Any, worker: Any) -> None:
    """Refuse what makes no sense before anything is started."""
    if not env_fns:
        raise UsageError("env_fns is empty; give one function for each env.")
    if worker is not None:
        raise UsageError(
            "worker= is AsyncVectorEnv's own; here the envs are hosted by multienv's worker. Leave it out."
        )
    is_pair = isinstance(observation_mode, tuple) and len(observation_mode) == 2
    if is_pair and not all(isinstance(space, gymnasium.Space) for space in observation_mode):
        raise WrongTypeError(f"observation_mode is {observation_mode!r:.200}; give a pair of spaces.")
    if not is_pair and observation_mode not in ("same", "different"):
        raise UsageError(
            f"observation_mode is {observation_mode!r:.200}; choose 'same', 'different' or a pair of the batched and "
            "the single space."
        )
    if max_concurrency is not None and (
        isinstance(max_concurrency, bool) or not isinstance(max_concurrency, int | np.integer) or max_concurrency < 1
    ):
        raise UsageError(f"max_concurrency is {max_concurrency!r}; give an integer of at least 1, or None.")


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
        raise ActionError(
            f"step(): the actions {shown(actions)} have shape {found}; {num_envs} envs with {space} want {shape}. "
            "Nothing was sent."
        )
    return whole


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
