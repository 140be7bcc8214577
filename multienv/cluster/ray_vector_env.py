"""A batch of envs on the nodes of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from gymnasium.vector import AutoresetMode

from multienv.cluster.fleet import Fleet
from multienv.cluster.options import RayOptions
from multienv.cluster.ray_env import CLOSE_PATIENCE, Nodes
from multienv.config import Deadlines, RestartPolicy
from multienv.envs.building import EnvFn, Workers, listed_env_fns
from multienv.errors import UsageError
from multienv.events import Hook
from multienv.vector.batching import deal
from multienv.vector.hosted_vector_env import HostedVectorEnv
from multienv.vector.vector_env import refuse_episode_recycling


class RayVectorEnv(HostedVectorEnv):
    """A :class:`~multienv.SubprocessVectorEnv` whose processes are on the nodes of a Ray cluster.

    ::

        envs = RayVectorEnv([lambda: gymnasium.make("HalfCheetah-v5")] * 256, ray=RayOptions(address="auto"))

    It steps, recovers and tells as the other does; :class:`~multienv.RayEnv` says what happens when a node is lost. A
    round is one call to each host, of 1 to 2 ms: for envs whose steps are short compared with that there is
    ``rollout()``.

    Args:
        env_fns: Each builds one env, on a node.
        ray: Where and how.
        envs_per_worker: How many envs share a process. ``"auto"``: one process for each CPU that the hosts can have.
        shared_memory, copy, observation_mode, autoreset_mode: As for :class:`~multienv.SubprocessVectorEnv`.
        max_concurrency, merge_infos, restart, deadlines: The same.
        context, native_threads, hooks, reports: The same.

    Raises:
        UsageError: Ray is not installed, or an argument makes no sense.
        ClusterError: The cluster cannot be reached, or has no CPU free.
        EnvsFailedError: Some envs could not be built; all have been closed.
    """

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        ray: RayOptions = RayOptions(),  # noqa: B008 - frozen
        envs_per_worker: int | str = "auto",
        shared_memory: bool | None = None,
        copy: bool = True,
        context: Any = None,
        observation_mode: Any = "same",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        restart: RestartPolicy = RestartPolicy(),  # noqa: B008 - frozen
        deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
        native_threads: int | None = 1,
        merge_infos: bool = True,
        hooks: Sequence[Hook] = (),
        reports: str | os.PathLike[str] | None = None,
    ) -> None:
        self.env_fns = listed_env_fns(type(self).__name__, env_fns)
        if not isinstance(ray, RayOptions):
            raise UsageError(f"ray is {ray!r:.100}; give RayOptions: ray=RayOptions(address=...).")
        fleet = self._fleet = Fleet(ray, len(self.env_fns))
        try:
            sizes = deal(len(self.env_fns), envs_per_worker, fleet.cores, max_concurrency)
            refuse_episode_recycling(restart, sizes)
            fleet.seat_workers(len(sizes))
            workers = Workers(
                Nodes(fleet, context, native_threads),
                restart=restart,
                deadlines=deadlines,
                hooks=hooks,
                reports=reports,
            )
            self._owner = os.getpid()
            super().__init__(
                self.env_fns,
                sizes,
                workers.make,
                shared_memory=shared_memory,
                copy=copy,
                observation_mode=observation_mode,
                autoreset_mode=autoreset_mode,
                merge_infos=merge_infos,
            )
        except BaseException:
            fleet.close()
            raise

    def close_extras(self, timeout: float | None = None, terminate: bool = False, **kwargs: Any) -> None:
        """End the processes, then their hosts, and a local Ray that was started for them."""
        super().close_extras(timeout, terminate, **kwargs)
        self._fleet.wait(CLOSE_PATIENCE)

    def __del__(self) -> None:
        """Release the processes, which then end by themselves, if close() was not called."""
        if self.__dict__.get("_owner") == os.getpid():  # a forked child leaves the trainer's workers alone
            for worker in self.__dict__.get("_workers", ()):
                worker.abandon()
