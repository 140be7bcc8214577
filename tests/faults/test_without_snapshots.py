"""With forked snapshots switched off a recovery is exact, or it is said not to be: never a splice, for any env.

An undisturbed env takes the same actions beside. Where the lost one could not be brought back exactly, the step says so;
both then begin a new life, and are held against each other from there.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from functools import partial
from typing import Any

import gymnasium
import pytest
from test_snapshots import REAL, actions_for, pid_of

from kit import observations_equal
from multienv import Deadlines, RestartPolicy, SubprocessEnv
from multienv.events import Recovery

# The journal reaches back to the construction of the env; or to a reset or two, which is not enough for all of them.
LIMITS = {"all": {}, "little": {"replay_limit": 0.02}}


QUICK = ("CartPole-v1", "BipedalWalker-v3", "ALE/Breakout-v5")
ROWS = [(env_id, 3) for env_id in QUICK] + [pytest.param(env_id, 72, marks=pytest.mark.soak) for env_id in REAL]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(("env_id", "kills"), ROWS)
def test_every_step_is_the_undisturbed_one_or_says_that_it_is_not(env_id: str, limit: str, kills: int) -> None:
    env_fn = partial(gymnasium.make, env_id, max_episode_steps=60, **REAL[env_id])
    actions = actions_for(env_fn, 25 * kills)
    dice, seen = random.Random(11), []
    moments = set(dice.sample(range(5, len(actions)), kills))
    policy = RestartPolicy(snapshots=False, **LIMITS[limit])
    told = 0
    with SubprocessEnv(env_fn, restart=policy, deadlines=Deadlines(step=1.0), hooks=[seen.append]) as env:
        twin = env_fn()
        expect_same(env.reset(seed=5), twin.reset(seed=5), "the first reset")
        for step, action in enumerate(actions):
            if step in moments:
                os.kill(pid_of(env), dice.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP]))
            result = env.step(action)
            if "multienv" in result[4]:
                told += 1
                assert result[3]
                assert result[4]["multienv"]["reason"]
                twin.close()
                twin = env_fn()
                expect_same(env.reset(seed=step), twin.reset(seed=step), f"the reset after step {step}")
                continue
            expect_same(result, twin.step(action), f"step {step}")
            if result[2] or result[3]:
                expect_same(env.reset(), twin.reset(), f"the reset after step {step}")
        twin.close()
        statistics = env.statistics()
    outcomes = Counter(event.outcome for event in seen if isinstance(event, Recovery))
    assert sum(outcomes.values()) == statistics.losses == kills
    assert outcomes["truncated"] == told
    if limit == "all":
        assert outcomes == {"exact": kills}


def expect_same(result: Any, expected: Any, where: str) -> None:
    assert observations_equal(result[0], expected[0]), where
    assert result[1:4] == expected[1:4] or len(result) == 2, where
