"""Seed the random generators of the process; save and restore them, and those of envs.

A replay that does not begin at the construction of the envs needs the generators as they were before its first request:
``random`` and ``numpy.random`` of the process, and every generator that an env, a wrapper or a space of theirs holds
in an attribute, or shows as ``np_random``. A count of episodes is saved and restored, too.
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


class EpisodeCount:
    """Counts the episodes of an env that holds it in an attribute of itself, or of a wrapper.

    Recoveries restore it like a random generator.

    Attributes:
        begun: How many have begun.
    """

    def __init__(self) -> None:
        self.begun = 0

    def getstate(self) -> int:
        """Return how many have begun."""
        return self.begun

    def setstate(self, begun: int) -> None:
        """Go on from there."""
        self.begun = begun


_KINDS = (np.random.Generator, np.random.RandomState, random.Random, EpisodeCount)
# Where gymnasium keeps the generator of an env or of a space, and the seed of an env's.
_USUAL = "_np_random"
_USUAL_SEED = "_np_random_seed"
_SHOWN = "np_random"
_SPACES = ("action_space", "observation_space")


def seed_process(seeds: Sequence[int]) -> None:
    """Seed ``random`` and ``numpy.random``: children of one forkserver would share the latter's state."""
    random.seed(seeds[0])
    np.random.seed(seeds[1])  # noqa: NPY002 - the legacy global state is what must not be shared


def state_of_process() -> Any:
    """Return the state of ``random`` and ``numpy.random``, for comparisons."""
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False), protocol=5)  # noqa: NPY002


def ensure_generator(env: Env, draw: int) -> None:
    """Give an env that has no generator of gymnasium's one that is seeded with a recorded number.

    A first reset without a seed then draws from it, and not from one that gymnasium would seed by chance. The reset
    itself is called without a seed: some envs do something else with one.
    """
    inner = env.unwrapped
    if getattr(inner, _USUAL, None) is None:
        inner._np_random, inner._np_random_seed = np_random(draw)


def states_of(env: Env) -> bytes:
    """Return the states of the process's generators and of all that are found in an env."""
    packed: dict[int, Any] = {}  # an env may hold one under several names
    generators = {}
    for place, holder, name in _generators(env):
        generator = getattr(holder, name)
        generators[place] = packed.setdefault(id(generator), _packed(generator))
    of_process = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
    # Without the seed beside the generator gymnasium would draw both anew when `np_random_seed` is read.
    return pickle.dumps((of_process, getattr(env.unwrapped, _USUAL_SEED, None), generators), protocol=5)


def _packed(generator: Any) -> Any:
    """Return a generator in the form in which it is sent: of most only the state, which takes a tenth of the time."""
    if _is_emulator(generator):
        return generator.cloneState(include_rng=True)
    if type(generator) is np.random.Generator and type(generator.bit_generator) is np.random.PCG64:
        return generator.bit_generator.state
    return generator


def _unpacked(packed: Any) -> Any:
    if not isinstance(packed, dict):
        return packed
    generator = np.random.Generator(np.random.PCG64())
    generator.bit_generator.state = packed
    return generator


def restore(env: Env, data: bytes, *, of_process: bool = True) -> None:
    """Put back what :func:`states_of` returned, into a newly built env of the same kind.

    Args:
        env: The env.
        data: What was returned.
        of_process: Put back ``random`` and ``numpy.random``, too.
    """
    process, seed, generators = pickle.loads(data)
    if seed is not None:
        setattr(env.unwrapped, _USUAL_SEED, seed)
    layers = list(layers_of(env))
    unpacked: dict[int, Any] = {}
    for (depth, path), packed in generators.items():
        with contextlib.suppress(IndexError, AttributeError):  # other wrappers than those that were recorded
            holder: Any = layers[depth]
            for name in path[:-1]:
                holder = getattr(holder, name)
            _restore_one(holder, path[-1], unpacked.setdefault(id(packed), _unpacked(packed)))
    if of_process:
        random.setstate(process[0])
        np.random.set_state(process[1])  # noqa: NPY002


def renew(env: Env) -> None:
    """Give an env other draws than when it was built: what it has drawn since is not known."""
    inner = env.unwrapped
    inner._np_random, inner._np_random_seed = np_random()


def layers_of(env: Any) -> Iterator[Any]:
    """Yield the outermost wrapper, then what it wraps, down to the env itself; then what an adapter holds in it."""
    yield env
    while isinstance(env, gymnasium.Wrapper):
        env = env.env
        yield env
    # An env of another library. The class is asked: some envs say that they have any attribute.
    if hasattr(type(env), "inner_layers"):
        yield from env.inner_layers()


def _generators(env: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield place, holder and attribute name of each generator; a place is a layer's depth and names from there."""
    for depth, layer in enumerate(layers_of(env)):
        for name in _names(layer):
            yield (depth, (name,)), layer, name
        # An env may keep its generator in an object of its own, and show it as gymnasium does: shimmy's of dm_control.
        if getattr(type(layer), _SHOWN, None) not in (gymnasium.Env.np_random, gymnasium.Wrapper.np_random):
            shown = None
            with contextlib.suppress(Exception):
                shown = getattr(layer, _SHOWN)
            if _is_generator(shown):
                yield (depth, (_SHOWN,)), layer, _SHOWN
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
    is_one = isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom)  # which has no state
    return is_one or _is_emulator(value)


def _is_emulator(value: Any) -> bool:
    """Tell whether this is the Atari emulator, which draws by itself: "sticky" actions."""
    kind: type = type(value)
    return kind.__name__ == "ALEInterface" and kind.__module__.partition(".")[0] == "ale_py"


def _restore_one(holder: Any, name: str, generator: Any) -> None:
    """Put the holder where ``generator`` stands; in place, because it may hold its own under several names."""
    own: Any = getattr(holder, name, None)
    if _is_emulator(own):
        own.restoreState(generator)
    elif type(own) is not type(generator):
        setattr(holder, name, generator)
    elif isinstance(own, random.Random | EpisodeCount):
        own.setstate(generator.getstate())
    elif isinstance(own, np.random.RandomState):
        own.set_state(generator.get_state())
    elif type(own.bit_generator) is type(generator.bit_generator):
        own.bit_generator.state = generator.bit_generator.state
    else:
        setattr(holder, name, generator)
