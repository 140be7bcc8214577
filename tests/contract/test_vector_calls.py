"""Calls, attributes, failures and the end of vector envs: as gymnasium's AsyncVectorEnv has them."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from contract_envs import EchoEnv
from gymnasium.vector import AutoresetMode

from kit import CounterEnv, FarewellEnv, Fault, FaultError, FaultyEnv
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


# --- wrong calls ------------------------------------------------------------------------------------


# --- failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@both_faces
def test_one_raises_in_a_step(face, mode):
    """The results of the others are not lost, and their episodes go on; the one that failed begins anew."""
    with face(
        [CounterEnv, partial(FaultyEnv, fault=Fault("raise", "step", at=3)), CounterEnv], autoreset_mode=mode
    ) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            envs.step([1, 2, 3])
        with pytest.raises(FaultError) as caught:
            envs.step([1, 2, 3])
        error: Any = caught.value
        assert list(error.failures) == [1]
        assert "Traceback" in error.failures[1].remote_traceback
        assert error.failures[1].env_index == 1
        seen = [None if row is None else row[0][[0, 3]].tolist() for row in error.results]
        assert seen == [[3, 1], None, [3, 3]]
        for step in range(2):
            assert envs.step([1, 2, 3])[0][:, 0].tolist() == [4 + step, step, 4 + step]


# --- timeouts and the end --------------------------------------------------------------------------------


@both_faces
def test_close_closes_the_envs_and_again_does_nothing(face, tmp_path):
    envs = face([partial(FarewellEnv, left=tmp_path / f"{index}") for index in range(3)])
    envs.reset(seed=0)
    envs.close()
    envs.close()
    assert sorted(path.name for path in tmp_path.glob("?")) == ["0", "1", "2"]


# --- nothing is sent, or nothing is lost ------------------------------------------------------------


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
