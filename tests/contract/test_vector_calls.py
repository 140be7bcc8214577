"""Calls, attributes, failures and the end of vector envs: as gymnasium's AsyncVectorEnv has them."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from contract_envs import EchoEnv, TellingEnv
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import TimeLimit

from kit import CounterEnv, FarewellEnv, Fault, FaultyEnv, kill_worker
from multienv import RestartPolicy, SerialVectorEnv, SubprocessVectorEnv, make_vec
from multienv.errors import (
    EnvError,
    EnvsFailedError,
)

FACES = [SubprocessVectorEnv, SerialVectorEnv]
both_faces = pytest.mark.parametrize("face", FACES)
CARTPOLE = partial(gymnasium.make, "CartPole-v1")
ACTIONS = np.array([1, 2])


# --- calls and attributes -------------------------------------------------------------------------


@both_faces
def test_calls_and_attributes(face):
    with face([CARTPOLE] * 3) as envs:
        assert envs.call("get_wrapper_attr", "gravity") == (9.8,) * 3
        assert envs.get_attr("gravity") == (9.8,) * 3
        envs.set_attr("gravity", [1.0, 2.0, 3.0])
        assert envs.get_attr("gravity") == (1.0, 2.0, 3.0)
        envs.set_attr("gravity", 4.0)
        assert envs.call("gravity") == (4.0,) * 3
        envs.set_attr("tags", [(1, 2), [3], None])
        assert envs.get_attr("tags") == ((1, 2), [3], None)


# --- timeouts and the end --------------------------------------------------------------------------------


@both_faces
def test_close_closes_the_envs_and_again_does_nothing(face, tmp_path):
    envs = face([partial(FarewellEnv, left=tmp_path / f"{index}") for index in range(3)])
    envs.reset(seed=0)
    envs.close()
    envs.close()
    assert sorted(path.name for path in tmp_path.glob("?")) == ["0", "1", "2"]


# --- errors, ends and what is sent all at once or not at all ------------------------------------------


def test_an_error_taken_for_an_end_has_a_final_observation():
    """Or the next episode would follow the last one without a word."""
    fns = [lambda: FaultyEnv(fault=Fault("raise", "step", at=3, per="episode")), CounterEnv]
    envs = SubprocessVectorEnv(
        fns, envs_per_worker=2, restart=RestartPolicy(on_error="truncate"), autoreset_mode=AutoresetMode.SAME_STEP
    )
    envs.reset(seed=0)
    for step in range(1, 10):
        observations, _, _, truncations, infos = envs.step(ACTIONS)
        assert truncations[0] == (step % 3 == 0)
        if step % 3 == 0:
            assert infos["final_obs"][0][0] == 2
            assert "FaultError" in infos["final_info"]["multienv"]["reason"][0]
        assert observations[0, 0] == step % 3
    envs.close()


@both_faces
def test_a_reset_that_raises_does_not_take_the_end_of_the_episode_with_it(face):
    """With autoreset in the same step it comes with the error."""
    fns = [partial(FaultyEnv, fault=Fault("raise", "reset", at=2), horizon=3), partial(CounterEnv, horizon=30)]
    envs = face(fns, autoreset_mode=AutoresetMode.SAME_STEP)
    reference = CounterEnv(horizon=3)
    envs.reset(seed=0)
    reference.reset(seed=0)
    for _ in range(2):
        envs.step(ACTIONS)
        reference.step(ACTIONS[0])
    expected = reference.step(ACTIONS[0])
    with pytest.raises(EnvsFailedError) as caught:
        envs.step(ACTIONS)
    failure = caught.value.failures[0]
    assert isinstance(failure, EnvError)
    assert "FaultError" in str(failure)
    assert failure.returned is not None
    assert failure.returned[0].tobytes() == expected[0].tobytes()
    assert failure.returned[1:] == expected[1:]
    assert caught.value.results[0] is None
    assert caught.value.results[1][0][0] == 3
    observations, rewards, terminations, _, _ = envs.step(ACTIONS)  # it is tried again
    assert observations[:, 0].tolist() == [0, 4]
    assert (rewards[0], terminations[0]) == (0.0, False)
    envs.close()


def tell_or_raise(fails_at, index, step):
    if (index, step) == (1, fails_at):
        raise ValueError(f"at step {step}")
    return {"step": step, "name": f"env {index}"} if index else {}


@both_faces
def test_if_an_env_raises_the_error_has_the_infos_of_the_others(face):
    with face([partial(TellingEnv, partial(tell_or_raise, 2), index) for index in range(3)]) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(3, int))
        with pytest.raises(EnvsFailedError) as caught:
            envs.step(np.zeros(3, int))
        expected = [{}, None, {"step": 2, "name": "env 2"}]
        assert [result and result[1:] for result in caught.value.results] == [
            info if info is None else (1.0, False, False, info) for info in expected
        ]
        envs.set_attr("tell", partial(tell_or_raise, 0))
        with pytest.raises(EnvsFailedError) as caught:
            envs.reset(seed=0)
        expected = [{}, None, {"step": 0, "name": "env 2"}]
        assert [result and result[1] for result in caught.value.results] == expected


@both_faces
def test_a_reward_that_is_no_number(face):
    envs = face([partial(EchoEnv, (np.zeros(2, np.float32), reward, False, False, {})) for reward in (None, 1.0)])
    envs.reset(seed=0)
    with pytest.raises(TypeError, match="as reward") as caught:
        envs.step(np.zeros(2, int))
    assert isinstance(caught.value, EnvsFailedError)
    assert list(caught.value.failures) == [0]
    envs.close()


# --- what gymnasium takes, or refuses by a type of its own --------------------------------------------


@pytest.mark.parametrize(("mode", "face"), [("sync", SerialVectorEnv), ("async", SubprocessVectorEnv)])
def test_a_spec_that_gymnasiums_make_vec_has_made(mode: str, face: Any) -> None:
    theirs = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    spec: Any = theirs.spec
    theirs.close()
    spec.kwargs["vectorization_mode"] = mode
    with contextlib.closing(make_vec(spec)) as envs:
        assert type(envs) is face
        assert envs.num_envs == 3


# --- some envs of a batch only, what is not recorded, options for each env, infos that are not merged --

NUM_ENVS = 5  # three in one worker, two in the other


@pytest.fixture(params=[SubprocessVectorEnv, SerialVectorEnv])
def envs(request: pytest.FixtureRequest) -> Any:
    options = {"envs_per_worker": 3} if request.param is SubprocessVectorEnv else {}
    made = request.param([partial(CounterEnv, horizon=100)] * NUM_ENVS, merge_infos=False, **options)
    yield made
    made.close()


def test_attributes_are_read_and_written_in_the_envs_that_are_named(envs):
    envs.set_attr("offset", [1.0, 2.0], [4, 0])
    assert envs.get_attr("offset") == (2.0, 0.0, 0.0, 0.0, 1.0)
    assert envs.get_attr("offset", [4, 1]) == (1.0, 0.0)
    envs.set_attr("offset", 3.0, [2])
    assert envs.get_attr("offset", [2, 0], calls_methods=False) == (3.0, 2.0)


def test_a_method_that_is_read_is_called_in_its_env(envs):
    poke, *_ = envs.get_attr("poke", [3], calls_methods=False)
    assert envs.get_attr("pokes") == (0,) * NUM_ENVS
    assert poke(0.5) == 1
    assert poke(amount=0.5) == 2
    assert envs.get_attr("pokes") == (0, 0, 0, 2, 0)
    assert envs.get_attr("poke", [3]) == (3,)  # as gymnasium does


def test_reading_takes_no_room_in_the_journal(envs):
    before = [one.journal_bytes for one in envs.statistics()]
    for name in ("horizon", "np_random_seed", "unwrapped.horizon", "action_space"):
        envs.get_attr(name)
    assert len(envs.np_random) == NUM_ENVS
    envs.is_wrapped(TimeLimit)
    assert envs.call("has_wrapper_attr", "poke") == (True,) * NUM_ENVS
    assert envs.call("get_wrapper_attr", "horizon") == (100,) * NUM_ENVS
    assert [one.journal_bytes for one in envs.statistics()] == before


def test_what_is_called_by_reading_it_is_called_again_after_a_loss() -> None:
    """A method of some envs, a function of others, a number elsewhere."""
    with SubprocessVectorEnv([CounterEnv] * 3, envs_per_worker=3, restart=RestartPolicy(snapshots=False)) as envs:
        envs.reset(seed=0)
        assert envs.get_attr("poke") == (1, 1, 1)
        envs.set_attr("poke", [7, len], [0, 1])  # of the inner env, where it hides the method
        with pytest.raises(TypeError, match="takes exactly one argument"):
            envs.get_attr("poke")  # which has called the third
        assert envs.get_attr("poke", [2, 0]) == (3, 7)
        kill_worker(envs)
        envs.step(np.zeros(3, int))
        assert envs.get_attr("pokes") == (1, 1, 3)


def test_each_env_is_reset_with_options_of_its_own(envs):
    observations, _ = envs.reset(seed=0, options=[{"start": 3}, None, {}, {"start": 5}, {"start": 7}])
    assert observations[:, 0].tolist() == [3, 0, 0, 5, 7]


def tell_odd(index: int, step: int) -> dict[Any, Any]:
    """Tell what gymnasium's merging changes: numbers of other types, keys that only some steps have."""
    return {"number": step, "pair": (1, 2)} if step % 2 else {}


