"""A small deterministic environment whose observation gives every lost, doubled or spliced step away."""

from __future__ import annotations

from typing import Any, Literal

import gymnasium
import numpy as np
from numpy.typing import NDArray

LARGEST_EXACT = float(2**24)  # the largest count that float32 holds exactly


class CounterEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Counts its steps and episodes, draws from its RNG, and shows all of it.

    The observation is a float32 array of four numbers:

    0. the step in the episode (0 after a reset),
    1. the number of the episode since the last *seeded* reset (0 for that one), or 0 with ``count_episodes=False``,
    2. a draw of ``self.np_random``, plus the attribute `offset`,
    3. the last action (-1 after a reset).

    The reward is ``(draw + offset) * (action + 1)`` in float64. An action outside of the space raises `ValueError`, a
    step without a running episode `gymnasium.error.ResetNeeded`.

    Because episode numbers count on over unseeded resets, a new process that replays only the current episode shows
    the wrong number from the reset on; pass ``count_episodes=False`` for an env whose episodes are independent.

    Args:
        horizon: the steps in an episode; None for an episode without end.
        ending: which flag the last step carries.
        num_actions: the size of the discrete action space.
        count_episodes: whether the observation carries the episode's number.
        render_mode: ``"rgb_array"`` (an image of the counts), ``"ansi"`` or None.

    ``reset(options={"start": n})`` begins the episode at step *n*.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array", "ansi"], "render_fps": 30}  # noqa: RUF012 (gymnasium's)

    def __init__(
        self,
        *,
        horizon: int | None = 10,
        ending: Literal["terminated", "truncated", "both"] = "terminated",
        num_actions: int = 4,
        count_episodes: bool = True,
        render_mode: str | None = None,
    ) -> None:
        self.horizon = horizon
        self.ending = ending
        self.count_episodes = count_episodes
        self.render_mode = render_mode
        self.offset = 0.0
        self.pokes = 0
        high = np.array([LARGEST_EXACT, LARGEST_EXACT, LARGEST_EXACT, max(num_actions - 1, 1)], dtype=np.float32)
        low = np.array([0, 0, -LARGEST_EXACT, -1], dtype=np.float32)
        self.observation_space = gymnasium.spaces.Box(low, high, dtype=np.float32)
        self.action_space = gymnasium.spaces.Discrete(num_actions)
        self.episode_step = 0
        self.episode_number = -1
        self._draw = 0.0
        self._last_action = -1
        self._running = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.episode_number = 0 if seed is not None else self.episode_number + 1
        self.episode_step = int((options or {}).get("start", 0))
        self._last_action = -1
        self._running = True
        self._draw = self._next_draw()
        return self._observe(), self._info()

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        if not self._running:
            raise gymnasium.error.ResetNeeded("no episode is running: call reset() first")
        if not self.action_space.contains(action):
            raise ValueError(f"action {action!r} is not in {self.action_space}")
        self.episode_step += 1
        self._last_action = int(action)
        self._draw = self._next_draw()
        ended = self.horizon is not None and self.episode_step >= self.horizon
        self._running = not ended
        terminated = ended and self.ending in ("terminated", "both")
        truncated = ended and self.ending in ("truncated", "both")
        return self._observe(), self._reward(), terminated, truncated, self._info()

    def render(self) -> Any:
        number = self.episode_number if self.count_episodes else 0
        if self.render_mode == "ansi":
            return f"episode {number} step {self.episode_step}"
        if self.render_mode == "rgb_array":
            frame = np.zeros((8, 8, 3), dtype=np.uint8)
            frame[..., 0] = self.episode_step % 256
            frame[..., 1] = number % 256
            frame[..., 2] = int(self._draw * 255)
            return frame
        return None

    def poke(self, amount: float = 0.0) -> int:
        """Add *amount* to `offset`, which shows in every later observation; returns the number of pokes so far."""
        self.offset += amount
        self.pokes += 1
        return self.pokes

    def _next_draw(self) -> float:
        return float(self.np_random.random())

    def _observe(self) -> NDArray[np.float32]:
        number = self.episode_number if self.count_episodes else 0
        values = (self.episode_step, number, self._draw + self.offset, self._last_action)
        return np.array(values, dtype=np.float32)

    def _reward(self) -> float:
        return (self._draw + self.offset) * (self._last_action + 1)

    def _info(self) -> dict[str, Any]:
        return {}
