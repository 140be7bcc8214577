"""The envs of the kit: deterministic where they say so, and quirky in exactly the way they say."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import time
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import multienv.testing as kit
from multienv.testing import (
    CounterEnv,
    ForkingEnv,
    GlobalRandomEnv,
    LeakyEnv,
    NoisyEnv,
    NondeterministicEnv,
    PidEnv,
    SameArrayEnv,
    SlowEnv,
    SpaceEnv,
    StickyStateEnv,
    TokenSpace,
    WallClockInfoEnv,
    assert_no_splice,
    assert_same_trajectory,
    descendants,
    digest_value,
    example_spaces,
    first_difference,
    is_alive,
    no_leaks,
    rollout,
)

ACTION = np.int64(2)
DETERMINISTIC = [CounterEnv, LeakyEnv, NoisyEnv, PidEnv, SameArrayEnv, SlowEnv, StickyStateEnv, WallClockInfoEnv]


def test_every_public_name_is_there_and_sorted_by_kind():
    assert all(hasattr(kit, name) for name in kit.__all__)
    assert len(set(kit.__all__)) == len(kit.__all__)


@pytest.mark.parametrize("env_class", [CounterEnv, PidEnv, SlowEnv])
def test_plain_envs_pass_gymnasiums_checker(env_class):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env_class(), skip_render_check=True)


def test_the_counter_shows_steps_episodes_draws_and_actions():
    env = CounterEnv(horizon=2)
    draws = np.random.Generator(np.random.PCG64(np.random.SeedSequence(5))).random(5)
    first, _ = env.reset(seed=5)
    np.testing.assert_array_equal(first, np.array([0, 0, draws[0], -1], dtype=np.float32))
    observation, reward, terminated, truncated, info = env.step(ACTION)
    np.testing.assert_array_equal(observation, np.array([1, 0, draws[1], 2], dtype=np.float32))
    assert (reward, terminated, truncated, info) == (draws[1] * 3, False, False, {})
    assert env.step(ACTION)[2:4] == (True, False)
    observation, _ = env.reset()
    np.testing.assert_array_equal(observation, np.array([0, 1, draws[3], -1], dtype=np.float32))
    assert env.reset(seed=5)[0][1] == 0


@pytest.mark.parametrize(
    ("ending", "flags"), [("terminated", (True, False)), ("truncated", (False, True)), ("both", (True, True))]
)
def test_the_counter_ends_as_told(ending, flags):
    env = CounterEnv(horizon=1, ending=ending)
    env.reset()
    assert env.step(ACTION)[2:4] == flags


def test_the_counter_refuses_what_makes_no_sense():
    env = CounterEnv(horizon=1)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(ACTION)
    env.reset()
    with pytest.raises(ValueError, match="not in"):
        env.step(np.int64(4))
    env.step(ACTION)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(ACTION)
    with pytest.raises(ValueError, match="ending"):
        CounterEnv(ending="never")


def test_the_counter_without_episode_numbers_starts_every_episode_alike():
    env = CounterEnv(count_episodes=False)
    assert env.reset(seed=1)[0][1] == env.reset()[0][1] == 0


def test_options_pokes_and_attributes_show_in_the_observation():
    env = CounterEnv(horizon=None)
    assert env.reset(seed=1, options={"start": 7})[0][0] == 7
    assert env.poke(2.0) == 1
    env.offset += 1.0
    assert 3 <= env.step(ACTION)[0][2] < 4


def test_the_counter_renders_its_counts():
    env = CounterEnv(render_mode="rgb_array")
    env.reset(seed=1)
    env.step(ACTION)
    frame = env.render()
    assert (frame.shape, frame.dtype, frame[0, 0, 0]) == ((8, 8, 3), np.uint8, 1)
    ansi = CounterEnv(render_mode="ansi")
    ansi.reset()
    assert ansi.render() == "episode 0 step 0"
    assert CounterEnv().render() is None


@pytest.mark.parametrize("env_class", DETERMINISTIC)
def test_deterministic_envs_repeat_themselves_and_never_splice(env_class, capfd):
    first = rollout(env_class(), num_steps=35, seed=4)
    second = rollout(pickle.loads(pickle.dumps(env_class))(), num_steps=35, seed=4)
    assert_same_trajectory(first, second)
    if env_class is not StickyStateEnv:
        assert_no_splice(first)
    capfd.readouterr()


def test_a_leaky_env_leaks():
    env = LeakyEnv(bytes_per_step=1000)
    rollout(env, num_steps=5)
    assert env.leaked == 5000


@pytest.mark.parametrize("shown_in", ["observation", "reward", "both"])
def test_a_nondeterministic_env_differs_only_since_and_where_told(shown_in):
    runs = [rollout(NondeterministicEnv(since=3, shown_in=shown_in), num_steps=9, seed=1) for _ in range(2)]
    assert_same_trajectory(runs[0][:3], runs[1][:3])
    observations = [first_difference(one.observation, other.observation) for one, other in zip(*runs, strict=True)]
    rewards = [one.reward == other.reward for one, other in zip(*runs, strict=True)]
    assert any(observations) == (shown_in != "reward")
    assert all(rewards) == (shown_in == "observation")


def test_sticky_state_shows_late_and_only_with_a_past():
    used = StickyStateEnv(visible_after=3)
    new = StickyStateEnv(visible_after=3)
    rollout(used, num_steps=4, seed=0)
    past = rollout(used, [ACTION] * 4, seed=1)
    fresh = rollout(new, [ACTION] * 4, seed=1)
    assert_same_trajectory(past[:3], fresh[:3])
    assert first_difference(past[3].observation, fresh[3].observation) is not None


def test_a_global_random_env_draws_from_the_globals():
    runs = []
    for _ in range(2):
        random.seed(1)
        np.random.seed(1)
        runs.append(rollout(GlobalRandomEnv(), num_steps=5, seed=0))
    assert_same_trajectory(*runs)
    other = rollout(GlobalRandomEnv(), num_steps=5, seed=0)
    assert first_difference(runs[0][0].observation, other[0].observation) is not None


def test_a_same_array_env_overwrites_what_it_returned():
    env = SameArrayEnv()
    first, _ = env.reset(seed=0)
    second = env.step(ACTION)[0]
    assert first is second
    assert first[0] == 1


def test_a_noisy_env_writes_both_ways(capfd):
    env = NoisyEnv(lines_per_step=4)
    rollout(env, num_steps=2)
    assert len(capfd.readouterr().err.splitlines()) == 8


def test_a_slow_env_sleeps_where_told(monkeypatch):
    naps = []
    monkeypatch.setattr(time, "sleep", naps.append)
    env = SlowEnv(build_seconds=1, reset_seconds=2, step_seconds=3, close_seconds=4)
    env.reset()
    env.step(ACTION)
    env.close()
    assert naps == [1, 2, 3, 4]


def test_infos_tell_the_time_and_the_process():
    info = WallClockInfoEnv().reset()[1]
    assert set(info) == {"time", "nanoseconds"}
    env = PidEnv()
    assert env.reset()[1] == {"pid": os.getpid()}
    assert env.pid == os.getpid()


def reap(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("how", ["exec", "fork"])
def test_a_forking_env_starts_children_and_forgets_them(how):
    with no_leaks():
        env = ForkingEnv(children=2, how=how)
        children = env.reset()[1]["children"]
        env.close()
        assert len(children) == 2
        assert all(is_alive(pid) for pid in children)
        for pid in children:
            os.kill(pid, signal.SIGTERM)
            assert reap(pid) == -signal.SIGTERM


@pytest.mark.parametrize("how", ["exec", "fork"])
def test_stubborn_children_lead_a_session_and_ignore_sigterm(how):
    with no_leaks():
        (pid,) = ForkingEnv(how=how, stubborn=True).children
        while os.getsid(pid) != pid or descendants(os.getpid())[pid].command.startswith("/bin/sh"):
            pass  # the child is still on its way
        os.kill(pid, signal.SIGTERM)
        assert is_alive(pid)
        os.kill(pid, signal.SIGKILL)
        assert reap(pid) == -signal.SIGKILL


def test_a_forked_child_holds_the_descriptors_of_its_parent():
    reading, writing = os.pipe()
    (pid,) = ForkingEnv(how="fork").children
    os.close(writing)
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):  # no end of file: the child holds the writing end
        os.read(reading, 1)
    os.kill(pid, signal.SIGKILL)
    reap(pid)
    assert os.read(reading, 1) == b""
    os.close(reading)


@pytest.mark.parametrize("name", example_spaces())
def test_a_space_env_is_deterministic_and_observes_members_of_its_space(name):
    def run():
        env = SpaceEnv(observation_space=example_spaces()[name], action_space=example_spaces()[name])
        return env, rollout(env, num_steps=25, seed=3)

    env, first = run()
    assert_same_trajectory(first, run()[1], compare_info=True)
    assert all(env.observation_space.contains(transition.observation) for transition in first)
    steps = [transition for transition in first if not transition.is_reset]
    assert all(transition.info["action"] == digest_value(transition.action) for transition in steps)


def test_a_space_env_seeded_at_construction_needs_no_seed_later():
    runs = [rollout(SpaceEnv(seed=9), num_steps=25) for _ in range(2)]
    assert_same_trajectory(*runs)


def test_a_space_env_leaves_the_rng_of_the_space_it_shows_alone():
    space = gymnasium.spaces.Box(-1, 1, (3,), seed=1)
    rollout(SpaceEnv(observation_space=space), num_steps=5, seed=1)
    assert np.array_equal(space.sample(), gymnasium.spaces.Box(-1, 1, (3,), seed=1).sample())


def test_a_space_env_refuses_foreign_actions():
    env = SpaceEnv()
    env.reset()
    with pytest.raises(ValueError, match="not in"):
        env.step("left")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(2, np.float32), np.zeros(2, np.float64)),
        (np.zeros((2, 1)), np.zeros((1, 2))),
        (np.int64(1), np.int32(1)),
        (np.int64(1), 1),
        (1, True),
        (1.0, 1),
        (0.0, -0.0),
        ((1, 2), [1, 2]),
        ({"a": 1}, {"a": 2}),
        ("a", b"a"),
    ],
)
def test_digests_tell_values_apart(one, other):
    assert digest_value(one) != digest_value(other)
    assert first_difference(one, other) is not None


def test_the_token_space_is_a_space():
    space = TokenSpace(size=3, seed=1)
    assert space.sample() in space
    assert "token-3" not in space
    assert space == pickle.loads(pickle.dumps(space))
    assert space != TokenSpace(size=4)


def test_importing_the_kit_needs_no_optional_package():
    code = "import sys, multienv.testing; sys.exit(bool({'psutil', 'pytest', 'hypothesis'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
