"""Make a vector env from a registered id."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, _find_spec

from multienv._engine.building.building import EnvFn, checked_env_fn
from multienv.config import checked_count, did_you_mean
from multienv.errors import EnvsFailedError, UsageError
from multienv.vector.hosted_vector_env import HostedVectorEnv
from multienv.vector.vector_env import SubprocessVectorEnv

_Env = gymnasium.Env[Any, Any]


# Names in the package, which imports what is for a cluster when it is first asked for.
_CLASSES = {"subprocess": "SubprocessVectorEnv", "serial": "SerialVectorEnv", "ray": "RayVectorEnv"}
_OF_GYMNASIUM = {"async": "subprocess", "sync": "serial"}  # in gymnasium's words
# What a spec may hold that a call to make_vec() has left there.
_OWN = ("num_envs", "vectorization", "vector_kwargs", "wrappers")


def make_vec(
    id: str | EnvSpec | EnvFn,  # noqa: A002 - gymnasium's name
    num_envs: int = 1,
    vectorization: str = "subprocess",
    vector_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[_Env], _Env]] | None = None,
    **make_kwargs: Any,
) -> HostedVectorEnv:
    """Make a batch of envs, as ``gymnasium.make_vec`` does.

    ::

        envs = make_vec("CartPole-v1", 8)
        envs = make_vec("HalfCheetah-v5", 32, deadlines=Deadlines(step=5.0), ctrl_cost_weight=0.2)
        envs = make_vec(lambda: MyEnv(), 8, wrappers=[lambda env: TimeLimit(env, 500)])

    Args:
        id: A registered id (``"module:Env-v0"`` imports the module first), an ``EnvSpec``, or a function that builds
            one env. A function that needs an argument, besides ``make_kwargs``, gets the env's index. The ``spec`` of
            the returned envs makes the same envs again.
        num_envs: Number of envs.
        vectorization: ``"subprocess"`` makes a :class:`SubprocessVectorEnv`, ``"serial"`` a :class:`SerialVectorEnv`,
            ``"ray"`` a :class:`RayVectorEnv`. Gymnasium's names for the first two, ``"async"`` and ``"sync"``, work
            too, and so does the keyword ``vectorization_mode=``.
        vector_kwargs: Options of that class, such as ``{"autoreset_mode": "SameStep"}``, as gymnasium wants them.
        wrappers: Wrappers for each env, the first one innermost; each is called with the env as its only argument.
        **make_kwargs: Options of :class:`SubprocessVectorEnv` and :class:`RayVectorEnv`, by name. All others are
            arguments for ``gymnasium.make``, or for the function, in every process: the env's own, ``render_mode`` and
            ``max_episode_steps``. Bind an argument of the env that has the name of an option to the function:
            ``make_vec(partial(gymnasium.make, "MyEnv-v0", copy=3), 8)``.

    Returns:
        The envs, built; call ``reset()`` next.

    Raises:
        TypeError: An argument is unknown, to the class or to the env.
        UsageError: The vectorization is unknown, or ``num_envs`` is less than 1.
        EnvsFailedError: Some envs could not be built.
        gymnasium.error.Error: The id is not registered.
    """
    vectorization = _our_name(make_kwargs.pop("vectorization_mode", None) or vectorization)
    options = _options()
    named = {name: make_kwargs.pop(name) for name in list(make_kwargs) if name in options}
    if callable(id):
        spec, kwargs, make = None, dict(make_kwargs), id
    elif isinstance(id, str | EnvSpec):
        spec = copy.deepcopy(_find_spec(id) if isinstance(id, str) else id)
        kwargs, spec.kwargs = spec.kwargs, {}
        num_envs = kwargs.pop("num_envs", num_envs)
        mode = _our_name(kwargs.pop("vectorization_mode", None))  # gymnasium's own make_vec has made the spec
        vectorization = kwargs.pop("vectorization", mode if mode in _CLASSES else vectorization)
        vector_kwargs = kwargs.pop("vector_kwargs", vector_kwargs)
        wrappers = kwargs.pop("wrappers", wrappers)
        kwargs |= make_kwargs
        make = partial(gymnasium.make, spec)
    else:
        raise UsageError(f"make_vec(): {id!r:.200} is no id, no EnvSpec and no function that builds an env.")
    if vectorization not in _CLASSES:
        raise UsageError(
            f"make_vec(): vectorization is {vectorization!r}; choose 'subprocess' ('async'), 'serial' ('sync'), 'ray'."
        )
    num_envs = checked_count("make_vec(): num_envs", num_envs)
    wrappers, vector_kwargs = tuple(wrappers or ()), {**(vector_kwargs or {}), **named}
    env_fns = [make] * num_envs
    if kwargs or wrappers:
        bound = partial(make, **kwargs)
        takes_index = checked_env_fn(bound, None, "make_vec(): the function") is not bound
        makes = [partial(make, index) if takes_index else make for index in range(num_envs)]
        env_fns = [partial(_build, each, kwargs, wrappers) for each in makes]
    try:
        make_envs = getattr(importlib.import_module("multienv"), _CLASSES[vectorization])
        envs: HostedVectorEnv = make_envs(env_fns, **vector_kwargs)
    except EnvsFailedError as error:
        for name in make_kwargs:
            if f"unexpected keyword argument '{name}'" in str(error) and did_you_mean(name, options):
                raise TypeError(
                    f"make_vec(): {name!r} is no option and no argument of the env.{did_you_mean(name, options)}"
                ) from error.__cause__
        raise
    if spec is not None:
        ours = (num_envs, vectorization, vector_kwargs, wrappers)
        envs.spec = copy.deepcopy(spec)
        envs.spec.kwargs = kwargs | {name: value for name, value in zip(_OWN, ours, strict=True) if value}
    return envs


def _options() -> set[str]:
    """Return the names of the options of the classes whose envs run in processes."""
    parameters = inspect.signature(SubprocessVectorEnv).parameters.values()
    return {one.name for one in parameters if one.kind is one.KEYWORD_ONLY} | {"ray"}


def _our_name(mode: Any) -> Any:
    """Return our word for a vectorization mode of gymnasium's, a string or its Enum; anything else as it is."""
    return _OF_GYMNASIUM.get(getattr(mode, "value", mode), mode)


def _build(make: Callable[..., _Env], kwargs: dict[str, Any], wrappers: Sequence[Callable[[_Env], _Env]]) -> _Env:
    """Build one env, in any process. Each env gets arguments of its own: it may change them."""
    env = make(**copy.deepcopy(kwargs))
    for wrapper in wrappers:
        env = wrapper(env)
    return env
