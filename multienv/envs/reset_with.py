"""Choose seed and options of each episode that begins without any, by its number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

from multienv._engine.worker.seeding import EpisodeCount


class ResetWith(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives an env seed and options for each reset that has neither: for automatic resets, and for a plain ``reset()``.

    It belongs into ``env_fn``, which may have the index of the env::

        def env_fn(index):
            def arguments(episode):
                return {"seed": 1000 * index + episode, "options": {"level": episode // 50}}

            return ResetWith(MyEnv(), arguments)

        envs = SubprocessVectorEnv([env_fn] * 8)

    The number of the episode survives recoveries: an env that is recovered goes on with the same seeds and options. It
    begins at 0 again only if nothing led back to a lost episode, or if a reset ended every process in which it was
    tried.

    Args:
        env: Any gymnasium.Env.
        arguments: Called with the number of the episode, which counts all resets of this env from 0; returns arguments
            for ``env.reset``: a dict that may have ``"seed"`` and ``"options"``. It must return the same for the same
            number, as it is called again in a recovery.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], arguments: Callable[[int], Mapping[str, Any]]) -> None:
        super().__init__(env)
        self._arguments = arguments
        self._count = EpisodeCount()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; see the class for what it begins with."""
        episode = self._count.begun
        self._count.begun += 1
        if seed is None and not options:
            return self.env.reset(**self._arguments(episode))
        return self.env.reset(seed=seed, options=options)
