"""An environment over any spaces, which tells exactly which action reached it."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class TokenSpace(gymnasium.Space[str]):
    """A custom space, as users write them: no shape, no dtype, nothing a batching library knows about.

    Its members are the strings ``"token-0"`` up to ``"token-<size - 1>"``.
    """

    def __init__(self, *, size: int = 16, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)
        self.size = size

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        return f"token-{int(self.np_random.integers(self.size))}"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and x in {f"token-{index}" for index in range(self.size)}

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenSpace) and other.size == self.size

    def __hash__(self) -> int:
        return hash((TokenSpace, self.size))


class SpaceEnv(gymnasium.Env[Any, Any]):
    """Observes samples of any space, deterministically, and echoes the action.

    Each reset seeds a private copy of the observation space from ``np_random``, so that episodes are reproducible from
    the seed, and a lost draw shows. ``info["action"]`` of a step is `digest_value` of the action received; the reward
    is a draw of ``np_random``.

    Args:
        observation_space: what is sampled; the object itself is only shown, its own RNG is not used.
        action_space: what actions are checked against; an action outside raises `ValueError`.
        horizon: the steps in an episode; the last one terminates.
        seed: seeds ``np_random`` at construction, so that even a first reset without a seed is reproducible.
        tells: whether there is an info.
    """

    def __init__(
        self,
        *,
        observation_space: gymnasium.Space[Any] | None = None,
        action_space: gymnasium.Space[Any] | None = None,
        horizon: int = 10,
        seed: int | None = None,
        tells: bool = True,
    ) -> None:
        self.tells = tells
        self.observation_space = spaces.Box(-1.0, 1.0, (3,)) if observation_space is None else observation_space
        self.action_space = spaces.Discrete(4) if action_space is None else action_space
        self.horizon = horizon
        self.episode_step = 0
        self._source = copy.deepcopy(self.observation_space)
        if seed is not None:
            super().reset(seed=seed)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._source.seed(int(self.np_random.integers(2**31)))
        self.episode_step = 0
        return self._source.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise ValueError(f"action {action!r} is not in {self.action_space}")
        self.episode_step += 1
        info = {"action": digest_value(action)} if self.tells else {}
        return self._source.sample(), float(self.np_random.random()), self.episode_step >= self.horizon, False, info


def digest_value(value: Any) -> str:
    """A short text that two values share only if type, dtype, shape and every bit agree; nested values included.

    Mappings are described in the order of their sorted keys, whichever mapping type they are.
    """
    if isinstance(value, np.ndarray):
        data = repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
        return f"ndarray({value.dtype.str}, {value.shape}, {hashlib.sha256(data).hexdigest()[:16]})"
    if isinstance(value, np.generic):
        return f"{type(value).__name__}({value.tobytes().hex()})"
    if isinstance(value, Mapping):
        items = ", ".join(f"{key!r}: {digest_value(value[key])}" for key in sorted(value, key=repr))
        return f"{{{items}}}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(digest_value, value))})"
    if isinstance(value, float):
        return f"float({value.hex()})"
    return f"{type(value).__name__}({value!r})"


def example_spaces() -> dict[str, gymnasium.Space[Any]]:
    """One space of each kind that an environment may use, by name, for parametrised tests. All are new objects."""
    box = spaces.Box(-1.0, 1.0, (2, 3), dtype=np.float32)
    nested = {"position": box, "inner": spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(4)))}
    return {
        "box_float32": box,
        "box_float64": spaces.Box(-np.inf, np.inf, (4,), dtype=np.float64),
        "box_uint8": spaces.Box(0, 255, (8, 8, 3), dtype=np.uint8),
        "box_scalar": spaces.Box(-1.0, 1.0, (), dtype=np.float32),
        "box_empty": spaces.Box(-1.0, 1.0, (0,), dtype=np.float32),
        "discrete": spaces.Discrete(5),
        "discrete_start": spaces.Discrete(5, start=-2),
        "multi_discrete": spaces.MultiDiscrete([3, 4, 5]),
        "multi_discrete_2d": spaces.MultiDiscrete(np.array([[3, 4], [5, 6]])),
        "multi_binary": spaces.MultiBinary((2, 3)),
        "dict": spaces.Dict(nested),
        "tuple": spaces.Tuple((spaces.Discrete(3), box)),
        "text": spaces.Text(max_length=12),
        "sequence": spaces.Sequence(spaces.Box(-1.0, 1.0, (2,))),
        "sequence_stacked": spaces.Sequence(spaces.Box(-1.0, 1.0, (2,)), stack=True),
        "graph": spaces.Graph(spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3)),
        "one_of": spaces.OneOf((spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,)))),
        "dict_of_variable": spaces.Dict({"text": spaces.Text(max_length=5), "box": box}),
        "custom": TokenSpace(size=8),
    }
