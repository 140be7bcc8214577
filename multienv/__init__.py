"""Gymnasium environments in processes that may die at any moment; trajectories as if none had.

Layers, lowest first; none imports one above it::

    errors, config, events       what is said
    threads, cores, turns        work for other threads; which core does what, and when
    wire                         frames, spaces in memory, shared memory
    reports                      crash reports, written and read
    worker                       the dispatcher, and a process around it
    processes                    launching, watching over, ending
    backends                     the seam: request and reply, from a process or from here
    recovery                     journal, replay, verification, budget: the supervisor
    remote_generator             an env's generator, from afar
    hosted_env … multi_env       the faces of one env and of lists of them
    rendering … vector_making    the faces of batches
    env_states … env_manager, async_env_manager …  the faces of envs by their ids
    testing                      faulty envs, leak checks, a conformance kit
    chaos, replay, cli           kills for a long time, beside an undisturbed run; a report run again; the command line
"""

from multienv.async_env_manager import AsyncSubprocessEnvManager
from multienv.autoreset import AutoResetWrapper
from multienv.config import Deadlines, RestartPolicy
from multienv.multi_env import MultiEnv
from multienv.recovery.restorer import Snapshot
from multienv.stacked_env_manager import StackedSubprocessEnvManager
from multienv.subprocess_env import SerialEnv, SubprocessEnv, create_subprocess_envs
from multienv.subprocess_vector_env import SerialVectorEnv, SubprocessVectorEnv
from multienv.sync_env_manager import SyncSubprocessEnvManager
from multienv.vector_making import make_vec
from multienv.worker.state_hooks import register_state_hook

__version__ = "0.1.0"

__all__ = [
    "AsyncSubprocessEnvManager",
    "AutoResetWrapper",
    "Deadlines",
    "MultiEnv",
    "RestartPolicy",
    "SerialEnv",
    "SerialVectorEnv",
    "Snapshot",
    "StackedSubprocessEnvManager",
    "SubprocessEnv",
    "SubprocessVectorEnv",
    "SyncSubprocessEnvManager",
    "create_subprocess_envs",
    "make_vec",
    "register_state_hook",
]
