"""Rollouts while workers are killed, in the middle of fragments and between them: the trajectory is the undisturbed one."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

from kit import CounterEnv, ForkingPolicy, SlowEnv, first_difference
from kit.policies import Linear, constant
from multienv import RestartPolicy, SerialEnv, SerialVectorEnv, SubprocessEnv, SubprocessVectorEnv
from multienv.testing import Killer

POLICIES = {
    "snapshot": ForkingPolicy(snapshot_every=20, backoff=0.0),
    "journal": RestartPolicy(snapshots=False, backoff=0.0),
}
MAKERS = {
    "HalfCheetah": partial(gymnasium.make, "HalfCheetah-v5", max_episode_steps=60),
    # Long enough for most kills to come in the middle of a fragment.
    "SlowEnv": partial(SlowEnv, step_seconds=0.0005, count_episodes=False),
}


def expect_same(one: Any, other: Any) -> None:
    difference = first_difference(vars(one), vars(other))
    assert difference is None, difference


def recovered(envs: SubprocessVectorEnv) -> bool:
    return any(worker.exact_recoveries for worker in envs.statistics())


@pytest.mark.parametrize(
    ("name", "policy", "mode"), [("HalfCheetah", "snapshot", "NEXT_STEP"), ("SlowEnv", "journal", "SAME_STEP")]
)
def test_a_batch_that_is_killed_at_random_moments_shows_the_undisturbed_fragments(
    name: str, policy: str, mode: str
) -> None:
    env_fns = [MAKERS[name]] * 4
    with (
        SubprocessVectorEnv(env_fns, envs_per_worker=2, restart=POLICIES[policy], autoreset_mode=mode) as envs,
        SerialVectorEnv(env_fns, autoreset_mode=mode) as twin,
    ):
        chosen = Linear(envs.single_action_space)
        observations = envs.reset(seed=21)[0]
        assert observations.tobytes() == twin.reset(seed=21)[0].tobytes()
        with Killer(envs, interval=(0.1, 0.2), kills=4, seed=5) as killer:
            turn = 0
            while killer.delivered < 4 or not recovered(envs):
                fragment = envs.rollout(chosen, 50)
                expect_same(fragment, twin.rollout(chosen, 50))
                if turn % 5 == 0:  # a step in between, which a replay must find
                    actions = chosen(fragment.final_observations)[0]
                    one, other = envs.step(actions), twin.step(actions)
                    assert first_difference(one, other) is None
                turn += 1
        assert not any(worker.truncated_recoveries for worker in envs.statistics())


class Unrepeatable:
    """Chooses by chance from outside: no two computations of a fragment agree."""

    def __call__(self, observations: Any) -> Any:
        import os

        return np.array([byte % 4 for byte in os.urandom(len(observations))])


def test_what_was_delivered_is_replayed_with_the_recorded_actions() -> None:
    """The policy would choose others: only the journal can bring the envs to where the caller saw them."""
    with SubprocessVectorEnv([CounterEnv] * 2, envs_per_worker=2, restart=POLICIES["journal"]) as envs:
        envs.reset(seed=4)
        actions = envs.rollout(Unrepeatable(), 30).actions
        killer = Killer(envs)
        assert killer.strike()
        with SerialVectorEnv([CounterEnv] * 2) as twin:
            twin.reset(seed=4)
            for action in actions:
                twin.step(action)
            expect_same(envs.rollout(constant, 30), twin.rollout(constant, 30))
        (told,) = envs.statistics()
        assert (told.exact_recoveries, told.truncated_recoveries) == (1, 0)


@pytest.mark.parametrize("is_batch", [False, True], ids=["one env", "a batch"])
def test_a_replay_begins_at_a_reset_inside_a_fragment(is_batch: bool) -> None:
    """The only reset that the trainer has asked for has left the journal."""
    slow: Any = partial(SlowEnv, step_seconds=0.001, count_episodes=False)
    quick: Any = partial(CounterEnv, count_episodes=False)
    restart = RestartPolicy(snapshots=False, backoff=0.0, journal_limit=15_000)
    with (
        SubprocessVectorEnv([slow] * 2, envs_per_worker=2, restart=restart)
        if is_batch
        else SubprocessEnv(slow, restart=restart) as env,
        SerialVectorEnv([quick] * 2) if is_batch else SerialEnv(quick) as twin,
    ):
        for one in (env, twin):
            one.reset(seed=4)
        for _ in range(6):
            expect_same(env.rollout(constant, 50), twin.rollout(constant, 50))
        assert Killer(env).strike()
        expect_same(env.rollout(constant, 50), twin.rollout(constant, 50))
        told = env.statistics()[0] if is_batch else env.statistics()
        assert (told.replayed_recoveries, told.truncated_recoveries) == (1, 0)
        assert 0 < told.replayed_steps < 200
