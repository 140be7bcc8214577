"""What an env manager says of its envs: where each stands, what a step has given, what they are all like."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
from typing_extensions import Self


class EnvState(enum.IntEnum):
    """Where an env stands.

    ::

        VOID ──launch──▶ INIT ──▶ RESET ──▶ RUN ──end of an episode──▶ RESET        (auto_reset)
                                    │        │            ├──────────▶ NEED_RESET   (else)
                                    │        │            └──────────▶ DONE         (the last one)
                                    └────────┴──it raised, or was lost for good──▶ ERROR

        NEED_RESET, DONE, ERROR, RUN ──reset()──▶ RESET           any ──close()──▶ VOID
    """

    VOID = 0
    INIT = 1
    RUN = 2
    RESET = 3
    DONE = 4
    ERROR = 5
    NEED_RESET = 6


class _Fields(NamedTuple):
    observation: Any
    reward: Any
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Timestep(_Fields):
    """What one step of one env has given; it unpacks into gymnasium's five values.

    Attributes:
        env_id: The env's.
        observation: After the step; ``obs`` is the same. With ``reset_inplace``, at the end of an episode, the first
            of the next one.
        reward: Of the step.
        terminated: The episode has ended by itself.
        truncated: It was cut short; ``info["abnormal"]`` is true where that is because the env's process was lost and
            could not be brought back exactly.
        info: The env's own.
    """

    env_id: int

    def __new__(cls, env_id: int, *values: Any) -> Self:
        """From the env's id and the five values."""
        self = super().__new__(cls, *values)
        self.env_id = env_id
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.env_id, *self)

    def _replace(self, **changes: Any) -> Timestep:
        return Timestep(self.env_id, *(changes.get(name, value) for name, value in self._asdict().items()))

    def __repr__(self) -> str:
        """With the env's id."""
        values = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
        return f"Timestep(env_id={self.env_id}, {values})"

    @property
    def obs(self) -> Any:
        """The observation, as DI-engine calls it."""
        return self.observation

    @property
    def done(self) -> bool:
        """Whether the episode has ended, either way."""
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True)
class EnvReference:
    """What the envs of a manager have in common, told by one of them: no env is built in the trainer.

    Attributes:
        observation_space: Of a single env, as the other spaces.
        action_space: It is sampled by ``random_action()``.
        reward_space: The env's own attribute of that name, or all real numbers.
        metadata: The env's.
        spec: The env's.
        render_mode: The env's.
    """

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    reward_space: gymnasium.Space[Any]
    metadata: dict[str, Any]
    spec: Any
    render_mode: str | None
