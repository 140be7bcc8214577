"""Random generators: those of the process, seeded; and those of envs, recorded and put back.

A replay that does not begin when the envs were built begins with the generators as they were at its first request:
``random`` and ``numpy.random`` of the process, and every generator that an env, a wrapper or a space of theirs holds
in an attribute.
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

Env = gymnasium.Env[Any, Any]

_KINDS = (np.random.Generator, np.random.RandomState, random.Random)
# Where gymnasium keeps the generator of an env or of a space, and the seed of an env's.
_USUAL = "_np_random"
_USUAL_SEED = "_np_random_seed"
_SPACES = ("action_space", "observation_space")


def seed_process(seeds: Sequence[int]) -> None:
    """Seed ``random`` and ``numpy.random``: children of one forkserver would share the latter's state."""
    random.seed(seeds[0])
    np.random.seed(seeds[1])  # noqa: NPY002 - the legacy global state is what must not be shared


def drawn_seed(draw: int, attempt: int) -> int:
    """Return the seed for a first reset without one.

    Args:
        draw: Recorded for the slot when its env was launched for the first time.
        attempt: How many resets of this env have raised.
    """
    return int(np.random.SeedSequence((draw, attempt)).generate_state(1)[0])


def has_generator(env: Env) -> bool:
    """Tell whether the env has made its own generator, in its constructor for instance."""
    return getattr(env.unwrapped, _USUAL, None) is not None


def capture(envs: Sequence[Env]) -> bytes:
    """Return the states of the process's generators and of all that are found in envs."""
    process = random.getstate(), np.random.get_state()  # noqa: NPY002
    found = []
    for env in envs:
        states = {place: _get_state(holder, name) for place, holder, name in _generators(env)}
        # Without the seed beside its generator gymnasium would draw both anew as soon as it is asked for the seed.
        found.append(([getattr(layer, _USUAL_SEED, None) for layer in layers_of(env)], states))
    return pickle.dumps((process, found), protocol=5)


def restore(envs: Sequence[Env], data: bytes) -> None:
    """Put back what :func:`capture` took, into newly built envs of the same kind."""
    (state_of_random, state_of_numpy), found = pickle.loads(data)
    for env, (seeds, states) in zip(envs, found, strict=True):
        layers = list(layers_of(env))
        for layer, seed in zip(layers, seeds, strict=True):
            if seed is not None:
                setattr(layer, _USUAL_SEED, seed)
        for (depth, path), state in states.items():
            holder: Any = layers[depth]
            for name in path[:-1]:
                holder = getattr(holder, name)
            _set_state(holder, path[-1], state)
    random.setstate(state_of_random)
    np.random.set_state(state_of_numpy)  # noqa: NPY002


def layers_of(env: Any) -> Iterator[Any]:
    """Yield the outermost wrapper, then what it wraps, down to the env itself."""
    while True:
        yield env
        if not isinstance(env, gymnasium.Wrapper):
            return
        env = env.env


def _generators(env: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield place, holder and attribute name of each generator; a place is a layer's depth and names from there."""
    for depth, layer in enumerate(layers_of(env)):
        for name in _names(layer):
            yield (depth, (name,)), layer, name
        for name in _SPACES:
            space = None
            with contextlib.suppress(Exception):  # it may be a property of theirs
                space = getattr(layer, name)
            if isinstance(getattr(space, _USUAL, None), np.random.Generator):
                yield (depth, (name, _USUAL)), space, _USUAL


def _names(layer: Any) -> list[str]:
    """Return the names of those attributes of an env or a wrapper that are generators.

    ``__dict__`` would tell, but before 3.13 CPython is slower with the attributes of an object whose ``__dict__``
    has once been asked for: it would cost each later step of CartPole 6 %. So the garbage collector is asked first.
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
