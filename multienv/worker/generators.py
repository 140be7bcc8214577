"""The random generators an env draws from: seeded, recorded, put back.

A replay that begins in the middle of a life must begin with the generators as they were there: the
process's own (``random``, ``numpy.random``) and every generator an env, a wrapper or a space of theirs
holds in an attribute.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import random
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np

from multienv.worker import entropy

_KINDS = (np.random.Generator, np.random.RandomState, random.Random)
# Where gymnasium keeps an env's own, and what else holds one.
_USUAL = "_np_random"
_USUAL_SEED = "_np_random_seed"
_SPACES = ("action_space", "observation_space")


def seed_process(seeds: Sequence[int]) -> None:
    """Seed ``random`` and ``numpy.random``: children of one forkserver would share the latter's state."""
    random.seed(seeds[0])
    np.random.seed(seeds[1])  # noqa: NPY002 - the legacy global state is what must not be shared


def capture(env: gymnasium.Env[Any, Any]) -> bytes:
    """The state of every generator found, as bytes."""
    states: dict[Any, Any] = {place: _get_state(holder, name) for place, holder, name in _generators(env)}
    # Without the seed beside its generator gymnasium would draw both anew as soon as it is asked for the seed.
    states["seeds"] = [getattr(layer, _USUAL_SEED, None) for layer in _layers(env)]
    states["random"] = random.getstate()
    states["numpy"] = np.random.get_state()  # noqa: NPY002
    states["entropy"] = entropy.capture()
    return pickle.dumps(states, protocol=5)


def restore(env: gymnasium.Env[Any, Any], states: bytes) -> None:
    """Put back what :func:`capture` took, into a fresh copy of the same env."""
    recorded: dict[Any, Any] = pickle.loads(states)
    random.setstate(recorded["random"])
    np.random.set_state(recorded["numpy"])  # noqa: NPY002
    entropy.restore(recorded["entropy"])
    layers = list(_layers(env))
    for layer, seed in zip(layers, recorded["seeds"], strict=True):
        if seed is not None:
            setattr(layer, _USUAL_SEED, seed)
    for place, state in recorded.items():
        if isinstance(place, tuple):
            depth, path = place
            holder: Any = layers[depth]
            for name in path[:-1]:
                holder = getattr(holder, name)
            _set_state(holder, path[-1], state)


def _layers(env: Any) -> Iterator[Any]:
    while True:
        yield env
        if not isinstance(env, gymnasium.Wrapper):
            return
        env = env.env


def _generators(env: Any) -> Iterator[tuple[Any, Any, str]]:
    """Place, holder and attribute name of each generator."""
    for depth, layer in enumerate(_layers(env)):
        for name in _names(layer):
            yield (depth, (name,)), layer, name
        for name in _SPACES:
            space = None
            with contextlib.suppress(Exception):  # it may be a property of theirs
                space = getattr(layer, name)
            if isinstance(getattr(space, _USUAL, None), np.random.Generator):
                yield (depth, (name, _USUAL)), space, _USUAL


def _names(layer: Any) -> list[str]:
    """Which attributes of an env or a wrapper are generators.

    ``__dict__`` would tell, but before 3.13 CPython is slower with the attributes of an object whose ``__dict__``
    has once been asked for: it would cost each later step of CartPole 6 %. So ask the garbage collector first.
    """
    held = gc.get_referents(layer)
    held += [value for attributes in held if type(attributes) is dict for value in attributes.values()]
    found = [value for value in held if isinstance(value, _KINDS)]
    if not found:
        return []
    if all(value is getattr(layer, _USUAL, None) for value in found):
        return [_USUAL]
    return [name for name, value in getattr(layer, "__dict__", {}).items() if isinstance(value, _KINDS)]


def _get_state(holder: Any, name: str) -> Any:
    generator = getattr(holder, name)
    if isinstance(generator, np.random.Generator):
        return generator  # pickles with its state; put back as a copy of its own
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(holder: Any, name: str, state: Any) -> None:
    if isinstance(state, np.random.Generator):
        present: Any = getattr(holder, name, None)
        if type(present) is type(state) and type(present.bit_generator) is type(state.bit_generator):
            # In place: the env may hold the same generator under several names.
            present.bit_generator.state = state.bit_generator.state
        else:
            setattr(holder, name, state)
    elif isinstance(getattr(holder, name, None), random.Random):
        getattr(holder, name).setstate(state)
    else:
        getattr(holder, name).set_state(state)
