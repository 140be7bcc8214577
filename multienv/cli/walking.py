"""Walk at random through an env, the same way each time, and record what the env returns."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from multienv.config import RestartPolicy
from multienv.recovery.verification import same

RAISE = RestartPolicy(on_crash="raise", on_timeout="raise", snapshots=False)


@dataclass
class Walk:
    """Holds the record of a random walk through an env.

    Attributes:
        seen: Name of each reset and step (``"step 7"``), and what it returned, without its info.
        steps: Number of steps taken.
        slowest_reset, slowest_step: Seconds.
    """

    seen: list[tuple[str, Any]] = field(default_factory=list)
    steps: int = 0
    slowest_reset: float = 0.0
    slowest_step: float = 0.0

    def differs_at(self, other: Walk) -> str:
        """Return the name of the first reset or step that differs in the other walk; ``""`` if none does."""
        pairs = zip(self.seen, other.seen, strict=False)
        return next((name for (name, one), (_, its) in pairs if not same(one, its)), "")


def walk(
    env: Any,
    steps: int,
    *,
    seconds: float = float("inf"),
    before_step: Callable[[int], object] = lambda step: None,
) -> Walk:
    """Reset an env with seed 0, and take the same random steps each time. When an episode ends, reset without a seed.

    Args:
        env: The env. This function seeds its ``action_space``.
        steps: Largest number of steps.
        seconds: The walk ends after this time, but not before the first step.
        before_step: Called with the number of each step, from 0.
    """
    found = Walk()

    def reset(name: str, **seed: int) -> None:
        began = time.perf_counter()
        observation, _ = env.reset(**seed)
        found.slowest_reset = max(found.slowest_reset, time.perf_counter() - began)
        found.seen.append((name, copy.deepcopy(observation)))

    env.action_space.seed(0)
    reset("reset 0", seed=0)
    until = time.monotonic() + seconds
    while found.steps < steps and (found.steps == 0 or time.monotonic() < until):
        before_step(found.steps)
        action, began = env.action_space.sample(), time.perf_counter()
        *transition, _ = env.step(action)
        found.slowest_step = max(found.slowest_step, time.perf_counter() - began)
        found.steps += 1
        found.seen.append((f"step {found.steps}", copy.deepcopy(transition)))
        if transition[2] or transition[3]:
            reset(f"the reset after step {found.steps}")
    return found
