"""The state of an env as bytes: taken between two requests, put into a newly built copy of the same env.

A stream of pickles, one for each part of the env: the attributes of each layer (wrappers and env), and the state of
each object that has a hook (see ``state_hooks``). What has a hook, and the layers themselves, are in the pickles by
their place in the env alone, so that in the copy they are its own. An env or wrapper with ``get_state`` and
``set_state`` is taken at its word for itself and all it wraps; the random generators are put back in any case.

Nothing must be left out in silence. So a class written in Python does not choose what is kept of its objects
(``__getstate__``, ``__reduce__``): all their attributes are. Arrays that share memory would do so no more, and one
that shows somebody else's memory would stand still: an env with such is refused. What C code leaves out of a pickle,
and what lies in no attribute at all, only the replay that follows can tell.
"""

from __future__ import annotations

import contextlib
import copyreg
import importlib
import io
import pickle
import sys
import types
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from multienv.worker import generators
from multienv.worker.attributes import FREE_TO_ASK, attributes_of
from multienv.worker.state_hooks import StateHook, hook_of, own_hook

Place = tuple[int, tuple[tuple[str, Any], ...]]  # the layer, and attributes ("a") and items ("i") from there

Beginning = tuple[int | None, dict[str, Any] | None]  # seed and options of a reset

_PROTOCOL = 5
# Each is a frame of ALE's at the least; that none of so many is taken, with sticky actions, does not happen.
_WARMING_STEPS = 8
# Objects to look through in search of one that has a hook.
_SEARCHED = 20_000
# What these say of their objects is believed.
_BELIEVED = sys.stdlib_module_names | {"numpy", "scipy", "pandas", "torch", "jax", "jaxlib", "numba"}
# What owns the memory of ALE's screens: each is a copy of its own.
_NANOBIND = "nb_ndarray"
# Written anew by gymnasium, and never a state.
_DERIVED = ("spec", "_cached_spec")
_ATOMS = (type(None), bool, int, float, complex, str, bytes, bytearray, np.ndarray, np.generic, type, types.ModuleType)
_KEYS = (type(None), bool, int, float, str, bytes, tuple)


class NotCapturable(Exception):  # noqa: N818 - travels as a Failure
    """The env's state cannot be had; the message says why."""


def capture(env: gymnasium.Env[Any, Any]) -> bytes:
    """The state of the env and of the process's random generators.

    Raises:
        NotCapturable: Something in it can neither be pickled nor has a hook.
    """
    layers = list(_layers(env))
    file = io.BytesIO()
    writer = _Writer(file, layers)
    try:
        for layer in layers:
            hook = _hook(layer)
            writer.write(layer, hook)
            if hook is not None:
                break  # it answers for all below
        writer.write_found()
        drawn = generators.capture(env)
    except NotCapturable:
        raise
    except Exception as error:  # pickling runs foreign code
        raise NotCapturable(f"{type(error).__name__}: {error}") from error
    return zlib.compress(pickle.dumps((drawn, file.getvalue()), protocol=_PROTOCOL), 1)


def restore(env: gymnasium.Env[Any, Any], state: bytes) -> None:
    """Put back what :func:`capture` took, into a fresh copy of the same env. Raises what foreign code raises."""
    drawn, parts = pickle.loads(zlib.decompress(state))
    layers = list(_layers(env))
    reader = _Reader(io.BytesIO(parts), layers)
    for part, contents in reader.read_all():
        if isinstance(contents, _Attributes):
            _set_attributes(part, contents, layers)
        else:
            hook = _hook(part)
            assert hook is not None
            hook.set_state(part, contents)
    generators.restore(env, drawn)


def warm_up(env: gymnasium.Env[Any, Any], beginning: Beginning | None, actions: Sequence[Any]) -> None:
    """Bring a new env near to where it is to be; ``actions`` holds the last one, if there was one.

    What a reset makes must be there to be given its state. And what no state tells may yet be as it was after some
    steps like the last one: the action that ALE repeats when it does not take the present one.
    """
    if beginning is None:
        return
    with contextlib.suppress(Exception):  # it need not come to its end
        env.reset(seed=beginning[0], options=beginning[1])
        for action in (*actions,) * _WARMING_STEPS:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                return


class _Attributes(dict[str, Any]):
    """Those of one layer."""


def _hook(layer: Any) -> StateHook | None:
    kind: type = type(layer)
    return hook_of(kind) or own_hook(kind)


def _layers(env: Any) -> Iterator[Any]:
    while True:
        yield env
        if not isinstance(env, gymnasium.Wrapper):
            return
        env = env.env


def _attributes(layer: Any, layers: list[Any]) -> _Attributes:
    held = attributes_of(layer, {type(one) for one in layers})
    return _Attributes(
        (name, value) for name, value in held.items() if not (name in _DERIVED and isinstance(value, EnvSpec | None))
    )


def _set_attributes(layer: Any, wanted: _Attributes, layers: list[Any]) -> None:
    for name in _attributes(layer, layers):
        if name not in wanted:
            object.__delattr__(layer, name)
    for name, value in wanted.items():
        object.__setattr__(layer, name, value)


