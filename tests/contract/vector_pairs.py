"""Two vector envs taken through the same calls, and held against each other to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from kit import first_difference

EnvFn = Callable[[], gymnasium.Env[Any, Any]]
AnyVectorEnv = VectorEnv[Any, Any, Any]


@contextmanager
def beside_gymnasium(
    face: Callable[..., AnyVectorEnv], env_fns: Sequence[EnvFn], own: dict[str, Any] | None = None, **common: Any
) -> Iterator[tuple[AnyVectorEnv, AnyVectorEnv]]:
    """One of ours and a SyncVectorEnv of the same envs; ``own`` are arguments for ours alone."""
    with ExitStack() as stack:
        theirs = SyncVectorEnv(list(env_fns), **common)
        stack.callback(theirs.close)
        ours = face(list(env_fns), **common, **(own or {}))
        stack.callback(ours.close)
        expect_same(description(ours), description(theirs))
        yield ours, theirs


def description(envs: AnyVectorEnv) -> list[Any]:
    """What a vector env says of itself."""
    spaces = [envs.observation_space, envs.single_observation_space, envs.action_space, envs.single_action_space]
    return [spaces, envs.num_envs, envs.render_mode, envs.spec, envs.metadata]


def expect_same(one: Any, other: Any, where: object = "") -> None:
    difference = first_difference(one, other)
    assert difference is None, f"{where}: {difference}"


def run_side_by_side(
    ours: AnyVectorEnv, theirs: AnyVectorEnv, steps: int, *, seed: int = 7, actions: Callable[[int], Any] | None = None
) -> int:
    """Step both with the same actions, and reset what has ended where nobody else does.

    Returns:
        How many episodes ended.
    """
    disabled = theirs.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    theirs.action_space.seed(seed)
    expect_same(ours.reset(seed=seed), theirs.reset(seed=seed), "reset")
    ended, episodes = np.zeros(theirs.num_envs, np.bool_), 0
    for step in range(steps):
        if disabled and ended.any():
            results = [envs.reset(options={"reset_mask": ended.copy()}) for envs in (ours, theirs)]
            expect_same(*results, f"reset before step {step}")
        action = theirs.action_space.sample() if actions is None else actions(step)
        mine, other = ours.step(action), copy.deepcopy(theirs.step(action))
        expect_same(mine, other, f"step {step}")
        ended = other[2] | other[3]
        episodes += int(ended.sum())
    return episodes
