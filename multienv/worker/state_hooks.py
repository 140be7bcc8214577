"""How the state of objects that cannot be pickled, or better are not, is read as plain data and put back.

ALE's emulator is known; :func:`register_state_hook` adds others. MuJoCo's objects are pickled like any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import cloudpickle

from multienv.errors import UsageError


@dataclass(frozen=True, slots=True)
class StateHook:
    """Two functions: one returns the state of an object, the other puts it into another object."""

    get_state: Callable[[Any], Any]
    set_state: Callable[[Any, Any], object]


_registered: dict[type, StateHook] = {}


def register_state_hook(kind: type, get_state: Callable[[Any], Any], set_state: Callable[[Any, Any], object]) -> None:
    """Register how the state of a type's objects is taken and put back, for example of objects that keep it in C.

    multienv keeps the state of an env in a long episode, so that a new process can go on from it when the worker is
    lost (see ``RestartPolicy.state_anchors``). The attributes of the env and its wrappers are pickled. Objects of this
    type, and of types derived from it, are not: the object that a newly built env holds in the same attribute, once it
    has been reset, is given the state. They are looked for in attributes of the env and of its wrappers, not deeper. A
    type of an env or of a wrapper may be registered too; its hook then answers for all that it wraps, as do the methods
    ``get_state()`` and ``set_state(state)`` of an env that has them.

    Call it before the env is made: its worker then knows the hook too. It may also be called in the worker, in
    ``env_fn``. Registering a type again replaces its hook.

    Args:
        kind: The type.
        get_state: Called with the object; returns a value that can be pickled. It must not change the object.
        set_state: Called with an object of a newly built env and such a state.

    Raises:
        UsageError: ``kind`` is not a type, or the functions cannot be called.
    """
    if not isinstance(kind, type):
        raise UsageError(f"register_state_hook({kind!r:.100}, …): give a type.")
    for name, function in (("get_state", get_state), ("set_state", set_state)):
        if not callable(function):
            raise UsageError(f"register_state_hook({kind.__name__}, …): {name} is {function!r:.100}; give a function.")
    _registered[kind] = StateHook(get_state, set_state)
    hook_of.cache_clear()


def registered_hooks() -> bytes:
    """Return the hooks registered in this process, pickled; ``b""`` if there are none.

    Raises:
        UsageError: It cannot be pickled.
    """
    if not _registered:
        return b""
    try:
        data: bytes = cloudpickle.dumps(list(_registered.items()))
    except Exception as error:  # pickling runs foreign code
        raise UsageError(
            f"The functions given to register_state_hook() cannot be pickled: {type(error).__name__}: {error}. "
            "Call it in env_fn."
        ) from error
    return data


def register_all(hooks: bytes) -> None:
    """Register the hooks of another process; those that were registered here take precedence."""
    if hooks:
        _registered.update({kind: hook for kind, hook in cloudpickle.loads(hooks) if kind not in _registered})
        hook_of.cache_clear()


@cache
def hook_of(kind: type) -> StateHook | None:
    """Return the hook for objects of this type: a registered one, or one of this module; ``None``: there is none."""
    for base in kind.__mro__:
        if base in _registered:
            return _registered[base]
    for base in kind.__mro__:
        built_in = _BUILT_IN.get((str(getattr(base, "__module__", "")).partition(".")[0], base.__name__))
        if built_in is not None:
            return built_in
    return None


@cache
def own_hook(kind: type) -> StateHook | None:
    """Return the methods ``get_state()`` and ``set_state(state)`` of a type of env or wrapper, if it has them.

    They are looked up in the type: a wrapper forwards unknown names to the env it wraps.
    """
    get_state, set_state = getattr(kind, "get_state", None), getattr(kind, "set_state", None)
    if not callable(get_state) or not callable(set_state):
        return None
    try:
        inspect.signature(get_state).bind(None)
        inspect.signature(set_state).bind(None, None)
    except (TypeError, ValueError):  # something else by that name, such as MuJoCo's set_state(qpos, qvel)
        return None
    return StateHook(get_state, set_state)


def _clone_ale(ale: Any) -> Any:
    """Return the emulator, its generator, lives and frame numbers."""
    return ale.cloneState(include_rng=True)


def _restore_ale(ale: Any, state: Any) -> None:
    ale.restoreState(state)


_BUILT_IN = {("ale_py", "ALEInterface"): StateHook(_clone_ale, _restore_ale)}
