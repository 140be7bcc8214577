"""What is given to an env manager, checked; and what one env tells of all."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from multienv.env_states import EnvReference
from multienv.errors import SpaceMismatchError, UsageError
from multienv.hosted_env import HostedEnv
from multienv.subprocess_env import SubprocessEnv

Param = dict[str, Any] | None


def checked_id(what: str, env_id: Any, env_num: int) -> int:
    """The id as an int, if there is such an env."""
    try:
        index = operator.index(env_id)
    except TypeError:
        index = -1
    if not 0 <= index < env_num:
        raise UsageError(f"{what}: {env_id!r:.100} is no env's id; they are 0 to {env_num - 1}.")
    return index


def checked_params(reset_param: Any, env_num: int) -> dict[int, Param]:
    """The parameters of resets, by id: copies."""
    if reset_param is None:
        return {}
    if not isinstance(reset_param, Mapping):
        raise UsageError(f"reset_param is {reset_param!r:.100}; give a dict: env id → parameters of its reset.")
    return {checked_id("reset_param", index, env_num): _checked(param) for index, param in reset_param.items()}


def _checked(param: Any) -> Param:
    if param is None:
        return None
    if not isinstance(param, Mapping) or not set(param) <= {"seed", "options"}:
        raise UsageError(f"reset_param has {param!r:.100} for an env; give None or a dict with 'seed' and 'options'.")
    return {"seed": HostedEnv._checked_seed(param.get("seed")), "options": copy.deepcopy(param.get("options"))}


def checked_seeds(seed: Any, env_num: int) -> dict[int, int | None]:
    """A seed for each env, or for some."""
    if isinstance(seed, Mapping):
        given = {checked_id("seed()", index, env_num): one for index, one in seed.items()}
    elif isinstance(seed, Sequence | np.ndarray) and not isinstance(seed, str) and getattr(seed, "shape", None) != ():
        if len(seed) != env_num:
            raise UsageError(f"seed(): {len(seed)} seeds for {env_num} envs; give one for each.")
        given = dict(enumerate(seed))
    else:
        first = HostedEnv._checked_seed(seed)
        if first is None:
            raise UsageError("seed(None): give an integer, a list of them, or a dict.")
        given = {index: first + index for index in range(env_num)}
    return {index: HostedEnv._checked_seed(one) for index, one in given.items()}


def compare_spaces(envs: Sequence[SubprocessEnv]) -> None:
    """Refuse envs with different spaces."""
    for index, env in enumerate(envs):
        for name in ("observation_space", "action_space"):
            if getattr(env, name) != getattr(envs[0], name):
                raise SpaceMismatchError(
                    f"Env {index} has {name} {getattr(env, name)}, env 0 has {getattr(envs[0], name)}. "
                    "Give a manager envs of one kind, or wrap them to the same spaces."
                )


def reference_of(env: SubprocessEnv) -> EnvReference:
    """What this env, which has been built, tells of all."""
    reward_space = env.get_attr("reward_space") if env.has_wrapper_attr("reward_space") else None
    return EnvReference(
        env.observation_space,
        copy.deepcopy(env.action_space),
        reward_space if reward_space is not None else gymnasium.spaces.Box(-np.inf, np.inf, (), np.float64),
        dict(env.metadata or {}),
        env.spec,
        env.render_mode,
    )