class _Writer(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes part after part; those with a hook that are met on the way are left for later."""

    def __init__(self, file: io.BytesIO, layers: list[Any]) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._layers = layers
        self._depths = {id(layer): depth for depth, layer in enumerate(layers)}
        self._found: deque[tuple[Any, StateHook]] = deque()
        self._names: dict[int, tuple[Place, str]] = {}
        self._places: dict[int, Place] = {}
        self._searched = False
        self._arrays: dict[int, list[Any]] = {}

    def write(self, part: Any, hook: StateHook | None) -> None:
        contents = _attributes(part, self._layers) if hook is None else hook.get_state(part)
        self.dump((part, contents))

    def write_found(self) -> None:
        while self._found:
            self.write(*self._found.popleft())
        self.dump(None)

    def persistent_id(self, obj: Any) -> Any:
        depth = self._depths.get(id(obj))
        if depth is not None:
            return (depth, ()), _name(type(obj))
        kind: type = type(obj)
        hook = hook_of(kind)
        if hook is None:
            return None
        known = self._names.get(id(obj))
        if known is None:
            known = self._names[id(obj)] = self._place_of(obj), _name(kind)
            self._found.append((obj, hook))
        return known

    def reducer_override(self, obj: Any) -> Any:
        kind: type = type(obj)
        if kind is np.ndarray:
            self._check_memory(obj)
        elif kind is types.ModuleType:
            return importlib.import_module, (obj.__name__,)
        elif _chooses(kind):
            return _whole(obj)
        elif not FREE_TO_ASK and not isinstance(obj, type) and _is_plain(kind):
            return copyreg.__newobj__, (kind,), attributes_of(obj)  # type: ignore[attr-defined]
        return super().reducer_override(obj)

    def _check_memory(self, array: Any) -> None:
        owner = array
        while True:
            beneath = owner.base if isinstance(owner, np.ndarray) else getattr(owner, "obj", None)
            if beneath is None:
                break
            owner = beneath
        if not isinstance(owner, np.ndarray | bytes | bytearray) and type(owner).__name__ != _NANOBIND:
            raise NotCapturable(f"an array shows memory of a {type(owner).__name__}, which it would do no more")
        others = self._arrays.setdefault(id(owner), [owner])
        if any(np.may_share_memory(array, other) for other in others[1:]):
            raise NotCapturable("two arrays share memory, which they would do no more")
        others.append(array)

    def _place_of(self, obj: Any) -> Place:
        if not self._searched:
            self._searched = True
            self._places = _places(self._layers)
        place = self._places.get(id(obj))
        if place is None:
            raise NotCapturable(f"a {_name(type(obj))} is not to be found by attributes and items of the env")
        return place


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, layers: list[Any]) -> None:
        super().__init__(file)
        self._layers = layers

    def read_all(self) -> list[tuple[Any, Any]]:
        parts = []
        while (part := self.load()) is not None:
            parts.append(part)
        return parts

    def persistent_load(self, known: Any) -> Any:
        (depth, path), name = known
        value = self._layers[depth]
        for how, key in path:
            value = getattr(value, key) if how == "a" else value[key]
        if _name(type(value)) != name:
            raise TypeError(f"the new env holds a {_name(type(value))} where there was a {name}")
        return value


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _places(layers: list[Any]) -> dict[int, Place]:
    """Where the objects that have a hook lie; the nearest place of each."""
    found: dict[int, Place] = {}
    known = {id(layer) for layer in layers}
    waiting: deque[tuple[Any, Place]] = deque((layer, (depth, ())) for depth, layer in enumerate(layers))
    while waiting:
        holder, (depth, path) = waiting.popleft()
        inside: dict[Any, Any]
        if not path:
            how, inside = "a", _attributes(holder, layers)
        elif isinstance(holder, dict):
            how, inside = "i", holder
        elif isinstance(holder, list | tuple | deque):
            how, inside = "i", dict(enumerate(holder))
        else:
            how, inside = "a", getattr(holder, "__dict__", {})
        for key, value in inside.items():
            if id(value) in known or isinstance(value, _ATOMS) or not isinstance(key, _KEYS):
                continue
            known.add(id(value))
            place = depth, (*path, (how, key))
            kind: type = type(value)
            if hook_of(kind) is not None:
                found[id(value)] = place
            elif len(known) < _SEARCHED:
                waiting.append((value, place))
    return found


def _chooses(kind: type) -> bool:
    """Whether somebody's Python code says what of such an object goes into a pickle."""
    for name in ("__reduce_ex__", "__reduce__", "__getstate__"):
        method = getattr(kind, name, None)
        if isinstance(method, types.FunctionType) and method.__module__.partition(".")[0] not in _BELIEVED:
            return True
    return False


@cache
def _is_plain(kind: type) -> bool:
    """Whether such an object pickles as its class and its ``__dict__``, which it is better not asked for."""
    inherited = ("__reduce_ex__", "__reduce__", "__getstate__", "__new__")
    return (
        "__dict__" in dir(kind)
        and all(getattr(kind, name, None) is getattr(object, name, None) for name in inherited)
        and not any(hasattr(kind, name) for name in ("__getnewargs__", "__getnewargs_ex__"))
        and not copyreg._slotnames(kind)  # type: ignore[attr-defined]
        and kind not in copyreg.dispatch_table
    )


def _whole(obj: Any) -> tuple[Any, ...]:
    """What makes the same object again, all its attributes included."""
    kind = type(obj)
    if getattr(kind, "__new__", None) is not object.__new__ or kind in copyreg.dispatch_table:
        raise NotCapturable(f"what a {_name(kind)} puts into a pickle is its own choice: register_state_hook()")
    return _blank, (kind,), attributes_of(obj), None, None, _fill


def _blank(kind: type) -> Any:
    return object.__new__(kind)


def _fill(obj: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        object.__setattr__(obj, name, value)
