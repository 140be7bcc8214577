"""Envs by id, asynchronously: the ones that are ready go on."""

from __future__ import annotations

import math

from multienv.env_manager_by_id import EnvManagerById
from multienv.env_manager_loop import Loop


class AsyncSubprocessEnvManager(EnvManagerById):
    """Steps envs by id, and waits for some of them only.

    ::

        with AsyncSubprocessEnvManager(env_fns, episode_num=10) as manager:
            while not manager.done:
                actions = {env_id: policy(obs) for env_id, obs in manager.ready_obs.items()}
                for env_id, timestep in manager.step(actions).items():
                    ...

    ``step()`` returns once ``wait_num`` timesteps are there and ``step_wait_timeout`` seconds are over, or all are;
    in the first case not before an env is ready to be stepped. Given fewer actions than ``wait_num`` it waits for as
    many timesteps, of whichever envs, so that the last fast env does not wait for the slow ones. What is not there yet
    comes with a later one.

    See :class:`~multienv.env_manager.EnvManager` for the arguments.
    """

    def _wait(self, loop: Loop, asked: int) -> None:
        if loop.stepping() or loop.news():
            wanted = min(self.config.wait_num, asked or math.inf)
            loop.until_stepped(wanted, self.config.step_wait_timeout)
        else:
            loop.until_some_are_ready()
