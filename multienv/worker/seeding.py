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
from gymnasium.utils.seeding import np_random

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


def give_generator(env: Env, draw: int) -> None:
    """Give an env that has no generator of gymnasium's one that is seeded with a recorded number.

    A first reset without a seed then draws from it, and not from one that gymnasium would seed by chance. The reset
    itself is called without a seed: some envs do something else with one.
    """
    inner = env.unwrapped
    if getattr(inner, _USUAL, None) is None:
        inner._np_random, inner._np_random_seed = np_random(draw)


def capture(envs: Sequence[Env]) -> bytes:
    """Return the states of the process's generators and of all that are found in envs."""
    process = random.getstate(), np.random.get_state()  # noqa: NPY002
    found = []
    for env in envs:
        generators = {place: getattr(holder, name) for place, holder, name in _generators(env)}
        # Without the seed beside the generator gymnasium would draw both anew when `np_random_seed` is read.
        found.append((getattr(env.unwrapped, _USUAL_SEED, None), generators))
    return pickle.dumps((process, found), protocol=5)


def restore(envs: Sequence[Env], data: bytes) -> None:
    """Put back what :func:`capture` took, into newly built envs of the same kind."""
    (state_of_random, state_of_numpy), found = pickle.loads(data)
    for env, (seed, generators) in zip(envs, found, strict=True):
        if seed is not None:
            setattr(env.unwrapped, _USUAL_SEED, seed)
        layers = list(layers_of(env))
        for (depth, path), generator in generators.items():
            holder: Any = layers[depth]
            for name in path[:-1]:
                holder = getattr(holder, name)
            _put_back(holder, path[-1], generator)
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
            with contextlib.suppress(Exception):  # the space may be a property of the env's, which raises
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
    found = [value for value in held if _is_generator(value)]
    if not found:
        return []
    if all(value is getattr(layer, _USUAL, None) for value in found):
        return [_USUAL]
    return [name for name, value in getattr(layer, "__dict__", {}).items() if _is_generator(value)]


def _is_generator(value: Any) -> bool:
    return isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom)  # which has no state


def _put_back(holder: Any, name: str, generator: Any) -> None:
    """Have the holder draw what ``generator`` would; in place, because it may hold its own under several names."""
    own: Any = getattr(holder, name, None)
    if type(own) is not type(generator):
        setattr(holder, name, generator)
    elif isinstance(own, random.Random):
        own.setstate(generator.getstate())
    elif isinstance(own, np.random.RandomState):
        own.set_state(generator.get_state())
    elif type(own.bit_generator) is type(generator.bit_generator):
        own.bit_generator.state = generator.bit_generator.state
    else:
        setattr(holder, name, generator)
