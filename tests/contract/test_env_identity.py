"""SubprocessEnv and SerialEnv are the env they hold: what it returns, takes, has and draws, to the bit."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from contract_envs import CallableAttributes, DictEnv, EchoEnv, Poked, wrapped_inside
from gymnasium import wrappers
from gymnasium.utils.env_checker import check_env

from kit import (
    CounterEnv,
    SameArrayEnv,
    SpaceEnv,
    assert_same_trajectory,
    digest_value,
    example_spaces,
    first_difference,
    kill_worker,
    rollout,
)
from kit.trainer_process import becomes_true
from multienv import SerialEnv, SubprocessEnv, flat_statistics
from multienv.errors import UsageError

FACES = [SubprocessEnv, SerialEnv]
CARTPOLE = partial(gymnasium.make, "CartPole-v1")


# --- gymnasium's checker ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env_fn",
    [partial(gymnasium.make, "CartPole-v1", render_mode="rgb_array"), DictEnv, wrapped_inside],
    ids=["CartPole", "Dict", "wrapped"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("face", FACES)
def test_gymnasiums_checker_passes(face, env_fn):
    with face(env_fn) as env:
        check_env(env, skip_render_check=True)


@pytest.mark.parametrize("face", FACES)
def test_it_is_known_by_what_the_env_is(face):
    twin = CARTPOLE()
    with face(CARTPOLE) as env:
        assert isinstance(env, gymnasium.Env)
        assert env.unwrapped is env
        assert (env.observation_space, env.action_space) == (twin.observation_space, twin.action_space)
        assert env.metadata == twin.metadata
        assert env.spec == twin.spec
        assert env.render_mode == twin.render_mode
        assert "CartPole-v1" in str(env)
    twin.close()


# --- what it returns ----------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [
    lambda env: wrappers.FrameStackObservation(wrappers.TimeLimit(env, 6), 3),
    lambda env: wrappers.NormalizeObservation(wrappers.Autoreset(env)),
], ids=["FrameStack", "Normalize"])  # fmt: skip
def test_wrappers_around_it_see_what_they_would_see_around_the_env(wrap):
    env_fn = partial(SpaceEnv, horizon=9)
    with SubprocessEnv(env_fn) as env:
        seen = rollout(wrap(env), num_steps=40, seed=3)
    assert_same_trajectory(seen, rollout(wrap(env_fn()), num_steps=40, seed=3), compare_info=True)


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "Pendulum-v1"])
def test_a_run_equals_that_of_the_env_itself_infos_included(env_id):
    env_fn = partial(gymnasium.make, env_id, max_episode_steps=25)
    twin = env_fn()
    expected = rollout(twin, num_steps=100, seed=11)
    generator = twin.unwrapped.np_random.bit_generator.state
    twin.close()
    for face in FACES:
        with face(env_fn) as env:
            assert_same_trajectory(rollout(env, num_steps=100, seed=11), expected, compare_info=True)
            state = env.get_attr("np_random").bit_generator.state
            assert state == generator, "the env draws something else afterwards"
            assert env.np_random_seed == env.get_attr("np_random_seed") == 11


@pytest.mark.parametrize("name", example_spaces())
def test_every_space_keeps_its_types_and_the_order_of_its_keys_also_after_a_loss(name):
    space = example_spaces()[name]
    env_fn = partial(SpaceEnv, observation_space=space, action_space=space)
    space.seed(5)
    actions = [space.sample() for _ in range(6)]
    for face in FACES:
        twin = env_fn()
        with face(env_fn) as env:
            assert env.observation_space == env.action_space == space
            for run in (twin, env):
                run.reset(seed=2)
            for step, action in enumerate(actions):
                if face is SubprocessEnv and step == 4:
                    kill_worker(env)
                seen, expected = env.step(action), twin.step(action)
                assert digest_value(seen[0]) == digest_value(expected[0])
                assert _key_order(seen[0]) == _key_order(expected[0])
                assert seen[1:] == expected[1:]
                assert type(seen[1]) is type(expected[1])
            assert face is SerialEnv or env.statistics().exact_recoveries == 1


def _key_order(value: Any) -> Any:
    return [(key, _key_order(item)) for key, item in value.items()] if isinstance(value, dict) else None


# Rewards and flags; for observations and infos see unit/test_wire_values.
RESULTS = [
    *((1.0, reward) for reward in (np.float32(0.1), 3, math.nan, -0.0, np.array([1.0, 2.0]), np.int64(2**60 + 1))),
    *((1.0, reward) for reward in (10**400, None, True)),
    (np.ma.masked_array(np.zeros(2, np.float32), mask=[True, False]), 1.0),
]


@pytest.mark.parametrize("face", FACES)
def test_what_does_not_fit_arrives_unchanged(face):
    infos = [{1: 2}, {"big": np.arange(300_000)}]
    results = [(*one, np.bool_(one is RESULTS[-1]), False, infos[index % 2]) for index, one in enumerate(RESULTS)]
    with face(partial(EchoEnv, *results)) as env:
        env.reset(seed=0)
        for index, expected in enumerate(results):
            seen = env.step(index)
            assert list(map(digest_value, seen[:2])) == list(map(digest_value, expected[:2])), index
            assert type(seen[0]) is type(expected[0])
            assert seen[2] == expected[2]
            assert first_difference(seen[4], expected[4]) is None


@pytest.mark.parametrize("face", FACES)
def test_each_observation_is_an_array_of_its_own(face):
    with face(SameArrayEnv) as env:
        seen = [env.reset(seed=0)[0], *(env.step(1)[0] for _ in range(4))]
        assert [one[0] for one in seen] == [0, 1, 2, 3, 4]


# --- attributes, calls, render ------------------------------------------------------------------


@pytest.mark.parametrize("face", FACES)
def test_attributes_and_calls_reach_every_layer(face):
    """Also in gymnasium's own ways, from a wrapper around it."""
    with face(lambda: CallableAttributes(wrappers.TimeLimit(CounterEnv(), 5))) as env:
        env.reset(seed=0)
        assert [env.get_attr(name) for name in ("gain", "horizon", "_max_episode_steps")] == [2.0, 10, 5]
        assert env.call("amplify", 3.0, by=2.0) == 12.0
        assert env.call("gain") == 2.0, "an attribute that is not callable is returned"
        env.set_attr("gain", 5.0)
        env.set_attr("offset", 10.0)
        assert env.call("amplify", 3.0) == 15.0
        assert env.step(1)[0][2] >= 10.0
        env.set_attr("brand_new", {"a": 1})
        assert env.get_attr("brand_new") == {"a": 1}
        outer = wrappers.TimeLimit(env, 5)
        assert outer.has_wrapper_attr("horizon")
        assert not outer.has_wrapper_attr("no_such_thing")
        assert outer.set_wrapper_attr("horizon", 3)
        assert outer.get_wrapper_attr("horizon") == env.get_attr("horizon") == 3
        assert not env.set_wrapper_attr("no_such_thing", 3, force=False)
        assert not env.has_wrapper_attr("no_such_thing")


