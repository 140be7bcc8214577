"""Two vector envs taken through the same calls, and held against each other to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from kit.trajectories import first_difference

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


def info_of(infos: dict[str, Any], index: int) -> dict[str, Any]:
    """Return an env's part of the merged infos of a batch."""
    found: dict[str, Any] = {}
    for key, value in infos.items():
        if key[0] != "_" and infos[f"_{key}"][index]:
            one = info_of(value, index) if isinstance(value, dict) else value[index]
            found[key] = one.item() if isinstance(one, np.generic) else one
    return found


def run_side_by_side(
    ours: Any,
    theirs: AnyVectorEnv,
    steps: int,
    *,
    seed: int = 7,
    actions: Callable[[int], Any] | None = None,
    before_step: Callable[[int], object] = bool,
    infos: bool = True,
) -> int:
    """Step both with the same actions, and reset what has ended where nobody else does.

    Args:
        ours: The envs in question.
        theirs: A vector env of the same envs, in which nothing happens to any process.
        steps: How many.
        seed: Of the first reset, and of the actions.
        actions: What is done in each step; None: samples.
        before_step: Called with the number of each step, from 0: kills, looks on.
        infos: Compare them, too.

    Returns:
        How many episodes ended.
    """
    parts = 5 if infos else 4
    disabled = theirs.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    theirs.action_space.seed(seed)
    expect_same(*(envs.reset(seed=seed)[: parts - 3] for envs in (ours, theirs)), "reset")
    ended, episodes = np.zeros(theirs.num_envs, np.bool_), 0
    for step in range(steps):
        if disabled and ended.any():
            results = [envs.reset(options={"reset_mask": ended.copy()})[: parts - 3] for envs in (ours, theirs)]
            expect_same(*results, f"reset before step {step}")
        action = theirs.action_space.sample() if actions is None else actions(step)
        before_step(step)
        mine, other = ours.step(action)[:parts], copy.deepcopy(theirs.step(action)[:parts])
        expect_same(mine, other, f"step {step}")
        ended = other[2] | other[3]
        episodes += int(ended.sum())
    return episodes
