"""The trainer's registered envs, taken along: ``gymnasium.make`` in a worker is to find the same."""

from __future__ import annotations

import contextlib
import importlib

import cloudpickle
import gymnasium
from gymnasium.envs.registration import EnvSpec

# Where the entry points lie of what every process finds registered by importing gymnasium.
_OWN = "gymnasium.envs"


def registrations() -> tuple[bytes, bytes]:
    """The specs registered here, pickled: others', and gymnasium's own, in which something may have been changed.

    The first may be many (a package's hundreds) and are looked at only where an id is not found.
    """
    own: list[EnvSpec] = []
    others: list[EnvSpec] = []
    for spec in list(gymnasium.registry.values()):
        (own if _is_own(spec) else others).append(spec)
    return _pickled(others), _pickled(own)


def adopt(others: bytes, own: bytes) -> None:
    """Have gymnasium's own ids mean what they mean in the trainer."""
    if own == _FOUND:
        return
    specs = {spec.id: spec for spec in cloudpickle.loads(own)}
    gone = _IDS.difference(specs)
    if gone:  # something else is registered there
        specs |= {spec.id: spec for spec in cloudpickle.loads(others) if spec.id in gone}
    for env_id in gone.difference(specs):
        gymnasium.registry.pop(env_id, None)
    gymnasium.registry.update(specs)


def register(specs: bytes) -> None:
    """Register the envs that the trainer knows.

    First their packages are imported: they may register their envs themselves, and would do so again.
    """
    told = cloudpickle.loads(specs)
    unknown = [spec for spec in told if spec.id not in gymnasium.registry and isinstance(spec.entry_point, str)]
    for package in {spec.entry_point.partition(".")[0].partition(":")[0] for spec in unknown}:
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    gymnasium.registry.update({spec.id: spec for spec in told})


def _is_own(spec: EnvSpec) -> bool:
    where = spec.entry_point if isinstance(spec.entry_point, str) else getattr(spec.entry_point, "__module__", None)
    return isinstance(where, str) and (where == _OWN or where.startswith((f"{_OWN}.", f"{_OWN}:")))


def _pickled(specs: list[EnvSpec]) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(specs)
    except Exception:  # some entry point cannot travel: leave out what cannot
        data = cloudpickle.dumps([spec for spec in specs if _travels(spec)])
    return data


def _travels(spec: EnvSpec) -> bool:
    try:
        cloudpickle.dumps(spec)
    except Exception:  # pickling runs foreign code
        return False
    return True


# In a worker: as a process finds them that knows nothing of the trainer.
_FOUND = registrations()[1]
_IDS = frozenset(spec.id for spec in gymnasium.registry.values() if _is_own(spec))
