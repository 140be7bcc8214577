"""Envs registered in the trainer, taken along: ``gymnasium.make`` in a worker must find them too."""

from __future__ import annotations

import cloudpickle
import gymnasium

# What every process finds registered by importing gymnasium.
_BUILT_IN = "gymnasium.envs."

_cache: tuple[tuple[int, ...], bytes] = ((), b"")


def registrations() -> bytes:
    """The specs registered here that a fresh process would not know, pickled."""
    global _cache
    own = [
        spec
        for spec in gymnasium.registry.values()
        if not (isinstance(spec.entry_point, str) and spec.entry_point.startswith(_BUILT_IN))
    ]
    key = tuple(map(id, own))
    if _cache[0] != key or not _cache[1]:
        _cache = key, _pickled(own)
    return _cache[1]


def _pickled(specs: list[gymnasium.envs.registration.EnvSpec]) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(specs)
    except Exception:  # some entry point cannot travel: leave out what cannot
        data = cloudpickle.dumps([spec for spec in specs if _travels(spec)])
    return data


def _travels(spec: gymnasium.envs.registration.EnvSpec) -> bool:
    try:
        cloudpickle.dumps(spec)
    except Exception:  # pickling runs foreign code
        return False
    return True
