"""rollout(policy, steps) is the loop of steps that it stands for, to the bit; and so is what comes after it."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from kit import CounterEnv, Fault, FaultyEnv, ForkingPolicy, SpaceEnv, example_spaces, first_difference
from kit.policies import Fails, Linear, Sampling, constant, telling
from kit.side_by_side import expect_same
from multienv import (
    Deadlines,
    Fragment,
    RestartPolicy,
    SerialEnv,
    SerialVectorEnv,
    SubprocessEnv,
    SubprocessVectorEnv,
)
from multienv.errors import (
    EnvError,
    EnvsFailedError,
    PolicyError,
    ResetNeededError,
    UsageError,
    WorkerLostError,
)

MAKERS = {
    "CartPole": partial(gymnasium.make, "CartPole-v1"),
    "LunarLander": partial(gymnasium.make, "LunarLander-v3", continuous=True),
    "HalfCheetah": partial(gymnasium.make, "HalfCheetah-v5", max_episode_steps=25),
}
FACES: dict[str, Any] = {
    "one worker": partial(SubprocessVectorEnv, envs_per_worker=3),
    "several workers": partial(SubprocessVectorEnv, envs_per_worker=2),
    "serial": SerialVectorEnv,
}
LENGTHS = (1, 40, 7, 64)
# Spaces whose values are a number: a row of a stack is a numpy scalar.
SCALARS = ("discrete", "discrete_start", "box_scalar")


def at_step(stack: Any, step: int) -> Any:
    if isinstance(stack, dict):
        return {key: at_step(member, step) for key, member in stack.items()}
    return tuple(at_step(member, step) for member in stack) if isinstance(stack, tuple) else stack[step]


def follow(fragment: Fragment, observation: Any, step: Any, *, exact_actions: bool = True) -> Any:
    """Take the steps of a fragment with ``step``, compare all that they return, and return the last observation."""
    for index in range(len(fragment)):
        expect_same(at_step(fragment.observations, index), observation, f"observation {index}")
        observation, reward, terminated, truncated, info = step(at_step(fragment.actions, index))
        told = fragment.rewards[index], fragment.terminations[index], fragment.truncations[index]
        expect_same(
            list(map(np.asarray, told)), list(map(np.asarray, (reward, terminated, truncated))), f"step {index}"
        )
        assert first_difference(dict(fragment.infos.get(index, {})), info) is None, f"info {index}"
    expect_same(fragment.final_observations, observation, "the final observations")
    return observation


@pytest.mark.parametrize(
    ("name", "face", "mode"),
    [
        *(("CartPole", face, mode) for face in FACES for mode in ("NEXT_STEP", "SAME_STEP")),
        ("LunarLander", "several workers", "NEXT_STEP"),
        ("HalfCheetah", "several workers", "SAME_STEP"),
    ],
)
def test_a_rollout_of_a_batch_is_the_loop_of_steps_to_the_bit(name: str, face: str, mode: str) -> None:
    """Against gymnasium's own vector env; the policy is asked the same in either."""
    with FACES[face]([MAKERS[name]] * 3, autoreset_mode=mode) as envs:
        twin = SyncVectorEnv([MAKERS[name]] * 3, autoreset_mode=AutoresetMode[mode])
        observations = twin.reset(seed=11)[0]
        expect_same(envs.reset(seed=11)[0], observations, "reset")
        policy = Linear(envs.single_action_space)
        for length in LENGTHS:
            fragment = envs.rollout(policy, length)
            assert len(fragment) == length
            actions, extras = policy(fragment.observations.reshape(3 * length, -1))
            expect_same(fragment.actions.reshape(actions.shape), actions, "actions")
            expect_same(fragment.extras["score"].ravel(), extras["score"], "extras")
            observations = follow(fragment, observations, twin.step)
            actions = policy(observations)[0]
            results = envs.step(actions), twin.step(actions)
            expect_same(*results, "a step after it")
            observations = results[1][0]
        assert np.any([worker.episodes > 3 for worker in envs.statistics()])
        twin.close()


@pytest.mark.parametrize("face", [SubprocessEnv, SerialEnv])
@pytest.mark.parametrize("name", ["CartPole", "HalfCheetah"])
def test_a_rollout_of_one_env_is_the_loop_of_steps_and_resets_to_the_bit(name: str, face: Any) -> None:
    with face(MAKERS[name]) as env:
        twin = MAKERS[name]()
        observation = twin.reset(seed=11)[0]
        expect_same(env.reset(seed=11)[0], observation)
        policy = Linear(env.action_space)

        def step(action: Any) -> Any:
            observation, reward, terminated, truncated, info = twin.step(action)
            if terminated or truncated:
                begun, more = twin.reset()
                info = {**more, "final_obs": observation, "final_info": info}
                observation = begun
            return observation, float(reward), terminated, truncated, info

        for length in LENGTHS:
            observation = follow(env.rollout(policy, length), observation, step)
            action = policy(observation)[0]
            observation, ended = env.step(action)[0], step(action)
            if ended[2] or ended[3]:
                observation = env.reset()[0]
            expect_same(observation, ended[0], "a step after it")
        assert env.statistics().steps == sum(LENGTHS) + len(LENGTHS)
        twin.close()


