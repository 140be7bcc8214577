"""Run gymnasium environments in processes that may die at any moment, with the same trajectories as if none had died.

Rooms: each imports only from rooms above it in this list (``tests/unit/test_architecture.py`` checks it)::

    errors, config, events   the error tree, options, the events for hooks
    interrupts               where Ctrl-C may raise KeyboardInterrupt
    threads, cores           calls in threads that Ctrl-C may interrupt; which worker runs on which core
    wire                     the shared memory of a worker: its layout, and how it is read
    worker                   inside a worker process: the request loop, the envs, snapshots
    processes                launching, monitoring and ending processes; the channel to a process
    reports                  the texts about a loss, and crash reports
    recovery                 state machine, hot path, journal, recoverer, verification: the supervisor of one worker
    fanout                   send to several workers, collect, recover in threads, continue after Ctrl-C
    envs, vector             the env classes
    cluster                  the same on the nodes of a Ray cluster
    managers                 envs by id
    adapters                 the env classes with the interfaces of other libraries
    testing, cli             faulty envs, a killer, checks; the command line
"""

import importlib
from typing import TYPE_CHECKING, Any

from multienv.config import Deadlines, RestartPolicy
from multienv.envs.autoreset import AutoResetWrapper
from multienv.envs.building import WorkerOptions
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
from multienv.recovery.checkpoint import Snapshot
from multienv.vector.hosted_vector_env import BatchOptions
from multienv.vector.make_vec import make_vec
from multienv.vector.vector_env import SerialVectorEnv, SubprocessVectorEnv

if TYPE_CHECKING:
    from multienv.cluster.options import RayOptions
    from multienv.cluster.ray_env import RayEnv, create_ray_envs
    from multienv.cluster.ray_vector_env import RayVectorEnv
    from multienv.envs.async_env import AsyncEnv

__version__ = "0.2.0"

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
    "make_vec",
    *_errors,
]


# Imported when first asked for: workers and most trainers need no asyncio and no cluster.
_LATER = {
    "AsyncEnv": "multienv.envs.async_env",
    "RayEnv": "multienv.cluster.ray_env",
    "RayOptions": "multienv.cluster.options",
    "RayVectorEnv": "multienv.cluster.ray_vector_env",
    "create_ray_envs": "multienv.cluster.ray_env",
}


def __getattr__(name: str) -> Any:
    """Import one of the names above."""
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
