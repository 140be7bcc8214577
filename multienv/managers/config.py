"""Options, states and timesteps of the env managers, and the properties that all envs of a manager share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import gymnasium
from typing_extensions import Self

from multienv._engine.processes.launcher import method_of
from multienv.config import Deadlines, check_seconds, checked_count, did_you_mean
from multienv.errors import UsageError

# DI-engine's configs name their class; these options are ignored.
_NAMES_OF_THE_CLASS = ("cfg_type", "type")


class EnvState(IntEnum):
    """Names the states of an env of a manager, with DI-engine's names and numbers.

    ::

        VOID ──launch──▶ INIT ──▶ RESET ──▶ RUN ──end of an episode──▶ RESET        (auto_reset)
                                    │        │            ├──────────▶ NEED_RESET   (else)
                                    │        │            └──────────▶ DONE         (the last one)
                                    └────────┴──it raised, or was lost for good──▶ ERROR

        NEED_RESET, DONE, ERROR, RUN ──reset()──▶ RESET           any ──close()──▶ VOID
    """

    VOID = 0  # the manager is not launched
    INIT = 1  # the env is built
    RUN = 2  # an episode runs
    RESET = 3  # a reset is under way
    DONE = 4  # it has run `episode_num` episodes
    ERROR = 5  # it raised, or its process is lost for good
    NEED_RESET = 6  # its episode has ended, and without `auto_reset` the caller resets


class _Fields(NamedTuple):
    observation: Any
    reward: Any
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Timestep(_Fields):
    """Holds the result of one step of one env; it unpacks into gymnasium's five values.

    Attributes:
        env_id: Id of the env.
        observation: The observation after the step; ``obs`` is the same. With ``reset_inplace``, at the end of an
            episode: the first observation of the next episode.
        reward: The reward of the step.
        terminated: Whether the env ended the episode.
        truncated: Whether the episode was cut short. ``info["abnormal"]`` is true if the reason is that the env's
            process was lost and could not be recovered exactly.
        info: The env's own info.
    """

    env_id: int

    def __new__(cls, env_id: int, *values: Any) -> Self:
        """Make a timestep of the env's id and the five values."""
        self = super().__new__(cls, *values)
        self.env_id = env_id
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.env_id, *self)

    def _replace(self, **changes: Any) -> Timestep:
        return Timestep(self.env_id, *(changes.get(name, value) for name, value in self._asdict().items()))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
        return f"Timestep(env_id={self.env_id}, {values})"

    @property
    def obs(self) -> Any:
        """Return the observation, under DI-engine's name."""
        return self.observation

    @property
    def done(self) -> bool:
        """Return whether the episode has ended, either way."""
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True)
class EnvReference:
    """Holds the properties that all envs of a manager share, read from the first env; the trainer builds no env.

    Attributes:
        observation_space: Space of a single env, like the other spaces.
        action_space: The space that ``random_action()`` samples.
        reward_space: The env's own attribute of that name, or all real numbers.
        metadata, spec, render_mode: Those of the env.
    """

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    reward_space: gymnasium.Space[Any]
    metadata: dict[str, Any]
    spec: Any
    render_mode: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvManagerConfig:
    """Says how a manager runs its envs. Times are in seconds.

    Args:
        episode_num: Whole episodes that each env runs before it is done.
        max_retry: How often a reset is tried before its error is raised; 1 is no retry.
        retry_type: Where a failed reset is tried again: in the same process (``"reset"``) or in a new one
            (``"renew"``).
        retry_waiting_time: Time between two tries.
        auto_reset: Reset an env in the background when its episode has ended, until the env is done.
        step_timeout: Time for one step; after that the process counts as hung, is killed, and its env is recovered.
            ``None``: no limit. ``"auto"``: see :class:`~multienv.Deadlines`.
        reset_timeout: The same for one reset, method call or rendering; ``None``: as long as ``connect_timeout``.
            ``"auto"`` is for resets only.
        connect_timeout: From the launch of a process to the built env; ``None``: no limit.
        wait_num: Timesteps that ``step()`` of the asynchronous manager waits for, at most one for each action that you
            give.
        step_wait_timeout: How long that ``step()`` waits for more timesteps; ``None``: for all.
        reset_inplace: The timestep that ends an episode has the first observation of the next episode, and its own last
            observation in ``info["final_obs"]``.
        shared_memory: Accepted because DI-engine's configs have it: observations always travel in shared memory.
        copy_on_get: Return a copy of each observation. If false, a timestep and ``ready_obs`` may share an array.
        context: ``"forkserver"`` or ``"spawn"``; ``None``: ``"forkserver"`` on Linux, ``"spawn"`` elsewhere.

    Raises:
        UsageError: A value is invalid.
    """

    episode_num: float = math.inf
    max_retry: int = 1
    retry_type: Literal["reset", "renew"] = "reset"
    retry_waiting_time: float = 0.1
    auto_reset: bool = True
    step_timeout: float | Literal["auto"] | None = None
    reset_timeout: float | Literal["auto"] | None = None
    connect_timeout: float | None = 60.0
    wait_num: float = 2
    step_wait_timeout: float | None = 0.01
    reset_inplace: bool = False
    shared_memory: bool = True
    copy_on_get: bool = True
    context: Any = None

    def __post_init__(self) -> None:
        for name in ("episode_num", "wait_num", "max_retry"):
            if name == "max_retry" or getattr(self, name) != math.inf:
                checked_count(name, getattr(self, name))
        for name in ("step_timeout", "reset_timeout", "connect_timeout"):
            if name == "connect_timeout" or getattr(self, name) != "auto":
                check_seconds(name, getattr(self, name))
        for name in ("retry_waiting_time", "step_wait_timeout"):
            check_seconds(name, getattr(self, name), zero=True, needed=name == "retry_waiting_time")
        if self.retry_type not in ("reset", "renew"):
            raise UsageError(f"retry_type is {self.retry_type!r:.100}; choose 'reset' or 'renew'.")
        if self.reset_inplace and not self.auto_reset:
            raise UsageError("reset_inplace=True wants auto_reset=True: without it nothing is reset in place.")
        method_of(self.context)

    @classmethod
    def of(cls, given: Any, options: Mapping[str, Any], defaults: EnvManagerConfig) -> EnvManagerConfig:
        """Build the config from a config or a mapping, with ``options`` on top; the rest comes from ``defaults``.

        Raises:
            UsageError: An option has an unknown name.
        """
        start, mapping = (given, {}) if isinstance(given, cls) else (defaults, dict(given or {}))
        named = {name: value for name, value in mapping.items() if name not in _NAMES_OF_THE_CLASS} | dict(options)
        known = [field.name for field in fields(cls)]
        for name in named:
            if name not in known:
                hint = did_you_mean(str(name), known)
                raise UsageError(f"{name!r} is no option of an env manager.{hint} There are: {', '.join(known)}.")
        return replace(start, **named)

    @property
    def deadlines(self) -> Deadlines:
        """Return the timeouts as the deadlines of a single env."""
        reset = self.connect_timeout if self.reset_timeout is None else self.reset_timeout
        call = self.connect_timeout if isinstance(reset, str) else reset
        return Deadlines(start=self.connect_timeout, reset=reset, step=self.step_timeout, call=call)
