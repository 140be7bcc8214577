"""Vector envs: many envs in a few processes that may die at any moment; and the same in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from multienv.config import takes_options_of
from multienv.cores import busy_cores, spread
from multienv.envs.building import EnvFn, Processes, SerialWorkers, Workers, listed_env_fns
from multienv.errors import UsageError
from multienv.events import Hook
from multienv.vector.batching import deal
from multienv.vector.hosted_vector_env import BatchOptions, HostedVectorEnv, VectorOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SubprocessVectorEnv(HostedVectorEnv):
    """A ``gymnasium.vector.VectorEnv`` whose envs live in processes, several in each, and survive their deaths.

    ::

        envs = SubprocessVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 32)
        observations, infos = envs.reset(seed=0)
        observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())

    It takes the place of ``gymnasium.vector.AsyncVectorEnv`` and equals ``SyncVectorEnv`` to the bit; the design page
    says what of the former is not here, and why. When a process dies, by any cause, its envs are brought back as
    :class:`~multienv.SubprocessEnv` brings back one, and the step returns what it would have returned. An env that
    cannot be brought back ends its episode with ``truncated``; the others of its process go on exactly.

    ``autoreset_mode`` says what happens at the end of an episode:

    - ``NEXT_STEP``: the step that ends it returns its last observation; the next one ignores the env's action and
      returns the first observation of the new episode, reward 0.0 and both flags False.
    - ``SAME_STEP``: the step that ends it returns the first observation of the new one, with the old one's last in
      ``infos["final_obs"]`` and its info in ``infos["final_info"]``.
    - ``DISABLED``: the caller resets the envs that have ended, ``reset(options={"reset_mask": mask})``.

    Args:
        env_fns: Each builds one env, in its process; they travel by cloudpickle. All envs have the same action space.
        envs_per_worker: How many envs share a process; the last one has what is left. ``"auto"``: one process a core,
            with the envs dealt out evenly. Envs that wait rather than compute do better with fewer in a process.
        max_concurrency: How many envs may step or reset at a time: at most so many processes share all envs.
        bind_cores: A process whose steps are short keeps to a core, and yields it to others; and each looks for its
            next request for 0.2 ms before it sleeps. Neither with a single core or under a quota of CPU time.
        daemon: Ignored: the processes end with the trainer in any case, and may start processes of their own.
        worker: Refused: multienv's own worker hosts the envs.
        **options: See :class:`~multienv.BatchOptions` and :class:`~multienv.WorkerOptions`.

    Raises:
        EnvsFailedError: Some envs could not be built; all have been closed.
        RuntimeError: Their spaces differ.
        TypeError: ``shared_memory=True``, and a space has no fixed layout in memory.
        UsageError: An ``env_fn`` is not callable or cannot be pickled, or another argument makes no sense.
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
                "could not be brought back. Leave it out, and put what it does into env_fn or a wrapper."
            )
        sizes = deal(len(self.env_fns), envs_per_worker, busy_cores(), max_concurrency)
        self._owner = os.getpid()
        workers = partial(Workers, Processes)
        super().__init__(self.env_fns, sizes, workers, spread if bind_cores else None, **options)

    def __del__(self) -> None:
        """Release the processes, which then end by themselves, if close() was not called."""
        if self.__dict__.get("_owner") == os.getpid():  # a forked child leaves the trainer's workers alone
            for worker in self.__dict__.get("_workers", ()):
                worker.abandon()


class SerialVectorEnv(HostedVectorEnv):
    """The same host, wire and supervisor with all envs in this very process: for debugging.

    A :class:`SubprocessVectorEnv` returns the same, to the bit, infos and errors included. A breakpoint in an env stops
    here. Deadlines are not enforced, and a crash of an env is a crash of this process.

    Attributes:
        envs: The envs themselves, as ``gymnasium.vector.SyncVectorEnv`` has them. For reading
            only: this class does not see what is done to them directly.

    Args:
        env_fns: Each builds one env.
        hooks: See :class:`~multienv.WorkerOptions`.
        **options: See :class:`~multienv.BatchOptions`.

    Raises:
        EnvsFailedError: Some envs could not be built; all have been closed.
        RuntimeError: Their spaces differ.
        UsageError: An argument makes no sense.
    """

    @takes_options_of(HostedVectorEnv.__init__)
    def __init__(
        self, env_fns: Sequence[EnvFn], *, hooks: Sequence[Hook] = (), **options: Unpack[BatchOptions]
    ) -> None:
        self.env_fns = listed_env_fns(type(self).__name__, env_fns)
        self.envs: list[Any] = [None] * len(self.env_fns)
        noted = [partial(_noted, env_fn, self.envs, index) for index, env_fn in enumerate(self.env_fns)]
        super().__init__(noted, [len(noted)], partial(SerialWorkers, hooks=hooks), **options)

    def __del__(self) -> None:
        """Do nothing: gymnasium before 1.2 closes the envs here."""


def _noted(env_fn: EnvFn, envs: list[Any], index: int) -> Any:
    """Build an env and note it in its place."""
    env = envs[index] = env_fn()
    return env
