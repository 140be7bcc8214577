"""Envs registered in the trainer, taken along: ``gymnasium.make`` in a worker must find them too."""

from __future__ import annotations

from operator import is_

import cloudpickle
import gymnasium

# What every process finds registered by importing gymnasium.
_BUILT_IN = "gymnasium.envs."

# As gymnasium left it, unless somebody registered before multienv was imported.
_AT_IMPORT = dict(gymnasium.registry)

# Specs, and their two pickles. The specs themselves: what is registered once they are gone may lie where they lay.
_cache: tuple[list[gymnasium.envs.registration.EnvSpec], tuple[bytes, bytes]] = [], (b"", b"")


def registrations() -> tuple[bytes, bytes]:
    """The specs registered here that a fresh process would not know, and those it would know otherwise; pickled.

    The first may be many (a package's hundreds) and are looked at only if an id is not found there.
    """
    global _cache
    unknown, overrides = [], []
    for name, spec in gymnasium.registry.items():
        if name in _AT_IMPORT and _AT_IMPORT[name] is not spec:
            overrides.append(spec)
        elif name not in _AT_IMPORT or not _is_built_in(spec):
            unknown.append(spec)
    specs = [*unknown, *overrides]
    if not _cache[1][0] or len(specs) != len(_cache[0]) or not all(map(is_, specs, _cache[0])):
        _cache = specs, (_pickled(unknown), _pickled(overrides))
    return _cache[1]


def _is_built_in(spec: gymnasium.envs.registration.EnvSpec) -> bool:
    return isinstance(spec.entry_point, str) and spec.entry_point.startswith(_BUILT_IN)


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
