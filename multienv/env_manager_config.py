"""The options of the env managers: one frozen value, with DI-engine's names and defaults."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from multienv.config import Deadlines, check_seconds
from multienv.errors import UsageError
from multienv.processes.launch import method_of

_RETRY_TYPES = ("reset", "renew")
# What its configs say of themselves: which class they are for.
_OF_DI_ENGINE = ("cfg_type", "type")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvManagerConfig:
    """How a manager runs its envs. Times are in seconds.

    Args:
        episode_num: Whole episodes each env runs before it is done.
        max_retry: How often a reset is tried before its error is raised; 1 is no retry.
        retry_type: A reset is tried again in the same process (``"reset"``) or in a new one (``"renew"``).
        retry_waiting_time: Between two tries.
        auto_reset: An env whose episode has ended is reset in the background, until it is done.
        step_timeout: One step; past it the process is hung: it is killed and brought back. ``None`` is for ever.
        reset_timeout: The same for one reset; ``None`` is as long as ``connect_timeout``.
        connect_timeout: From the launch of a process to the built env; ``None`` is for ever.
        wait_num: Timesteps the asynchronous manager's ``step()`` waits for; as many as it has been given actions, if
            those are fewer.
        step_wait_timeout: As long as this it waits for more of them; ``None``: for all.
        reset_inplace: The timestep that ends an episode has the first observation of the next one, and the last one in
            ``info["final_obs"]``.
        shared_memory: Large observations travel in shared memory.
        copy_on_get: Every observation handed out is the caller's own; if false, the same array may be handed out
            twice, in the timestep and in ``ready_obs``.
        context: ``"forkserver"``, ``"spawn"`` or ``"fork"``; ``None`` is the first where it exists. DI-engine's default
            is ``"fork"``, which copies the trainer's locks and has no frozen snapshots.

    Raises:
        UsageError: A value makes no sense.
    """

    episode_num: float = math.inf
    max_retry: int = 1
    retry_type: Literal["reset", "renew"] = "reset"
    retry_waiting_time: float = 0.1
    auto_reset: bool = True
    step_timeout: float | None = None
    reset_timeout: float | None = None
    connect_timeout: float | None = 60.0
    wait_num: float = 2
    step_wait_timeout: float | None = 0.01
    reset_inplace: bool = False
    shared_memory: bool = True
    copy_on_get: bool = True
    context: Any = None

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        for name in ("episode_num", "wait_num", "max_retry"):
            _check_count(name, getattr(self, name), infinite=name != "max_retry")
        for name in ("auto_reset", "reset_inplace", "shared_memory", "copy_on_get"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} is {getattr(self, name)!r:.100}; give True or False.")
        for name in ("step_timeout", "reset_timeout", "connect_timeout"):
            check_seconds(name, getattr(self, name))
        for name in ("retry_waiting_time", "step_wait_timeout"):
            check_seconds(name, getattr(self, name), zero=True)
        if self.retry_waiting_time is None:
            raise UsageError("retry_waiting_time is None; give a number of seconds.")
        if self.retry_type not in _RETRY_TYPES:
            raise UsageError(f"retry_type is {self.retry_type!r:.100}; choose 'reset' or 'renew'.")
        if self.reset_inplace and not self.auto_reset:
            raise UsageError("reset_inplace=True wants auto_reset=True: without it nothing is reset in place.")
        method_of(self.context)

    @classmethod
    def of(cls, given: Any, options: Mapping[str, Any], defaults: EnvManagerConfig) -> EnvManagerConfig:
        """What the caller has given, as a config, a mapping or single options; the rest from ``defaults``.

        Raises:
            UsageError: An option of another name.
        """
        if given is not None and not isinstance(given, cls | Mapping):
            raise UsageError(f"cfg is {given!r:.100}; give an EnvManagerConfig or a dict of its options.")
        start = given if isinstance(given, cls) else defaults
        mapping = given if isinstance(given, Mapping) else {}
        named = {name: value for name, value in mapping.items() if name not in _OF_DI_ENGINE} | dict(options)
        known = [field.name for field in fields(cls)]
        for name in named:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise UsageError(f"{name!r} is no option of an env manager.{hint} There are: {', '.join(known)}.")
        return replace(start, **named)

    @property
    def deadlines(self) -> Deadlines:
        """The same in the terms of a single env."""
        reset = self.connect_timeout if self.reset_timeout is None else self.reset_timeout
        return Deadlines(start=self.connect_timeout, reset=reset, step=self.step_timeout)


def _check_count(name: str, value: Any, *, infinite: bool) -> None:
    if infinite and value == math.inf:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise UsageError(
            f"{name} is {value!r:.100}; give an integer of at least 1{', or infinity' if infinite else ''}."
        )
