"""Envs in batches, in the order of the observations that the manager returned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from multienv.errors import ActionError, EnvError, UsageError
from multienv.managers.config import EnvManagerConfig, EnvState, Timestep
from multienv.managers.env_manager import EnvManager
from multienv.managers.scheduler import Scheduler

# Spaces whose actions for several envs can be one value; those for others are a list.
_BATCHED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict, spaces.Tuple)


class StackedSubprocessEnvManager(EnvManager):
    """Steps batches of the envs that are ready: it returns a batch of observations and takes a batch of actions.

    ::

        with StackedSubprocessEnvManager(env_fns, episode_num=10) as manager:
            while not manager.done:
                actions = policy(manager.ready_obs)      # one row for each env in manager.ready_obs_id
                for timestep in manager.step(actions):
                    timestep.env_id, timestep.reward, timestep.done

    An env that becomes ready in between is in the next batch; it does not change this one.

    See :class:`~multienv.AsyncSubprocessEnvManager` for the arguments.
    """

    _defaults = EnvManagerConfig(wait_num=math.inf, step_wait_timeout=None)
    _waits_for_all = True
    _way_to_collect = "a step() of the batch that ready_obs gives now"
    _batch: list[int] | None = None  # ids in the last batch that was read and not stepped
    _implied: list[int] | None = None  # a batch that may be stepped although it was not read

    @property
    def ready_obs(self) -> Any:
        """Return the observations of the envs that can be stepped, as one batch; :attr:`ready_obs_id` has their ids.

        If no env is ready and one is being reset, it waits. If no env is being reset either, the batch is empty.

        Raises:
            EnvsFailedError: Some envs could not be reset in the background, or returned an observation that does not
                fit their space; ``results`` has the other observations.
        """
        scheduler = self._launched("ready_obs")
        scheduler.until_some_are_ready()
        self._raise_failures(scheduler)
        ready = scheduler.ready()
        observations = [scheduler.records[index].observation for index in ready]
        try:
            batch = _stacked(self.observation_space, observations)
        except Exception:  # of numpy's, or of a custom space
            for index, observation in zip(ready, observations, strict=True):
                if (failure := self._misfit(index, observation)) is not None:
                    scheduler.update_records([index], state=EnvState.ERROR, failure=failure)
            self._raise_failures(scheduler)
            raise
        self._batch, self._implied = ready, None
        return batch

    @property
    def ready_obs_id(self) -> list[int]:
        """Return the ids of the envs in the last batch. The actions must have this order."""
        if self._batch is None:
            _ = self.ready_obs
        return list(self._batch or [])

    def random_action(self) -> list[Any]:  # type: ignore[override]  # batches take the place of dicts
        """Sample an action for each env in the last batch."""
        return [self.action_space.sample() for _ in self.ready_obs_id]

    def step(self, actions: Any) -> list[Timestep]:  # type: ignore[override]
        """Step the envs of the last batch.

        Two cases need no read of ``ready_obs`` before. After ``launch()`` or a reset of all envs, the batch is all
        envs. After a step that ended no episode, the batch is the same envs.

        Args:
            actions: One action for each env of the batch, in its order, as a list or a batch.

        Returns:
            The timesteps of these envs, in the same order; each has an ``env_id``.

        Raises:
            ActionError: The number of actions is wrong; nothing was sent.
            UsageError: ``ready_obs`` must be read first.
            EnvsFailedError: As for the other managers; ``results`` is by env id.
        """
        scheduler = self._launched("step()")
        batch = self._batch
        if batch is None and not scheduler.stepping() and not scheduler.undelivered():
            batch = self._implied
            if batch is None:
                raise UsageError("step(): read ready_obs first: the actions are for the envs of that batch.")
        order = batch or []
        rows = _rows(self.action_space, actions, order)
        self._send_steps(scheduler, dict(zip(order, rows, strict=True)))
        self._batch = self._implied = None
        self._wait(scheduler, len(order))
        return scheduler.deliver_timesteps("step()", lambda steps: self._listed(scheduler, steps, order))  # type: ignore[no-any-return]

    def _reset(self, scheduler: Scheduler, params: Mapping[int, dict[str, Any] | None] | None) -> None:
        """Reset envs, at the launch too: the last batch is no longer valid; all envs together are the next one."""
        self._batch = self._implied = None
        super()._reset(scheduler, params)
        if params is None or len(params) == self.env_num:
            self._implied = list(range(self.env_num))

    def _listed(self, scheduler: Scheduler, steps: dict[int, Timestep], order: list[int]) -> list[Timestep]:
        # Which envs a reset in the background makes ready is chance: these are in no batch until ready_obs is read.
        goes_on = self.config.reset_inplace or not any(timestep.done for timestep in steps.values())
        if order and goes_on and all(map(scheduler.is_idle, order)):
            self._implied = order
        first = [steps[index] for index in order if index in steps]
        return first + [step for index, step in steps.items() if index not in order]

    def _raise_failures(self, scheduler: Scheduler) -> None:
        scheduler.raise_failures("ready_obs", {index: scheduler.observation(index) for index in scheduler.ready()})

    def _misfit(self, index: int, observation: Any) -> EnvError | None:
        """Return an error if the observation of an env does not fit the space."""
        space = self.observation_space
        try:
            _stacked(space, [observation])
        except Exception as error:
            failure = EnvError(
                f"Env {index} has returned the observation {observation!r:.100}, which does not fit its space "
                f"{space!r:.100}: {error}. Reset it; the managers by id take any."
            )
            failure.env_index = index
            return failure
        return None


def _stacked(space: spaces.Space[Any], observations: Sequence[Any]) -> Any:
    stack: Any = create_empty_array(space, len(observations), np.zeros)
    return concatenate(space, observations, stack) if observations else stack


def _rows(space: spaces.Space[Any], actions: Any, batch: list[int]) -> list[Any]:
    """Return a list with the action for each env of a batch; raise ActionError for a wrong number."""
    number = len(batch)
    whole = isinstance(actions, Mapping) if type(space) is spaces.Dict else not isinstance(actions, list)
    if type(space) is spaces.Tuple:
        whole = isinstance(actions, tuple)
    try:
        if not whole or type(space) not in _BATCHED:
            rows = list(actions)
        elif type(space) in (spaces.Dict, spaces.Tuple):
            rows = list(iterate(batch_space(space, number), actions)) if number else []
        else:
            rows = list(np.asarray(actions))
    except (TypeError, ValueError, KeyError) as error:
        raise ActionError(f"step({actions!r:.100}): this is no batch of actions. Nothing was sent.") from error
    if len(rows) != number:
        raise ActionError(
            f"step(): {number} actions are wanted, for the envs {batch} of the last ready_obs; {len(rows)} are given. "
            "Nothing was sent."
        )
    return rows
