"""Run gymnasium environments in processes that may die at any moment, with the same trajectories as if none had died.

Rooms, the nearest to the user first. Each imports only from itself and from rooms below it
(``tests/unit/test_architecture.py`` checks it)::

    cli                      the command line
    testing                  faulty envs, a killer, checks
    adapters                 the env classes with the interfaces of other libraries
    managers                 envs by id
    vector                   the env classes of batches
    envs                     the other env classes
    _engine                  what they are made of: see there
    events, config, errors   the events for hooks, options, the error tree
"""

import importlib
from typing import TYPE_CHECKING, Any

import gymnasium as _gymnasium

if not hasattr(_gymnasium.vector, "AutoresetMode"):
    raise ImportError(f"multienv needs gymnasium 1.1 or later, and this is {_gymnasium.__version__}: upgrade it.")

from multienv._engine.building.building import WorkerOptions
from multienv._engine.native import native as _native
from multienv._engine.publishing import publish as _publish
from multienv._engine.recovery.checkpoint import Snapshot
from multienv._engine.version import __version__ as __version__
from multienv.config import Deadlines, RayOptions, RestartPolicy
from multienv.envs.autoreset import AutoResetWrapper
from multienv.envs.fragments import Fragment
from multienv.envs.multi_env import MultiEnv
from multienv.envs.reset_with import ResetWith
from multienv.envs.subprocess_env import SerialEnv, SubprocessEnv, create_subprocess_envs
from multienv.errors import *  # noqa: F403 - the error tree, see there
from multienv.errors import __all__ as _errors
from multienv.events import Loss, Recovery, Recycled, Statistics, flat_statistics
from multienv.managers.config import EnvManagerConfig, Timestep
from multienv.managers.env_manager import AsyncSubprocessEnvManager, SyncSubprocessEnvManager
from multienv.managers.stacked import StackedSubprocessEnvManager
from multienv.vector.hosted_vector_env import BatchOptions
from multienv.vector.make_vec import make_vec
from multienv.vector.vector_env import SerialVectorEnv, SubprocessVectorEnv

if TYPE_CHECKING:
    from multienv.envs.async_env import AsyncEnv
    from multienv.envs.ray_env import RayEnv, create_ray_envs
    from multienv.vector.ray_vector_env import RayVectorEnv
    from multienv.vector.replacing import ReplacedVectorEnvs, replace_vector_envs

__all__ = [
    "AsyncEnv",
    "AsyncSubprocessEnvManager",
    "AutoResetWrapper",
    "BatchOptions",
    "Deadlines",
    "EnvManagerConfig",
    "Fragment",
    "Loss",
    "MultiEnv",
    "RayEnv",
    "RayOptions",
    "RayVectorEnv",
    "Recovery",
    "Recycled",
    "ReplacedVectorEnvs",
    "ResetWith",
    "RestartPolicy",
    "SerialEnv",
    "SerialVectorEnv",
    "Snapshot",
    "StackedSubprocessEnvManager",
    "Statistics",
    "SubprocessEnv",
    "SubprocessVectorEnv",
    "SyncSubprocessEnvManager",
    "Timestep",
    "WorkerOptions",
    "create_ray_envs",
    "create_subprocess_envs",
    "flat_statistics",
    "has_native_extension",
    "make_vec",
    "replace_vector_envs",
    *_errors,
]


#: Whether the native extension was built and is used; the page *Speed and layout* says what it does.
has_native_extension: bool = _native is not None

# Imported when first asked for: workers and most trainers need no asyncio, no cluster, and replace nothing.
_LATER = {
    "AsyncEnv": "multienv.envs.async_env",
    "RayEnv": "multienv.envs.ray_env",
    "RayVectorEnv": "multienv.vector.ray_vector_env",
    "ReplacedVectorEnvs": "multienv.vector.replacing",
    "create_ray_envs": "multienv.envs.ray_env",
    "replace_vector_envs": "multienv.vector.replacing",
}

# The errors and the constant stay what they are.
_publish(__name__, *(globals()[one] for one in __all__ if one not in {*_errors, *_LATER, "has_native_extension"}))


def __getattr__(name: str) -> Any:
    """Import one of the names above."""
    if name in _LATER:
        thing = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
        _publish(__name__, thing)
        return thing
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