@pytest.mark.parametrize("kind", sorted(example_spaces()))
def test_observations_and_actions_of_every_space(kind: str) -> None:
    """The infos tell of type, shape and every bit of the action that each env was given."""
    found = example_spaces()
    env_fn = partial(SpaceEnv, observation_space=found[kind], action_space=found[kind], horizon=3, seed=1)
    policy = Sampling(found[kind], 2)
    with (
        FACES["one worker"]([env_fn] * 2, autoreset_mode="SAME_STEP") as envs,
        FACES["serial"]([env_fn] * 2, autoreset_mode="SAME_STEP") as twin,
    ):
        observations = envs.reset(seed=2)[0]
        expect_same(observations, twin.reset(seed=2)[0])
        follow(envs.rollout(policy, 7), observations, twin.step)
        actions = policy(observations)
        expect_same(envs.step(actions), twin.step(actions))
    policy = Sampling(found[kind])
    with SubprocessEnv(env_fn) as env, SerialEnv(env_fn) as other:
        observation = env.reset(seed=2)[0]
        expect_same(observation, other.reset(seed=2)[0])
        fragment = env.rollout(policy, 2)
        for index in range(2):
            seen = at_step(fragment.observations, index)
            expect_same(*map(np.asarray, (seen, observation))) if kind in SCALARS else expect_same(seen, observation)
            observation = other.step(policy(observation))[0]
        action = policy(observation)
        expect_same(env.step(action), other.step(action))


def test_parts_of_workers_are_put_together_in_the_order_of_the_envs() -> None:
    env_fn = partial(SpaceEnv, observation_space=example_spaces()["dict"], horizon=5, seed=1)
    with SubprocessVectorEnv([env_fn] * 3, envs_per_worker=2) as envs, SerialVectorEnv([env_fn] * 3) as twin:
        observations = envs.reset(seed=4)[0]
        expect_same(observations, twin.reset(seed=4)[0])
        follow(envs.rollout(partial(_ones, 3), 12), observations, twin.step)


def _ones(most: int, observations: Any) -> Any:
    rows = len(observations["position"])
    assert rows < most
    return np.ones(rows, np.int64)


# --- what it is to the rest ---------------------------------------------------------------------


def test_a_worker_that_makes_rollouts_alone_takes_snapshots_and_forgets_what_is_far_back() -> None:
    restart = ForkingPolicy(snapshot_every=16, journal_limit=4000)
    with SubprocessVectorEnv([CounterEnv] * 2, envs_per_worker=2, restart=restart) as envs:
        envs.reset(seed=1)
        for _ in range(40):
            envs.rollout(constant, 32)
        (told,) = envs.statistics()
        assert told.snapshots >= 20
        assert (
            told.journal_bytes < 60_000
        )  # with the generators of a few starts; all of it would take four times as much


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "at"), [("raise", 1), ("wrong", 5)])
@pytest.mark.parametrize("face", [SubprocessEnv, SerialEnv, *FACES])
def test_a_policy_that_raises_is_told_and_the_envs_go_on_exactly(face: Any, at: int, what: str) -> None:
    one = not isinstance(face, str)
    with (
        face(CounterEnv) if one else FACES[face]([CounterEnv] * 3) as env,
        SerialEnv(CounterEnv) if one else SerialVectorEnv([CounterEnv] * 3) as twin,
    ):
        for each in (env, twin):
            each.reset(seed=8)
        with pytest.raises(PolicyError) as told:
            env.rollout(Fails(at, what), 9)
        assert ("KeyError: 'no such layer'" if what == "raise" else "78.5") in str(told.value)
        assert "policies.py" in told.value.remote_traceback or what == "wrong"
        assert isinstance(told.value.__cause__, KeyError if what == "raise" else UsageError)
        for _ in range(at - 1):
            twin.step(1 if one else np.ones(3, np.int64))
        expect_same(vars(env.rollout(constant, 20)), vars(twin.rollout(constant, 20)))
        # An action that the env refuses is no error of the policy.
        with pytest.raises(ValueError, match="78 is not in Discrete|78\\) is not in Discrete") as refused:
            env.rollout(Fails(3, "wide"), 9)
        assert isinstance(refused.value, EnvError if one else EnvsFailedError)


