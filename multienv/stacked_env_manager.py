"""Envs in batches whose order is that of the observations handed out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from multienv.env_lane import Lane
from multienv.env_manager import EnvManager
from multienv.env_manager_calls import surfacing
from multienv.env_manager_config import EnvManagerConfig
from multienv.env_manager_loop import Loop
from multienv.env_states import EnvState, Timestep
from multienv.errors import ActionError, EnvError, MultienvError, UsageError


class StackedSubprocessEnvManager(EnvManager):
    """Takes and gives batches of whichever envs are ready.

    ::

        with StackedSubprocessEnvManager(env_fns, episode_num=10) as manager:
            while not manager.done:
                actions = policy(manager.ready_obs)      # one row for each env in manager.ready_obs_id
                for timestep in manager.step(actions):
                    timestep.env_id, timestep.reward, timestep.done

    An env that becomes ready in between is in the next batch, and does not shift this one.

    See :class:`~multienv.env_manager.EnvManager` for the arguments.
    """

    _defaults = EnvManagerConfig(wait_num=math.inf, step_wait_timeout=None)
    _way_to_collect = "a step() of the batch that ready_obs gives now"
    _handed_out: list[int] | None = None
    _implied: list[int] | None = None  # the batch to be stepped though nobody has read it

    @property
    @surfacing
    def ready_obs(self) -> Any:
        """The observations of the envs that can be stepped, one batch; :attr:`ready_obs_id` has their ids.

        Waits until there is one, unless none is being reset: then the batch is empty.

        Raises:
            EnvsFailedError: Envs could not be reset in the background, or have returned what does not fit their space;
                it holds the other observations.
        """
        loop = self._entered("ready_obs")
        try:
            loop.until_some_are_ready()
            ready = loop.ready()
            if loop.failed():
                observations = {lane.index: lane.observation() for lane in ready}
                loop.tell_failures("ready_obs", [observations.get(lane.index) for lane in loop.lanes])
            batch = self._stacked(loop, ready)
            self._handed_out, self._implied = [lane.index for lane in ready], None
        except MultienvError:
            loop.leave()
            raise
        loop.leave()
        return batch

    @property
    @surfacing
    def ready_obs_id(self) -> list[int]:
        """The ids of the envs in the last batch, in its order: the order of the actions."""
        if self._handed_out is None:
            _ = self.ready_obs
        return list(self._handed_out or [])

    def random_action(self) -> list[Any]:
        """An action for each env in the last batch."""
        return [self.action_space.sample() for _ in self.ready_obs_id]

    def step(self, actions: Any) -> list[Timestep]:
        """Step the envs of the last batch.

        It need not be read after ``launch()`` or a reset of all envs, which is a batch of all; nor after a step in
        which no episode has ended, which is a batch of the same envs.

        Args:
            actions: One for each, as a list or as a batch, in the order of the batch.

        Returns:
            Their timesteps, in the same order; each has an ``env_id``.

        Raises:
            ActionError: A wrong number of actions; nothing was sent.
            UsageError: ``ready_obs`` must be read first.
            EnvsFailedError: As for the other managers; ``results`` is by env id.
        """
        loop = self._entered("step()")
        try:
            batch = self._handed_out
            if batch is None and not loop.stepping() and not loop.news():
                batch = self._implied
                if batch is None:
                    raise UsageError("step(): read ready_obs first: the actions are for the envs of that batch.")
            rows = self._rows(actions, batch or [])
            self._take_steps(dict(zip(batch or [], rows, strict=True)), loop)
            self._handed_out = self._implied = None
            if loop.stepping() or loop.news():
                loop.until_stepped(math.inf, None)
            else:
                loop.until_some_are_ready()
            order = batch or []
            return loop.hand_over("step()", lambda steps: self._shaped(loop, steps, order))  # type: ignore[no-any-return]
        except MultienvError:
            loop.leave()
            raise

    def reset(self, reset_param: Any = None) -> None:
        """As :meth:`EnvManager.reset`; the last batch is out of date then."""
        self._handed_out = self._implied = None
        super().reset(reset_param)
        if reset_param is None or len(reset_param) == self.env_num:
            self._implied = list(range(self.env_num))

    def launch(self, reset_param: Any = None) -> None:
        """As :meth:`EnvManager.launch`."""
        self._handed_out = self._implied = None
        super().launch(reset_param)
        self._implied = list(range(self.env_num))

    def _stacked(self, loop: Loop, ready: list[Lane]) -> Any:
        space = self.observation_space
        try:
            return _batch(space, [lane.now.observation for lane in ready])
        except Exception:  # of numpy's, or of a custom space
            for lane in ready:
                try:
                    _batch(space, [lane.now.observation])
                except Exception as error:
                    failure = EnvError(
                        f"Env {lane.index} has returned the observation {lane.now.observation!r:.100}, which does not "
                        f"fit its space {space!r:.100}: {error}. Reset it; the managers by id take any."
                    )
                    failure.env_index = lane.index
                    lane.now = lane.now._replace(state=EnvState.ERROR, failure=(next(loop.crew.numbers), failure))
            if loop.failed():
                observations = {lane.index: lane.observation() for lane in loop.ready()}
                loop.tell_failures("ready_obs", [observations.get(lane.index) for lane in loop.lanes])
            raise

    def _shaped(self, loop: Loop, steps: dict[int, Timestep], order: list[int]) -> list[Timestep]:
        # What a background reset makes ready by chance is in no batch that has not been read.
        goes_on = self.config.reset_inplace or not any(timestep.done for timestep in steps.values())
        if order and goes_on and all(loop.lanes[index].is_idle for index in order):
            self._implied = order
        first = [steps[index] for index in order if index in steps]
        return first + [step for index, step in steps.items() if index not in order]

    def _rows(self, actions: Any, batch: list[int]) -> list[Any]:
        space, number = self.action_space, len(batch)
        is_batch = isinstance(actions, Mapping) if type(space) is spaces.Dict else not isinstance(actions, list)
        if type(space) is spaces.Tuple:
            is_batch = isinstance(actions, tuple)
        try:
            if not is_batch or type(space) not in _BATCHED:
                rows = list(actions)
            elif type(space) in (spaces.Dict, spaces.Tuple):
                rows = list(iterate(batch_space(space, number), actions)) if number else []
            else:
                rows = list(np.asarray(actions))
        except (TypeError, ValueError, KeyError) as error:
            raise ActionError(f"step({actions!r:.100}): this is no batch of actions. Nothing was sent.") from error
        if len(rows) != number:
            raise ActionError(
                f"step(): {len(rows)} actions for the {number} envs of the last ready_obs, {batch}. Nothing was sent."
            )
        return rows


def _batch(space: spaces.Space[Any], observations: list[Any]) -> Any:
    stack: Any = create_empty_array(space, len(observations), np.zeros)
    return concatenate(space, observations, stack) if observations else stack


_BATCHED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict, spaces.Tuple)