@pytest.mark.parametrize("face", FACES)
def test_what_is_set_on_it_is_set_on_the_env(face):
    """As Stable-Baselines3's ``set_attr`` and Tianshou's ``set_env_attr`` do, with ``unwrapped``."""
    with face(CounterEnv) as env:
        before = env.reset(seed=0)[0][2]
        wrappers.TimeLimit(env, 5).unwrapped.offset = 2.5
        assert env.get_attr("offset") == 2.5
        assert env.get_wrapper_attr("offset") == 2.5
        assert env.call("_observe")[2] == np.float32(before + 2.5)
        env.render_mode = "its own"
        env._mine = 3
        assert env.get_attr("render_mode") is None
        with pytest.raises(AttributeError):
            env.get_attr("_mine")
        with pytest.raises(UsageError, match="cannot pickle"):
            env.offset = threading.Lock()
        assert env.get_attr("offset") == 2.5
        assert env.step(1)[3] is False, "the episode goes on"


@pytest.mark.parametrize("face", FACES)
def test_what_the_env_does_not_have_is_its_own(face):
    class Face(face):
        def __init__(self, env_fn):
            super().__init__(env_fn)
            self.episodes = 0

    with Face(CounterEnv) as env:
        env.episodes += 1
        env.lock = threading.Lock()
        env.reset(seed=0)
        env.step_async(1)
        env.episodes += 1
        assert (env.episodes, env.unwrapped.episodes, hasattr(env, "lock")) == (2, 2, True)
        env.step_wait()
        assert not env.call("has_wrapper_attr", "episodes")
    env.ended = True
    assert env.ended


