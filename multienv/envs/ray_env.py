"""One env on a node of a Ray cluster, and several of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from typing_extensions import Unpack

from multienv._engine.building.building import (
    EnvFn,
    WorkerOptions,
    Workers,
    checked_env_fn,
    listed_env_fns,
    setting_elsewhere,
)
from multienv._engine.cluster.fleet import Fleet, RelayLauncher
from multienv._engine.processes.launcher import Preload
from multienv._engine.wire.messages import Setting
from multienv._engine.wire.shared_pickle import SharedPickle
from multienv.config import RayOptions, takes_options_of
from multienv.envs.subprocess_env import SubprocessEnv, SupervisedEnv, built_envs

# Seconds that close() waits, with the last env, until the hosts have been told to end and a local Ray is shut down.
CLOSE_PATIENCE = 10.0


class Nodes:
    """Places workers on the hosts of a fleet: a backend.

    Args:
        fleet: Whose.
        method: Start method, ``"forkserver"`` or ``"spawn"``.
        native_threads: See :class:`~multienv.WorkerOptions`.
        first: Index of the first worker.
    """

    shares = preloads = False  # a host may be anywhere

    def __init__(self, fleet: Fleet, method: str, native_threads: int | None, first: int = 0) -> None:
        self._fleet, self._method, self._native_threads, self._next = fleet, method, native_threads, first

    def launcher(self, title: str, shared: SharedPickle | None, preload: Preload | None) -> RelayLauncher:
        """Return what launches the processes of the next worker."""
        index, self._next = self._next, self._next + 1
        return self._fleet.launcher(index, self._method, self._native_threads, title)

    def setting(self) -> Setting:
        """Return what a worker takes from the trainer; path, directory and environment are those of its node."""
        return setting_elsewhere()


class RayEnv(SupervisedEnv):
    """A :class:`~multienv.SubprocessEnv` whose process runs on a node of a Ray cluster.

    The journal stays with the trainer. If the process dies, the env is recovered on its node, from a forked snapshot.
    If the node is lost, the env is recovered on another node, from the journal: exactly, or its episode ends with
    ``truncated=True``.

    Args:
        env_fn: Function that builds the env, on the node. It travels by cloudpickle; the packages that it imports must
            be installed there.
        ray: A :class:`~multienv.RayOptions`; or a ``Fleet`` that several envs share.
        env_index: Index of the env in its batch, for messages.
        **options: See :class:`~multienv.WorkerOptions`.

    Raises:
        UsageError: Ray is not installed, ``env_fn`` is not callable or cannot be pickled, or an option is invalid.
        ClusterError: The cluster cannot be reached, or has no free CPU.
    """

    @takes_options_of(Workers.__init__)
    def __init__(
        self,
        env_fn: EnvFn,
        *,
        ray: RayOptions | Fleet = RayOptions(),  # noqa: B008 - frozen
        env_index: int | None = None,
        **options: Unpack[WorkerOptions],
    ) -> None:
        fns = [checked_env_fn(env_fn, env_index)]
        fleet = self._fleet = ray if isinstance(ray, Fleet) else fleet_for(ray, 1)
        try:
            workers = Workers(partial(Nodes, fleet, first=env_index or 0), **options)
            super().__init__(workers.make(fns, env_index, verbatim=True))
        except BaseException:
            fleet.close()
            raise

    def close(self) -> None:
        """End the process; with the fleet's last env also its hosts, and a local Ray that was started for them."""
        super().close()
        self._fleet.wait(CLOSE_PATIENCE)

    __del__ = SubprocessEnv.__del__


def fleet_for(options: Any, envs: int) -> Fleet:
    """Return a new fleet for this number of envs, each with its own process. Raises UsageError, ClusterError."""
    fleet = Fleet(options, envs)
    fleet.seat_workers(envs)
    return fleet


@takes_options_of(Workers.__init__)
def create_ray_envs(
    env_fns: Iterable[EnvFn],
    *,
    ray: RayOptions = RayOptions(),  # noqa: B008 - frozen
    **options: Unpack[WorkerOptions],
) -> list[RayEnv]:
    """Make envs with a process each on the nodes of a Ray cluster: start all first, then build the envs in parallel.

    Args:
        env_fns: One function for each env.
        ray: A :class:`~multienv.RayOptions`: which cluster, and how to use it.
        **options: Options for all envs: see :class:`~multienv.WorkerOptions`.

    Returns:
        The initialized envs, in order; each has its index as ``env_index``.

    Raises:
        EnvsFailedError: Some envs could not be built; all are closed again.
        ClusterError: The cluster cannot be reached, or has no free CPU.
    """
    return built_envs("create_ray_envs()", unbuilt_envs(listed_env_fns("create_ray_envs", env_fns), ray, **options))


def unbuilt_envs(env_fns: Sequence[EnvFn], ray: RayOptions | None, **options: Unpack[WorkerOptions]) -> list[RayEnv]:
    """Return envs that share their hosts, not started; see :func:`create_ray_envs`."""
    fleet = fleet_for(RayOptions() if ray is None else ray, len(env_fns))
    try:
        return [RayEnv(env_fn, ray=fleet, env_index=index, **options) for index, env_fn in enumerate(env_fns)]
    except BaseException:
        fleet.close()
        raise
