"""Test how your env, or your training loop, survives the death of a process.

- :func:`check_env_recovers`: checks that your env is recovered bit for bit; ``multienv chaos`` runs it for long.
- :class:`FaultyEnv`: an env that dies, hangs, raises or leaks at the step you name.
- :class:`Killer`: kills or stops workers while your code runs.
"""

from multienv._engine.publishing import publish as _publish
from multienv.testing.faulty_env import FaultyEnv
from multienv.testing.killer import Killer, worker_pids
from multienv.testing.recovery_check import RecoveryCheck, check_env_recovers

__all__ = ["FaultyEnv", "Killer", "RecoveryCheck", "check_env_recovers", "worker_pids"]

_publish(__name__, FaultyEnv, Killer, RecoveryCheck, check_env_recovers, worker_pids)
