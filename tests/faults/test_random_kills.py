"""Real simulators, real deaths at random moments: every step is the undisturbed one, or says that it is not.

An undisturbed env takes the same actions beside. Where the lost one could not be brought back exactly, the step says
so; both then begin a new life, and are held against each other from there.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import ale_py
import gymnasium
import pytest

from kit import descendants, first_difference
from multienv import Deadlines, RestartPolicy, SubprocessEnv
from multienv.events import Recovery

gymnasium.register_envs(ale_py)

# "little": the journal reaches back to a reset or two, which is not enough for all of them.
POLICIES = {
    "snapshot": RestartPolicy(snapshot_every=4),
    "journal": RestartPolicy(snapshots=False),
    "little": RestartPolicy(snapshots=False, replay_limit=0.02),
}
STICKY = {"repeat_action_probability": 0.25}


def actions_for(env_fn: Callable[[], Any], count: int) -> list[Any]:
    env = env_fn()
    env.action_space.seed(3)
    actions = [env.action_space.sample() for _ in range(count)]
    env.close()
    return actions


def expect_same(result: Any, expected: Any, where: str) -> None:
    assert first_difference(result[0], expected[0]) is None, where
    assert result[1:4] == expected[1:4] or len(result) == 2, where


def play_beside(
    env: SubprocessEnv, env_fn: Callable[[], Any], actions: list[Any], strike: Callable[[int], object]
) -> int:
    """Take the actions beside an undisturbed env, striking before some of them; return how many were truncated."""
    told, twin = 0, env_fn()
    expect_same(env.reset(seed=5), twin.reset(seed=5), "the first reset")
    for step, action in enumerate(actions):
        strike(step)
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
    if not told:
        assert env.get_attr("np_random").random() == twin.unwrapped.np_random.random()
    twin.close()
    return told


@pytest.mark.parametrize(
    ("env_id", "rung"),
    [
        ("LunarLander-v3", "little"),
        ("HalfCheetah-v5", "journal"),
        ("ALE/Pong-v5", "snapshot"),
        ("ALE/Pong-v5", "little"),
    ],
)
def test_every_step_is_the_undisturbed_one_or_says_that_it_is_not(env_id: str, rung: str) -> None:
    options: dict[str, Any] = STICKY if "ALE" in env_id else {}
    env_fn = partial(gymnasium.make, env_id, max_episode_steps=60, **options)
    kills = 5
    actions = actions_for(env_fn, 25 * kills)
    dice, seen = random.Random(11), list[Any]()
    moments = set(dice.sample(range(5, len(actions)), kills))
    policy, limits = POLICIES[rung], Deadlines(step=0.5)
    with SubprocessEnv(env_fn, restart=policy, deadlines=limits, hooks=[seen.append]) as env:

        def strike(step: int) -> None:
            if step not in moments:
                return
            pid = env.statistics().pid or 0
            alone = rung != "snapshot" or dice.random() < 0.6
            number = dice.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP][: 3 if alone else 2])
            for snapshot in descendants(pid) if not alone else ():
                with contextlib.suppress(ProcessLookupError):  # a newer one has just taken its place
                    os.kill(snapshot, number)
            os.kill(pid, number)

        told = play_beside(env, env_fn, actions, strike)
        assert env.statistics().losses == kills
    recoveries = [event for event in seen if isinstance(event, Recovery)]
    outcomes = Counter(event.outcome for event in recoveries)
    assert outcomes == Counter(exact=kills - told, truncated=told)
    if rung != "little":
        assert told == 0
    if rung == "snapshot":
        assert sum(event.method == "snapshot" for event in recoveries) >= kills * 0.3
