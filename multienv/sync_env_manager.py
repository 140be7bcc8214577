"""Envs by id, synchronously: exactly the ones that were asked."""

from __future__ import annotations

import math

from multienv.env_manager_by_id import EnvManagerById
from multienv.env_manager_config import EnvManagerConfig
from multienv.env_manager_loop import Loop


class SyncSubprocessEnvManager(EnvManagerById):
    """Steps envs by id: ``step()`` returns the timesteps of exactly the ids it was given, any subset of those ready.

    With ``reset_inplace=True`` all envs are ready again after each step. ``wait_num`` and ``step_wait_timeout`` are the
    asynchronous manager's, and mean nothing here.

    See :class:`~multienv.env_manager.EnvManager` for the arguments.
    """

    _defaults = EnvManagerConfig(wait_num=math.inf, step_wait_timeout=None)

    def _wait(self, loop: Loop, asked: int) -> None:
        if loop.stepping() or loop.news():
            loop.until_stepped(math.inf, None)
        else:
            loop.until_some_are_ready()
