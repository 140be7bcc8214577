"""What the managers that are stepped by id have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from multienv.env_manager import EnvManager
from multienv.env_manager_calls import surfacing
from multienv.env_manager_loop import Loop
from multienv.env_states import Timestep
from multienv.errors import MultienvError, UsageError


class EnvManagerById(EnvManager):
    """A manager whose observations, actions and timesteps are dicts: env id → value."""

    @property
    @surfacing
    def ready_obs(self) -> dict[int, Any]:
        """The observations of the envs that can be stepped: env id → observation.

        Waits until there is one, unless none is being reset: empty when all are done, or wait for a reset of yours, or
        are being stepped (``step({})`` collects those).

        Raises:
            EnvsFailedError: Envs could not be reset in the background; it holds the other observations.
        """
        loop = self._entered("ready_obs")
        try:
            loop.until_some_are_ready()
            if loop.failed():
                ready = {lane.index: lane.observation() for lane in loop.ready()}
                loop.tell_failures("ready_obs", [ready.get(lane.index) for lane in loop.lanes])
            observations = {lane.index: lane.observation() for lane in loop.ready()}
        except MultienvError:
            loop.leave()
            raise
        loop.leave()
        return observations

    def random_action(self) -> dict[int, Any]:
        """An action for each env that can be stepped now."""
        return {index: self.action_space.sample() for index in self.ready_env}

    def step(self, actions: Mapping[int, Any]) -> dict[int, Timestep]:
        """Step these envs: env id → action.

        An interrupted step (Ctrl-C) has been sent all the same: the next one, ``step({})`` for instance, gives its
        timesteps.

        Returns:
            Env id → timestep. The one that ends an episode has its last observation; the first of the next episode
            will be in ``ready_obs``.

        Raises:
            UsageError: An id that does not exist, or an env that cannot be stepped now; nothing was sent.
            EnvsFailedError: Some envs raised, or could not be reset in the background; its ``results`` has the
                timesteps of the others, by id.
        """
        loop = self._entered("step()")
        try:
            if not isinstance(actions, Mapping):
                raise UsageError(f"step({actions!r:.100}): give a dict: env id → action.")
            self._take_steps(actions, loop)
            self._wait(loop, len(actions))
            return loop.hand_over("step()", dict)  # type: ignore[no-any-return]
        except MultienvError:
            loop.leave()
            raise

    @abstractmethod
    def _wait(self, loop: Loop, asked: int) -> None:
        """Until there is enough to return; so many have been asked just now."""
