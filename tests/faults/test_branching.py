"""Branching: any state of any forkable env can be come back to, any number of times."""

from __future__ import annotations

import gc
import os
import random
import signal
from functools import partial
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest
from trainer_process import becomes_true

from kit import (
    CounterEnv,
    descendants,
    first_difference,
    is_alive,
)
from multienv import RestartPolicy, SerialEnv, SubprocessEnv
from multienv.errors import ClosedError, NotForkableError, UsageError

gymnasium.register_envs(ale_py)
ENDLESS = partial(CounterEnv, horizon=None)
STICKY = {"repeat_action_probability": 0.25}


def play(env: Any, actions: list[Any]) -> list[Any]:
    return [env.step(action)[:4] for action in actions]


@pytest.mark.parametrize(
    ("env_id", "options"),
    [
        ("LunarLander-v3", {}),
        pytest.param("BipedalWalker-v3", {}, marks=pytest.mark.soak),
        ("ALE/Breakout-v5", STICKY),
        pytest.param("HalfCheetah-v5", {}, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("killing", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["", "killing"])
def test_each_branch_is_the_trajectory_that_leads_there(env_id: str, options: Any, killing: bool) -> None:
    """A tree of random depth, held against envs that take the same actions from the start."""
    env_fn = partial(gymnasium.make, env_id, **options)
    dice = random.Random(4)
    plain = env_fn()
    plain.action_space.seed(1)
    sample = plain.action_space.sample
    with SubprocessEnv(env_fn, restart=RestartPolicy(snapshot_every=10)) as env:
        env.reset(seed=3)
        tree = [(env.snapshot(), list[Any]())]
        for _ in range(7):
            token, path = dice.choice(tree)
            env.restore(token)
            branch = [sample() for _ in range(dice.randint(1, 6))]
            for action in branch[:-1]:
                env.step(action)
                if killing and dice.random() < 0.3:
                    os.kill(env.statistics().pid or 0, signal.SIGKILL)
            seen = env.step(branch[-1])
            path = path + branch
            plain.reset(seed=3)
            plain = reborn(env_fn, plain)
            plain.reset(seed=3)
            assert first_difference(seen[:4], play(plain, path)[-1]) is None
            tree.append((env.snapshot(), path))
        if killing:
            assert env.statistics().losses
        assert env.statistics().truncated_recoveries == 0
    plain.close()


def reborn(env_fn: Any, old: Any) -> Any:
    """Its state may outlive an episode."""
    old.close()
    return env_fn()


def test_they_are_freed() -> None:
    with SubprocessEnv(ENDLESS, restart=RestartPolicy(snapshots=False)) as env:
        env.reset(seed=1)
        before = alive()
        tokens = [env.snapshot() for _ in range(4)]
        assert becomes_true(lambda: len(alive() - before) == 4)
        tokens.pop().free()
        assert becomes_true(lambda: len(alive() - before) == 3)
        tokens.pop()
        gc.collect()
        assert becomes_true(lambda: len(alive() - before) == 2)
        with pytest.raises(UsageError, match="freed"):
            tokens[0].free()
            env.restore(tokens[0])
        env.restore(tokens[1])
        assert env.step(np.int64(1))[0][0] == 1
    assert becomes_true(lambda: not alive() - before)
    with pytest.raises(ClosedError):
        env.restore(tokens[1])
    with pytest.raises(ClosedError):
        env.snapshot()


@pytest.mark.parametrize("how", ["freed", "closed"])
def test_one_that_has_been_stopped_ends_too(how: str) -> None:
    """The one that is kept and the worker's own; another env keeps the monitor busy."""
    with SubprocessEnv(ENDLESS) as other, SubprocessEnv(ENDLESS, restart=RestartPolicy(snapshot_every=2)) as env:
        other.reset(seed=0)
        env.reset(seed=0)
        before = alive()
        for _ in range(3):
            env.step(np.int64(1))
        token = env.snapshot()
        assert becomes_true(lambda: len(alive() - before) == 2)
        for pid in alive() - before:
            os.kill(pid, signal.SIGSTOP)
        if how == "freed":
            token.free()
            assert becomes_true(lambda: len(alive() - before) == 1)
        env.close()
        assert becomes_true(lambda: not alive() - before)


def alive() -> set[int]:
    return {pid for pid in descendants(os.getpid()) if is_alive(pid)}


def test_wrong_calls() -> None:
    policy = RestartPolicy(max_snapshots=2)
    with SubprocessEnv(ENDLESS, restart=policy) as env, SubprocessEnv(ENDLESS) as other:
        token = env.snapshot()
        with pytest.raises(UsageError, match="another env's"):
            other.restore(token)
        with pytest.raises(UsageError, match="what snapshot"):
            env.restore("token")  # type: ignore[arg-type]
        kept = env.snapshot()
        with pytest.raises(UsageError, match="max_snapshots"):
            env.snapshot()
        kept.free()
        env.snapshot()
        env.reset(seed=0)
        env.step_async(np.int64(1))
        with pytest.raises(UsageError, match="pending"):
            env.snapshot()
        with pytest.raises(UsageError, match="pending"):
            env.restore(token)
        assert env.step_wait()[0][0] == 1


def test_an_env_in_the_trainers_own_process_says_that_it_cannot_be_forked() -> None:
    with SerialEnv(ENDLESS) as env:
        env.reset(seed=0)
        with pytest.raises(NotForkableError):
            env.snapshot()
        assert env.step(np.int64(1))[0][0] == 1
