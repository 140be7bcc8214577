"""Look at an env in a process that may die of it: walk at random, and time it."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium

from multienv import Deadlines, RestartPolicy, SubprocessEnv
from multienv.recovery.verification import same
from multienv.testing.side_by_side import EnvFn

RAISE = RestartPolicy(on_crash="raise", on_timeout="raise", snapshots=False)


class Probe(gymnasium.Env[Any, Any]):
    """Calls functions in the process that it is built in; it has no episodes worth the name."""

    observation_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(1)
    action_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(1)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what the function returns."""
        return function(*arguments)


class Stepper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Steps an env for as long as it is told to: the most that a core can do.

    Args:
        env_fn: Builds the env.
        core: To run on.
    """

    def __init__(self, env_fn: EnvFn, core: int) -> None:
        super().__init__(env_fn())
        self._core = core
        self.env.reset(seed=0)
        self.env.action_space.seed(0)
        self._actions = [self.env.action_space.sample() for _ in range(64)]

    def step_for(self, seconds: float) -> float:
        """Step for so long, and begin the next episode where one ends; return the steps a second."""
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {self._core})
        env, steps, began = self.env, 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds:
            _, _, terminated, truncated, _ = env.step(self._actions[steps % 64])
            if terminated or truncated:
                env.reset()
            steps += 1
        return steps / spent


def in_worker(function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
    """Call a function in a process of its own, which it may hang or kill.

    Args:
        function: It and its arguments are pickled, and so is what it returns.
        arguments: For it.
        seconds: It is killed after that.

    Raises:
        EnvRaisedError: It raised.
        WorkerLostError: It ended its process, or hung.
    """
    with SubprocessEnv(Probe, restart=RAISE, deadlines=Deadlines(call=seconds), reports="") as worker:
        return worker.call("run", function, *arguments)


@dataclass
class Walk:
    """Holds what was seen of an env on a random walk.

    Attributes:
        seen: What each reset and step returned, but for its info, by its name: ``"step 7"``.
        steps: How many steps were taken.
    """

    seen: list[tuple[str, Any]] = field(default_factory=list)
    steps: int = 0

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
    env.action_space.seed(0)
    found.seen.append(("reset 0", copy.deepcopy(env.reset(seed=0)[0])))
    until = time.monotonic() + seconds
    while found.steps < steps and (found.steps == 0 or time.monotonic() < until):
        before_step(found.steps)
        *transition, _ = env.step(env.action_space.sample())
        found.steps += 1
        found.seen.append((f"step {found.steps}", copy.deepcopy(transition)))
        if transition[2] or transition[3]:
            found.seen.append((f"the reset after step {found.steps}", copy.deepcopy(env.reset()[0])))
    return found


class Times(NamedTuple):
    """Tells how long an env takes, in seconds: the median of its resets and steps, and the slowest step."""

    build: float = 0.0
    reset: float = 0.0
    step: float = 0.0
    slowest_step: float = 0.0
    close: float = 0.0


def times(env_fn: EnvFn, most: int, seconds: float) -> Times:
    """Build an env in this process, step it so often or for so long, and close it; return what took how long."""
    clock = time.perf_counter
    began = clock()
    env = env_fn()
    build = clock() - began
    resets: list[float] = []
    steps: list[float] = []
    ended, seed = True, 0
    env.action_space.seed(0)
    until = clock() + seconds
    while not steps or (clock() < until and len(steps) < most):
        if ended:
            began = clock()
            env.reset(seed=seed)
            resets.append(clock() - began)
            seed += 1
        action = env.action_space.sample()
        began = clock()
        _, _, terminated, truncated, _ = env.step(action)
        steps.append(clock() - began)
        ended = bool(terminated or truncated)
    began = clock()
    env.close()
    close = clock() - began
    resets.sort()
    steps.sort()
    return Times(build, resets[len(resets) // 2], steps[len(steps) // 2], steps[-1], close)
