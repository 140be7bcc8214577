"""Invariant 8: Ctrl-C costs nothing. Real SIGINTs at random moments cost no worker and no transition.

Each raises KeyboardInterrupt exactly once. The calls are made again after each.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from faces import KINDS, Face

from kit import CounterEnv, assert_same_trajectory
from kit.sigints import Presses
from kit.trainer_process import PATH, run
from multienv import AsyncEnv, MultiEnv, SubprocessEnv, SubprocessVectorEnv, create_subprocess_envs, interrupts

ENDLESS = partial(CounterEnv, horizon=None)
# SIGINTs in a test, and in the soak run.
SOME, MANY = 25, 200


class SlowEnv(CounterEnv):
    """Takes a millisecond for a step: the trainer sleeps meanwhile."""

    def step(self, action: Any) -> Any:
        time.sleep(0.001)
        return super().step(action)


def actions_of(number: int, num_envs: int) -> list[int]:
    return [(number + env) % 4 for env in range(num_envs)]


def plain_steps(kind: str, env_fn: str, times: str) -> None:
    """Step through SIGINTs; hold all that came back against the same envs in this process."""
    env_fns = [partial({"fast": CounterEnv, "slow": SlowEnv}[env_fn], horizon=None)] * 2
    face = Face(kind, env_fns)
    first, envs = face.reset(0), face.envs

    def step(number: int) -> Any:
        actions = actions_of(number, face.num_envs)
        given: Any = actions if kind == "multi_env" else np.array(actions)
        return envs.step(np.int64(actions[0]) if kind == "subprocess_env" else given)

    steps = Presses(int(times), 0.01, f"{kind} {env_fn}").repeat(step)
    assert [(one.losses, one.restarts, one.recycled) for one in face.statistics()] == [(0, 0, 0)] * len(face.pids())
    face.close()
    for env in range(face.num_envs):
        bare = CounterEnv(horizon=None)
        assert np.array_equal(bare.reset(seed=env)[0], first[env].observation)
        for number, one in enumerate(steps):
            row = one if kind == "subprocess_env" else [part[env] for part in one[:4]]
            expected = bare.step(np.int64(actions_of(number, face.num_envs)[env]))
            assert np.array_equal(row[0], expected[0]), (number, row, expected)
            assert tuple(row[1:4]) == expected[1:4], (number, row, expected)
    print(len(steps), "steps", times, "SIGINTs", flush=True)


@pytest.mark.parametrize("env_fn", ["fast", "slow"])
@pytest.mark.parametrize("kind", KINDS)
def test_plain_steps(kind: str, env_fn: str) -> None:
    run("test_8_sigint_costs_nothing", "plain_steps", kind, env_fn, SOME)


@pytest.mark.soak
@pytest.mark.parametrize("env_fn", ["fast", "slow"])
@pytest.mark.parametrize("kind", KINDS)
def test_plain_steps_through_many(kind: str, env_fn: str) -> None:
    print(run("test_8_sigint_costs_nothing", "plain_steps", kind, env_fn, MANY, within=120.0))
