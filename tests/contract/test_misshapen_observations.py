"""Observations that are not what their nested space says: one sentence names the part, what it is and what is wanted."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
from contract_envs import NestedEnv

from multienv import SerialVectorEnv, SubprocessVectorEnv
from multienv.errors import EnvsFailedError

WRONG = {
    "no key": "observation lacks the key 'state'; the env's observation space wants a dict with the keys 'in', 'state'",
    "an array": "observation is of type ndarray; the env's observation space wants a dict with the keys 'in', 'state'",
    "inner no key": "['in'] lacks the key 'pair'; the env's observation space wants a dict with the key 'pair'",
    "inner array": "['in'] is of type ndarray; the env's observation space wants a dict with the key 'pair'",
    "short": "['in']['pair'] has length 1; the env's observation space wants a tuple of 2",
    "long": "['in']['pair'] has length 3; the env's observation space wants a tuple of 2",
    "no tuple": "['in']['pair'] is of type int; the env's observation space wants a tuple of 2",
}


@pytest.mark.parametrize("text", [False, True], ids=["rows", "pickled"])
@pytest.mark.parametrize("face", [SubprocessVectorEnv, SerialVectorEnv])
def test_observation_without_a_member_of_its_space_is_told_in_one_sentence(face: Any, text: bool) -> None:
    wrong = WRONG
    if not text:
        wrong = {**WRONG, "inner shape": "['in']['pair'][0] has shape (5,); the env's observation space wants (2,)"}
    with face([partial(NestedEnv, text=text)] * 2) as envs:
        for kind, words in wrong.items():
            with pytest.raises(EnvsFailedError) as caught:
                envs.reset(options=[None, {"as": kind}])
            assert list(caught.value.failures) == [1], kind
            assert f"{words}. Fix the env, or its observation_space." in str(caught.value)
            envs.reset(seed=0)


def test_observation_that_only_acts_as_a_dict_is_taken() -> None:
    """As gymnasium takes it: it need not even have a length."""
    with SerialVectorEnv([NestedEnv]) as envs:
        assert set(envs.reset(options={"as": "no dict"})[0]) == {"state", "in"}


@pytest.mark.parametrize("text", [False, True], ids=["rows", "pickled"])
def test_members_that_the_space_does_not_have_are_dropped_with_one_warning(text: bool) -> None:
    with SerialVectorEnv([partial(NestedEnv, text=text)]) as envs, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for kind in ("one more", "inner one more", "one more"):
            observations, _ = envs.reset(options={"as": kind})
            assert set(observations) == {"state", "in"}
    told = [str(one.message) for one in caught if "dropped" in str(one.message)]
    assert [one.split(",")[0] for one in told] == [
        "An observation has the key 'x'",
        "An observation['in'] has the key 'y'",
    ]


def test_a_worker_warns_of_members_that_are_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    with SubprocessVectorEnv([NestedEnv]) as envs:
        envs.reset(options={"as": "one more"})
    assert "An observation has the key 'x', which the env's observation space lacks: dropped." in capfd.readouterr().err