@pytest.mark.parametrize("face", FACES)
def test_a_method_is_called_there_and_not_on_a_copy(face):
    """As Stable-Baselines3's ``env_method`` does."""
    with face(Poked) as env:
        env.reset(seed=0)
        for name in ("poke", "poke_later"):
            env.set_attr("offset", 0.0)
            wrappers.TimeLimit(env, 5).get_wrapper_attr(name)(0.5)
            assert env.get_attr(name)(amount=1.0) is not None
            assert env.get_attr("offset") == 1.5
        assert env.get_attr("named")(name="an argument's") == 13
        assert env.get_attr("step")(1)[0][0] == 1


@pytest.mark.parametrize("face", FACES)
def test_what_the_env_has_is_read_from_it(face):
    """As gymnasium's AtariPreprocessing and Tianshou's ``get_env_attr`` do, with ``unwrapped``."""
    with pytest.raises(AttributeError, match="get_attr"):
        _ = face(Poked).horizon
    with face(Poked) as env:
        env.reset(seed=0)
        outer = wrappers.TimeLimit(env, 5).unwrapped
        outer.offset = 1.5
        outer.offset *= 2
        assert (outer.offset, outer.named("an argument's"), getattr(outer, "_nothing", 7)) == (3.0, 13, 7)
        assert hasattr(env, "horizon")
        assert not hasattr(env, "nothing")
        with pytest.raises(AttributeError, match="belongs into the env_fn"):
            _ = env.engine
        env.step_async(1)
        assert not hasattr(env, "horizon"), "it cannot be asked"
        assert env.step_wait()[0][0] == 1
    assert not hasattr(env, "horizon")


# --- statistics ---------------------------------------------------------------------------------


def test_statistics_follow_its_life():
    env = SubprocessEnv(partial(CounterEnv, horizon=2))
    calls = [env.start, env.initialize, partial(env.reset, seed=0), partial(env.step, 0), partial(env.step, 0)]
    seen = [env.statistics().state, *((call(), env.statistics().state)[1] for call in calls)]
    now = env.statistics()
    env.close()
    assert [*seen, env.statistics().state] == ["new", "starting", "ready", "running", "running", "ended", "closed"]
    assert (now.steps, now.episodes, now.losses, now.restarts, now.last_loss) == (2, 1, 0, 0, None)
    assert now.pid
    assert now.rss is None or now.rss > 2**20
    assert now.journal_bytes > 0
    assert env.statistics().pid is None
    with pytest.raises(AttributeError):
        now.steps = 5  # type: ignore[misc]


def test_statistics_do_not_name_a_process_that_has_died_between_two_calls() -> None:
    with SubprocessEnv(CounterEnv).initialize() as env:
        env.reset(seed=0)
        kill_worker(env)
        assert becomes_true(lambda: env.statistics().pid is None)
        assert env.statistics().rss is None
        assert flat_statistics(env.statistics())["workers"] == 0
        env.step(1)
        assert env.statistics().pid
        assert env.statistics().exact_recoveries == 1


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("info", [None, OrderedDict()], ids=repr)
def test_no_info_is_an_empty_one_at_every_reset(face, info):
    with face(partial(EchoEnv, first=(np.zeros(2, np.float32), info))) as env:
        infos = [env.reset(seed=seed)[1] for seed in range(3)]
    assert infos == [{}] * 3
    assert {type(info) for info in infos} == {dict}
