"""Walk at random through an env, the same way each time, and record what the env returns."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from multienv._engine.recovery.verification import same
from multienv.config import RestartPolicy

# Not 0: some envs take that for no seed.
SEED = 1
RAISE = RestartPolicy(on_crash="raise", on_timeout="raise", snapshots=False)


@dataclass
class Walk:
    """Holds the record of a random walk through an env.

    Attributes:
        seen: Name of each reset and step (``"step 7"``), and what it returned, without its info.
        steps: Number of steps taken.
        ends: Number of steps that had been taken at the end of each episode.
        ended: Number of episodes that ended by themselves.
        lost_in: Numbers of the steps in which this walk and earlier tries of it ended because the worker was lost.
        seconds: Time of all resets and steps.
        slowest_reset, slowest_step: Seconds.
    """

    seen: list[tuple[str, Any]] = field(default_factory=list)
    steps: int = 0
    ends: list[int] = field(default_factory=list)
    ended: int = 0
    lost_in: list[int] = field(default_factory=list)
    seconds: float = 0.0
    slowest_reset: float = 0.0
    slowest_step: float = 0.0

    def differs_at(self, other: Walk, *, observations: bool = True) -> str:
        """Return the name of the first reset or step that differs in the other walk; ``""``: none, as far as both go.

        Args:
            other: The other walk.
            observations: Compare them, too, and not the rewards and flags alone.
        """
        pairs = zip(self.seen, other.seen, strict=False)
        skipped = 0 if observations else 1  # a reset has returned nothing else
        return next((name for (name, one), (_, its) in pairs if not same(one[skipped:], its[skipped:])), "")


def walk(
    env: Any,
    steps: int,
    *,
    seconds: float = float("inf"),
    longest: float = float("inf"),
    cut_from: float = 0,
    before_step: Callable[[int], object] = lambda step: None,
    found: Walk | None = None,
) -> Walk:
    """Reset an env with seed 1, and take the same random steps each time. When an episode ends, reset without a seed.

    Args:
        env: The env. This function seeds its ``action_space``.
        steps: Largest number of steps.
        seconds: The walk ends after this time, but not before the first step.
        longest: Number of steps after which an episode is ended by a reset.
        cut_from: Before so many steps of the walk, no episode is ended so.
        before_step: Called with the number of each step, from 0.
        found: The record to fill, for a caller that wants it even if the walk ends with an error.
    """
    found = Walk() if found is None else found

    def reset(name: str, **seed: int) -> None:
        began = time.perf_counter()
        observation, _ = env.reset(**seed)
        took = time.perf_counter() - began
        found.slowest_reset = max(found.slowest_reset, took)
        found.seconds += took
        found.seen.append((name, (copy.deepcopy(observation),)))

    env.action_space.seed(SEED)
    reset("reset 0", seed=SEED)
    until = time.monotonic() + seconds
    while found.steps < steps and (found.steps == 0 or time.monotonic() < until):
        before_step(found.steps)
        action, began = env.action_space.sample(), time.perf_counter()
        *transition, _ = env.step(action)
        took = time.perf_counter() - began
        found.slowest_step = max(found.slowest_step, took)
        found.seconds += took
        found.steps += 1
        found.seen.append((f"step {found.steps}", copy.deepcopy(transition)))
        has_ended = bool(transition[2] or transition[3])
        found.ended += has_ended
        if has_ended or (found.steps - (found.ends or [0])[-1] >= longest and found.steps >= cut_from):
            found.ends.append(found.steps)
            reset(f"the reset after step {found.steps}")
    return found