def test_further_values_must_have_a_row_for_each_observation() -> None:
    with SubprocessVectorEnv([CounterEnv] * 2, envs_per_worker=2) as envs:
        envs.reset(seed=1)
        with pytest.raises(PolicyError, match="'value' of shape"):
            envs.rollout(Fails(2, "ragged"), 3)


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
@pytest.mark.parametrize("face", FACES)
def test_an_env_that_raises_ends_its_episode_and_the_fragments_are_in_the_error(face: str, mode: str) -> None:
    faulty = partial(FaultyEnv, fault=Fault("raise", "step", at=4))
    env_fns = [CounterEnv, faulty, CounterEnv]
    with (
        FACES[face](env_fns, autoreset_mode=mode) as envs,
        SerialVectorEnv([CounterEnv] * 3, autoreset_mode=mode) as twin,
    ):
        for one in (envs, twin):
            one.reset(seed=5)
        expected = twin.rollout(telling, 20)
        with pytest.raises(EnvsFailedError) as told:
            envs.rollout(telling, 20)
        assert list(told.value.failures) == [1]
        assert told.value.results[1] is None
        for index in (0, 2):
            expect_same(told.value.results[index].observations, expected.observations[:, index])
            expect_same(told.value.results[index].rewards, expected.rewards[:, index])
        own = told.value.failures[1].fragment
        expect_same(own.extras["given"], own.observations)
        assert own.truncations.tolist()[:5] == [False, False, False, True, False]
        assert own.rewards[3] == 0.0
        assert "FaultError" in own.infos[3]["multienv"]["reason"]
        expect_same(own.observations[:4], expected.observations[:4, 1])
        if mode == "NEXT_STEP":
            expect_same(own.observations[4], own.observations[3])
            assert own.observations[5][0] == 0
        else:
            expect_same(own.infos[3]["final_obs"], own.observations[3])
        assert len(envs.rollout(constant, 5)) == 5


def test_an_env_alone_that_raises_goes_on_with_its_next_episode() -> None:
    with SubprocessEnv(partial(FaultyEnv, fault=Fault("raise", "step", at=4))) as env:
        env.reset(seed=5)
        with pytest.raises(RuntimeError) as told:
            env.rollout(telling, 8)
        fragment = told.value.fragment
        expect_same(fragment.extras["given"], fragment.observations)
        assert fragment.truncations.tolist() == [False, False, False, True, False, False, False, False]
        assert fragment.observations[:, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
        assert fragment.infos[3]["final_obs"][0] == 3
        assert "FaultError" in fragment.infos[3]["final_info"]["multienv"]["reason"]
        assert env.step(1)[0][0] == 5
    with SubprocessEnv(partial(FaultyEnv, fault=Fault("raise", "reset", at=2), horizon=3)) as env:
        env.reset(seed=5)
        with pytest.raises(RuntimeError) as told:
            env.rollout(constant, 8)
        assert len(told.value.fragment) == 3
        with pytest.raises(ResetNeededError):
            env.rollout(constant, 8)
        env.reset()
        assert len(env.rollout(constant, 8)) == 8


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_an_error_that_truncates_is_a_truncation_of_its_step(mode: str) -> None:
    restart = RestartPolicy(on_error="truncate")
    faulty = partial(FaultyEnv, fault=Fault("raise", "step", at=4))
    with SubprocessVectorEnv([CounterEnv, faulty], envs_per_worker=2, autoreset_mode=mode, restart=restart) as envs:
        observations = envs.reset(seed=5)[0]
        with SubprocessVectorEnv([CounterEnv, faulty], envs_per_worker=2, autoreset_mode=mode, restart=restart) as twin:
            twin.reset(seed=5)
            follow(envs.rollout(constant, 8), observations, twin.step)
    with SubprocessEnv(faulty, restart=restart) as env:
        env.reset(seed=5)
        assert env.rollout(constant, 8).truncations.tolist() == [index == 3 for index in range(8)]
        assert env.statistics().truncated_recoveries == 1


# --- policies that end their process ------------------------------------------------------------


def test_a_policy_that_ends_every_process_raises_and_no_episode_ends() -> None:
    restart = RestartPolicy(backoff=0.0, snapshots=False)
    with (
        SubprocessVectorEnv([CounterEnv] * 2, envs_per_worker=2, restart=restart) as envs,
        SerialVectorEnv([CounterEnv] * 2) as twin,
    ):
        for one in (envs, twin):
            one.reset(seed=8)
            one.rollout(constant, 4)
        with pytest.raises(EnvsFailedError) as told:
            envs.rollout(Fails(3, "die"), 5)
        assert isinstance(told.value.failures[0], WorkerLostError)
        expect_same(vars(envs.rollout(constant, 20)), vars(twin.rollout(constant, 20)))


def test_a_fragment_has_the_time_of_its_steps() -> None:
    with SubprocessEnv(CounterEnv, deadlines=Deadlines(step=0.05), restart=RestartPolicy(on_timeout="raise")) as env:
        env.reset(seed=8)
        with pytest.raises(WorkerLostError, match=r"within its deadline of 0\.25 s") as told:
            env.rollout(Fails(3, "hang"), 5)
        assert isinstance(told.value, TimeoutError)
