"""A batch of envs on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from typing_extensions import Unpack

from multienv._engine.building.building import EnvFn, Workers, listed_env_fns
from multienv._engine.cluster.fleet import Fleet
from multienv.config import RayOptions, takes_options_of
from multienv.envs.ray_env import CLOSE_PATIENCE, Nodes
from multienv.vector.batching import deal
from multienv.vector.hosted_vector_env import HostedVectorEnv, VectorOptions


class RayVectorEnv(HostedVectorEnv):
    """A :class:`~multienv.SubprocessVectorEnv` whose processes run on the nodes of a Ray cluster.

    ::

        envs = RayVectorEnv([lambda: gymnasium.make("HalfCheetah-v5")] * 256, ray=RayOptions(address="auto"))

    Steps, recoveries and results are the same as there; :class:`~multienv.RayEnv` says what happens when a node is
    lost. A round is one call to each host and takes 1 to 2 ms. If your envs' steps are shorter than that, use
    ``rollout()``.

    Args:
        env_fns: One function for each env, which builds it on a node.
        ray: A :class:`~multienv.RayOptions`: which cluster, and how to use it.
        envs_per_worker: Number of envs that share a process. ``"auto"``: one process for each CPU that the hosts can
            have.
        max_concurrency: How many envs may step or reset at a time: at most this many processes share all envs.
        **options: See :class:`~multienv.BatchOptions` and :class:`~multienv.WorkerOptions`.

    Raises:
        UsageError: Ray is not installed, or an argument is invalid.
        ClusterError: The cluster cannot be reached, or has no free CPU.
        EnvsFailedError: Some envs could not be built; all have been closed.
    """

    @takes_options_of(HostedVectorEnv.__init__, Workers.__init__)
    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        ray: RayOptions = RayOptions(),  # noqa: B008 - frozen
        envs_per_worker: int | str = "auto",
        max_concurrency: int | None = None,
        **options: Unpack[VectorOptions],
    ) -> None:
        self.env_fns = listed_env_fns(type(self).__name__, env_fns)
        fleet = self._fleet = Fleet(ray, len(self.env_fns))
        try:
            sizes = deal(len(self.env_fns), envs_per_worker, fleet.cores, max_concurrency)
            fleet.seat_workers(len(sizes))
            super().__init__(self.env_fns, sizes, partial(Workers, partial(Nodes, fleet)), **options)
        except BaseException:
            fleet.close()
            raise

    def close_extras(self, timeout: float | None = None, terminate: bool = False, **kwargs: Any) -> None:
        """End the processes, then their hosts, and a local Ray that was started for them."""
        super().close_extras(timeout, terminate, **kwargs)
        self._fleet.wait(CLOSE_PATIENCE)
