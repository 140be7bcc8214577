"""The state of an env as bytes: taken between two requests, put into a newly built copy of the same env.

The attributes of all layers (wrappers and env) are pickled together. In that pickle two kinds of objects appear by
their place in the env alone, so that in the copy they are its own: the layers, and objects with a hook (see
``state_hooks``), whose state is had by that hook. An env or wrapper with ``get_state()`` and ``set_state(state)`` is
taken at its word for itself and all that it wraps.

Whether a state was complete is not judged here: the replay that follows is verified.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import gymnasium

from multienv.worker.seeding import layers_of
from multienv.worker.state_hooks import StateHook, hook_of, own_hook

Env = gymnasium.Env[Any, Any]
Beginning = tuple[int | None, dict[str, Any] | None]  # seed and options of a reset
Place = tuple[int, str]  # depth of a layer; name of its attribute, or "" for the layer itself

_PROTOCOL = 5
# Made anew by gymnasium, and never a state.
_DERIVED = frozenset(("spec", "_cached_spec"))


class NotCapturable(Exception):  # noqa: N818 - travels as a Failure
    """The env's state cannot be had; the message says why."""


def capture(env: Env) -> bytes:
    """Return the state of an env.

    Raises:
        NotCapturable: Something in it can neither be pickled nor has a hook.
    """
    try:
        layers, last_hook = _layers(env)
        hooked = _hooked(layers if last_hook is None else layers[:-1])
        places = {id(layer): (depth, "") for depth, layer in enumerate(layers_of(env))}
        places |= {id(held): place for place, (held, _) in hooked.items()}
        attributes = [_attributes(layer) for layer in (layers if last_hook is None else layers[:-1])]
        of_last = None if last_hook is None else last_hook.get_state(layers[-1])
        of_hooked = {place: hook.get_state(held) for place, (held, hook) in hooked.items()}
        file = io.BytesIO()
        _Pickler(file, places).dump((attributes, of_last, of_hooked))
    except NotCapturable:
        raise
    except Exception as error:  # pickling runs foreign code
        raise NotCapturable(f"{type(error).__name__}: {error}") from error
    return zlib.compress(file.getvalue(), 1)


def restore(env: Env, state: bytes) -> None:
    """Put back what :func:`capture` returned, into a newly built env of the same kind."""
    layers, last_hook = _layers(env)
    unpickler = _Unpickler(io.BytesIO(zlib.decompress(state)), list(layers_of(env)))
    attributes, of_last, of_hooked = unpickler.load()
    objects = [(unpickler.persistent_load(place), of_one) for place, of_one in of_hooked.items()]
    for layer, wanted in zip(layers, attributes, strict=False):
        held = vars(layer)
        for name in [name for name in held if name not in _DERIVED]:
            del held[name]
        held.update(wanted)
    for held_by_env, of_one in objects:
        hook = _hook(held_by_env)
        if hook is None:
            raise TypeError(f"the new env holds a {_name(held_by_env)}, which has no state hook")
        hook.set_state(held_by_env, of_one)
    if last_hook is not None:
        last_hook.set_state(layers[-1], of_last)


def warm_up(env: Env, beginning: Beginning | None) -> None:
    """Reset a new env as the old one was last reset (``None``: never): objects that a reset makes must be there."""
    if beginning is not None:
        with contextlib.suppress(Exception):  # what matters is the state that follows
            env.reset(seed=beginning[0], options=beginning[1])


def _layers(env: Env) -> tuple[list[Any], StateHook | None]:
    """Return the layers down to the first that has a hook, and that hook."""
    layers = []
    for layer in layers_of(env):
        layers.append(layer)
        kind: type = type(layer)
        hook = hook_of(kind) or own_hook(kind)
        if hook is not None:
            return layers, hook
    return layers, None


def _hooked(layers: Sequence[Any]) -> dict[Place, tuple[Any, StateHook]]:
    """Return the objects with a hook that layers hold in attributes, and their hooks, by place."""
    found: dict[int, tuple[Place, tuple[Any, StateHook]]] = {}
    for depth, layer in enumerate(layers):
        for name, value in vars(layer).items():
            hook = _hook(value)
            if hook is not None and not isinstance(value, gymnasium.Env):
                found.setdefault(id(value), ((depth, name), (value, hook)))
    return dict(found.values())


def _hook(value: Any) -> StateHook | None:
    kind: type = type(value)
    return hook_of(kind)


def _attributes(layer: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(layer).items() if name not in _DERIVED}


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles layers and objects with a hook as their places."""

    def __init__(self, file: io.BytesIO, places: Mapping[int, Place]) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._places = places

    def persistent_id(self, value: Any) -> Any:
        place = self._places.get(id(value))
        if place is None and _hook(value) is not None:
            kind = type(value).__qualname__
            raise NotCapturable(f"a {kind} is found elsewhere than in an attribute of the env or of a wrapper")
        return None if place is None else (*place, _name(value))


class _Unpickler(pickle.Unpickler):
    """Takes layers and objects with a hook from the new env."""

    def __init__(self, file: io.BytesIO, layers: Sequence[Any]) -> None:
        super().__init__(file)
        self._layers = layers
        self._held = [dict(vars(layer)) for layer in layers]

    def persistent_load(self, place: Any) -> Any:
        depth, attribute, *name = place
        value = self._held[depth][attribute] if attribute else self._layers[depth]
        if name and _name(value) != name[0]:
            raise TypeError(f"the new env holds a {_name(value)} where there was a {name[0]}")
        return value


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
