"""Walk at random through an env, the same way each time, and note what is seen."""

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
    """Holds what was seen of an env on a random walk.

    Attributes:
        seen: What each reset and step returned, but for its info, by its name: ``"step 7"``.
        steps: How many steps were taken.
        slowest_reset, slowest_step: Seconds.
    """

    seen: list[tuple[str, Any]] = field(default_factory=list)
    steps: int = 0
    slowest_reset: float = 0.0
    slowest_step: float = 0.0

    def differs_at(self, other: Walk) -> str:
        """Return the name of the first reset or step that is another one there; ``""`` if there is none."""
        pairs = zip(self.seen, other.seen, strict=False)
        return next((name for (name, one), (_, its) in pairs if not same(one, its)), "")


def walk(
    env: Any,
    steps: int,
    *,
    seconds: float = float("inf"),
    before_step: Callable[[int], object] = lambda step: None,
) -> Walk:
    """Reset an env with seed 0 and take the same random steps each time; reset it without a seed where an episode ends.

    Args:
        env: The env. Its ``action_space`` is seeded.
        steps: How many, at the most.
        seconds: Ends after this time, but not before the first step.
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
