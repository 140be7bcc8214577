"""How the state of objects that cannot be pickled, or better are not, is read as plain data and put back.

ALE's emulator and MuJoCo's model and data are known; :func:`register_state_hook` adds others.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import cloudpickle
import numpy as np

from multienv.errors import UsageError


@dataclass(frozen=True, slots=True)
class StateHook:
    """Two functions: one returns the state of an object, the other puts it into another object."""

    get_state: Callable[[Any], Any]
    set_state: Callable[[Any, Any], object]


_registered: dict[type, StateHook] = {}


def register_state_hook(kind: type, get_state: Callable[[Any], Any], set_state: Callable[[Any, Any], object]) -> None:
    """Say how the state of a type's objects is taken and put back: for what holds its state in C, say.

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


# --- ALE: the emulator, its generator, lives and frame numbers ---------------------------------------


def _clone_ale(ale: Any) -> Any:
    return ale.cloneState(include_rng=True)


def _restore_ale(ale: Any, state: Any) -> None:
    ale.restoreState(state)


# --- MuJoCo -------------------------------------------------------------------------------------------


def _mujoco() -> Any:
    return sys.modules["mujoco"]  # imported: there is an object of it


def _saved_model(model: Any) -> bytes:
    buffer = np.empty(_mujoco().mj_sizeModel(model), np.uint8)
    _mujoco().mj_saveModel(model, None, buffer)
    return buffer.tobytes()


@lru_cache(maxsize=1)  # the envs of a process have equal models as a rule
def _compressed(model: bytes) -> bytes:
    return zlib.compress(model, 1)


def _clone_model(model: Any) -> bytes:
    return _compressed(_saved_model(model))


def _restore_model(model: Any, state: bytes) -> None:
    """Put a saved model into that of a new env, which is equal unless the env changes its model as it goes."""
    wanted = zlib.decompress(state)
    if _saved_model(model) == wanted:
        return
    other = _mujoco().MjModel.from_binary_path("state.mjb", {"state.mjb": wanted})
    for mine, theirs in ((model, other), (model.opt, other.opt), (model.stat, other.stat), (model.vis, other.vis)):
        _copy_numbers(mine, theirs)
    if _saved_model(model) != wanted:
        raise ValueError("the env has changed its MjModel in ways that cannot be put back")


def _copy_numbers(mine: Any, theirs: Any) -> None:
    for name in dir(mine):
        value = None if name.startswith("_") else getattr(theirs, name)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            getattr(mine, name)[...] = value
        elif isinstance(value, int | float) and value != getattr(mine, name):
            with contextlib.suppress(AttributeError):  # a size, and the same if the model is
                setattr(mine, name, value)
        elif type(value).__module__.startswith("mujoco") and name in _PARTS_OF_VISUAL:
            _copy_numbers(getattr(mine, name), value)


_PARTS_OF_VISUAL = ("global_", "quality", "headlight", "map", "scale", "rgba")


def _clone_data(data: Any) -> tuple[bytes, bool, bytes]:
    """Return all of an MjData: what a step has computed is read by the next one, before it is computed again.

    Less its model, which is three quarters of the pickle: the new env has an equal one, or is given it.

    Returns:
        The pickle before the model, whether the model was left out, and the pickle behind it.
    """
    pickled, model = pickle.dumps(data, protocol=5), _saved_model(data.model)
    begin = pickled.find(model[:_ENOUGH])
    if not pickled.startswith(model, begin):
        return pickled, False, b""
    return pickled[:begin], True, pickled[begin + len(model) :]


def _restore_data(data: Any, state: tuple[bytes, bool, bytes]) -> None:
    before, without_model, behind = state
    copy = pickle.loads(before + (_saved_model(data.model) if without_model else b"") + behind)
    _mujoco().mj_copyData(data, copy.model, copy)


# The first bytes of a model, by which it is found in a pickle.
_ENOUGH = 1024

_BUILT_IN = {
    ("ale_py", "ALEInterface"): StateHook(_clone_ale, _restore_ale),
    ("mujoco", "MjModel"): StateHook(_clone_model, _restore_model),
    ("mujoco", "MjData"): StateHook(_clone_data, _restore_data),
}