@both_faces
def test_infos_that_are_not_merged_are_what_each_env_gave(face):
    fns = [
        partial(TellingEnv, tell_odd, horizon=3),
        partial(TellingEnv, tell_odd),
        partial(TellingEnv, lambda index, step: {}),
    ]
    with face(fns, merge_infos=False, autoreset_mode="SameStep") as envs:
        _, infos = envs.reset(seed=0)
        assert infos == [{}, {}, {}]
        odd = {"number": 1, "pair": (1, 2)}
        infos = envs.step(np.zeros(3, int))[4]
        assert infos == [odd, odd, {}]
        assert type(infos[0]["number"]) is int
        assert infos[0] is not infos[1]
        assert envs.step(np.zeros(3, int))[4] == [{}, {}, {}]
        infos = envs.step(np.zeros(3, int))[4]
        assert infos[0]["final_info"] == {"number": 3, "pair": (1, 2)}
        assert infos[0]["final_obs"][0] == 3
        assert infos[1:] == [{"number": 3, "pair": (1, 2)}, {}]


@both_faces
def test_an_env_that_two_functions_return_is_refused(face):
    env = CounterEnv()
    options = {"envs_per_worker": 2} if face is SubprocessVectorEnv else {}
    with pytest.raises(EnvsFailedError, match="returned already. Build a new env") as caught:
        face([lambda: env] * 2, **options)
    assert set(caught.value.failures) == {1}
