"""Vector envs: many envs in a few processes that may die at any moment; and the same in the trainer's process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from typing_extensions import Unpack

from multienv._engine.building.building import EnvFn, Processes, SerialWorkers, Workers, listed_env_fns
from multienv._engine.cores import busy_cores, spread
from multienv.config import takes_options_of
from multienv.errors import EnvsFailedError, UsageError
from multienv.events import Hook
from multienv.vector.batching import deal
from multienv.vector.hosted_vector_env import BatchOptions, HostedVectorEnv, VectorOptions

logger = logging.getLogger("multienv")


class SubprocessVectorEnv(HostedVectorEnv):
    """A ``gymnasium.vector.VectorEnv`` whose envs run in processes, several in each, and survive their deaths.

    ::

        envs = SubprocessVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 32)
        observations, infos = envs.reset(seed=0)
        observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())

    It replaces ``gymnasium.vector.AsyncVectorEnv`` and equals ``SyncVectorEnv`` to the bit. The design page lists the
    parts of AsyncVectorEnv that it leaves out, and why. When a process dies, from any cause, its envs are recovered, as
    in :class:`~multienv.SubprocessEnv`. The step returns the same result as without the loss. An env that cannot be
    recovered ends its episode with ``truncated``; the other envs of its process go on exactly.

    ``autoreset_mode`` says what happens at the end of an episode:

    - ``NEXT_STEP``: the step that ends the episode returns its last observation. The next step ignores the env's action
      and returns the first observation of the new episode, reward 0.0 and both flags False.
    - ``SAME_STEP``: the step that ends the episode returns the first observation of the new episode. The last
      observation of the old one is in ``infos["final_obs"]``, its info in ``infos["final_info"]``.
    - ``DISABLED``: you reset the envs that have ended, with ``reset(options={"reset_mask": mask})``.

    Args:
        env_fns: One function for each env, which builds it in its process; one that needs an argument gets the env's
            index. They travel by cloudpickle. All envs must have the same action space.
        envs_per_worker: Number of envs that share a process; the last process gets the rest. ``"auto"``: one process
            per core, with the envs spread evenly; or one per env, if a process can hold only one. Use fewer per process
            for envs that wait rather than compute.
        max_concurrency: How many envs may step or reset at a time: at most this many processes share all envs.
        bind_cores: Let each process with short steps keep to one core, and yield that core to others. Each process also
            polls for its next request for 0.2 ms before it sleeps. Both are off with a single core, or under a quota of
            CPU time.
        daemon: Ignored: the processes always end with the trainer, and may start processes of their own.
        worker: Refused: multienv's own worker hosts the envs.
        **options: See :class:`~multienv.BatchOptions` and :class:`~multienv.WorkerOptions`.

    Raises:
        EnvsFailedError: Some envs could not be built; all have been closed.
        RuntimeError: The spaces of the envs differ.
        TypeError: ``shared_memory=True``, and a space has no fixed layout in memory.
        UsageError: An ``env_fn`` is not callable or cannot be pickled, or another argument is invalid.
    """

    @takes_options_of(HostedVectorEnv.__init__, Workers.__init__)
    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        envs_per_worker: int | str = "auto",
        max_concurrency: int | None = None,
        bind_cores: bool = True,
        daemon: bool = True,
        worker: None = None,
        **options: Unpack[VectorOptions],
    ) -> None:
        self.env_fns = listed_env_fns(type(self).__name__, env_fns)
        if worker is not None:
            raise UsageError(
                "A custom `worker` runs AsyncVectorEnv's own protocol; here multienv's worker hosts the envs, or they "
                "could not be recovered. Leave it out, and put what it does into env_fn or a wrapper."
            )
        sizes = deal(len(self.env_fns), envs_per_worker, busy_cores(), max_concurrency)
        workers, place = partial(Workers, Processes), spread if bind_cores else None
        try:
            super().__init__(self.env_fns, sizes, workers, place, **options)
        except EnvsFailedError as error:
            # Some simulators, stable-retro and libsumo for instance, allow one instance in a process.
            is_first = not error.failures.keys().isdisjoint(accumulate(sizes, initial=0))
            if envs_per_worker != "auto" or max_concurrency is not None or is_first:
                raise
            logger.warning(
                "Only the first env of each process could be built, so each env gets a process of its own. "
                "envs_per_worker=1 does so from the start. %s",
                next(iter(error.failures.values())),
            )
        else:
            return
        self.closed = False
        super().__init__(self.env_fns, [1] * len(self.env_fns), workers, place, **options)


class SerialVectorEnv(HostedVectorEnv):
    """A :class:`SubprocessVectorEnv` without processes, for debugging: all envs run in the trainer's process.

    It returns the same as :class:`SubprocessVectorEnv`, to the bit, including infos and errors. A breakpoint in an env
    stops here. Deadlines are not enforced, and a crash of an env is a crash of your process.

    Attributes:
        envs: The envs themselves, as in ``gymnasium.vector.SyncVectorEnv``. Only read from them: this class does not
            see direct changes.

    Args:
        env_fns: One function for each env, which builds it; one that needs an argument gets the env's index.
        hooks: See :class:`~multienv.WorkerOptions`.
        **options: See :class:`~multienv.BatchOptions`.

    Raises:
        EnvsFailedError: Some envs could not be built; all have been closed.
        RuntimeError: The spaces of the envs differ.
        UsageError: An argument is invalid.
    """

    @takes_options_of(HostedVectorEnv.__init__)
    def __init__(
        self, env_fns: Sequence[EnvFn], *, hooks: Sequence[Hook] = (), **options: Unpack[BatchOptions]
    ) -> None:
        self.env_fns = listed_env_fns(type(self).__name__, env_fns)
        self.envs: list[Any] = [None] * len(self.env_fns)
        fns = [partial(_build_into, env_fn, self.envs, index) for index, env_fn in enumerate(self.env_fns)]
        super().__init__(fns, [len(fns)], partial(SerialWorkers, hooks=hooks), **options)

    def __del__(self) -> None:
        """Do nothing: gymnasium before 1.2 closes the envs here."""


def _build_into(env_fn: EnvFn, envs: list[Any], index: int) -> Any:
    """Build an env and note it in its place."""
    env = envs[index] = env_fn()
    return env
